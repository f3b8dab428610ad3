"""Rows of environments side by side become episodes one after the other, exactly as many as asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.collection.collector import Collector
from rl_lab.collection.recorder import EpisodeRecorder
from rl_lab.types import ActionSpec, ArraySpec, ConfigError, EnvSpec, Phase, PolicyStep, TimeStep
from rl_lab.utils.timing import Stopwatch
from tests.doubles import CPU, ScriptedEnvironment, always, counter, env_rows

EPISODE, STEP = 0, 1  # columns of Counter's observation


def record(recorder: EpisodeRecorder, environment: Any, policy: Any = None, *, rows_at_a_time: int = 4) -> list[Any]:
    collector = Collector(environment, {"dataset": recorder}, device=CPU, stopwatch=Stopwatch())
    phase = Phase("collect", buffer="dataset", collect_steps=rows_at_a_time)
    episodes = []
    while not recorder.is_full:
        collector.collect(policy or always(3), phase=phase)
        episodes += recorder.take()
    return episodes


@pytest.mark.parametrize("rows_at_a_time", [1, 4, 64])
@pytest.mark.parametrize("steps", [1, 2, 3, 11, 40])
def test_exactly_so_many_steps_are_taken_and_every_episode_ends(steps: int, rows_at_a_time: int) -> None:
    environment = counter(3, length=5)
    recorder = EpisodeRecorder(environment.spec, 3, steps=steps)
    episodes = record(recorder, environment, rows_at_a_time=rows_at_a_time)
    assert recorder.agent_steps == steps == sum(len(episode["reward"]) - 1 for episode in episodes)
    assert recorder.num_rows == sum(len(episode["reward"]) for episode in episodes)
    assert len(recorder.finished) + recorder.cut_episodes == len(episodes)
    for episode in episodes:
        length = len(episode["reward"]) - 1
        assert length >= 1
        assert episode["is_first"].tolist() == [True] + [False] * length
        assert episode["is_last"].tolist() == [False] * length + [True]
        assert episode["vector"][:, STEP].tolist() == list(range(length + 1)), "consecutive rows of one environment"
        assert episode["reward"].tolist() == [0.0] + [3.0] * length
        assert episode["action"].tolist() == [3] * length + [0]


def test_how_rows_are_asked_for_does_not_change_them() -> None:
    def recorded(rows_at_a_time: int) -> list[Any]:
        environment = counter(2, length=5)
        recorder = EpisodeRecorder(environment.spec, 2, steps=33)
        return record(recorder, environment, rows_at_a_time=rows_at_a_time)

    for left, right in zip(recorded(1), recorded(16), strict=True):
        assert all(np.array_equal(left[key], right[key]) for key in left)


def test_a_cut_episode_is_ended_as_by_a_time_limit() -> None:
    environment = counter(1, length=5)
    (episode,) = record(EpisodeRecorder(environment.spec, 1, steps=3), environment)
    assert episode["is_last"].tolist() == [False, False, False, True]
    assert not episode["is_terminal"].any()


def test_whole_episodes_come_from_every_environment_alike() -> None:
    environment = counter(3, length=5)
    recorder = EpisodeRecorder(environment.spec, 3, episodes=7)
    episodes = record(recorder, environment)
    assert len(episodes) == 7 and recorder.cut_episodes == 0
    assert sorted(episode.env_index for episode in recorder.finished) == [0, 0, 0, 1, 1, 2, 2]
    assert [episode.episode_return for episode in recorder.finished] == [3.0 * len(e["reward"][1:]) for e in episodes]
    ends = [(bool(episode["is_last"][-1]), bool(episode["is_terminal"][-1])) for episode in episodes]
    assert ends == [(True, int(episode["vector"][0, EPISODE]) % 2 == 0) for episode in episodes]
    assert recorder.progress == (7, 7)


def test_what_a_policy_keeps_beside_its_action_is_left_out() -> None:
    def act(time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        return PolicyStep(torch.zeros(time_step.num_envs, dtype=torch.int64), None, {"value": time_step.reward})

    environment = counter(1)
    (episode,) = record(EpisodeRecorder(environment.spec, 1, steps=2), environment, act)
    assert set(episode) == {"vector", "reward", "is_first", "is_last", "is_terminal", "action"}


def test_continuous_actions_are_stored_as_the_environment_took_them() -> None:
    action = ActionSpec("continuous", (2,), low=(-2.0, -float("inf")), high=(2.0, float("inf")))
    spec = EnvSpec("scripted", {"vector": ArraySpec((1,), "float32")}, action)
    rows = [env_rows([0.0], first=1), env_rows([1.0]), env_rows([2.0])]

    def act(time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        return PolicyStep(torch.tensor([[1.5, -3.0]]))

    (episode,) = record(EpisodeRecorder(spec, 1, steps=1), ScriptedEnvironment(rows, spec=spec), act)
    assert episode["action"].dtype == np.float32
    assert episode["action"].tolist() == [[1.0, -3.0], [0.0, 0.0]], "the second has no bounds to be clipped to"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({}, "Say how much to collect: steps or episodes, one of the two."),
        ({"steps": 1, "episodes": 1}, "Say how much to collect"),
        ({"steps": 0}, "steps is 0: write a whole number of at least 1."),
        ({"episodes": 0}, "episodes is 0: write a whole number of at least 1."),
    ],
)
def test_how_much_must_be_said_once(wanted: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EpisodeRecorder(counter().spec, 2, **wanted)
