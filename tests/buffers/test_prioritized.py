"""Prioritised replay: the tree against plain sums, priorities against a dictionary, weights by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_lab.buffers.priorities import SumTree
from rl_lab.buffers.prioritized import PrioritizedReplayBuffer
from rl_lab.training.schedules import Schedule
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, EnvSpec, Progress, RunError
from rl_lab.utils.tree import equal, numpy_to_tensors
from tests import test_contract as contract

EPISODE, ENVS = 4, 2  # rows of an episode; environments


def row(time: int, *, is_answered: bool = True) -> Batch:
    env_index = torch.arange(ENVS)
    place = (time + env_index) % EPISODE
    values = {
        "vector": torch.stack([env_index.float(), torch.full((ENVS,), float(time))], dim=-1),
        "reward": torch.full((ENVS,), float(time)),
        "is_first": place == 0,
        "is_last": place == EPISODE - 1,
        "is_terminal": place == EPISODE - 1,
    }
    return {**values, "action": env_index} if is_answered else values


def make(**given_settings: Any) -> PrioritizedReplayBuffer:
    chosen = {"num_envs": ENVS, "capacity_rows": 16, "batch_size": 8, "alpha": 1.0, "beta": 1.0, "epsilon": 1e-3}
    return PrioritizedReplayBuffer(**{**chosen, **given_settings})


def fill(buffer: PrioritizedReplayBuffer, times: range) -> PrioritizedReplayBuffer:
    for time in times:
        buffer.add(row(time))
    return buffer


def priorities_of(buffer: PrioritizedReplayBuffer) -> dict[tuple[int, int], float]:
    """(environment, time) -> stored priority, of every start that can be drawn."""
    buffer._store_waiting()
    leaves = buffer._priorities.tree.leaves.reshape(ENVS, -1)
    times = buffer._time_at(np.arange(buffer.slots_per_env))
    return {(env, int(times[slot])): float(leaves[env, slot]) for env, slot in zip(*leaves.nonzero(), strict=True)}


# --- the tree ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, 16, 4096, 4097, 70_000, 1_000_000])
def test_leaves_are_found_where_the_cumulative_sum_says(size: int) -> None:
    generator = np.random.default_rng(0)
    tree = SumTree(size)
    for _ in range(3):
        index = generator.integers(0, size, 300)
        tree.set(index, generator.random(300) * (generator.random(300) < 0.8) + (index == 0))
    cumulative = tree.leaves.cumsum()
    fraction = generator.random(1000)
    found = tree.find(fraction)
    assert bool((tree.leaves[found] > 0).all())
    target = fraction * cumulative[-1]
    below = cumulative[found] - tree.leaves[found]
    assert bool((below <= target + 1e-9).all()) and bool((target <= cumulative[found] + 1e-9).all())


def test_a_leaf_without_mass_is_never_found_even_at_the_very_ends() -> None:
    tree = SumTree(100_000)
    tree.set(np.array([17, 90_001]), np.array([1e-9, 1e9]))
    edges = np.array([0.0, 1e-30, 0.5, np.nextafter(1.0, 0), 1.0])
    assert set(tree.find(edges).tolist()) <= {17, 90_001}
    assert tree.find(np.array([0.0])).tolist() == [17]


def test_sums_depend_on_the_leaves_alone_not_on_how_they_came() -> None:
    generator = np.random.default_rng(1)
    lived, rebuilt = SumTree(70_000), SumTree(70_000)
    for _ in range(50):
        lived.set(generator.integers(0, 70_000, 64), generator.random(64) ** 8 * 1e6)
    rebuilt.rebuild(lived.leaves)
    for left, right in zip(lived._levels, rebuilt._levels, strict=True):
        assert np.array_equal(left, right)


def test_of_a_leaf_named_twice_the_last_mass_counts() -> None:
    tree = SumTree(10_000)
    tree.set(np.array([3, 3, 9_999]), np.array([5.0, 2.0, 1.0]))
    assert tree.leaves[3] == 2.0
    assert sum(tree._levels[-1]) == 3.0


def test_an_empty_tree_has_nothing_to_draw() -> None:
    with pytest.raises(AssertionError, match="every priority is 0"):
        SumTree(8).find(np.array([0.5]))


# --- the buffer --------------------------------------------------------------------------------


class Naive:
    """The same rules over a dictionary: one priority for each start, worked out row by row."""

    def __init__(self, buffer: PrioritizedReplayBuffer) -> None:
        self.buffer = buffer
        self.known: dict[tuple[int, int], float] = {}
        self.opened = 0
        self.largest = 1.0

    def stored(self, end: int) -> None:
        """`end` rows have been stored."""
        begin = max(0, end - self.buffer.slots_per_env)
        self.known = {(env, time): value for (env, time), value in self.known.items() if time >= begin}
        while self.opened + self.buffer.sequence_length <= end:
            for env in range(ENVS):
                if not bool(row(self.opened)["is_last"][env]):
                    self.known[env, self.opened] = self.largest
            self.opened += 1

    def update(self, index: list[int], priority: list[float]) -> None:
        for each, value in zip(index, priority, strict=True):
            place = (each % ENVS, each // ENVS)
            stored = (abs(value) + self.buffer._priorities.epsilon) ** self.buffer._priorities.alpha
            if place in self.known:
                self.known[place] = stored
                self.largest = max(self.largest, stored)


operation = st.one_of(
    st.just("add"), st.just("pending"), st.lists(st.floats(-1e3, 1e3, width=32), min_size=8, max_size=8)
)


@settings(max_examples=80, deadline=None)
@given(
    operations=st.lists(operation, max_size=60),
    length=st.integers(2, 4),
    alpha=st.sampled_from([0.0, 0.6, 1.0]),
    is_late=st.booleans(),
)
def test_priorities_equal_a_naive_reference(operations: list[Any], length: int, alpha: float, is_late: bool) -> None:
    buffer = make(n_step=length - 1, alpha=alpha)
    naive = Naive(buffer)
    answered, asked = 0, None
    for each in operations:
        if each == "add":
            buffer.add(row(answered))
            answered += 1
        elif each == "pending":
            buffer.set_pending(row(answered, is_answered=False))
        elif buffer.ready():
            index = buffer.sample()["index"]
            used = asked if is_late and asked is not None else index  # late: rows may have been overwritten since
            asked = index
            buffer.update_priorities(used, torch.tensor(each))
            naive.update(used.tolist(), torch.tensor(each).double().tolist())
        naive.stored(buffer._end)
        found = priorities_of(buffer)
        assert found.keys() == naive.known.keys()
        assert all(found[place] == pytest.approx(naive.known[place], rel=1e-12) for place in found)


def test_starts_are_drawn_in_proportion_to_their_priorities() -> None:
    buffer = fill(make(batch_size=1000), range(3))
    index = torch.tensor([0, 1, 2, 3])  # (environment 0, time 0), (1, 0), (0, 1), (1, 1)
    buffer.update_priorities(index, torch.tensor([1.0, 2.0, 3.0, 4.0]) - 1e-3)
    counts = torch.bincount(buffer.sample()["index"], minlength=4)
    assert (counts - torch.tensor([100, 200, 300, 400])).abs().max() <= 2, "stratified: hardly any noise"


def test_weights_undo_the_preference_by_hand() -> None:
    buffer = fill(make(beta=0.5, batch_size=100), range(3))
    buffer.update_priorities(torch.tensor([0, 1, 2, 3]), torch.tensor([1.0, 4.0, 16.0, 64.0]) - 1e-3)
    batch = buffer.sample()
    expected = torch.tensor([1.0, 0.5, 0.25, 0.125])[batch["index"]]
    assert torch.allclose(batch["weight"], expected, rtol=1e-5)
    assert batch["weight"].dtype == torch.float32


def test_beta_follows_its_schedule() -> None:
    buffer = fill(make(beta=Schedule("linear", 0.0, 1.0), batch_size=100), range(3))
    buffer.update_priorities(torch.tensor([0, 1, 2, 3]), torch.tensor([1.0, 4.0, 16.0, 64.0]) - 1e-3)
    for fraction, weights in ((0.0, [1.0] * 4), (0.5, [1.0, 0.5, 0.25, 0.125]), (1.0, [1.0, 0.25, 0.0625, 0.015625])):
        batch = buffer.sample(Progress(fraction=fraction))
        assert torch.allclose(batch["weight"], torch.tensor(weights)[batch["index"]], rtol=1e-4)
    assert torch.equal(buffer.sample()["weight"], torch.ones(100)), "without progress: the schedule's start"


def test_the_loop_tells_the_buffer_how_far_the_phase_is() -> None:
    asked: list[float] = []

    class Watched(PrioritizedReplayBuffer):
        def sample(self, progress: Progress | None = None) -> Batch:
            asked.append((progress or Progress(fraction=-1.0)).fraction)
            return super().sample(progress)

    class Learner(contract.Contract):
        notes_priorities = True

        def update_controller(self, batch: Batch, **given_phase: Any) -> dict[str, Any]:
            batch["priority"] = batch["reward"][:, 1]
            return {}

    contract.run(Learner(), Watched(num_envs=3, capacity_rows=60, batch_size=8), duration_cycles=4)
    assert asked == [0.0, 0.25, 0.5, 0.75]


def test_index_names_the_rows_of_the_batch() -> None:
    batch = fill(make(n_step=2), range(21)).sample()
    assert torch.equal(batch["vector"][:, 0, 0].long(), batch["index"] % ENVS)
    assert torch.equal(batch["vector"][:, 0, 1].long(), batch["index"] // ENVS)


def test_a_new_row_gets_the_largest_priority_there_has_been() -> None:
    buffer = fill(make(), range(2))
    buffer.update_priorities(torch.tensor([0]), torch.tensor([50.0]))
    fill(buffer, range(2, 3))
    assert priorities_of(buffer)[0, 1] == pytest.approx(50.001)


def test_priorities_of_overwritten_rows_are_passed_over() -> None:
    buffer = fill(make(), range(4))
    fill(buffer, range(4, 12))
    before = priorities_of(buffer)
    buffer.update_priorities(torch.tensor([0, 1, 2]), torch.tensor([9.0, 9.0, 9.0]))
    assert priorities_of(buffer) == before


def test_learning_gives_its_priorities_back_with_the_batch() -> None:
    buffer = fill(make(), range(4))
    batch = buffer.sample()
    buffer.learned({**batch, "priority": batch["reward"][:, 1]})
    known = priorities_of(buffer)
    for index, reward in zip(batch["index"].tolist(), batch["reward"][:, 1].tolist(), strict=True):
        assert known[index % ENVS, index // ENVS] == pytest.approx(reward + 1e-3)


def test_a_workflow_without_priorities_is_told_what_to_do() -> None:
    buffer = fill(make(), range(4))
    with pytest.raises(ConfigError, match=r"without batch\['priority'\].*gives no priorities.*ReplayBuffer"):
        buffer.learned(buffer.sample())


def test_a_cleared_buffer_forgets_rows_and_priorities_and_never_gives_an_index_twice() -> None:
    buffer = fill(make(), range(6))
    before = buffer.sample()["index"]
    buffer.update_priorities(before, torch.full((8,), 9.0))
    buffer.clear()
    assert not buffer.ready() and priorities_of(buffer) == {}
    fill(buffer, range(6, 9))
    assert set(priorities_of(buffer).values()) == {1.0}
    assert not set(before.tolist()) & set(buffer.sample()["index"].tolist())


def test_a_priority_that_is_not_finite_never_reaches_the_tree() -> None:
    buffer = fill(make(), range(4))
    with pytest.raises(RunError, match="A priority is not finite: learning has diverged.*smaller learning rate"):
        buffer.update_priorities(torch.tensor([0]), torch.tensor([float("nan")]))


def test_too_few_rows_give_no_batch() -> None:
    with pytest.raises(AssertionError, match="too few rows"):
        fill(make(), range(1)).sample()


@pytest.mark.parametrize("cut", [0, 2, 7, 8, 9, 20])
def test_the_state_continues_bit_for_bit(cut: int) -> None:
    buffer, other = fill(make(), range(cut)), fill(make(seed=3), range(5))
    if buffer.ready():
        buffer.update_priorities(buffer.sample()["index"], torch.rand(8, generator=torch.Generator().manual_seed(0)))
    other.set_state(numpy_to_tensors(buffer.get_state()))
    assert equal(other.get_state(), buffer.get_state())
    for time in range(cut, cut + 15):
        fill(buffer, range(time, time + 1))
        fill(other, range(time, time + 1))
        if buffer.ready():
            left, right = buffer.sample(), other.sample()
            assert equal(left, right)
            buffer.update_priorities(left["index"], left["reward"][:, 0])
            other.update_priorities(right["index"], right["reward"][:, 0])


def test_memory_counts_the_tree() -> None:
    spec = EnvSpec("any", {"vector": ArraySpec((2,), "float32")}, ActionSpec("discrete", (4,)))
    buffer = fill(make(capacity_rows=20_000), range(1))
    allocated = buffer._ring.allocated_bytes + buffer._priorities.tree.allocated_bytes
    assert buffer.memory_bytes(spec) == allocated == 20_000 * (8 + 4 + 3 + 8) + 8 * (20_000 + 1264)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epsilon": math.nan}, "epsilon is nan; write a small number above 0"),
        ({"alpha": 1.5}, "alpha is 1.5; allowed is 0 .* to 1"),
        ({"beta": -0.1}, "beta is -0.1; allowed is 0 .* to 1"),
        ({"beta": Schedule("linear", 0.4, 1.5)}, r"beta is 1.5; allowed is 0 .*beta: linear\(0.4, 1.0\)"),
        ({"epsilon": 0.0}, "epsilon is 0.0; write a small number above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**wrong)


def test_prioritised_replay_keeps_the_convention() -> None:
    class Surprised(contract.Contract):
        notes_priorities = True

        def update_controller(self, batch: Batch, **given_phase: Any) -> dict[str, Any]:
            rows = {key: value for key, value in batch.items() if key not in ("index", "weight")}
            batch["priority"] = batch["reward"][:, 1]
            return super().update_controller(rows, **given_phase)

    buffer = PrioritizedReplayBuffer(num_envs=3, capacity_rows=60, batch_size=32, n_step=3)
    workflow = Surprised()
    contract.run(workflow, buffer, duration_cycles=12)
    assert len(workflow.batches) == 12
    assert not any(bool(batch["is_last"][:, 0].any()) for batch in workflow.batches)
