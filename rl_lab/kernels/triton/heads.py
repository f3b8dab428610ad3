"""What follows a head's last product, as single GPU kernels: two-hot means and losses, bounded actions.

Two-hot heads give 255 numbers for every row of every dream. Torch passes over them ten times between product and loss
(cast, softmax, gather and all that on the way back); here they are read once there and once back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 1024  # per program of an element-wise kernel
ROWS = 8  # per program of a two-hot kernel


# --- two-hot -------------------------------------------------------------------------------------


@triton.jit
def _two_hot_mean(logits, bins, means, rows, K: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    half: tl.constexpr = K // 2
    k = tl.arange(0, BLOCK)  # bins above the middle; each is summed with its mirror image, so equal ones cancel exactly
    inside = (row < rows)[:, None] & (k < half)[None, :]
    above = tl.load(logits + row[:, None] * K + half + 1 + k[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    below = tl.load(logits + row[:, None] * K + half - 1 - k[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    middle = tl.load(logits + row * K + half, mask=row < rows, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.maximum(tl.max(above, axis=1), tl.max(below, axis=1)), middle)
    above, below = tl.exp(above - largest[:, None]), tl.exp(below - largest[:, None])
    total = tl.sum(above + below, axis=1) + tl.exp(middle - largest)
    size = tl.load(bins + half + 1 + k, mask=k < half, other=0.0)
    tl.store(means + row, tl.sum((above - below) * size[None, :], axis=1) / total, mask=row < rows)


@triton.jit
def _two_hot_loss(
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
    logits, targets, bins, normalizers, gradients, slopes, rows, K: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    k = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (k < K)[None, :]
    x = tl.load(logits + row[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    normalizer = tl.load(normalizers + row, mask=row < rows, other=0.0)
    gradient = tl.load(gradients + row, mask=row < rows, other=0.0)
    slope = (tl.exp(x - normalizer[:, None]) - _two_hot(targets, bins, row, rows, k, K)) * gradient[:, None]
    tl.store(slopes + row[:, None] * K + k[None, :], slope, mask=inside)


@triton.jit
def _two_hot(targets, bins, row, rows, k, K: tl.constexpr):
    """Each target's share of every bin `[R, BLOCK]`: of its two neighbours by closeness, of all others none."""
    here = tl.load(bins + k, mask=k < K, other=float("inf"))
    target = tl.load(targets + row, mask=row < rows, other=0.0)
    lowest, highest = tl.load(bins), tl.load(bins + K - 1)
    # What is no number stays none, so that the loss shows it.
    target = tl.maximum(target, lowest, propagate_nan=tl.PropagateNan.ALL)
    target = tl.minimum(target, highest, propagate_nan=tl.PropagateNan.ALL)
    is_reached = (here[None, :] <= target[:, None]).to(tl.int32)
    below = tl.minimum(tl.maximum(tl.sum(is_reached, axis=1) - 1, 0), K - 2)
    low, high = tl.load(bins + below), tl.load(bins + below + 1)
    share = (target - low) / (high - low)
    lower, upper = k[None, :] == below[:, None], k[None, :] == (below + 1)[:, None]
    return tl.where(lower, (1.0 - share)[:, None], 0.0) + tl.where(upper, share[:, None], 0.0)


def two_hot_mean(logits: Tensor, bins: Tensor) -> Tensor:
    """The expected number `[...]` of logits `[..., K]`, exactly 0 where they are mirrored."""
    flat, means = _flat(logits), torch.empty(logits.shape[:-1], device=logits.device)
    size = triton.next_power_of_2(len(bins) // 2)
    _two_hot_mean[_grid(flat)](flat, bins, means, len(flat), K=len(bins), BLOCK=size, R=ROWS)
    return means


def two_hot_loss(logits: Tensor, target: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies `[...]` to targets `[...]`, and what the way back needs."""
    flat, losses = _flat(logits), torch.empty(logits.shape[:-1], device=logits.device)
    normalizers = torch.empty_like(losses)
    sizes = {"K": len(bins), "BLOCK": triton.next_power_of_2(len(bins)), "R": ROWS}
    _two_hot_loss[_grid(flat)](flat, target.contiguous(), bins, losses, normalizers, len(flat), **sizes)
    return losses, normalizers


def two_hot_loss_backward(
    logits: Tensor, target: Tensor, bins: Tensor, normalizers: Tensor, gradient: Tensor
) -> Tensor:
    """The logits' gradient `[..., K]` from that of the losses `[...]`."""
    flat = _flat(logits)
    slopes = torch.empty_like(flat)
    sizes = {"K": len(bins), "BLOCK": triton.next_power_of_2(len(bins)), "R": ROWS}
    told = (target.contiguous(), bins, normalizers, gradient.contiguous(), slopes)
    _two_hot_loss_backward[_grid(flat)](flat, *told, len(flat), **sizes)
    return slopes.view(logits.shape)


def _flat(logits: Tensor) -> Tensor:
    """Rows side by side: `reshape` alone leaves every other row where one axis has a single place."""
    return logits.reshape(-1, logits.shape[-1]).contiguous()


def _grid(flat: Tensor) -> tuple[int]:
    return (triton.cdiv(len(flat), ROWS),)


# --- actions -------------------------------------------------------------------------------------


@triton.jit
def _bounded_draw(mean, deviation, noise, action, count, lowest, highest, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(mean + place, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(tl.load(deviation + place, mask=inside, other=0.0).to(tl.float32) + 2.0)
    drawn = tl.load(noise + place, mask=inside, other=0.0)
    spread = lowest + (highest - lowest) * share
    tl.store(action + place, 2.0 * tl.sigmoid(2.0 * x) - 1.0 + drawn * spread, mask=inside)


@triton.jit
def _press(action, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(action + place, mask=place < count, other=0.0)
    tl.store(out + place, x / tl.maximum(tl.abs(x), 1.0), mask=place < count)


def bounded_draw(mean: Tensor, deviation: Tensor, noise: Tensor, lowest: float, highest: float) -> Tensor:
    """`LatentActor.decide` for continuous actions, from its two outputs."""
    action = torch.empty(noise.shape, device=noise.device)
    grid = (triton.cdiv(noise.numel(), ELEMENTS),)
    told = (mean.contiguous(), deviation.contiguous(), noise.contiguous(), action)
    _bounded_draw[grid](*told, noise.numel(), lowest, highest, BLOCK=ELEMENTS)
    return action


def press(action: Tensor, dtype: torch.dtype) -> Tensor:
    """`RSSM.encode_action` for continuous actions."""
    out = torch.empty(action.shape, dtype=dtype, device=action.device)
    _press[(triton.cdiv(action.numel(), ELEMENTS),)](action.contiguous(), out, action.numel(), BLOCK=ELEMENTS)
    return out
