"""The evaluator: as many episodes from each environment, those it cuts included, from the same starting states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.collection.evaluator import Evaluator
from rl_lab.environments import Environment, make_environment
from rl_lab.types import ConfigError, EnvRows, EnvSpec, Episode, PolicyStep, TimeStep
from tests.doubles import CPU, SPEC, ScriptedEnvironment, always, counter, env_rows


def evaluator_of(environment: Environment, **settings: Any) -> Evaluator:
    return Evaluator(lambda: environment, make_render_environment=lambda: environment, device=CPU, **settings)


def episodes_of(lengths: list[int], *, rewards: list[float]) -> list[EnvRows]:
    """Environments whose episodes have fixed lengths and rewards, for some time."""
    rows = []
    for time in range(60):
        place = np.array([time % (length + 1) for length in lengths])
        is_last = place == np.array(lengths)
        rows.append(
            env_rows(
                [0.0] * len(lengths), reward=np.where(place > 0, rewards, 0.0).tolist(), first=place == 0, last=is_last
            )
        )
    return rows


def test_each_environment_gives_as_many_episodes_however_short_they_are() -> None:
    """Taking whichever five end first would score 5 * 1: the short, bad episodes of environment 0."""
    environment = ScriptedEnvironment(episodes_of([1, 10], rewards=[1.0, 2.0]))
    played = evaluator_of(environment).play_episodes(always(0), episodes=5)
    assert [episode.env_index for episode in played] == [0, 0, 0, 1, 1]
    assert [episode.episode_return for episode in played] == [1.0, 1.0, 1.0, 20.0, 20.0]
    assert not any(episode.is_cut for episode in played)


def test_metrics_count_the_episodes_that_a_time_limit_ended() -> None:
    """As docs/metrics.md says: the environment's own limit, or the evaluation's, which alone cuts."""
    environment = ScriptedEnvironment(episodes_of([1, 3], rewards=[1.0, 3.0]))
    for rows in environment.script:
        rows.is_terminal[0] = rows.is_last[0]
    metrics = evaluator_of(environment).evaluate(always(0), episodes=2)
    assert metrics == {
        "eval/episodes": 2,
        "eval/timed_out_episodes": 1,
        "eval/cut_episodes": 0,
        "eval/episode_return_mean": 5.0,
        "eval/episode_return_std": 4.0,
        "eval/episode_return_min": 1.0,
        "eval/episode_return_max": 9.0,
        "eval/episode_length_mean": 2.0,
    }


def test_rows_are_played_from_the_same_states_with_the_actions_that_answered_them() -> None:
    evaluator = evaluator_of(counter(2, length=3))
    answers = iter(range(12))

    def act(time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        assert mode == "eval" and (state is None) == bool(time_step.is_first.all() and not kept)
        kept.append(time_step.observation["vector"].clone())
        return PolicyStep(torch.full((2,), next(answers) % 2), state="kept")

    kept: list[torch.Tensor] = []
    rows = evaluator.play_rows(act, length=6)
    assert torch.equal(rows["vector"], torch.stack(kept, dim=1))
    assert rows["action"].tolist() == [[0, 1, 0, 1, 0, 1]] * 2
    assert rows["is_first"][0].tolist() == [True, False, False, False, True, False]
    assert rows["is_last"][0].tolist() == [False, False, False, True, False, False]
    kept = []
    again = evaluator.play_rows(act, length=6)
    assert all(torch.equal(again[key], values) for key, values in rows.items())
    evaluator.close()


def test_fewer_episodes_than_environments_leave_some_out() -> None:
    environment = ScriptedEnvironment(episodes_of([2, 1, 1], rewards=[1.0, 1.0, 1.0]))
    played = evaluator_of(environment).play_episodes(always(0), episodes=1)
    assert [episode.env_index for episode in played] == [0]


def test_an_episode_that_outlives_the_time_out_counts_with_its_return_so_far() -> None:
    """Its environment cannot be reset alone: it begins again with all others when nobody else has anything to play."""
    environment = ScriptedEnvironment(episodes_of([2, 1000], rewards=[1.0, 1.0]))
    played = evaluator_of(environment, timeout_steps=10).play_episodes(always(0), episodes=4)
    assert played == [
        Episode(0, 2.0, 2, False),
        Episode(0, 2.0, 2, False),
        Episode(1, 10.0, 10, False, is_cut=True),
        Episode(1, 10.0, 10, False, is_cut=True),
    ]
    assert (len(environment.actions), environment.resets) == (20, 2)


def test_after_a_cut_the_next_episode_of_that_environment_counts_from_its_beginning() -> None:
    environment = ScriptedEnvironment(episodes_of([1, 6], rewards=[1.0, 1.0]))
    played = evaluator_of(environment, timeout_steps=4).play_episodes(always(0), episodes=14)
    assert [episode.length for episode in played if episode.env_index == 1] == [4] * 7
    assert [episode.length for episode in played if episode.env_index == 0] == [1] * 7
    assert sum(episode.is_cut for episode in played) == 7


def test_a_cut_policy_scores_by_what_it_has() -> None:
    """CartPole that survives to 500 scored 456 from the one episode that fell before a time-out of 490."""
    environment = ScriptedEnvironment(episodes_of([50, 50, 45], rewards=[1.0, 1.0, 1.0]))
    metrics = evaluator_of(environment, timeout_steps=49).evaluate(always(0), episodes=3)
    assert (metrics["eval/episodes"], metrics["eval/cut_episodes"], metrics["eval/timed_out_episodes"]) == (3, 2, 3)
    assert metrics["eval/episode_return_mean"] == (49 + 49 + 45) / 3


def test_a_real_survivor_is_cut_as_often_as_asked() -> None:
    environment = make_environment(id="rl_lab/NativeCounter-v0", num_envs=3, vectorization="native")
    played = evaluator_of(environment, timeout_steps=4).play_episodes(always(2), episodes=8)
    assert [episode.env_index for episode in played] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert {(episode.episode_return, episode.length, episode.is_cut) for episode in played} == {(8.0, 4, True)}
    environment.close()


def test_the_spec_gives_the_time_limit_and_an_episode_may_take_all_of_it() -> None:
    spec = EnvSpec(SPEC.id, SPEC.observation, SPEC.action, max_episode_steps=7)
    environment = ScriptedEnvironment(episodes_of([7], rewards=[1.0]), spec=spec)
    played = evaluator_of(environment).play_episodes(always(0), episodes=2)
    assert [(episode.length, episode.is_cut) for episode in played] == [(7, False), (7, False)]


def test_every_evaluation_starts_from_the_same_states() -> None:
    seen: list[list[float]] = []

    def watching(time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        assert mode == "eval"
        seen.append(time_step.observation["vector"].flatten().tolist())
        return PolicyStep(torch.zeros(time_step.num_envs, dtype=torch.int64))

    evaluator = evaluator_of(counter(3))
    evaluator.evaluate(watching, episodes=3)
    first = list(seen)
    seen.clear()
    evaluator.evaluate(always(2), episodes=5)  # another policy and more episodes lie between
    evaluator.evaluate(watching, episodes=3)
    assert seen == first


def test_the_policy_starts_without_a_state() -> None:
    states: list[Any] = []

    def remembering(time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        states.append(state)
        return PolicyStep(torch.zeros(time_step.num_envs, dtype=torch.int64), "a state")

    evaluator = evaluator_of(counter(1))
    evaluator.evaluate(remembering, episodes=1)
    evaluator.evaluate(remembering, episodes=1)
    assert states == [None, *["a state"] * 4] * 2


def test_environments_are_made_when_first_needed_and_closed_with_the_evaluator() -> None:
    made: list[ScriptedEnvironment] = []

    def make() -> ScriptedEnvironment:
        made.append(ScriptedEnvironment(episodes_of([1], rewards=[1.0])))
        return made[-1]

    evaluator = Evaluator(make, make_render_environment=make, device=CPU)
    evaluator.close()
    assert made == []
    evaluator.evaluate(always(0), episodes=1)
    evaluator.evaluate(always(0), episodes=1)
    assert len(made) == 1
    evaluator.close()
    assert made[0].is_closed


# --- recording ---------------------------------------------------------------------------------

FRAME = np.zeros((4, 4, 3), np.uint8)


def test_a_recording_shows_one_whole_episode() -> None:
    environment = ScriptedEnvironment(episodes_of([3], rewards=[2.0]), frame=FRAME)
    recording = evaluator_of(environment).record(always(0))
    assert recording is not None
    assert len(recording.frames) == 4
    assert recording.episode_return == 6.0
    assert recording.fps == SPEC.render_fps
    assert environment.is_closed


def test_several_recordings_begin_at_episode_starts() -> None:
    environment = ScriptedEnvironment(episodes_of([2], rewards=[1.0]), frame=FRAME)
    recordings = evaluator_of(environment).record_episodes(always(0), episodes=3)
    assert [len(recording.frames) for recording in recordings] == [3, 3, 3]
    assert [recording.episode_return for recording in recordings] == [2.0, 2.0, 2.0]


def test_a_long_episode_is_cut_and_the_next_recording_begins_a_new_one() -> None:
    environment = ScriptedEnvironment(episodes_of([9], rewards=[1.0]), frame=FRAME)
    recordings = evaluator_of(environment).record_episodes(always(0), episodes=2, max_frames=4)
    assert [len(recording.frames) for recording in recordings] == [4, 4]
    assert [recording.episode_return for recording in recordings] == [3.0, 3.0]


def test_an_environment_that_cannot_render_gives_no_recording() -> None:
    environment = ScriptedEnvironment(episodes_of([3], rewards=[1.0]))
    assert evaluator_of(environment).record(always(0)) is None
    assert environment.is_closed


def test_no_episode_at_all_is_refused() -> None:
    for call in ("evaluate", "record_episodes"):
        with pytest.raises(ConfigError, match="episodes is 0: write a whole number of at least 1"):
            getattr(evaluator_of(make_environment(id="rl_lab/Counter-v0")), call)(always(0), episodes=0)
