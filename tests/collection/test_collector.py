"""The collector: what it counts, stores, refuses and carries over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.buffers.rollout import RolloutBuffer
from rl_lab.collection.collector import Collector
from rl_lab.environments.base import Environment
from rl_lab.environments.factory import make_environment
from rl_lab.types import Counts, EnvironmentFault, EnvSpec, Phase, PolicyStep, RunError, TimeStep
from rl_lab.utils.timing import Stopwatch
from rl_lab.utils.tree import equal, numpy_to_tensors
from tests.doubles import CPU, SPEC, ScriptedEnvironment, always, counter, env_rows


def phase(steps: int, **settings: Any) -> Phase:
    return Phase("train", collect_steps=steps, duration_cycles=1, **settings)


def collector_of(environment: Environment, *, steps: int = 100) -> Collector:
    buffers = {"rollout": RolloutBuffer(capacity_steps=steps), "other": RolloutBuffer(capacity_steps=steps)}
    return Collector(environment, buffers, device=CPU, stopwatch=Stopwatch())


class Accumulator:
    """A recurrent policy: its state counts the rows it answered since it was last given None."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def __call__(self, time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        assert mode == "train"
        self.states.append(None if state is None else int(state[0]))
        state = torch.zeros(time_step.num_envs) if state is None else state
        return PolicyStep(torch.zeros(time_step.num_envs, dtype=torch.int64), state + 1, {"count": state})


# --- counting ----------------------------------------------------------------------------------


def test_resets_are_no_decisions() -> None:
    """An episode of length 5 has six rows: five are decided upon, the last one is only answered with a reset."""
    collector = collector_of(counter(2))
    result = collector.collect(always(1), phase=phase(6))
    assert result.counts == Counts(env_frames=10, agent_steps=10, episodes=2)
    result = collector.collect(always(1), phase=phase(7))  # odd episodes are one step longer
    assert result.counts == Counts(env_frames=12, agent_steps=12, episodes=2)


def test_frames_count_action_repeats() -> None:
    environment = make_environment(
        id="rl_lab/Counter-v0", num_envs=2, vectorization="sync", action_repeat=4, kwargs={"length": 100}
    )
    result = collector_of(environment).collect(always(1), phase=phase(3))
    assert result.counts == Counts(env_frames=24, agent_steps=6, episodes=0)


def test_an_episode_is_reported_with_its_return_length_and_end() -> None:
    collector = collector_of(counter(2))
    result = collector.collect(always(3), phase=phase(12))
    assert [(e.env_index, e.episode_return, e.length, e.is_terminal) for e in result.episodes] == [
        (0, 15.0, 5, True),
        (1, 15.0, 5, True),
        (0, 18.0, 6, False),
        (1, 18.0, 6, False),
    ]
    assert result.metrics["collect/episode_return_mean"] == 16.5
    assert result.metrics["collect/episode_length_mean"] == 5.5


def test_statistics_carry_over_to_collections_without_a_finished_episode() -> None:
    collector = collector_of(counter(1))
    collector.collect(always(3), phase=phase(6))
    result = collector.collect(always(3), phase=phase(2))
    assert result.counts.episodes == 0
    assert result.metrics["collect/episode_return_mean"] == 15.0


def test_time_is_split_between_environment_policy_and_waiting_for_the_device() -> None:
    collector = collector_of(counter(1))
    collector.collect(always(0), phase=phase(5))
    assert collector.stopwatch.seconds.keys() == {"environment", "policy", "device"}


# --- rows --------------------------------------------------------------------------------------


def test_the_environments_are_reset_once_and_the_pending_row_is_answered_next() -> None:
    environment = ScriptedEnvironment([env_rows([number], first=int(number == 0)) for number in range(9)])
    collector = collector_of(environment)
    seen = []
    for steps in (2, 3):
        collector.collect(always(0), phase=phase(steps))
        seen.append(collector.buffers["rollout"].sample()["vector"][0, :, 0].tolist())  # type: ignore[attr-defined]
    assert seen == [[0.0, 1.0, 2.0], [2.0, 3.0, 4.0, 5.0]]
    assert environment.resets == 1


def test_a_phase_names_the_buffer_its_rows_go_to() -> None:
    collector = collector_of(counter(1))
    collector.collect(always(0), phase=phase(2, buffer="other"))
    assert collector.buffers["other"].ready()  # type: ignore[attr-defined]
    assert not collector.buffers["rollout"].ready()  # type: ignore[attr-defined]


def test_collecting_builds_no_graph() -> None:
    weight = torch.ones((), requires_grad=True)

    def learning(time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        value = time_step.reward * weight
        return PolicyStep(torch.zeros(time_step.num_envs, dtype=torch.int64), None, {"value": value})

    collector = collector_of(counter(1))
    collector.collect(learning, phase=phase(2))
    batch = collector.buffers["rollout"].sample()  # type: ignore[attr-defined]
    assert not batch["value"].requires_grad
    (batch["value"] * weight).sum().backward()  # rows are ordinary tensors: they may be learnt from


# --- the policy's state ------------------------------------------------------------------------


def test_the_policy_state_goes_on_from_one_collection_to_the_next() -> None:
    collector, policy = collector_of(counter(1)), Accumulator()
    collector.collect(policy, phase=phase(2))
    collector.collect(policy, phase=phase(2))
    assert policy.states == [None, 1, 2, 3]


def test_another_controller_starts_without_a_state() -> None:
    collector, policy = collector_of(counter(1)), Accumulator()
    collector.collect(policy, phase=phase(2))
    collector.collect(always(0), phase=phase(1, controller="random", buffer="other"))
    collector.collect(policy, phase=phase(2))
    assert policy.states == [None, 1, None, 1]


# --- broken environments -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "name", "shown"),
    [
        (env_rows([0.0, 0.0, np.nan]), "vector", "[nan]"),
        (env_rows([0.0, 0.0, 0.0], reward=[0.0, 0.0, -np.inf]), "reward", "-inf"),
    ],
)
def test_what_is_not_finite_is_refused_naming_the_environment(broken: Any, name: str, shown: str) -> None:
    environment = ScriptedEnvironment([env_rows([0.0, 0.0, 0.0], first=1), broken])
    with pytest.raises(EnvironmentFault) as fault:
        collector_of(environment).collect(always(0), phase=phase(3))
    assert str(fault.value).startswith(f"Environment 2 of 'scripted' sent a {name} that is not finite ({shown}).")


def test_a_policy_whose_action_is_not_finite_is_not_the_environments_fault() -> None:
    environment = ScriptedEnvironment([env_rows([0.0], first=1), env_rows([np.nan])])

    def diverged(time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        return PolicyStep(torch.full((1, 1), float("nan")), None)

    with pytest.raises(
        RunError, match="The policy's action is not finite.*environment 0 sent a vector.*smaller learning"
    ):
        collector_of(environment).collect(diverged, phase=phase(1))


def test_a_first_observation_that_is_not_finite_is_refused_too() -> None:
    environment = ScriptedEnvironment([env_rows([np.inf], first=1)])
    with pytest.raises(EnvironmentFault, match="Environment 0 of 'scripted' sent a vector that is not finite"):
        collector_of(environment).collect(always(0), phase=phase(1))


@pytest.mark.filterwarnings("ignore:overflow")
def test_large_finite_numbers_are_no_fault() -> None:
    """Their sum overflows float32, they themselves do not."""
    environment = ScriptedEnvironment([env_rows([3e38, 3e38], first=1)])
    collector_of(environment).collect(always(0), phase=phase(2))


def test_restarts_are_counted_and_told() -> None:
    told: list[str] = []
    environment = ScriptedEnvironment([env_rows([0.0], first=1)])
    collector = collector_of(environment)
    collector.report = told.append
    environment.events = ["environment 0 crashed and was restarted"]
    result = collector.collect(always(0), phase=phase(1))
    assert told == ["environment 0 crashed and was restarted"]
    assert result.metrics["collect/environment_restarts"] == 1


# --- state -------------------------------------------------------------------------------------


def test_before_the_first_row_there_is_nothing_to_save_of_the_environments() -> None:
    state = collector_of(counter(1)).get_state()
    assert state["environment"] is None
    assert state["pending"] is None


@pytest.mark.parametrize("rows", [1, 5, 6, 9])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_state_continues_in_mid_episode(rows: int, seed: int) -> None:
    straight, policy = collector_of(counter(2, seed=seed)), Accumulator()
    straight.collect(policy, phase=phase(rows))
    straight.buffers["rollout"].sample()  # type: ignore[attr-defined]
    fresh = collector_of(counter(2, seed=seed + 1))
    fresh.set_state(numpy_to_tensors(straight.get_state()))
    results = [each.collect(policy, phase=phase(10)) for each in (straight, fresh)]
    assert results[0] == results[1]
    batches = [each.buffers["rollout"].sample() for each in (straight, fresh)]  # type: ignore[attr-defined]
    assert equal(batches[0], batches[1])
    assert equal(straight.get_state(), fresh.get_state())


def test_a_state_is_not_changed_by_what_the_policy_does_next() -> None:
    def in_place(time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        state = torch.zeros(time_step.num_envs) if state is None else state.add_(1.0)
        return PolicyStep(torch.zeros(time_step.num_envs, dtype=torch.int64), state)

    collector = collector_of(counter(1))
    collector.collect(in_place, phase=phase(1))
    state = collector.get_state()
    collector.collect(in_place, phase=phase(3))
    assert state["policy_state"].tolist() == [0.0]


def test_the_spec_tells_the_frames_of_a_step() -> None:
    spec = EnvSpec(SPEC.id, SPEC.observation, SPEC.action, frames_per_step=3)
    environment = ScriptedEnvironment([env_rows([0.0])], spec=spec)
    assert collector_of(environment).collect(always(0), phase=phase(5)).counts.env_frames == 15


def test_a_restart_begins_new_episodes_everywhere_and_forgets_the_running_ones() -> None:
    collector = collector_of(counter(2, length=6))
    collector.collect(always(1), phase=phase(3))
    collector.restart()
    result = collector.collect(always(1), phase=phase(8))
    assert [episode.length for episode in result.episodes] == [7, 7], "the second episode, whole: odd ones are longer"
