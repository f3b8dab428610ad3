"""What happens between the matrix products of a world model's time step, in torch: what CPUs run, and what the Triton
kernels of the same names must equal. All write to the tensors they are given."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


class Kernels(Protocol):
    """This module, or `triton_kernels`."""

    norm_silu: Any
    norm_silu_backward: Any
    gate: Any
    gate_backward: Any
    sample: Any
    sample_backward: Any


class ImageKernels(Protocol):
    """This module, or `image_kernels`."""

    pool_norm_silu: Any
    pool_norm_silu_backward: Any
    spread_norm_silu: Any
    spread_norm_silu_backward: Any


@cache
def kernels_for(device: torch.device) -> Kernels:
    """The kernels of a device."""
    if device.type != "cuda":
        return sys.modules[__name__]  # type: ignore[return-value]
    from rl_lab.kernels.triton import elementwise as triton_kernels

    return triton_kernels  # type: ignore[return-value]


@cache
def image_kernels_for(device: torch.device) -> ImageKernels:
    """The kernels of a device for what stands between convolutions."""
    if device.type != "cuda":
        return sys.modules[__name__]  # type: ignore[return-value]
    from rl_lab.kernels.triton import images as image_kernels

    return image_kernels  # type: ignore[return-value]


def blocks_of(rows: Tensor, blocks: int) -> Tensor:
    """`[R, D]` as `[G, R, D/G]`, in place."""
    return rows.unflatten(1, (blocks, -1)).transpose(0, 1)


def norm_silu(pre: Tensor, bias: Tensor | None, weight: Tensor, out: Tensor, *, segments: int, epsilon: float) -> None:
    """`silu(rms_norm(pre + bias) * weight)` of rows `[R, segments * W]` to the first columns of `out`."""
    normed, _ = _normed(pre, bias, segments, epsilon)
    y = normed.flatten(1) * weight
    out[:, : y.shape[1]] = y * torch.sigmoid(y)


def norm_silu_backward(
    pre: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    gradient: Tensor,
    slope: Tensor,
    *,
    segments: int,
    epsilon: float,
    wants_parameters: bool,
) -> tuple[Tensor, Tensor] | None:
    """Writes the gradient of `pre` to `slope`; returns those of bias and weight if they are wanted."""
    normed, scale = _normed(pre, bias, segments, epsilon)
    y = normed.flatten(1) * weight
    sigmoid = torch.sigmoid(y)
    after_norm = gradient.to(y.dtype) * sigmoid * (1.0 + y * (1.0 - sigmoid))
    inner = (after_norm * weight).unflatten(1, (segments, -1))
    exact = (scale * (inner - normed * (inner * normed).mean(dim=-1, keepdim=True))).flatten(1)
    slope.copy_(exact)
    return (exact.sum(dim=0), (after_norm * normed.flatten(1)).sum(dim=0)) if wants_parameters else None


def gate(
    gates: Tensor,
    bias: Tensor,
    before: Tensor,
    keep_next: Tensor | None,
    after: Tensor,
    after_low: Tensor,
    next_before: Tensor | None,
    next_low: Tensor | None,
) -> None:
    """Gates `[G, B, 3, D/G]` and the deter before `[B, D]` to the deter after, and to the next row's input."""
    _, candidate, update, _ = _open_gates(gates, bias, before)
    after.copy_(before + update * (candidate - before))
    after_low.copy_(after)
    if next_before is not None and next_low is not None and keep_next is not None:
        next_before.copy_(after * keep_next.unsqueeze(-1))
        next_low.copy_(next_before)


def gate_backward(
    gates: Tensor,
    bias: Tensor,
    before: Tensor,
    from_output: Tensor,
    from_posterior: Tensor,
    from_next: Tensor | None,
    from_next_direct: Tensor | None,
    keep_next: Tensor | None,
    slope: Tensor,
    direct: Tensor,
) -> None:
    """All that asks something of deter_t, to the gates' gradients and to `direct`, what passes by the gates."""
    reset, candidate, update, middle = _open_gates(gates, bias, before)
    total = from_output.to(before.dtype) + from_posterior
    if from_next is not None and from_next_direct is not None and keep_next is not None:
        total = total + (from_next + from_next_direct) * keep_next.unsqueeze(-1)
    inner = total * update * (1.0 - candidate.square())
    parts = (
        inner * middle * reset * (1.0 - reset),
        inner * reset,
        total * (candidate - before) * update * (1.0 - update),
    )
    slope.copy_(torch.stack([blocks_of(part, len(gates)) for part in parts], dim=2))
    direct.copy_(total * (1.0 - update))


def sample(
    output: Tensor,
    bias: Tensor,
    noise: Tensor | None,
    keep_next: Tensor | None,
    parameters: Tensor,
    choice: Tensor,
    next_low: Tensor | None,
    *,
    groups: int,
    unimix: float,
) -> None:
    """Logits `[B, P]` to `parameters` (with bias), a one-hot choice per group, and to the next row's input."""
    parameters.copy_(output + bias)
    logits = parameters.unflatten(1, (groups, -1))
    probs = torch.softmax(logits, dim=-1) * (1.0 - unimix) + unimix / logits.shape[-1]
    if noise is not None:
        probs = probs / noise.view_as(probs)
    choice.zero_().view_as(probs).scatter_(-1, probs.argmax(dim=-1, keepdim=True), 1.0)
    if next_low is not None and keep_next is not None:
        next_low.copy_(choice * keep_next.unsqueeze(-1))


def sample_backward(
    parameters: Tensor,
    from_output: Tensor,
    from_parameters: Tensor,
    from_next: Tensor | None,
    keep_next: Tensor | None,
    slope: Tensor,
    *,
    groups: int,
    unimix: float,
) -> None:
    """The gradients of choice (straight through to its probabilities) and parameters, to those of the logits."""
    gradient = from_output
    if from_next is not None and keep_next is not None:
        gradient = gradient + from_next * keep_next.unsqueeze(-1)
    probs = torch.softmax(parameters.unflatten(1, (groups, -1)), dim=-1)
    inner = gradient.view_as(probs) * (1.0 - unimix)
    inner = probs * (inner - (inner * probs).sum(dim=-1, keepdim=True))
    slope.copy_(inner.flatten(1) + from_parameters)


def _normed(pre: Tensor, bias: Tensor | None, segments: int, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = pre.to(torch.promote_types(pre.dtype, torch.float32))
    wide = (wide if bias is None else wide + bias).unflatten(1, (segments, -1))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return wide * scale, scale


def _open_gates(gates: Tensor, bias: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reset, candidate, update and the candidate's input, each `[B, D]`."""
    opened = gates.to(before.dtype) + bias.view(len(gates), 1, 3, -1)
    reset, middle, update = (opened[:, :, part].transpose(0, 1).flatten(1) for part in range(3))
    reset, update = torch.sigmoid(reset), torch.sigmoid(update - 1.0)
    return reset, torch.tanh(reset * middle), update, middle


# --- between convolutions ---


def pool_norm_silu(image: Tensor, bias: Tensor, weight: Tensor, out: Tensor, *, epsilon: float) -> None:
    """`[N, 2h, 2w, C]` to the 2x2 maximum `[N, h, w, C]`, with bias, normed over the channels, through SiLU."""
    pooled = _pool(image).amax(dim=3).flatten(0, 2)
    norm_silu(pooled, bias, weight, out.view(pooled.shape), segments=1, epsilon=epsilon)


def pool_norm_silu_backward(
    image: Tensor, bias: Tensor, weight: Tensor, gradient: Tensor, slope: Tensor, *, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Writes the gradient of `image` to `slope`; returns those of bias and weight. Of equals, the first was the one."""
    windows = _pool(image)
    largest, place = windows.max(dim=3, keepdim=True)
    rows = largest.flatten(0, 3)
    inner = torch.empty_like(rows)
    found = norm_silu_backward(
        rows, bias, weight, gradient.reshape(rows.shape), inner, segments=1, epsilon=epsilon, wants_parameters=True
    )
    spread_out = torch.zeros_like(windows).scatter_(3, place, inner.view(largest.shape))
    count, height, width, _, channels = windows.shape
    slope.copy_(spread_out.view(count, height, width, 2, 2, channels).permute(0, 1, 3, 2, 4, 5).reshape(slope.shape))
    assert found is not None
    return found


def spread_norm_silu(phases: Tensor, bias: Tensor, weight: Tensor, out: Tensor, *, epsilon: float) -> None:
    """`[N, h, w, 2, 2, C]` to its places in `[N, 2h, 2w, C]`, with bias, normed over the channels, through SiLU."""
    rows = phases.flatten(0, 4)
    active = torch.empty_like(rows)
    norm_silu(rows, bias, weight, active, segments=1, epsilon=epsilon)
    out.copy_(active.view(phases.shape).permute(0, 1, 3, 2, 4, 5).reshape(out.shape))


def spread_norm_silu_backward(
    phases: Tensor, bias: Tensor, weight: Tensor, gradient: Tensor, slope: Tensor, *, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Writes the gradient of `phases` to `slope`; returns those of bias and weight."""
    count, height, width, _, _, channels = phases.shape
    gathered = gradient.view(count, height, 2, width, 2, channels).permute(0, 1, 3, 2, 4, 5).reshape(-1, channels)
    rows = phases.flatten(0, 4)
    inner = torch.empty_like(rows)
    found = norm_silu_backward(rows, bias, weight, gathered, inner, segments=1, epsilon=epsilon, wants_parameters=True)
    slope.copy_(inner.view(slope.shape))
    assert found is not None
    return found


def _pool(image: Tensor) -> Tensor:
    """`[N, 2h, 2w, C]` as windows `[N, h, w, 4, C]`."""
    count, height, width, channels = image.shape
    windows = image.view(count, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 2, 4, 5)
    return windows.reshape(count, height // 2, width // 2, 4, channels)
