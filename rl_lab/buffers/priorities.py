"""Priorities of starts, and a tree of sums from which starts are drawn in proportion to them.

A start's stored priority is (|priority| + epsilon) ** alpha; 0 where no sequence may start: an is_last row, a slot
that was never written, or a row whose sequence would cross the write head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf, isfinite, nextafter

import numpy as np
import torch

from rl_lab.types import ConfigError, RunError, StateTree

_FAN_OUT = 16  # children of a node: few numpy calls per level, and little summed in vain
_JUST_BELOW_1 = float(np.nextafter(1.0, 0.0))
_WIDEST_TOP = 4096  # nodes that one cumulative sum covers faster than another level would


def split(number: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """`divmod` of whole numbers from 0 on, in a third of its time."""
    quotient = number // size
    return quotient, number - quotient * size


class SumTree:
    """Non-negative float64 masses whose sums are kept, so that k leaves are drawn or changed in a few array calls.

    Each sum is computed anew from its children, never corrected by a difference: it depends on the leaves alone, not
    on the history, and rounding errors do not add up.
    """

    def __init__(self, size: int) -> None:
        self.size = size
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
        first = np.arange(0, len(rest) * _FAN_OUT, _FAN_OUT)  # where each block's children begin
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

    def close(self, times: Sequence[int]) -> None:
        """No sequence may start at these times."""
        slots = np.asarray(times, np.int64) % self.slots_per_env
        self.tree.set((self._first_leaves[:, None] + slots).ravel(), 0.0)

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
