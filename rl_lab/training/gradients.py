"""What happens to gradients between backward and the change: the loss scale of fp16, and clipping by the norm of all of
them or each by its parameter's norm (AGC).

On a GPU they lie end to end in one block of memory for it, so that one launch scales each by a number of its own:

    rows of 64      [ weight … ][ weight … 0 0 ][ bias 0 0 0 … ][ … ]
    owner of a row      0             0               1           …

`torch._foreach_mul_` with one device scalar per tensor is a launch per tensor; with a factor per row it is one.
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from rl_lab.types import StateTree

SMALLEST_PARAMETER_NORM = 1e-3  # lets parameters that start at zero move (Brock et al. 2021)
ROW = 64  # numbers: 256 bytes of float32, so that every tensor starts aligned and factors stay few


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


def divisor_to(limit: float, norm: Tensor) -> Tensor | None:
    """What brings gradients of this norm down to `limit`; on a CPU, where nobody waits for it, None if nothing must."""
    if norm.device.type == "cpu":
        return None if float(norm) <= limit else norm / limit
    return (norm / limit).clamp_(min=1.0)


def clip_adaptively(
    parameters: list[Tensor],
    gradients: list[Tensor],
    clip: float,
    segments: Segments | None = None,
    norms: Tensor | None = None,
) -> list[Tensor]:
    """Each gradient's norm at most `clip` times its parameter's norm (AGC, one norm per tensor); in place, or with
    `segments` in there. `norms` are those of the gradients, where somebody has them."""
    with torch.no_grad():
        sizes = torch.stack(torch._foreach_norm(parameters)).clamp_(min=SMALLEST_PARAMETER_NORM)
        norms = (torch.stack(torch._foreach_norm(gradients)) if norms is None else norms).clamp(min=1e-6)
        factors = (sizes * clip / norms).clamp_(max=1.0)
        if segments is None:
            torch._foreach_mul_(gradients, list(factors.unbind()))
            return gradients
        segments.take(gradients).mul_(segments.by_row(factors))
        return segments.views


class Segments:
    """Scratch space with the shapes of some tensors, and each in the order in which its tensor lies in memory."""

    def __init__(self, tensors: list[Tensor]) -> None:
        rows = [max(1, -(-tensor.numel() // ROW)) for tensor in tensors]
        device = tensors[0].device
        self.block = torch.zeros(sum(rows), ROW, device=device)
        self.owner_of_row = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)).to(device)
        starts = [sum(rows[:index]) * ROW for index in range(len(rows))]
        numbers = self.block.view(-1)
        self.views = [
            numbers.as_strided(tensor.shape, dense_strides(tensor), start)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

    def take(self, tensors: list[Tensor]) -> Tensor:
        """A copy of the tensors in the views; the block that holds them all."""
        torch._foreach_copy_(self.views, tensors)
        return self.block

    def by_row(self, factors: Tensor) -> Tensor:
        """One number per tensor as one number per row, `[rows, 1]`, to multiply or divide the block by."""
        return factors.index_select(0, self.owner_of_row).unsqueeze(1)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Those of a tensor of its own that lies as this one does: a convolution's kernel may have its channels last."""
    return torch.empty_like(tensor, device="meta").stride()


class SegmentsByMembers:
    """One scratch space per set of tensors: made at the first use, and there when a graph is recorded."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Segments] = {}

    def of(self, tensors: list[Tensor]) -> Segments:
        key = tuple([id(tensor) for tensor in tensors])
        if key not in self._made:
            self._made[key] = Segments(tensors)
        return self._made[key]
