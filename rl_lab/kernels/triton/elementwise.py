"""The element-wise parts of a world model's layers and time steps, each everything between two matrix products.

One time step of 16 rows is a few microseconds of arithmetic. What takes the time is the number of kernels that wait
for each other. All functions but `layer` write to the tensors they are given.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

NORM_EPSILON = 1e-4  # that of layers.py, which is part of the digest of RMSNorm.forward
MOST_PROGRAMS = 512  # about four per multiprocessor of an H200: enough to fill it, few partial sums to add up


def autocast_dtype(device: torch.device) -> torch.dtype:
    """Of matrix products."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32


# --- norm and SiLU ------------------------------------------------------------------------------


@triton.jit
def _norm_silu(
    pre, bias, weight, out, pre_row, out_row, epsilon, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row, segment = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = segment * WIDTH + column
    x = tl.load(pre + row * pre_row + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / WIDTH + epsilon)
    y = x * scale * tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + place, y * tl.sigmoid(y), mask=inside)


@triton.jit
def _norm_silu_backward(
    pre, bias, weight, gradient, result, partial, rows, pre_row, gradient_row, result_row, epsilon,
    HAS_BIAS: tl.constexpr, WANTS_PARTIAL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = segment * WIDTH + column
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    bias_gradient = tl.zeros([BLOCK], tl.float32)
    weight_gradient = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(pre + row * pre_row + place, mask=inside, other=0.0).to(tl.float32) + b
        g = tl.load(gradient + row * gradient_row + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x) / WIDTH + epsilon)
        normed = x * scale
        y = normed * w
        sigmoid = tl.sigmoid(y)
        g = g * sigmoid * (1.0 + y * (1.0 - sigmoid))
        weight_gradient += g * normed
        g = g * w
        dx = scale * (g - normed * (tl.sum(g * normed) / WIDTH))
        bias_gradient += tl.where(inside, dx, 0.0)
        tl.store(result + row * result_row + place, dx, mask=inside)
    if WANTS_PARTIAL:
        width = tl.num_programs(1) * WIDTH
        program = partial + tl.program_id(0) * 2 * width + place
        tl.store(program, bias_gradient, mask=inside)
        tl.store(program + width, weight_gradient, mask=inside)


def norm_silu(pre: Tensor, bias: Tensor | None, weight: Tensor, out: Tensor, *, segments: int, epsilon: float) -> None:
    """`silu(rms_norm(pre + bias) * weight)` of rows `[R, segments * W]`, each segment normed on its own."""
    width = pre.shape[1] // segments
    _norm_silu[(len(pre), segments)](
        pre, weight if bias is None else bias, weight, out, pre.stride(0), out.stride(0), epsilon,
        HAS_BIAS=bias is not None, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip


def norm_silu_backward(
    pre: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    gradient: Tensor,
    result: Tensor,
    *,
    segments: int,
    epsilon: float,
    wants_parameters: bool,
) -> tuple[Tensor, Tensor] | None:
    """Writes the gradient of `pre` to `result`; returns those of bias and weight if they are wanted."""
    rows, width = len(pre), pre.shape[1] // segments
    programs = min(rows, MOST_PROGRAMS)
    partial = pre.new_empty((programs, 2, pre.shape[1]), dtype=torch.float32) if wants_parameters else result
    _norm_silu_backward[(programs, segments)](
        pre, weight if bias is None else bias, weight, gradient, result, partial, rows, pre.stride(0),
        gradient.stride(0), result.stride(0), epsilon,
        HAS_BIAS=bias is not None, WANTS_PARTIAL=wants_parameters, WIDTH=width,
        BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip
    if not wants_parameters:
        return None
    bias_gradient, weight_gradient = total(partial).unbind()
    return bias_gradient, weight_gradient


def _warps(width: int) -> int:
    return 1 if width <= 256 else 4 if width <= 2048 else 8


# --- a layer --------------------------------------------------------------------------------------


class NormSilu(Function):
    """`silu(rms_norm(total + bias) * weight)` over the last axis."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, bias: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        rows = total.reshape(-1, total.shape[-1])
        out = torch.empty_like(rows)
        norm_silu(rows, bias, weight, out, segments=1, epsilon=epsilon)
        ctx.save_for_backward(rows, bias, weight)
        ctx.epsilon = epsilon
        return out.view(total.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, bias, weight = ctx.saved_tensors
        _, needs_bias, needs_weight, _ = ctx.needs_input_grad
        result, flat = torch.empty_like(rows), gradient.reshape(rows.shape)
        flat = flat if flat.stride(-1) == 1 else flat.contiguous()  # a sum's gradient is one number for all
        wanted = {"epsilon": ctx.epsilon, "wants_parameters": needs_bias or needs_weight}
        found = norm_silu_backward(rows, bias, weight, flat, result, segments=1, **wanted)
        bias_gradient, weight_gradient = found or (None, None)
        return result.view(gradient.shape), bias_gradient if needs_bias else None, weight_gradient, None


def layer(part: Any, features: Tensor) -> Tensor:
    """`Layer.forward`. Dreams lie in memory with their steps first: a product in that order needs no copy of them."""
    weight, turned = part.linear.weight, features.transpose(0, 1) if features.dim() == 3 else features
    if features.dim() == 3 and not features.is_contiguous() and turned.is_contiguous():
        total = F.linear(turned, weight).transpose(0, 1)
    else:
        total = F.linear(features, weight)
    return NormSilu.apply(total, part.linear.bias, part.norm.weight, NORM_EPSILON)  # type: ignore[no-untyped-call]


# --- sums over programs ----------------------------------------------------------------


@triton.jit
def _total(partial, sums, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        found += tl.load(partial + row[:, None] * width + column[None, :], mask=inside, other=0.0)
    tl.store(sums + column, tl.sum(found, axis=0), mask=column < width)


def total(partial: Tensor) -> Tensor:
    """The sum `[...]` over the first axis of `[programs, ...]`, by as many programs as there are eights of columns:
    torch's own sum leaves most of the GPU idle for so few columns."""
    sums = torch.empty(partial.shape[1:], device=partial.device)
    _total[(triton.cdiv(sums.numel(), 8),)](partial, sums, len(partial), sums.numel(), ROWS=256, COLUMNS=8, num_warps=8)
    return sums


# --- the gates of the block GRU -------------------------------------------------------------------


@triton.jit
def _gate(
    gates, bias, before, keep_next, after, after_low, next_before, next_low, block_row, after_low_row,
    next_low_row, HAS_NEXT: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    size = BLOCKS * WIDTH
    start = gates + block * block_row + row * 3 * WIDTH + column
    shift = bias + block * 3 * WIDTH + column
    reset = tl.load(start, mask=inside, other=0.0).to(tl.float32) + tl.load(shift, mask=inside, other=0.0)
    middle = tl.load(start + WIDTH, mask=inside, other=0.0).to(tl.float32)
    middle += tl.load(shift + WIDTH, mask=inside, other=0.0)
    update = tl.load(start + 2 * WIDTH, mask=inside, other=0.0).to(tl.float32)
    update += tl.load(shift + 2 * WIDTH, mask=inside, other=0.0)
    place = block * WIDTH + column
    old = tl.load(before + row * size + place, mask=inside, other=0.0)
    candidate = 2.0 * tl.sigmoid(2.0 * tl.sigmoid(reset) * middle) - 1.0
    new = old + tl.sigmoid(update - 1.0) * (candidate - old)
    tl.store(after + row * size + place, new, mask=inside)
    tl.store(after_low + row * after_low_row + place, new, mask=inside)
    if HAS_NEXT:
        kept = tl.where(tl.load(keep_next + row) > 0.0, new, 0.0)  # not a product: NaN times 0 is NaN
        tl.store(next_before + row * size + place, kept, mask=inside)
        tl.store(next_low + row * next_low_row + place, kept, mask=inside)


@triton.jit
def _gate_backward(
    gates, bias, before, from_output, from_posterior, from_next, from_next_direct, keep_next, result, direct, block_row,
    from_next_row, HAS_NEXT: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    size = BLOCKS * WIDTH
    place = row * size + block * WIDTH + column
    g = tl.load(from_output + place, mask=inside, other=0.0).to(tl.float32)
    g += tl.load(from_posterior + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_NEXT:
        next_place = row * from_next_row + block * WIDTH + column
        later = tl.load(from_next + next_place, mask=inside, other=0.0).to(tl.float32)
        later += tl.load(from_next_direct + place, mask=inside, other=0.0)
        g += tl.where(tl.load(keep_next + row) > 0.0, later, 0.0)
    offset = block * block_row + row * 3 * WIDTH + column
    shift = bias + block * 3 * WIDTH + column
    reset = tl.load(gates + offset, mask=inside, other=0.0).to(tl.float32) + tl.load(shift, mask=inside, other=0.0)
    middle = tl.load(gates + offset + WIDTH, mask=inside, other=0.0).to(tl.float32)
    middle += tl.load(shift + WIDTH, mask=inside, other=0.0)
    update = tl.load(gates + offset + 2 * WIDTH, mask=inside, other=0.0).to(tl.float32)
    update += tl.load(shift + 2 * WIDTH, mask=inside, other=0.0)
    old = tl.load(before + place, mask=inside, other=0.0)
    reset = tl.sigmoid(reset)
    update = tl.sigmoid(update - 1.0)
    candidate = 2.0 * tl.sigmoid(2.0 * reset * middle) - 1.0
    inner = g * update * (1.0 - candidate * candidate)
    tl.store(result + offset, inner * middle * reset * (1.0 - reset), mask=inside)
    tl.store(result + offset + WIDTH, inner * reset, mask=inside)
    tl.store(result + offset + 2 * WIDTH, g * (candidate - old) * update * (1.0 - update), mask=inside)
    tl.store(direct + place, g * (1.0 - update), mask=inside)


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
    blocks, rows, _, width = gates.shape
    has_next = keep_next is not None
    _gate[(rows, blocks)](
        gates, bias, before, keep_next if has_next else before, after, after_low, next_before if has_next else after,
        next_low if has_next else after_low, gates.stride(0), after_low.stride(0),
        next_low.stride(0) if next_low is not None else 0,
        HAS_NEXT=has_next, BLOCKS=blocks, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip


def gate_backward(
    gates: Tensor,
    bias: Tensor,
    before: Tensor,
    from_output: Tensor,
    from_posterior: Tensor,
    from_next: Tensor | None,
    from_next_direct: Tensor | None,
    keep_next: Tensor | None,
    result: Tensor,
    direct: Tensor,
) -> None:
    """All gradients of deter_t to those of the gates, and to `direct`, what passes by the gates."""
    blocks, rows, _, width = gates.shape
    has_next = from_next is not None
    _gate_backward[(rows, blocks)](
        gates, bias, before, from_output, from_posterior, from_next if has_next else before,
        from_next_direct if has_next else before, keep_next if has_next else before, result, direct, gates.stride(0),
        from_next.stride(0) if from_next is not None else 0,
        HAS_NEXT=has_next, BLOCKS=blocks, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip


# --- the choice of the latent ---------------------------------------------------------------------


@triton.jit
def _choices(choices, GROUPS: tl.constexpr, CLASSES: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """Which choices a program makes, `[CHOICES]`, and where their classes lie, `[CHOICES, BLOCK]`."""
    choice_id = tl.program_id(0) * CHOICES + tl.arange(0, CHOICES)
    column = tl.arange(0, BLOCK)
    inside = (choice_id < choices)[:, None] & (column < CLASSES)[None, :]
    row = choice_id // GROUPS
    within = (choice_id % GROUPS)[:, None] * CLASSES + column[None, :]
    return choice_id, column, inside, row, within, choice_id[:, None] * CLASSES + column[None, :]


@triton.jit
def _sample(
    output, bias, noise, keep_next, parameters, sample, next_low, choices, next_low_row, unimix,
    HAS_NEXT: tl.constexpr, HAS_NOISE: tl.constexpr, GROUPS: tl.constexpr, CLASSES: tl.constexpr,
    CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    choice_id, column, inside, row, within, place = _choices(choices, GROUPS, CLASSES, CHOICES, BLOCK)
    logits = tl.load(output + place, mask=inside, other=0.0).to(tl.float32)
    logits += tl.load(bias + within, mask=inside, other=0.0)
    tl.store(parameters + place, logits, mask=inside)
    logits = tl.where((column < CLASSES)[None, :], logits, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    probs = weights / tl.sum(weights, axis=1)[:, None] * (1.0 - unimix) + unimix / CLASSES
    if HAS_NOISE:
        probs = probs / tl.load(noise + place, mask=inside, other=1.0)
    best = tl.argmax(tl.where((column < CLASSES)[None, :], probs, -1.0), axis=1)
    one_hot = tl.where(column[None, :] == best[:, None], 1.0, 0.0)
    tl.store(sample + place, one_hot, mask=inside)
    if HAS_NEXT:
        kept = one_hot * tl.load(keep_next + row, mask=choice_id < choices, other=0.0)[:, None]
        tl.store(next_low + row[:, None] * next_low_row + within, kept, mask=inside)


@triton.jit
def _sample_backward(
    parameters, from_output, from_parameters, from_next, keep_next, result, choices, from_next_row, unimix,
    HAS_NEXT: tl.constexpr, GROUPS: tl.constexpr, CLASSES: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    choice_id, column, inside, row, within, place = _choices(choices, GROUPS, CLASSES, CHOICES, BLOCK)
    logits = tl.load(parameters + place, mask=inside, other=0.0)
    logits = tl.where((column < CLASSES)[None, :], logits, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    probs = weights / tl.sum(weights, axis=1)[:, None]
    g = tl.load(from_output + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_NEXT:
        later = tl.load(from_next + row[:, None] * from_next_row + within, mask=inside, other=0.0).to(tl.float32)
        is_kept = tl.load(keep_next + row, mask=choice_id < choices, other=0.0) > 0.0
        g += tl.where(is_kept[:, None], later, 0.0)
    g = g * (1.0 - unimix)
    g = probs * (g - tl.sum(g * probs, axis=1)[:, None])
    g += tl.load(from_parameters + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + place, g, mask=inside)


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
    classes = output.shape[1] // groups
    has_next = keep_next is not None
    choices, tile = len(output) * groups, _tile_choices(classes, len(output) * groups)
    _sample[(triton.cdiv(choices, tile),)](
        output, bias, output if noise is None else noise, keep_next if has_next else output, parameters, choice,
        next_low if has_next else choice, choices, next_low.stride(0) if next_low is not None else 0, unimix,
        HAS_NEXT=has_next, HAS_NOISE=noise is not None, GROUPS=groups, CLASSES=classes, CHOICES=tile,
        BLOCK=triton.next_power_of_2(classes), num_warps=1,
    )  # fmt: skip


def sample_backward(
    parameters: Tensor,
    from_output: Tensor,
    from_parameters: Tensor,
    from_next: Tensor | None,
    keep_next: Tensor | None,
    result: Tensor,
    *,
    groups: int,
    unimix: float,
) -> None:
    """Gradients of choice (straight through to its probabilities) and parameters to those of the logits."""
    classes = parameters.shape[1] // groups
    has_next = from_next is not None
    choices, tile = len(parameters) * groups, _tile_choices(classes, len(parameters) * groups)
    _sample_backward[(triton.cdiv(choices, tile),)](
        parameters, from_output, from_parameters, from_next if has_next else parameters,
        keep_next if has_next else parameters, result, choices, from_next.stride(0) if from_next is not None else 0,
        unimix,
        HAS_NEXT=has_next, GROUPS=groups, CLASSES=classes, CHOICES=tile, BLOCK=triton.next_power_of_2(classes),
        num_warps=1,
    )  # fmt: skip


def _tile_choices(classes: int, choices: int) -> int:
    """Choices that one warp makes: few while that keeps more of the GPU busy, at most 256 numbers."""
    return 2 if choices <= 1024 else max(1, 256 // triton.next_power_of_2(classes))
