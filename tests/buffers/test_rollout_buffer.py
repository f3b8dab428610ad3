"""The rollout buffer: T answered rows and the pending one, handed out once."""

from __future__ import annotations

import pytest
import torch

from rl_lab.buffers.rollout import RolloutBuffer
from rl_lab.types import Batch
from rl_lab.utils.tree import equal


def row(time: int, *, envs: int = 2, is_answered: bool = True) -> Batch:
    """Row `time` of some environments: every number shows where it came from."""
    numbers = torch.arange(envs, dtype=torch.float32) * 100 + time
    values: Batch = {
        "vector": numbers.unsqueeze(-1),
        "reward": numbers,
        "is_first": torch.zeros(envs, dtype=torch.bool),
        "is_last": torch.zeros(envs, dtype=torch.bool),
        "is_terminal": torch.zeros(envs, dtype=torch.bool),
    }
    return {**values, "action": numbers.long(), "log_prob": -numbers} if is_answered else values


def filled(times: range, *, capacity_steps: int = 4) -> RolloutBuffer:
    buffer = RolloutBuffer(capacity_steps=capacity_steps)
    for time in times:
        buffer.add(row(time))
    buffer.set_pending(row(times.stop, is_answered=False))
    return buffer


def test_a_batch_is_the_answered_rows_and_the_pending_one() -> None:
    batch = filled(range(4)).sample()
    assert batch["vector"].shape == (2, 5, 1)
    assert batch["vector"][1, :, 0].tolist() == [100.0, 101.0, 102.0, 103.0, 104.0]
    assert batch["action"][1].tolist() == [100, 101, 102, 103, 0]
    assert batch["log_prob"][1].tolist() == [-100.0, -101.0, -102.0, -103.0, 0.0]
    assert batch["action"].dtype == torch.int64
    assert batch["is_last"].dtype == torch.bool


def test_a_rollout_is_handed_out_once() -> None:
    buffer = filled(range(4))
    assert buffer.ready()
    buffer.sample()
    assert not buffer.ready()
    with pytest.raises(AssertionError, match="no finished rollout to sample"):
        buffer.sample()


def test_a_rollout_without_its_pending_row_is_not_ready() -> None:
    buffer = RolloutBuffer(capacity_steps=4)
    assert not buffer.ready()
    buffer.add(row(0))
    assert not buffer.ready()


def test_a_batch_does_not_change_when_the_buffer_is_filled_again() -> None:
    buffer = filled(range(4))
    batch = buffer.sample()
    before = {key: value.clone() for key, value in batch.items()}
    for time in range(4, 8):
        buffer.add(row(time))
    assert equal(batch, before)


def test_what_only_an_answer_brings_is_zero_in_the_pending_row_of_every_rollout() -> None:
    buffer = filled(range(4))
    buffer.sample()
    for time in range(4, 7):  # shorter: its pending row lies where the last rollout had an action
        buffer.add(row(time))
    buffer.set_pending(row(7, is_answered=False))
    batch = buffer.sample()
    assert batch["action"][0].tolist() == [4, 5, 6, 0]
    assert batch["log_prob"][0].tolist() == [-4.0, -5.0, -6.0, 0.0]


def test_a_rollout_that_was_not_taken_gives_way_to_the_next() -> None:
    buffer = filled(range(4))
    for time in range(4, 6):
        buffer.add(row(time))
    buffer.set_pending(row(6, is_answered=False))
    assert buffer.sample()["vector"][0, :, 0].tolist() == [4.0, 5.0, 6.0]


def test_a_policy_that_keeps_other_extras_starts_a_new_rollout() -> None:
    buffer = filled(range(4))
    buffer.sample()
    without_extras = {key: value for key, value in row(9).items() if key != "log_prob"}
    buffer.add(without_extras)
    buffer.set_pending(row(10, is_answered=False))
    assert "log_prob" not in buffer.sample()


def test_more_rows_than_the_buffer_holds_are_our_own_mistake() -> None:
    buffer = RolloutBuffer(capacity_steps=1)
    buffer.add(row(0))
    with pytest.raises(AssertionError, match="a rollout longer than its buffer"):
        buffer.add(row(1))
    with pytest.raises(AssertionError, match="every row of a rollout has the same keys"):
        changed = RolloutBuffer(capacity_steps=2)
        changed.add(row(0))
        changed.add(row(1, is_answered=False))
    with pytest.raises(AssertionError, match="a rollout has at least one step"):
        RolloutBuffer(capacity_steps=0)


@pytest.mark.parametrize("answered", [0, 1, 3, 4])
def test_the_state_continues_a_rollout_wherever_it_stood(answered: int) -> None:
    buffer = RolloutBuffer(capacity_steps=4)
    for time in range(answered):
        buffer.add(row(time))
    fresh = filled(range(50, 54))  # what it held before must not show
    fresh.set_state(buffer.get_state())
    assert equal(fresh.get_state(), buffer.get_state())
    for target in (buffer, fresh):
        for time in range(answered, 4):
            target.add(row(time))
        target.set_pending(row(4, is_answered=False))
    assert equal(fresh.sample(), buffer.sample())


def test_the_state_of_a_finished_rollout_can_be_sampled() -> None:
    fresh = RolloutBuffer(capacity_steps=4)
    fresh.set_state(filled(range(4)).get_state())
    assert fresh.ready()
    assert equal(fresh.sample(), filled(range(4)).sample())


def test_a_state_does_not_share_memory_with_the_buffer() -> None:
    buffer = filled(range(4))
    state = buffer.get_state()
    buffer.sample()
    buffer.add(row(77))
    assert state["rows"]["vector"][0, 0, 0] == 0.0
