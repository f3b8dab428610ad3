"""The one data convention, checked row by row through the real loop.

`Contract` learns nothing. It answers every observation with an action computed from that observation alone, and the
Counter environment rewards an action with its own number, so each row tells whether it is where it belongs:

     row t          [episode, step, identity]     reward = the action that answered row t-1
     action         encode(row t)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_lab.buffers.base import Buffer
from rl_lab.buffers.episodes import EpisodeBuffer
from rl_lab.buffers.prioritized import PrioritizedReplayBuffer
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.rollout import RolloutBuffer
from rl_lab.buffers.sequence import SequenceReplay
from rl_lab.config.phases import make_phase
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.types import Batch, ConfigError, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Workflow
from tests.doubles import counter, make_orchestrator

LENGTH, ACTIONS = 5, 10
EPISODE, STEP, IDENTITY = 0, 1, 2  # columns of Counter's observation


def encode(observation: Tensor) -> Tensor:
    """An action that tells its row: different for neighbouring steps, episodes and environments."""
    episode, step, identity = (observation[..., column].long() for column in (EPISODE, STEP, IDENTITY))
    return (3 * episode + 7 * step + identity) % ACTIONS


class Contract(Workflow):
    """Checks every batch against the convention; keeps them for the test."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.answered = 0

    def act(self, time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        """The state counts the rows since the last first one, as a recurrent policy's would."""
        count = torch.zeros(time_step.num_envs) if state is None else state
        count = torch.where(time_step.is_first, 0.0, count)
        assert torch.equal(count, time_step.observation["vector"][:, STEP]), "the policy's state belongs to its row"
        self.answered += int((~time_step.is_last).sum())
        return PolicyStep(encode(time_step.observation["vector"]), count + 1, {"steps_before": count})

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        check_rows_are_consecutive(batch)
        check_flags(batch)
        check_actions_answer_their_rows(batch)
        self.batches.append(batch)
        return {}


def real_rows(batch: Batch) -> Tensor:
    """`[B, T]`: False where an episode buffer padded; padding lies after the first is_last of a whole episode."""
    after_an_end = batch["is_last"].cumsum(1) - batch["is_last"].long() > 0
    was_padded = after_an_end & ~batch["is_first"] & (batch["vector"].abs().sum(-1) == 0)
    return ~was_padded


def check_rows_are_consecutive(batch: Batch) -> None:
    vector, real = batch["vector"], real_rows(batch)
    here, there, both = vector[:, :-1], vector[:, 1:], real[:, 1:]
    ends = batch["is_last"][:, :-1]
    same_episode = there[..., EPISODE] - here[..., EPISODE] == ends.float()
    next_step = there[..., STEP] == torch.where(ends, 0.0, here[..., STEP] + 1)
    assert bool((same_episode | ~both).all())
    assert bool((next_step | ~both).all())
    assert bool(((there[..., IDENTITY] == here[..., IDENTITY]) | ~both).all())


def check_flags(batch: Batch) -> None:
    vector, real = batch["vector"], real_rows(batch)
    is_even = vector[..., EPISODE] % 2 == 0
    is_last = vector[..., STEP] == torch.where(is_even, LENGTH, LENGTH + 1)
    expected = {"is_first": vector[..., STEP] == 0, "is_last": is_last, "is_terminal": is_last & is_even}
    for name, flag in expected.items():
        assert bool(((batch[name] == flag) | ~real).all()), name
    assert bool(batch["is_last"][~real].all()), "padding says is_last, so that no transition of it is valid"
    first_rows_after_the_last = batch["is_last"][:, :-1] & real[:, 1:]
    assert torch.equal(batch["is_first"][:, 1:] & real[:, 1:], first_rows_after_the_last)


def check_actions_answer_their_rows(batch: Batch) -> None:
    real, valid = real_rows(batch), ~batch["is_last"][:, :-1]
    action, reward = batch["action"][:, :-1], batch["reward"][:, 1:]
    assert bool(((action == encode(batch["vector"][:, :-1])) | ~real[:, :-1]).all())
    assert bool((reward == action)[valid].all()), "the reward arrives with the row after the action"
    assert bool((batch["reward"][batch["is_first"]] == 0).all())
    assert bool(((batch["steps_before"] == batch["vector"][..., STEP])[:, :-1] | ~real[:, :-1]).all())


def run(
    workflow: Workflow, buffer: Buffer, *, num_envs: int = 3, vectorization: str = "sync", **phase: Any
) -> Orchestrator:
    settings = {"name": "train", "buffer": "held", "collect_steps": 8, "duration_cycles": 6, **phase}
    environment = counter(num_envs, vectorization=vectorization, length=LENGTH, num_actions=ACTIONS)
    try:
        loop = make_orchestrator(
            workflow, [make_phase(settings, place="phase")], environment=environment, buffers={"held": buffer}
        )
        assert loop.run() == "finished"
    finally:
        environment.close()
    return loop


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_rollouts_keep_the_convention(vectorization: str) -> None:
    workflow = Contract()
    loop = run(workflow, RolloutBuffer(capacity_steps=8), vectorization=vectorization)
    assert len(workflow.batches) == 6
    assert loop.scheduler.run_counts.agent_steps == workflow.answered
    identities = workflow.batches[0]["vector"][:, 0, IDENTITY]
    assert len(identities.unique()) == 3, "every environment has a seed of its own"


def test_the_pending_row_is_the_first_row_of_the_next_rollout() -> None:
    workflow = Contract()
    run(workflow, RolloutBuffer(capacity_steps=7), collect_steps=7, duration_cycles=9)
    for before, after in zip(workflow.batches, workflow.batches[1:], strict=False):
        for key in ("vector", "reward", "is_first", "is_last", "is_terminal"):
            assert torch.equal(before[key][:, -1], after[key][:, 0]), key
        assert bool((before["action"][:, -1] == 0).all()), "the pending row is not answered yet"


def test_rollouts_of_one_row_keep_the_convention() -> None:
    workflow = Contract()
    run(workflow, RolloutBuffer(capacity_steps=1), collect_steps=1, duration_cycles=30)
    assert all(batch["vector"].shape == (3, 2, 3) for batch in workflow.batches)


@pytest.mark.parametrize("capacity_steps", [2, 64])
def test_episodes_keep_the_convention(capacity_steps: int) -> None:
    workflow = Contract()
    buffer = EpisodeBuffer(num_envs=3, episodes_per_batch=2, capacity_steps=capacity_steps)
    run(workflow, buffer, duration_cycles=10)
    assert len(workflow.batches) > 5
    seen = [tuple(int(value) for value in row) for batch in workflow.batches for row in batch["vector"][:, 0]]
    assert len(set(seen)) == len(seen), "no episode is learnt from twice"
    for batch in workflow.batches:
        assert bool(batch["is_first"][:, 0].all())
        assert bool(batch["is_last"][:, -1].all())
        assert not bool(batch["is_first"][:, 1:].any()), "one episode per row of the batch"


def test_valid_transitions_of_episodes_are_exactly_the_decisions() -> None:
    workflow = Contract()
    run(workflow, EpisodeBuffer(num_envs=3, episodes_per_batch=1), duration_cycles=10)
    for batch in workflow.batches:
        for i in range(len(batch["reward"])):
            valid = int((~batch["is_last"][i, :-1]).sum())
            is_even = int(batch["vector"][i, 0, EPISODE]) % 2 == 0
            assert valid == (LENGTH if is_even else LENGTH + 1)


class Surprised(Contract):
    """Gives priorities, as some replays ask."""

    notes_priorities = True

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        batch["priority"] = batch["reward"][:, 1]
        return super().update_controller(batch, phase=phase)


REPLAYS: dict[str, Any] = {
    "one-step": partial(ReplayBuffer, batch_size=32),
    "n-step": partial(ReplayBuffer, batch_size=32, n_step=4),
    "prioritised": partial(PrioritizedReplayBuffer, batch_size=32, n_step=2),
    "sequences": partial(SequenceReplay, batch_size=16, sequence_length=6, uniform=0.4, priority=0.3, recency=0.3),
}


@pytest.mark.parametrize("kind", REPLAYS)
@pytest.mark.parametrize(("capacity_rows", "collect_steps"), [(24, 1), (60, 8), (60, 19), (3000, 5)])
def test_replays_keep_the_convention_wherever_the_ring_stands(
    kind: str, capacity_rows: int, collect_steps: int
) -> None:
    """Sequences that crossed the write head, or a row out of place, would break the chain of numbers."""
    workflow = Surprised()
    buffer = REPLAYS[kind](num_envs=3, capacity_rows=capacity_rows)
    loop = run(workflow, buffer, collect_steps=collect_steps, duration_steps=240, duration_cycles=None)
    assert len(workflow.batches) >= 240 // (3 * collect_steps) - 2
    assert buffer.num_rows <= capacity_rows
    oldest, newest = (loop.scheduler.run_counts.agent_steps - capacity_rows) // 3, workflow.batches[-1]
    elapsed = newest["vector"][..., EPISODE] * LENGTH + newest["vector"][..., STEP]
    assert bool((elapsed >= oldest - 2 * LENGTH).all()), "what the ring has lost is not drawn"


@pytest.mark.parametrize("kind", REPLAYS)
@pytest.mark.parametrize("updates_per_step", [0.25, 1.0, 1.5])
def test_updates_keep_exactly_to_their_ratio(kind: str, updates_per_step: float) -> None:
    workflow = Surprised()
    buffer = REPLAYS[kind](num_envs=3, capacity_rows=60)
    loop = run(workflow, buffer, collect_steps=7, updates_per_step=updates_per_step, duration_cycles=8)
    assert len(workflow.batches) == int(loop.scheduler.run_counts.agent_steps * updates_per_step)


def test_a_misspelt_hook_never_reaches_the_environment() -> None:
    workflow = Contract()
    with pytest.raises(ConfigError, match="lists the hook 'update_controler'.*Did you mean 'update_controller'"):
        run(workflow, RolloutBuffer(capacity_steps=8), workflow_hooks=["update_controler"])
    assert workflow.answered == 0


def test_the_checks_notice_a_row_out_of_place() -> None:
    """A contract that cannot be broken guards nothing."""
    workflow = Contract()
    run(workflow, RolloutBuffer(capacity_steps=8), duration_cycles=1)
    (batch,) = workflow.batches
    swapped = [0, 2, 1, *range(3, 9)]
    with pytest.raises(AssertionError):
        check_rows_are_consecutive({key: value[:, swapped] for key, value in batch.items()})
    with pytest.raises(AssertionError):
        check_actions_answer_their_rows({**batch, "action": batch["action"].roll(1, dims=1)})
    with pytest.raises(AssertionError, match="arrives with the row after"):
        check_actions_answer_their_rows({**batch, "reward": batch["reward"].roll(1, dims=1)})
    with pytest.raises(AssertionError, match="is_terminal"):
        check_flags({**batch, "is_terminal": ~batch["is_terminal"]})
