"""The evaluator: finished episodes only, as many from each environment, always from the same starting states."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rl_lab.collection.evaluator import Evaluator
from rl_lab.environments.base import Environment
from rl_lab.types import EnvRows, EnvSpec, PolicyStep, TimeStep
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
    finished, timed_out = evaluator_of(environment).play_episodes(always(0), episodes=5)
    assert [episode.env_index for episode in finished] == [0, 0, 0, 1, 1]
    assert [episode.episode_return for episode in finished] == [1.0, 1.0, 1.0, 20.0, 20.0]
    assert timed_out == 0


def test_metrics_are_over_finished_episodes() -> None:
    environment = ScriptedEnvironment(episodes_of([1, 3], rewards=[1.0, 3.0]))
    metrics = evaluator_of(environment).evaluate(always(0), episodes=2)
    assert metrics == {
        "eval/episodes": 2,
        "eval/timed_out_episodes": 0,
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
    finished, _ = evaluator_of(environment).play_episodes(always(0), episodes=1)
    assert [episode.env_index for episode in finished] == [0]


def test_an_episode_that_does_not_end_is_given_up() -> None:
    environment = ScriptedEnvironment(episodes_of([2, 1000], rewards=[1.0, 1.0]))
    finished, timed_out = evaluator_of(environment, timeout_steps=10).play_episodes(always(0), episodes=4)
    assert [episode.env_index for episode in finished] == [0, 0]
    assert timed_out == 2
    assert len(environment.actions) == 11


def test_the_spec_gives_the_time_limit_and_an_episode_may_take_all_of_it() -> None:
    spec = EnvSpec(SPEC.id, SPEC.observation, SPEC.action, max_episode_steps=7)
    environment = ScriptedEnvironment(episodes_of([7], rewards=[1.0]), spec=spec)
    finished, timed_out = evaluator_of(environment).play_episodes(always(0), episodes=2)
    assert ([episode.length for episode in finished], timed_out) == ([7, 7], 0)


def test_when_nothing_ended_there_is_no_score() -> None:
    environment = ScriptedEnvironment(episodes_of([1000], rewards=[1.0]))
    metrics = evaluator_of(environment, timeout_steps=5).evaluate(always(0), episodes=3)
    assert metrics == {"eval/episodes": 0, "eval/timed_out_episodes": 3}


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
