"""The layers of TD-MPC2's networks: a product, then bias, LayerNorm and Mish or SimNorm as one kernel.

pre [E, R, W] = hidden @ weight        out = act((pre + bias - mean) / std * scale + shift), of every member its own
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rl_lab.kernels.triton.elementwise import MOST_PROGRAMS, total

EPSILON = 1e-5  # F.layer_norm's own


@triton.jit
def mish_factor(y):
    """tanh(softplus(y)) and what remains of its square to 1; from 20 on the first is 1 in fp32."""
    e = tl.exp(tl.minimum(y, 20.0))
    n = e * (e + 2.0)
    rest = 1.0 / (n + 2.0)
    return n * rest, 4.0 * (n + 1.0) * rest * rest


@triton.jit
def simplices(y, SIMPLEX: tl.constexpr, BLOCK: tl.constexpr):
    """A softmax over every SIMPLEX neighbours of `[BLOCK]`."""
    groups = tl.reshape(y, (BLOCK // SIMPLEX, SIMPLEX))
    weights = tl.exp(groups - tl.max(groups, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit
def _normed(
    pre, bias, scale, shift, out, rows, out_row, member_row,
    HAS_BIAS: tl.constexpr, SIMPLEX: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    own = member * member_row + column
    place = (member * rows + tl.program_id(0)).to(tl.int64) * WIDTH + column
    x = tl.load(pre + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + own, mask=inside, other=0.0)
    x = tl.where(inside, x - tl.sum(x) / WIDTH, 0.0)
    normed = x * tl.rsqrt(tl.sum(x * x) / WIDTH + EPS)
    y = normed * tl.load(scale + own, mask=inside, other=0.0) + tl.load(shift + own, mask=inside, other=0.0)
    if SIMPLEX > 0:
        result = tl.reshape(simplices(y, SIMPLEX, BLOCK), (BLOCK,))
    else:
        result = y * mish_factor(y)[0]
    tl.store(out + (member * rows + tl.program_id(0)).to(tl.int64) * out_row + column, result, mask=inside)


@triton.jit
def _normed_backward(
    pre, bias, scale, shift, gradient, result, partial, rows, HAS_BIAS: tl.constexpr, WANTS_PARTIAL: tl.constexpr,
    SIMPLEX: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    own = member * WIDTH + column
    w = tl.load(scale + own, mask=inside, other=0.0)
    s = tl.load(shift + own, mask=inside, other=0.0)
    b = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + own, mask=inside, other=0.0)
    bias_gradient = tl.zeros([BLOCK], tl.float32)
    scale_gradient = tl.zeros([BLOCK], tl.float32)
    shift_gradient = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        place = (member * rows + row).to(tl.int64) * WIDTH + column
        x = tl.load(pre + place, mask=inside, other=0.0).to(tl.float32) + b
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x - tl.sum(x) / WIDTH, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x) / WIDTH + EPS)
        normed = x * rstd
        y = normed * w + s
        if SIMPLEX > 0:
            probs = simplices(y, SIMPLEX, BLOCK)
            grouped = tl.reshape(g, (BLOCK // SIMPLEX, SIMPLEX))
            g = tl.reshape(probs * (grouped - tl.sum(probs * grouped, axis=1)[:, None]), (BLOCK,))
        else:
            factor, remainder = mish_factor(y)
            g = g * (factor + y * remainder * tl.sigmoid(y))
        shift_gradient += g
        scale_gradient += g * normed
        g = tl.where(inside, g * w, 0.0)
        dx = rstd * (g - tl.sum(g) / WIDTH - normed * (tl.sum(g * normed) / WIDTH))
        bias_gradient += dx
        tl.store(result + place, dx, mask=inside)
    if WANTS_PARTIAL:
        stride = tl.num_programs(1) * WIDTH
        first = partial + tl.program_id(0) * 3 * stride + own
        tl.store(first, bias_gradient, mask=inside)
        tl.store(first + stride, scale_gradient, mask=inside)
        tl.store(first + 2 * stride, shift_gradient, mask=inside)


def _constants(width: int, simplex: int) -> dict[str, Any]:
    warps = 1 if width <= 128 else 2 if width <= 256 else 4 if width <= 2048 else 8
    return {
        "SIMPLEX": simplex,
        "WIDTH": width,
        "BLOCK": triton.next_power_of_2(width),
        "EPS": EPSILON,
        "num_warps": warps,
    }


def normed(
    pre: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor, out: Tensor, *, simplex: int, out_row: int
) -> None:
    """Of contiguous rows `[E, R, W]`, into `out`, whose rows lie `out_row` numbers apart. `simplex` 0: Mish. From
    member to member, bias, scale and shift lie equally far apart."""
    members, rows, width = pre.shape
    if rows:
        _normed[(rows, members)](
            pre, scale if bias is None else bias, scale, shift, out, rows, out_row, scale.stride(0),
            HAS_BIAS=bias is not None, **_constants(width, simplex),
        )  # fmt: skip


class Normed(Function):
    """Of rows `[E, R, W]`; bias, scale and shift are `[E, 1, W]`. `simplex` 0: Mish."""

    @staticmethod
    def forward(
        ctx: Any, pre: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor, simplex: int, dtype: torch.dtype
    ) -> Tensor:
        pre = pre.contiguous()
        out = torch.empty(pre.shape, dtype=dtype, device=pre.device)
        normed(pre, bias, scale, shift, out, simplex=simplex, out_row=pre.shape[-1])
        ctx.save_for_backward(pre, bias, scale, shift)
        ctx.simplex = simplex
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        pre, bias, scale, shift = ctx.saved_tensors
        members, rows, width = pre.shape
        wanted = ctx.needs_input_grad[1:4]
        programs = max(1, min(rows, MOST_PROGRAMS // members))
        result, partial = torch.empty_like(pre), pre
        if any(wanted):
            partial = torch.empty(programs, 3, members, 1, width, device=pre.device)
        _normed_backward[(programs, members)](
            pre, scale if bias is None else bias, scale, shift, gradient.contiguous(), result, partial, rows,
            HAS_BIAS=bias is not None, WANTS_PARTIAL=any(wanted), **_constants(width, ctx.simplex),
        )  # fmt: skip
        found: tuple[Tensor | None, ...] = (None, None, None)
        if any(wanted):
            sums = total(partial).unbind()
            found = tuple(each if want else None for each, want in zip(sums, wanted, strict=True))
        return result, *found, None, None


def forward(mlp: Any, inputs: Tensor, *, drop: bool = False, members: Tensor | None = None) -> Tensor:
    """`NormedMLP.forward`."""
    groups = (mlp.weights, mlp.biases, mlp.norm_weights, mlp.norm_biases)
    weights, biases, scales, shifts = (
        [each if members is None else each.index_select(0, members) for each in group] for group in groups
    )
    last = len(weights) - 1
    hidden = inputs.reshape(-1, inputs.shape[-1]).expand(len(weights[0]), -1, -1)
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        drops = index == 0 and drop and mlp.dropout
        is_normed = index < len(scales)
        if drops or not is_normed:
            hidden, bias = torch.baddbmm(bias, hidden, weight), None
        else:
            hidden = torch.bmm(hidden, weight)
        if drops:
            hidden = F.dropout(hidden, mlp.dropout)
        if is_normed:
            # A network's result is in fp32, as LayerNorm's is under autocast; what a product reads is as it wants it.
            dtype = hidden.dtype if index < last else torch.float32
            simplex = mlp.simplex_size if index == last else 0
            hidden = Normed.apply(hidden, bias, scales[index], shifts[index], simplex, dtype)  # type: ignore[no-untyped-call]
    return hidden.unflatten(1, inputs.shape[:-1])
