"""Uniform replay: consecutive rows from anywhere but across the write head, exact across a checkpoint."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.buffers import replay
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.components.returns.transitions import n_step_transitions
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, EnvSpec
from rl_lab.utils.tree import equal, numpy_to_tensors
from tests import test_contract as contract

EPISODE = 5  # rows of every episode, the is_last one included


def row(time: int, *, envs: int = 2, is_answered: bool = True) -> Batch:
    """Row `time` of some environments whose episodes are shifted against each other: its numbers show its place."""
    env_index = torch.arange(envs)
    place = (time + env_index) % EPISODE
    is_last = place == EPISODE - 1
    values: Batch = {
        "vector": torch.stack([env_index.float(), torch.full((envs,), float(time))], dim=-1),
        "image": torch.full((envs, 2, 2, 3), time % 256, dtype=torch.uint8),
        "reward": env_index * 1000.0 + time,
        "is_first": place == 0,
        "is_last": is_last,
        "is_terminal": is_last & (env_index == 0),
    }
    return {**values, "action": env_index * 1000 + time + 1} if is_answered else values


def fill(buffer: ReplayBuffer, times: range, *, is_pending: bool = False, envs: int = 2) -> Any:
    for time in times:
        buffer.add(row(time, envs=envs))
        if is_pending:
            buffer.set_pending(row(time + 1, envs=envs, is_answered=False))
    return buffer


def make(**settings: Any) -> ReplayBuffer:
    return ReplayBuffer(**{"num_envs": 2, "capacity_rows": 24, "batch_size": 64, **settings})


def times_of(batch: Batch) -> set[tuple[int, int]]:
    """Environment and time of each start of a batch."""
    return {(int(env), int(time)) for env, time in batch["vector"][:, 0]}


@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("length", [2, 4, 12])
@pytest.mark.parametrize("count", [12, 13, 17, 24, 40])
def test_rows_are_consecutive_and_never_cross_the_write_head(count: int, length: int, is_pending: bool) -> None:
    buffer = fill(make(n_step=length - 1), range(count), is_pending=is_pending)
    newest = count if is_pending else count - 1
    if not buffer.ready():  # a single start of each environment: both may be is_last
        assert length == 12
        return
    for _ in range(20):
        batch = buffer.sample()
        times = batch["vector"][..., 1]
        assert bool((times[:, 1:] - times[:, :-1] == 1).all())
        assert bool((batch["vector"][..., 0] == batch["vector"][:, :1, 0]).all())
        assert newest - 11 <= int(times.min()) and int(times.max()) <= newest
        assert torch.equal(batch["reward"], batch["vector"][..., 0] * 1000 + times)
        assert torch.equal(batch["image"][..., 0, 0, 0].long(), times.long() % 256)
        assert not bool(batch["is_last"][:, 0].any()), "nothing was decided on an is_last row"
        answered = times < count
        assert torch.equal(batch["action"][answered], (batch["reward"] + 1).long()[answered])
        assert bool((batch["action"][~answered] == 0).all()), "the pending row is not answered yet"


def test_every_start_is_drawn_and_as_often_as_any_other() -> None:
    buffer = fill(make(n_step=2, batch_size=1000), range(30))
    counts: dict[tuple[int, int], int] = {}
    for _ in range(30):
        for env, time in buffer.sample()["vector"][:, 0].long().tolist():
            counts[env, time] = counts.get((env, time), 0) + 1
    starts = {(env, time) for env in range(2) for time in range(18, 28) if (time + env) % EPISODE != EPISODE - 1}
    assert counts.keys() == starts
    expected = 30_000 / len(starts)
    assert all(abs(count - expected) < 6 * math.sqrt(expected) for count in counts.values())


def test_the_newest_transition_ends_in_the_pending_row() -> None:
    buffer = fill(make(batch_size=500), range(3))
    assert (0, 2) not in times_of(buffer.sample())
    buffer.set_pending(row(3, is_answered=False))
    assert (0, 2) in times_of(buffer.sample())
    fill(buffer, range(3, 4))
    assert buffer.num_rows == 8, "the pending row was answered, not stored a second time"


def test_pixels_stay_bytes_and_one_dimensional_parts_keep_their_shape() -> None:
    batch = fill(make(), range(10)).sample()
    assert batch["image"].dtype == torch.uint8
    assert batch["image"].shape == (64, 2, 2, 2, 3)
    assert batch["action"].dtype == torch.int64
    assert batch["reward"].shape == batch["is_last"].shape == (64, 2)


def test_a_batch_is_the_learners_own() -> None:
    buffer = fill(make(), range(10))
    for value in buffer.sample().values():
        value.zero_()
    assert bool((buffer.sample()["action"] > 0).all())


def test_ready_waits_for_the_rows_it_was_told_and_for_a_whole_sequence() -> None:
    buffer = make(minimum_rows=8, n_step=2)
    assert not buffer.ready()
    assert not fill(buffer, range(3)).ready()
    assert fill(buffer, range(3, 4)).ready()
    short = make(n_step=2)
    assert not fill(short, range(2)).ready()
    with pytest.raises(AssertionError, match="too few rows to sample"):
        short.sample()


def test_a_replay_of_ends_alone_is_not_ready() -> None:
    buffer = make(num_envs=1, capacity_rows=2)
    fill(buffer, range(EPISODE + 1), envs=1)
    assert not buffer.ready(), "the only start is the is_last row"
    with pytest.raises(AssertionError, match="too few rows to sample"):
        buffer.sample()
    assert fill(buffer, range(EPISODE + 1, EPISODE + 2), envs=1).ready()


def test_rows_that_went_elsewhere_in_between_end_the_episode_as_a_time_limit_does() -> None:
    buffer = make(num_envs=1, batch_size=300)
    fill(buffer, range(2), envs=1)
    buffer.set_pending(row(2, envs=1, is_answered=False))
    fill(buffer, range(10, 13), envs=1)
    batch = make_sequences(buffer, length=5)
    assert batch["vector"][:, 1].tolist() == [0, 1, 2, 10, 11, 12]
    assert batch["is_last"].tolist() == [False, False, True, False, False, False]
    assert not bool(batch["is_terminal"].any()), "a value may be bootstrapped there"
    assert batch["is_first"].tolist() == [True, False, False, True, False, False]
    assert batch["reward"].tolist() == [0, 1, 2, 0, 11, 12]


def make_sequences(buffer: ReplayBuffer, *, length: int) -> Batch:
    """All rows of environment 0, in order."""
    buffer._store_waiting()
    rows = buffer._ring.read(np.zeros(1, int), np.zeros(1, int), length + 1)
    return {key: value[0] for key, value in rows.items()}


def test_a_pending_row_is_recognised_by_its_values_too() -> None:
    buffer = fill(make(), range(3))
    buffer.set_pending(row(3, is_answered=False))
    other = make()
    other.set_state(buffer.get_state())
    fill(other, range(3, 4))
    other._store_waiting()
    assert not bool(other._ring.view("is_last")[0, 3])
    assert other.num_rows == 8


def test_a_cleared_buffer_starts_anew_and_mixes_nothing_with_what_was() -> None:
    buffer = fill(make(), range(20), is_pending=True)
    buffer.clear()
    assert not buffer.ready() and buffer.num_rows == 0
    fill(buffer, range(50, 54))
    assert int(buffer.sample()["vector"][..., 1].min()) == 50


def test_n_step_targets_by_hand_across_a_time_limit_and_a_termination() -> None:
    """Environment 0 ends terminally at place 4, environment 1 by its time limit; reward = 1000 * environment + time."""
    buffer = fill(make(n_step=3, batch_size=400), range(12))
    batch = buffer.sample()
    found = n_step_transitions(batch, 0.5)
    targets = {}
    for i, (env, time) in enumerate(batch["vector"][:, 0].long().tolist()):
        targets[env, time] = [float(found[key][i]) for key in ("reward", "discount", "next_row")]
    assert targets[0, 0] == [1 + 2 / 2 + 3 / 4, 0.125, 3]  # r1 + r2 / 2 + r3 / 4, then the value of row 3
    assert targets[0, 2] == [3 + 4 / 2, 0.0, 2]  # terminal at time 4: nothing after has value
    assert targets[0, 3] == [4.0, 0.0, 1]
    assert targets[1, 1] == [1002 + 1003 / 2, 0.25, 2]  # a time limit at time 3: its value bootstraps
    assert (0, 4) not in targets and (1, 3) not in targets, "nothing was decided there"


def test_a_policy_that_keeps_more_widens_the_rows_and_one_that_keeps_less_leaves_zeros() -> None:
    buffer = fill(make(batch_size=300), range(4))
    buffer.add({**row(4), "latent": torch.full((2, 3), 7.0)})
    fill(buffer, range(5, 7))
    batch = buffer.sample()
    is_four = batch["vector"][..., 1] == 4
    assert bool((batch["latent"][is_four] == 7).all()) and bool((batch["latent"][~is_four] == 0).all())
    assert torch.equal(batch["reward"], batch["vector"][..., 0] * 1000 + batch["vector"][..., 1])


@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 5, 11, 12, 13, 30])
def test_the_state_continues_bit_for_bit(cut: int, is_pending: bool) -> None:
    buffer = fill(make(), range(cut), is_pending=is_pending)
    if buffer.ready():
        buffer.sample()
    other = fill(make(seed=1), range(7))
    other.set_state(numpy_to_tensors(buffer.get_state()))
    assert equal(other.get_state(), buffer.get_state())
    for time in range(cut, cut + 20):
        fill(buffer, range(time, time + 1), is_pending=is_pending)
        fill(other, range(time, time + 1), is_pending=is_pending)
        if time > cut:
            assert equal(buffer.sample(), other.sample())


@pytest.mark.parametrize("taken", [1, 8, 9, 15, 17, 50])
def test_batches_drawn_ahead_continue_bit_for_bit(taken: int) -> None:
    buffer, other = fill(make(batch_size=4), range(20)), fill(make(batch_size=4, seed=1), range(7))
    for _ in range(taken):
        buffer.sample()
    assert len(buffer._ahead) == {1: 0, 8: 0, 9: 7, 15: 1, 17: 15, 50: 14}[taken], (
        "eight alone, then 8, then 16 at once"
    )
    other.set_state(numpy_to_tensors(buffer.get_state()))
    assert equal(other.get_state(), buffer.get_state())
    assert all(equal(buffer.sample(), other.sample()) for _ in range(40))


def test_drawing_ahead_changes_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def batches() -> list[Batch]:
        buffer, drawn = make(batch_size=8), []
        for cycle, count in enumerate([10, 20, 12, 25, 25, 1]):
            fill(buffer, range(12 * cycle, 12 * cycle + 12), is_pending=True)
            drawn += [buffer.sample() for _ in range(count)]
        return drawn

    ahead = batches()
    monkeypatch.setattr(replay, "_MOST_AHEAD", 1)  # then none is drawn ahead
    assert equal(ahead, batches())


def test_batches_drawn_ahead_are_forgotten_when_rows_come_and_as_many_are_drawn_the_next_time() -> None:
    buffer = fill(make(batch_size=100), range(12))
    for _ in range(9):
        buffer.sample()
    assert len(buffer._ahead) == 7
    fill(buffer, range(12, 30))
    assert int(buffer.sample()["vector"][..., 1].min()) == 18, "all of the older rows are gone"
    assert len(buffer._ahead) == 8, "nine were taken the last time"


def test_large_batches_are_drawn_one_by_one() -> None:
    buffer = fill(make(batch_size=4000), range(12))
    for _ in range(20):
        buffer.sample()
        assert not buffer._ahead


def test_a_state_does_not_change_with_the_buffer() -> None:
    buffer = fill(make(), range(15))
    state = buffer.get_state()
    kept = numpy_to_tensors({**state, "rows": {key: value.copy() for key, value in state["rows"].items()}})
    fill(buffer, range(15, 20))
    assert equal(numpy_to_tensors(state), kept)


SPEC = EnvSpec(
    "any", {"vector": ArraySpec((17,), "float32"), "image": ArraySpec((8, 8, 3), "uint8")}, ActionSpec("discrete", (4,))
)


def row_of_spec(envs: int) -> Batch:
    flags = {name: torch.zeros(envs, dtype=torch.bool) for name in ("is_first", "is_last", "is_terminal")}
    values = {"vector": torch.zeros(envs, 17), "image": torch.zeros(envs, 8, 8, 3, dtype=torch.uint8)}
    return {**values, "reward": torch.zeros(envs), **flags, "action": torch.zeros(envs, dtype=torch.int64)}


def test_memory_is_known_before_it_is_taken_and_holds_nothing_but_the_rows() -> None:
    buffer = ReplayBuffer(num_envs=4, capacity_rows=4000)
    predicted = buffer.memory_bytes(SPEC)
    assert buffer._ring.allocated_bytes == 0
    for _ in range(1200):
        buffer.add(row_of_spec(4))
    information = 17 * 4 + 8 * 8 * 3 + 4 + 3 + 8
    assert predicted == buffer._ring.allocated_bytes == 4000 * information
    assert buffer.memory_bytes(SPEC, extra_bytes_per_row=12) == predicted + 4000 * 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; write a whole number of at least 1"),
        ({"n_step": 0}, "n_step is 0; write a whole number of at least 1"),
        ({"capacity_rows": 7, "n_step": 3}, "leaves 3 rows to each of 2 environments.*needs 4.*at least 8"),
        ({"minimum_rows": -1}, "minimum_rows is -1; write a whole number of at least 1"),
        ({"minimum_rows": 25}, "minimum_rows is 25, more than the 24 rows.*smaller minimum_rows"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**settings)


def test_a_state_of_another_size_is_refused_with_the_size_to_write() -> None:
    state = fill(make(), range(4)).get_state()
    with pytest.raises(ConfigError, match="holds 2 environments of 12 rows each, this one 2 of 20.*capacity_rows 24"):
        make(capacity_rows=40).set_state(state)


@pytest.mark.parametrize("capacity_rows", [21, 60, 3000])
@pytest.mark.parametrize("collect_steps", [1, 8])
def test_replay_keeps_the_convention(capacity_rows: int, collect_steps: int) -> None:
    workflow = contract.Contract()
    buffer = ReplayBuffer(num_envs=3, capacity_rows=capacity_rows, batch_size=32, n_step=5, minimum_rows=21)
    contract.run(workflow, buffer, collect_steps=collect_steps, duration_cycles=100 // collect_steps)
    assert len(workflow.batches) > 5


def test_batches_drawn_ahead_know_the_answer_that_came_since() -> None:
    """The newest row may be in a batch before it is answered; once it is, no batch is without its action."""
    buffer = fill(make(batch_size=8), range(6), is_pending=True)
    for _ in range(9):
        buffer.sample()
    assert buffer._ahead
    buffer.add(row(6))
    newest = [batch["action"][batch["vector"][..., 1] == 6.0] for batch in (buffer.sample() for _ in range(40))]
    assert sum(map(len, newest)) > 0 and all(set(found.tolist()) <= {7, 1007} for found in newest)
