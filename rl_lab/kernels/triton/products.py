"""Matrix products in the precision of convolutions, and one for few rows that shares its weights out over the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from rl_lab.kernels.triton.laprop import is_capturing

MOST_ROWS = 64  # beyond them a product has enough to do in each program
PROGRAMS = 264  # two for each multiprocessor of an H200
MOST_SPLITS = 16  # whoever adds the parts up reads all of them
COLUMNS, INNER = 32, 128  # of a tile of weights: 16 kB in float32
LOW = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
NUMBERS = 4096  # of the weights that a program of `linears` holds: 32 for each thread


def is_tf32() -> bool:
    """Whether convolutions may round float32 to TF32, as is torch's default: products in place of them may, too."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


@contextmanager
def _as_precise_as_convolutions() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = is_tf32()
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def product(left: Tensor, right: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix product with a result in float32, or in the dtype of its factors."""
    if left.dtype is torch.float32:
        with _as_precise_as_convolutions():
            return torch.mm(left, right)
    if dtype is left.dtype:
        return torch.mm(left, right)
    return torch.mm(left, right, out_dtype=dtype) if left.is_cuda else torch.mm(left, right).to(dtype)


def few_rows(x: Tensor) -> bool:
    return len(x) * x.shape[1] <= MOST_ROWS


@triton.jit
def _share_products(
    x, weight, out, rows, length, length_out, channels, width, columns, part,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    step = row % length_out * STRIDE - PADDING
    plan = row // length_out * length
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(tl.program_id(1) * part, (tl.program_id(1) + 1) * part, INNER):
        inner = start + tl.arange(0, INNER)
        place = step[:, None] + (inner % TAPS)[None, :]
        is_inner = inner < width
        inside = (row < rows)[:, None] & is_inner[None, :] & (place >= 0) & (place < length)
        offset = (plan[:, None] + place) * channels + (inner // TAPS)[None, :]
        a = tl.load(x + offset, mask=inside, other=0.0)
        is_weight = (column < columns)[:, None] & is_inner[None, :]
        w = tl.load(weight + column[:, None] * width + inner[None, :], mask=is_weight, other=0.0)
        a, w = a.to(LOW).to(tl.float32), w.to(LOW).to(tl.float32)  # TF32 holds every number of both low precisions
        found = tl.dot(a, tl.trans(w), found, input_precision=PRECISION)
    place = (tl.program_id(1) * rows + row)[:, None] * columns + column[None, :]
    tl.store(out + place, found, mask=(row < rows)[:, None] & (column < columns)[None, :])


def share_products(x: Tensor, weight: Tensor, taps: Any, after: int, low: torch.dtype, is_tf32: bool) -> Tensor:
    """A convolution of `[B, T, C]` without its bias, in parts `[parts, B, T', C']` that are yet to be added up.

    Weights are read once, in float32: casting them first would read and write more than is multiplied."""
    batch, length, channels = x.shape
    columns, width, rows = len(weight), channels * taps.number, batch * after
    tiles = triton.cdiv(columns, COLUMNS)
    splits = max(1, min(MOST_SPLITS, PROGRAMS // tiles, width // INNER))
    part = triton.cdiv(triton.cdiv(width, splits), INNER) * INNER
    splits = triton.cdiv(width, part)
    out = torch.empty(splits, batch, after, columns, device=x.device)
    precision = "tf32" if is_tf32 or low is not torch.float32 else "ieee"
    _share_products[(tiles, splits)](
        x, weight, out, rows, length, after, channels, width, columns, part, *taps, LOW=LOW[low], PRECISION=precision,
        ROWS=max(16, triton.next_power_of_2(rows)), COLUMNS=COLUMNS, INNER=INNER, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


# --- linear layers of few rows ------------------------------------------------------------------


@triton.jit
def mish(y):
    """`y * tanh(softplus(y))` and its derivative: both are fractions of exp(y)."""
    e = tl.exp(tl.minimum(y, 20.0))
    n = e * (e + 2.0)
    tanh = n / (n + 2.0)
    slope = tanh + y * 4.0 * (n + 1.0) / ((n + 2.0) * (n + 2.0)) * (e / (e + 1.0))
    return y * tanh, tl.where(y > 20.0, 1.0 + (y - y), slope)


@triton.jit
def _linears(
    x, table, out, batch, width, tiles, x_row, out_row,
    HAS_MISH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = table + tl.program_id(0)
    column, place = tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    is_column = column < tl.load(tile + 3 * tiles)
    weight = tl.load(tile).to(tl.pointer_type(tl.float32)) + column[:, None] * width + place[None, :]
    w = tl.load(weight, mask=is_column[:, None] & (place < width)[None, :], other=0.0)
    b = tl.load(tl.load(tile + tiles).to(tl.pointer_type(tl.float32)) + column, mask=is_column, other=0.0)
    start = out + tl.load(tile + 2 * tiles) + column
    for row in range(batch):
        values = tl.load(x + row * x_row + place, mask=place < width, other=0.0)
        if HAS_MISH:
            values, _ = mish(values)
        tl.store(start + row * out_row, tl.sum(w * values[None, :], axis=1) + b, mask=is_column)


class Tiles:
    """Where the rows of some linear layers lie, cut into tiles of equally many; they must stay there."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.width, first = layers[0].in_features, 0
        self.columns = max(1, NUMBERS // triton.next_power_of_2(self.width))
        tiles: list[tuple[int, int, int, int]] = []  # addresses of weights and biases, the first result, how many
        for layer in layers:
            assert layer.in_features == self.width
            for row in range(0, layer.out_features, self.columns):
                places = (layer.weight[row].data_ptr(), layer.bias.data_ptr() + row * layer.bias.element_size())
                tiles.append((*places, first + row, min(self.columns, layer.out_features - row)))
            first += layer.out_features
        self.count = len(tiles)
        self.table = torch.tensor(tiles, dtype=torch.int64).t().contiguous().to(layers[0].weight.device)


_tiles: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], Tiles]] = WeakKeyDictionary()


def tiles_of(layers: Sequence[nn.Linear]) -> Tiles | None:
    """Their tiles; None where one is not float32 without gaps, or where a graph is recorded and there are none yet."""
    key = tuple([part.data_ptr() for layer in layers for part in (layer.weight, layer.bias)])
    made = _tiles.setdefault(layers[0], {})
    if key not in made and not is_capturing():
        parts = [part for layer in layers for part in (layer.weight, layer.bias)]
        if not all(part.dtype is torch.float32 and part.is_contiguous() for part in parts):
            return None
        made[key] = Tiles(layers)  # older ones stay: a recorded graph may read them
    return made.get(key)


def linears(tiles: Tiles, x: Tensor, out: Tensor, *, has_mish: bool) -> None:
    """What the layers make of `x` `[B, D]`, or of Mish of it, side by side into `out`. Weights are read once."""
    _linears[(tiles.count,)](
        x, tiles.table, out, len(x), tiles.width, tiles.count, x.stride(0), out.stride(0),
        HAS_MISH=has_mish, COLUMNS=tiles.columns, BLOCK=triton.next_power_of_2(tiles.width), num_warps=4,
    )  # fmt: skip
