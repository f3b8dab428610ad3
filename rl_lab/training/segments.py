"""Many tensors end to end in one block of memory, so that one launch can scale each by a number of its own.

    rows of 64      [ weight … ][ weight … 0 0 ][ bias 0 0 0 … ][ … ]
    owner of a row      0             0               1           …

`torch._foreach_mul_` with one device scalar per tensor is a launch per tensor; with a factor per row it is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW = 64  # numbers: 256 bytes of float32, so that every tensor starts aligned and factors stay few


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
