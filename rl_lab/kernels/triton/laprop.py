"""LaProp's whole change as one GPU kernel: every number is read once and written once, whichever tensor it is in.

Torch's own operations on lists of tensors pass over parameters, gradients and averages fourteen times. The kernel
reads where each tensor lies from a table of addresses, made once, cut into pieces of equal size:

    piece       0        1        2        3            a program each
    of tensor   0        0        1        2            its bias corrections
    begins at   p0       p0+2048  p1       p2           the same for gradients and both averages
    numbers     2048     952      64       2048
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

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
        each.dtype is torch.float32 and each.stride() == torch.empty_like(group[0], device="meta").stride()
        for group in tensors
        for each in group
    )


class Table:
    """Where some tensors `are_known` of lie; they must stay there."""

    def __init__(self, lists: Sequence[tuple[Tensor, ...]]) -> None:
        addresses: list[list[int]] = [[], [], [], []]
        sizes: list[int] = []
        owners: list[int] = []
        for owner, tensors in enumerate(lists):
            for begin in range(0, tensors[0].numel(), PIECE):
                sizes.append(min(PIECE, tensors[0].numel() - begin))
                owners.append(owner)
                for column, tensor in zip(addresses, tensors, strict=True):
                    column.append(tensor.data_ptr() + begin * tensor.element_size())
        device = lists[0][0].device
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self.owners = torch.tensor(owners, dtype=torch.int32, device=device)


_tables: WeakKeyDictionary[Any, dict[tuple[int, ...], Table | None]] = WeakKeyDictionary()


def table_of(rule: Any, members: Any) -> Table | None:
    """The table of these tensors; None where one is of another kind, or where a graph is recorded that has none yet."""
    lists = (members.parameters, members.gradients, members.state["mean"], members.state["mean_square"])
    key = tuple([tensor.data_ptr() for each in lists for tensor in each])
    made = _tables.setdefault(rule, {})
    if key not in made and not is_capturing():
        groups = list(zip(*lists, strict=True))
        made[key] = Table(groups) if are_known(groups) else None
    return made.get(key)


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def change(rule: Any, members: Any, learning_rate: float | Tensor, divisor: Tensor | None) -> None:
    """`LaProp.change`."""
    if divisor is not None:
        torch._foreach_div_(members.gradients, divisor)
    table = table_of(rule, members)
    assert table is not None
    beta1, beta2 = rule.betas
    counts, pieces = torch.stack(members.count).double(), len(table.sizes)
    rates = (learning_rate / (1.0 - beta1**counts)).float()
    spreads = (1.0 - beta2**counts).sqrt_().float()
    _change[(pieces,)](
        table.addresses, table.sizes, table.owners, spreads, rates, pieces,
        beta1, beta2, 1.0 - beta1, 1.0 - beta2, rule.epsilon, PIECE=PIECE,
    )  # fmt: skip
