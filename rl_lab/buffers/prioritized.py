"""Prioritised replay: starts are drawn in proportion to how surprising they were when last learnt from.

A start's stored priority is (|priority| + epsilon) ** alpha; 0 says that no sequence may start there: an is_last row,
a slot nobody has written, or a row whose sequence would cross the write head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, nextafter
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rl_lab.buffers.replay import ReplayBuffer, split
from rl_lab.buffers.rows import as_array
from rl_lab.types import Batch, ConfigError, Progress, RunError, ScheduledNumber, StateTree

_FAN_OUT = 16  # children of a node: few numpy calls per level, and little summed in vain
_JUST_BELOW_1 = float(np.nextafter(1.0, 0.0))
_WIDEST_TOP = 4096  # nodes that one cumulative sum covers faster than another level would


class SumTree:
    """Non-negative float64 masses whose sums are kept, so that k leaves are drawn or changed in a few array calls.

    Each sum is computed anew from its children, never corrected by a difference: it depends on the leaves alone, not
    on the history, and rounding errors do not add up.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._firsts = np.arange(0)
        self._widths = [_padded(size)]
        while self._widths[-1] > _WIDEST_TOP:
            self._widths.append(_padded(self._widths[-1] // _FAN_OUT))

    @cached_property
    def _levels(self) -> list[np.ndarray]:
        """The leaves, their sums, and so on; taken with the first leaf, so that what cannot fit is refused before."""
        return [np.zeros(width) for width in self._widths]

    @property
    def allocated_bytes(self) -> int:
        """What the tree takes, once leaves are set."""
        return 8 * sum(self._widths)

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
        nodes = self._levels[-1]
        top = _cumulative(nodes)
        whole = float(top[-1])
        assert whole > 0, "nothing to draw: every priority is 0"
        rest = np.minimum(fraction * whole, nextafter(whole, 0.0))
        node = top.searchsorted(rest, side="right")
        rest -= top.take(node) - nodes.take(node)
        first = self._first_children(len(rest))
        for below in reversed(self._levels[:-1]):
            blocks = below.reshape(-1, _FAN_OUT).take(node, axis=0)
            cumulative = _cumulative(blocks)
            # Rounding may leave a rest beside its block: pulled inside, it meets a child that has mass.
            np.minimum(rest, cumulative[:, -1] * _JUST_BELOW_1, out=rest)
            np.maximum(rest, 0.0, out=rest)
            child = (cumulative <= rest[:, None]).argmin(1)  # the first that reaches beyond the rest
            node = node * _FAN_OUT + child
            if below is not self._levels[0]:
                child += first
                rest -= cumulative.take(child) - blocks.take(child)
        return node

    def _first_children(self, count: int) -> np.ndarray:
        """Where each of so many blocks begins when they lie one after the other."""
        if len(self._firsts) != count:
            self._firsts = np.arange(0, count * _FAN_OUT, _FAN_OUT)
        return self._firsts

    def rebuild(self, leaves: np.ndarray) -> None:
        """Take over all leaves at once."""
        self._levels[0][: self.size] = leaves
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            above[: len(below) // _FAN_OUT] = _sums(below.reshape(-1, _FAN_OUT))


def _sums(blocks: np.ndarray) -> np.ndarray:
    """Row by row in one order, however many rows there are; half of `sum`'s time on short rows."""
    return np.einsum("nk->n", blocks)


def _cumulative(blocks: np.ndarray) -> np.ndarray:
    """Along the last axis; a third of numpy's time."""
    return torch.from_numpy(blocks).cumsum(dim=-1).numpy()


def _padded(count: int) -> int:
    return -(-count // _FAN_OUT) * _FAN_OUT


class StartPriorities:
    """One priority for every slot of every environment, kept in step with a ring of rows."""

    def __init__(self, *, num_envs: int, slots_per_env: int, alpha: float, epsilon: float) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"Replay: alpha is {alpha}; allowed is 0 (all alike) to 1 (as given). Write alpha: 0.6.")
        if not 0.0 < epsilon < inf:
            raise ConfigError(f"Replay: epsilon is {epsilon}; write a small number above 0, such as 1e-6.")
        self.alpha, self.epsilon = alpha, epsilon
        self.slots_per_env = slots_per_env
        self.tree = SumTree(num_envs * slots_per_env)
        self.largest = 1.0  # of all stored priorities so far: what a new start gets, so that each is seen soon
        self._first_leaves = np.arange(num_envs) * slots_per_env

    def rows_stored(self, times: range, *, starts: range, is_last: np.ndarray | None = None) -> None:
        """Rows have taken their slots: what started there is gone, and the sequences from `starts` are complete.

        `is_last [N, C]` says where no sequence may start; without it, one may start anywhere.
        """
        stored = np.arange(times.start, times.stop) % self.slots_per_env
        opened = np.arange(starts.start, starts.stop) % self.slots_per_env
        mass = np.zeros((len(self._first_leaves), len(stored) + len(opened)))
        mass[:, len(stored) :] = self.largest if is_last is None else np.where(is_last[:, opened], 0.0, self.largest)
        leaves = self._first_leaves[:, None] + np.concatenate([stored, opened])
        self.tree.set(leaves.ravel(), mass.ravel())

    def draw(self, fraction: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Environments and slots at these fractions of the whole priority."""
        return split(self.tree.find(fraction), self.slots_per_env)

    def update(self, leaf: np.ndarray, is_there: np.ndarray | None, priority: np.ndarray) -> None:
        """New priorities of starts; what is no start any more is passed over. `is_there` None: all of them are."""
        stored = np.abs(priority, dtype=np.float64)
        stored += self.epsilon
        stored **= self.alpha
        if not isfinite(np.add.reduce(stored)):
            raise RunError(
                "A priority is not finite: learning has diverged, and stopped; the last checkpoint is from before. Try "
                "a smaller learning rate or `max_grad_norm` of the optimizer."
            )
        if is_there is not None:
            is_start = is_there & (self.tree.leaves.take(leaf) > 0)
            leaf, stored = leaf[is_start], stored[is_start]
        if len(leaf):
            self.tree.set(leaf, stored)
            self.largest = max(self.largest, float(np.maximum.reduce(stored)))

    def clear(self) -> None:
        self.tree.rebuild(np.zeros(self.tree.size))
        self.largest = 1.0

    def get_state(self) -> StateTree:
        return {"leaves": self.tree.leaves.copy(), "largest": self.largest}

    def set_state(self, state: StateTree) -> None:
        self.tree.rebuild(np.asarray(state["leaves"]))
        self.largest = state["largest"]


def noted_priority(batch: Batch) -> Tensor:
    """The priorities `[B]` that learning noted in a batch."""
    if "priority" not in batch:
        raise ConfigError(
            "Replay: the batch came back without batch['priority'], so that nothing tells what was surprising: this "
            "workflow does not give priorities. Draw uniformly (buffer rl_lab.buffers.replay.ReplayBuffer, or "
            "priority: 0.0 of a sequence replay), or let an update hook set batch['priority'] to the size of each "
            "start's error, [B]."
        )
    return batch["priority"]


@dataclass(kw_only=True, eq=False, repr=False)
class PrioritizedReplayBuffer(ReplayBuffer):
    """Adds `batch["index"]` and `batch["weight"]` `[B]`; learning notes each start's error as `batch["priority"]`.

    Weights undo the preference for surprising starts as far as `beta` says (1: wholly) and are at most 1 in a batch.
    `beta` may be a schedule: the paper lets it grow to 1, since the bias matters most where learning converges.
    """

    alpha: float = 0.6
    beta: float | ScheduledNumber = 0.4
    epsilon: float = 1e-6
    wants_priorities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = (self.beta,) if isinstance(self.beta, float | int) else (self.beta.start, self.beta.end)
        for beta in ends:
            if beta is not None and not 0.0 <= beta <= 1.0:
                raise ConfigError(
                    f"Replay: beta is {beta}; allowed is 0 (no correction) to 1 (whole). Write beta: 0.4, or "
                    "beta: linear(0.4, 1.0) to let it grow over the phase."
                )
        self._strata = np.arange(self.batch_size, dtype=np.float64)
        self._drawn: tuple[Tensor | None, np.ndarray, int] = (None, self._strata, 0)  # the last batch: index and leaves
        self._priorities = StartPriorities(
            num_envs=self.num_envs, slots_per_env=self.slots_per_env, alpha=self.alpha, epsilon=self.epsilon
        )

    def _rows_stored(self, begin: int, end: int) -> None:
        starts = self._completed_by(begin, end)
        self._priorities.rows_stored(range(begin, end), starts=starts, is_last=self._ring.view("is_last"))

    def _rows_forgotten(self, begin: int, end: int) -> None:
        self._priorities.rows_stored(range(begin, end), starts=range(0))

    def sample(self, progress: Progress | None = None) -> Batch:
        """B starts, one from each B-th of the whole priority, and T consecutive rows from each."""
        self._store_waiting()
        assert self._num_starts > 0, "too few rows to sample"
        fraction = self._random.random(self.batch_size)
        fraction += self._strata
        fraction /= self.batch_size
        leaf = self._priorities.tree.find(fraction)
        env_index, slot = split(leaf, self.slots_per_env)
        batch = self._read(env_index, slot, self.sequence_length)
        mass = self._priorities.tree.leaves.take(leaf)
        batch["index"] = self._index_of(env_index, self._time_at(slot))
        weight = (np.minimum.reduce(mass) / mass).astype(np.float32)
        beta = self.beta if isinstance(self.beta, float | int) else self.beta(progress or Progress())
        weight **= np.float32(beta)
        batch["weight"] = torch.from_numpy(weight)
        self._drawn = (batch["index"], leaf, self._booked)
        return batch

    def learned(self, batch: Batch) -> None:
        """Take over the priorities that learning noted in the batch."""
        self.update_priorities(batch["index"], noted_priority(batch))

    def clear(self) -> None:
        super().clear()
        self._priorities.clear()
        self._drawn = (None, self._strata, 0)

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Set the priorities of a batch's starts; rows that have been overwritten since are passed over."""
        self._store_waiting()
        drawn, leaf, booked = self._drawn
        is_there: np.ndarray | None = None
        if drawn is not index or booked != self._booked:  # not the last batch, or rows have been overwritten since
            env_index, slot, is_there = self._places_of(index)
            leaf = env_index * self.slots_per_env + slot
        self._priorities.update(leaf, is_there, as_array(priority.detach().float()))

    @property
    def priority_bytes(self) -> int:
        return self._priorities.tree.allocated_bytes

    def get_state(self) -> StateTree:
        return {**super().get_state(), "priorities": self._priorities.get_state()}

    def set_state(self, state: StateTree) -> None:
        super().set_state(state)
        self._priorities.set_state(state["priorities"])
        self._drawn = (None, self._strata, 0)
