"""Prioritised replay: starts are drawn in proportion to how surprising they were when last learnt from.

A start's stored priority is (|priority| + epsilon) ** alpha; 0 says that no sequence may start there: an is_last row,
a slot nobody has written, or a row whose sequence would cross the write head.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rl_lab.buffers.replay import ReplayBuffer, to_batch
from rl_lab.buffers.rows import as_array
from rl_lab.types import Batch, ConfigError, EnvSpec, StateTree

_FAN_OUT = 16  # children of a node: few numpy calls per level, and little summed in vain
_WIDEST_TOP = 4096  # nodes that one cumulative sum covers faster than another level would


class SumTree:
    """Non-negative float64 masses whose sums are kept, so that k leaves are drawn or changed in a few array calls.

    Each sum is computed anew from its children, never corrected by a difference: it depends on the leaves alone, not
    on the history, and rounding errors do not add up.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._levels = [np.zeros(_padded(size))]
        while len(self._levels[-1]) > _WIDEST_TOP:
            self._levels.append(np.zeros(_padded(len(self._levels[-1]) // _FAN_OUT)))

    @property
    def allocated_bytes(self) -> int:
        return sum(level.nbytes for level in self._levels)

    @property
    def leaves(self) -> np.ndarray:
        """The masses `[size]`; to be read, not written."""
        return self._levels[0][: self.size]

    def set(self, index: np.ndarray, mass: np.ndarray | float) -> None:
        """Give leaves a new mass; of a leaf named twice the last one counts."""
        self._levels[0][index] = mass
        node = index
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            node = node // _FAN_OUT
            above[node] = _sums(below.reshape(-1, _FAN_OUT).take(node, axis=0))

    def find(self, fraction: np.ndarray) -> np.ndarray:
        """The leaves at these fractions, 0 up to 1, of the whole mass; never one without mass."""
        top = self._levels[-1].cumsum()
        assert top[-1] > 0, "nothing to draw: every priority is 0"
        rest = np.minimum(fraction * top[-1], np.nextafter(top[-1], 0))
        node = top.searchsorted(rest, side="right")
        before = np.where(node > 0, top[node - 1], 0.0)
        each = np.arange(len(rest))
        for below in reversed(self._levels[:-1]):
            blocks = torch.from_numpy(below.reshape(-1, _FAN_OUT).take(node, axis=0))
            cumulative = blocks.cumsum(dim=1).numpy()  # a third of numpy's time on short rows
            # Rounding may leave a rest beside its block: pulled inside, it meets a child that has mass.
            rest = np.maximum(np.minimum(rest - before, np.nextafter(cumulative[:, -1], 0)), 0.0)
            child = (cumulative > rest[:, None]).argmax(axis=1)
            node = node * _FAN_OUT + child
            if below is not self._levels[0]:
                before = np.where(child > 0, cumulative[each, child - 1], 0.0)
        return node

    def rebuild(self, leaves: np.ndarray) -> None:
        """Take over all leaves at once."""
        self._levels[0][: self.size] = leaves
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            above[: len(below) // _FAN_OUT] = _sums(below.reshape(-1, _FAN_OUT))


def _sums(blocks: np.ndarray) -> np.ndarray:
    """Row by row in one order, however many rows there are; half of `sum`'s time on short rows."""
    return np.einsum("nk->n", blocks)


def _padded(count: int) -> int:
    return -(-count // _FAN_OUT) * _FAN_OUT


class StartPriorities:
    """One priority for every slot of every environment, kept in step with a ring of rows."""

    def __init__(self, *, num_envs: int, slots_per_env: int, alpha: float, epsilon: float) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"Replay: alpha is {alpha}; allowed is 0 (all alike) to 1 (as given). Write alpha: 0.6.")
        if epsilon <= 0.0:
            raise ConfigError(f"Replay: epsilon is {epsilon}; write a small number above 0, such as 1e-6.")
        self.alpha, self.epsilon = alpha, epsilon
        self.slots_per_env = slots_per_env
        self.tree = SumTree(num_envs * slots_per_env)
        self.largest = 1.0  # of all stored priorities so far: what a new start gets, so that each is seen soon
        self._first_leaves = np.arange(num_envs) * slots_per_env

    def row_stored(self, time: int, *, sequence_length: int, is_last: np.ndarray | None = None) -> None:
        """A row has taken its slot: what started there is gone, and the sequence that ends in it is complete.

        `is_last [N, C]` says where no sequence may start; without it, one may start anywhere.
        """
        self.tree.set(self._first_leaves + time % self.slots_per_env, 0.0)
        start = time - sequence_length + 1
        if start >= 0:
            slot = start % self.slots_per_env
            opened = self.largest if is_last is None else np.where(is_last[:, slot], 0.0, self.largest)
            self.tree.set(self._first_leaves + slot, opened)

    def draw(self, fraction: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Environments and slots at these fractions of the whole priority."""
        return np.divmod(self.tree.find(fraction), self.slots_per_env)

    def masses(self, env_index: np.ndarray, slot: np.ndarray) -> np.ndarray:
        return self.tree.leaves[env_index * self.slots_per_env + slot]

    def update(self, env_index: np.ndarray, slot: np.ndarray, is_there: np.ndarray, priority: np.ndarray) -> None:
        """New priorities of starts; what is no start any more is passed over."""
        assert np.isfinite(priority).all(), "a priority is not finite"
        leaf = env_index * self.slots_per_env + slot
        stored = (np.abs(priority.astype(np.float64)) + self.epsilon) ** self.alpha
        is_start = is_there & (self.tree.leaves[leaf] > 0)
        if not is_start.all():
            leaf, stored = leaf[is_start], stored[is_start]
        if len(leaf):
            self.tree.set(leaf, stored)
            self.largest = max(self.largest, float(stored.max()))

    def get_state(self) -> StateTree:
        return {"leaves": self.tree.leaves.copy(), "largest": self.largest}

    def set_state(self, state: StateTree) -> None:
        self.tree.rebuild(np.asarray(state["leaves"]))
        self.largest = state["largest"]


class PrioritizedReplayBuffer(ReplayBuffer):
    """Adds `batch["index"]` and `batch["weight"]` `[B]`; give `index` back to `update_priorities` after learning.

    Weights undo the preference for surprising starts as far as `beta` says (1: wholly) and are at most 1 in a batch.
    """

    def __init__(
        self,
        *,
        num_envs: int,
        capacity_rows: int = 1_000_000,
        batch_size: int = 256,
        sequence_length: int = 2,
        minimum_rows: int = 1,
        alpha: float = 0.6,
        beta: float = 0.4,
        epsilon: float = 1e-6,
        seed: int = 0,
    ) -> None:
        super().__init__(
            num_envs=num_envs,
            capacity_rows=capacity_rows,
            batch_size=batch_size,
            sequence_length=sequence_length,
            minimum_rows=minimum_rows,
            seed=seed,
        )
        if not 0.0 <= beta <= 1.0:
            raise ConfigError(f"Replay: beta is {beta}; allowed is 0 (no correction) to 1 (whole). Write beta: 0.4.")
        self.beta = beta
        self._priorities = StartPriorities(
            num_envs=num_envs, slots_per_env=self.slots_per_env, alpha=alpha, epsilon=epsilon
        )

    def _row_stored(self, time: int) -> None:
        is_last = self._ring.view("is_last")
        self._priorities.row_stored(time, sequence_length=self.sequence_length, is_last=is_last)

    def sample(self) -> Batch:
        """B starts, one from each B-th of the whole priority, and T consecutive rows from each."""
        assert self._num_starts > 0, "too few rows to sample"
        fraction = (np.arange(self.batch_size) + self._random.random(self.batch_size)) / self.batch_size
        env_index, slot = self._priorities.draw(fraction)
        batch = to_batch(self._ring.read(env_index, slot, self.sequence_length))
        mass = self._priorities.masses(env_index, slot)
        batch["index"] = self._index_of(env_index, self._time_at(slot))
        batch["weight"] = torch.from_numpy(((mass.min() / mass) ** self.beta).astype(np.float32))
        return batch

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Set the priorities of a batch's starts; rows that have been overwritten since are passed over."""
        self._priorities.update(*self._places_of(index), as_array(priority.detach().float()))

    def memory_bytes(self, spec: EnvSpec, *, extra_bytes_per_row: int = 0) -> int:
        rows = super().memory_bytes(spec, extra_bytes_per_row=extra_bytes_per_row)
        return rows + self._priorities.tree.allocated_bytes

    def get_state(self) -> StateTree:
        return {**super().get_state(), "priorities": self._priorities.get_state()}

    def set_state(self, state: StateTree) -> None:
        super().set_state(state)
        self._priorities.set_state(state["priorities"])
