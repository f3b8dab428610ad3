"""What keeps the gradients of fp16 training above its floor."""

from __future__ import annotations

from math import isfinite

from torch import Tensor

from rl_lab.types import StateTree


class LossScale:
    """fp16 only: keeps small gradients above fp16's floor by scaling the loss, halved when they overflow."""

    grow_after = 2000  # changes without overflow, as in mixed-precision practice since 2018

    def __init__(self) -> None:
        self.value = 2.0**16
        self.accepted = 0

    def accepts(self, grad_norm: Tensor) -> bool:
        """Whether the gradients are finite; adapts the scale. Reads the number, so it waits for the device."""
        if not isfinite(grad_norm):
            self.value, self.accepted = self.value * 0.5, 0
            return False
        self.accepted += 1
        if self.accepted == self.grow_after:
            self.value, self.accepted = self.value * 2.0, 0
        return True

    def get_state(self) -> StateTree:
        return {"value": self.value, "accepted": self.accepted}

    def set_state(self, state: StateTree) -> None:
        self.value, self.accepted = float(state["value"]), int(state["accepted"])
