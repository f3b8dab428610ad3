"""On-policy rollouts: T answered rows of every environment, and the pending row to bootstrap from.

    row             0      1     ...    T-1     T
    observation     o0     o1           oT-1    oT       row T is pending: its value bootstraps
    reward          r0     r1           rT-1    rT
    action, extras  a0     a1           aT-1    0        not answered yet
    next rollout                                row 0    the pending row is answered first

Each rollout is used once: `sample` hands it out and empties the buffer. One that was not taken gives way to the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_lab.types import Batch, Progress, StateTree


class RolloutBuffer:
    """Holds one rollout `[N, T+1, ...]` in preallocated, batch-major memory."""

    def __init__(self, *, capacity_steps: int) -> None:
        assert capacity_steps > 0, "a rollout has at least one step"
        self.capacity_steps = capacity_steps
        self._storage: Batch = {}
        self._slots: list[tuple[Tensor, ...]] = []
        self._length = 0
        self._has_pending = False

    def add(self, row: Batch) -> None:
        if self._has_pending:
            self._length = 0  # the last rollout was not taken: it gives way to a fresh one
        assert self._length < self.capacity_steps, "a rollout longer than its buffer"
        if self._storage.keys() != row.keys():
            self._allocate(row)
        torch._foreach_copy_(self._slots[self._length], [row[key] for key in self._storage])
        self._length += 1
        self._has_pending = False

    def set_pending(self, row: Batch) -> None:
        for key, stored in self._storage.items():
            stored[:, self._length] = row.get(key, 0)  # what only an answer brings is zero
        self._has_pending = True

    def clear(self) -> None:
        """Forget every row: what comes next is another policy's."""
        self._length, self._has_pending = 0, False

    def cut(self) -> None:
        """Every collection begins a rollout of its own, and ends it: there is nothing to cut."""

    def ready(self) -> bool:
        return self._length > 0 and self._has_pending

    def sample(self, progress: Progress | None = None) -> Batch:
        """The rollout `[N, T+1, ...]`; what the policy adds to the pending row is zero."""
        assert self.ready(), "no finished rollout to sample"
        batch = {key: value[:, : self._length + 1].clone() for key, value in self._storage.items()}
        self.clear()
        return batch

    def learned(self, batch: Batch) -> None:
        """Each rollout is used once."""

    def _allocate(self, row: Batch) -> None:
        assert self._length == 0, "every row of a rollout has the same keys"
        self._storage = {
            key: value.new_zeros((value.shape[0], self.capacity_steps + 1, *value.shape[1:]))
            for key, value in row.items()
        }
        # One list of views per row: storing a row is then a single call, not one slice and one copy per key.
        self._slots = list(zip(*(value.unbind(dim=1) for value in self._storage.values()), strict=True))

    def get_state(self) -> StateTree:
        kept = self._length + 1 if self._length or self._has_pending else 0
        return {
            "length": self._length,
            "has_pending": self._has_pending,
            "rows": {key: value[:, :kept].clone() for key, value in self._storage.items()} if kept else {},
        }

    def set_state(self, state: StateTree) -> None:
        self._storage, self._length = {}, 0
        if state["rows"]:
            self._allocate({key: value[:, 0] for key, value in state["rows"].items()})
            for key, value in state["rows"].items():
                self._storage[key][:, : value.shape[1]] = value
        self._length, self._has_pending = state["length"], state["has_pending"]
