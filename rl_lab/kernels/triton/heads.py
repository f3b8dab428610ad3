"""What follows a head's last product, as single GPU kernels: two-hot means and losses, bounded actions.

Two-hot heads give 255 numbers for every row of every dream. Torch passes over them ten times between product and loss
(cast, softmax, gather and their backward); here they are read once forward and once backward.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

ELEMENTS = 1024  # per program of an element-wise kernel
ROWS = 8  # per program of a two-hot kernel


# --- two-hot -------------------------------------------------------------------------------------


@triton.jit
def mean_of_bins(above, below, middle, size):
    """Of logits above, below `[R, BLOCK]` (-inf: none) and in the middle `[R]`; the bins above are `size` `[BLOCK]`."""
    largest = tl.maximum(tl.maximum(tl.max(above, axis=1), tl.max(below, axis=1)), middle)
    above, below = tl.exp(above - largest[:, None]), tl.exp(below - largest[:, None])
    total = tl.sum(above + below, axis=1) + tl.exp(middle - largest)
    return tl.sum((above - below) * size[None, :], axis=1) / total


@triton.jit
def symexp(x):
    size = tl.abs(x)
    # exp(x) - 1 loses the digits of small numbers; there the series is exact to fp32.
    grown = tl.where(size < 0.04, size * (1.0 + size * (0.5 + size * (1.0 / 6.0 + size / 24.0))), tl.exp(size) - 1.0)
    return tl.where(x < 0.0, -grown, grown)


@triton.jit
def _two_hot_mean(
    logits, bins, means, rows, K: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, IS_SYMLOG: tl.constexpr
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    half: tl.constexpr = K // 2
    k = tl.arange(0, BLOCK)  # bins above the middle; each is summed with its mirror image, so equal ones cancel exactly
    inside = (row < rows)[:, None] & (k < half)[None, :]
    above = tl.load(logits + row[:, None] * K + half + 1 + k[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    below = tl.load(logits + row[:, None] * K + half - 1 - k[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    middle = tl.load(logits + row * K + half, mask=row < rows, other=0.0).to(tl.float32)
    mean = mean_of_bins(above, below, middle, tl.load(bins + half + 1 + k, mask=k < half, other=0.0))
    if IS_SYMLOG:
        mean = symexp(mean)
    tl.store(means + row, mean, mask=row < rows)


@triton.jit
def _symlog_mean_backward(logits, bins, gradients, result, rows, K: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    k = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (k < K)[None, :]
    x = tl.load(logits + row[:, None] * K + k[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.where(row < rows, tl.max(x, axis=1), 0.0)
    weights = tl.exp(x - largest[:, None])
    probs = weights / tl.where(row < rows, tl.sum(weights, axis=1), 1.0)[:, None]
    sizes = tl.load(bins + k, mask=k < K, other=0.0)
    # In pairs, as the formula sums them: the gradient of |mean| is 0 where the mean is exactly that.
    mirrored = tl.load(logits + row[:, None] * K + (K - 1 - k)[None, :], mask=inside, other=float("-inf"))
    others = tl.exp(mirrored.to(tl.float32) - largest[:, None])
    pairs = tl.where((k < K // 2)[None, :], (weights - others) * sizes[None, :], 0.0)
    mean = tl.sum(pairs, axis=1) / tl.where(row < rows, tl.sum(weights, axis=1), 1.0)
    gradient = tl.load(gradients + row, mask=row < rows, other=0.0)
    gradient = tl.where(mean == 0.0, 0.0, gradient * tl.exp(tl.abs(mean)))
    found = probs * (sizes[None, :] - mean[:, None]) * gradient[:, None]
    tl.store(result + row[:, None] * K + k[None, :], found, mask=inside)


@triton.jit
def _two_hot_loss_forward(
    logits, targets, bins, losses, normalizers, rows, K: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    k = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (k < K)[None, :]
    x = tl.load(logits + row[:, None] * K + k[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.where(row < rows, tl.max(x, axis=1), 0.0)
    normalizer = largest + tl.log(tl.sum(tl.exp(x - largest[:, None]), axis=1))
    tl.store(normalizers + row, normalizer, mask=row < rows)
    weight = _two_hot(targets, bins, row, rows, k, K)
    tl.store(losses + row, normalizer - tl.sum(tl.where(inside, x * weight, 0.0), axis=1), mask=row < rows)


@triton.jit
def _two_hot_loss_backward(
    logits, targets, bins, normalizers, gradients, result, rows, K: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    k = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (k < K)[None, :]
    x = tl.load(logits + row[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    normalizer = tl.load(normalizers + row, mask=row < rows, other=0.0)
    gradient = tl.load(gradients + row, mask=row < rows, other=0.0)
    found = (tl.exp(x - normalizer[:, None]) - _two_hot(targets, bins, row, rows, k, K)) * gradient[:, None]
    tl.store(result + row[:, None] * K + k[None, :], found, mask=inside)


@triton.jit
def _two_hot(targets, bins, row, rows, k, K: tl.constexpr):
    """Each target's weight of every bin `[R, BLOCK]`: of its two neighbours by closeness, of all others 0."""
    here = tl.load(bins + k, mask=k < K, other=float("inf"))
    target = tl.load(targets + row, mask=row < rows, other=0.0)
    lowest, highest = tl.load(bins), tl.load(bins + K - 1)
    # NaN stays NaN, so that the loss shows it.
    target = tl.maximum(target, lowest, propagate_nan=tl.PropagateNan.ALL)
    target = tl.minimum(target, highest, propagate_nan=tl.PropagateNan.ALL)
    is_reached = (here[None, :] <= target[:, None]).to(tl.int32)
    below = tl.minimum(tl.maximum(tl.sum(is_reached, axis=1) - 1, 0), K - 2)
    low, high = tl.load(bins + below), tl.load(bins + below + 1)
    above = (target - low) / (high - low)
    lower, upper = k[None, :] == below[:, None], k[None, :] == (below + 1)[:, None]
    return tl.where(lower, (1.0 - above)[:, None], 0.0) + tl.where(upper, above[:, None], 0.0)


def two_hot_mean(head: Any, *, is_symlog: bool = False) -> Tensor:
    """`TwoHot.mean`."""
    flat, bins = _flat(head.logits), head.bins
    means = torch.empty(head.logits.shape[:-1], device=flat.device)
    size = triton.next_power_of_2(len(bins) // 2)
    _two_hot_mean[_grid(flat)](flat, bins, means, len(flat), K=len(bins), BLOCK=size, R=ROWS, IS_SYMLOG=is_symlog)
    return means


def symlog_mean(head: Any) -> Tensor:
    """`SymlogTwoHot.mean`."""
    return _SymlogMean.apply(head.logits, head.bins)  # type: ignore[no-untyped-call, no-any-return]


class _SymlogMean(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bins: Tensor) -> Tensor:
        ctx.save_for_backward(logits, bins)
        return two_hot_mean(SimpleNamespace(logits=logits, bins=bins), is_symlog=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, bins = ctx.saved_tensors
        flat = _flat(logits)
        result = torch.empty_like(flat)
        _symlog_mean_backward[_grid(flat)](flat, bins, gradient.contiguous(), result, len(flat), **_sizes(bins))
        return result.view(logits.shape), None


def two_hot_loss(head: Any, target: Tensor) -> Tensor:
    """`TwoHot.loss`."""
    assert target.shape == head.logits.shape[:-1], (target.shape, head.logits.shape)
    return _TwoHotLoss.apply(head.logits, target.float().contiguous(), head.bins)  # type: ignore[no-untyped-call]


class _TwoHotLoss(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, bins: Tensor) -> Tensor:
        flat, losses = _flat(logits), torch.empty(logits.shape[:-1], device=logits.device)
        normalizers = torch.empty_like(losses)
        _two_hot_loss_forward[_grid(flat)](flat, target, bins, losses, normalizers, len(flat), **_sizes(bins))
        ctx.save_for_backward(logits, target, bins, normalizers)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, target, bins, normalizers = ctx.saved_tensors
        flat = _flat(logits)
        result = torch.empty_like(flat)
        args = (target, bins, normalizers, gradient.contiguous(), result)
        _two_hot_loss_backward[_grid(flat)](flat, *args, len(flat), **_sizes(bins))
        return result.view(logits.shape), None, None


def _sizes(bins: Tensor) -> dict[str, int]:
    return {"K": len(bins), "BLOCK": triton.next_power_of_2(len(bins)), "R": ROWS}


def _flat(logits: Tensor) -> Tensor:
    """Rows side by side: `reshape` alone leaves every other row where one axis has a single place."""
    return logits.reshape(-1, logits.shape[-1]).contiguous()


def _grid(flat: Tensor) -> tuple[int]:
    return (triton.cdiv(len(flat), ROWS),)


# --- actions -------------------------------------------------------------------------------------


@triton.jit
def _bounded_draw(mean, std, noise, action, count, lowest, highest, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(mean + place, mask=inside, other=0.0).to(tl.float32)
    fraction = tl.sigmoid(tl.load(std + place, mask=inside, other=0.0).to(tl.float32) + 2.0)
    drawn = tl.load(noise + place, mask=inside, other=0.0)
    spread = lowest + (highest - lowest) * fraction
    tl.store(action + place, 2.0 * tl.sigmoid(2.0 * x) - 1.0 + drawn * spread, mask=inside)


@triton.jit
def _scaled_action(action, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(action + place, mask=place < count, other=0.0)
    tl.store(out + place, x / tl.maximum(tl.abs(x), 1.0), mask=place < count)


def decide(actor: Any, features: Tensor, noise: Tensor) -> Tensor:
    """`LatentActor.decide` for continuous actions with bounded stds."""
    hidden, action = actor.stack(features), torch.empty(noise.shape, device=noise.device)
    args = (actor.output(hidden).contiguous(), actor.deviation_output(hidden).contiguous(), noise.contiguous(), action)
    grid = (triton.cdiv(noise.numel(), ELEMENTS),)
    _bounded_draw[grid](*args, noise.numel(), *actor.stds, BLOCK=ELEMENTS)
    return action


def scaled_action(action: Tensor, dtype: torch.dtype) -> Tensor:
    """`RSSM.encode_action` for continuous actions."""
    out = torch.empty(action.shape, dtype=dtype, device=action.device)
    grid = (triton.cdiv(action.numel(), ELEMENTS),)
    _scaled_action[grid](action.contiguous(), out, action.numel(), BLOCK=ELEMENTS)
    return out
