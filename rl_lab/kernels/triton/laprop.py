"""LaProp's whole change as one GPU kernel: every number is read once and written once, whichever tensor it is in.

Torch's own operations on lists of tensors pass over parameters, gradients and averages fourteen times. A kernel needs
to know where each tensor lies; a table of addresses, made once, tells it, cut into pieces of equal size:

    piece       0        1        2        3            a program each
    of tensor   0        0        1        2            its bias corrections
    begins at   p0       p0+2048  p1       p2           the same for gradients and both averages
    numbers     2048     952      64       2048
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_lab.training.segments import dense_strides

PIECE = 2048


@triton.jit
def _change(
    table, sizes, owners, spreads, rates, pieces, beta1, beta2, new1, new2, epsilon, PIECE: tl.constexpr
):  # fmt: skip
    piece = tl.program_id(0)
    place = tl.arange(0, PIECE)
    inside = place < tl.load(sizes + piece)
    owner = tl.load(owners + piece)
    parameter = tl.load(table + piece).to(tl.pointer_type(tl.float32)) + place
    gradient = tl.load(table + pieces + piece).to(tl.pointer_type(tl.float32)) + place
    mean = tl.load(table + 2 * pieces + piece).to(tl.pointer_type(tl.float32)) + place
    mean_square = tl.load(table + 3 * pieces + piece).to(tl.pointer_type(tl.float32)) + place
    g = tl.load(gradient, mask=inside, other=0.0)
    s = beta2 * tl.load(mean_square, mask=inside, other=0.0) + new2 * (g * g)
    tl.store(mean_square, s, mask=inside)
    unit = g / (tl.sqrt(s) / tl.load(spreads + owner) + epsilon)
    m = beta1 * tl.load(mean, mask=inside, other=0.0) + new1 * unit
    tl.store(mean, m, mask=inside)
    p = tl.load(parameter, mask=inside, other=0.0)
    tl.store(parameter, p - tl.load(rates + owner) * m, mask=inside)


def are_known(tensors: Iterable[tuple[Tensor, ...]]) -> bool:
    """Whether every parameter is float32 without gaps, and its gradient and averages lie as it does."""
    return all(
        each.dtype is torch.float32 and each.stride() == dense_strides(group[0]) for group in tensors for each in group
    )


class Pieces:
    """The table for some tensors `are_known` of, which must stay where they are."""

    def __init__(self, parameters: list[Tensor], gradients: list[Tensor], means: list[Tensor], squares: list[Tensor]):
        addresses: list[list[int]] = [[], [], [], []]
        sizes: list[int] = []
        owners: list[int] = []
        lists = list(zip(parameters, gradients, means, squares, strict=True))
        assert are_known(lists)
        for owner, tensors in enumerate(lists):
            for begin in range(0, tensors[0].numel(), PIECE):
                sizes.append(min(PIECE, tensors[0].numel() - begin))
                owners.append(owner)
                for column, tensor in zip(addresses, tensors, strict=True):
                    column.append(tensor.data_ptr() + begin * tensor.element_size())
        device = parameters[0].device
        self.table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self.owners = torch.tensor(owners, dtype=torch.int32, device=device)

    def change(self, spreads: Tensor, rates: Tensor, *, betas: tuple[float, float], epsilon: float) -> None:
        """By each tensor's `sqrt(1 - beta2**count)` and learning rate, corrected by its count."""
        beta1, beta2 = betas
        pieces = len(self.sizes)
        _change[(pieces,)](
            self.table, self.sizes, self.owners, spreads, rates, pieces,
            beta1, beta2, 1.0 - beta1, 1.0 - beta2, epsilon, PIECE=PIECE,
        )  # fmt: skip


class PiecesByAddress:
    """One table per set of tensors: made while nothing is recorded, and there when a graph is."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Pieces | None] = {}

    def of(self, *tensors: list[Tensor], may_make: bool) -> Pieces | None:
        """None where there is no table and none may be made, or where a tensor is of another kind."""
        key = tuple([tensor.data_ptr() for each in tensors for tensor in each])
        if key not in self._made and may_make:
            self._made[key] = Pieces(*tensors) if are_known(zip(*tensors, strict=True)) else None
        return self._made.get(key)
