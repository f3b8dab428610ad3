"""`ConditionalUNet.forward` as matrix products with one kernel each before and after them.

A plan is so short that a convolution over it is one product: the k steps that an output sees become k times the
channels. Memory has channels last, `[B, T, C]`, and a kernel `[out, in, k]` is a matrix `[out, in * k]` as it lies.

    plan  t0 t1 t2 t3                unfolded  row t1:  c0(t0) c0(t1) c0(t2)  c1(t0) c1(t1) c1(t2)  ...       k = 3
    Conv1d             unfold, product                  backward: product, fold (the sum of what each step was seen by)
    ConvTranspose1d    product, fold                    backward: unfold, product

After it, one kernel adds the bias, norms the groups, applies Mish, scales and shifts by the condition and adds the
residual. Few rows without gradients, as while acting, are unfolded within the product, which shares the weights out
over the whole GPU: reading them is then all there is to do. Everything is summed in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from rl_lab.kernels.gpu import Taps
from rl_lab.kernels.triton.elementwise import autocast_dtype, total
from rl_lab.kernels.triton.products import few_rows, is_tf32, linears, mish, product, share_products, tiles_of

BLOCK = 1024

# --- unfold and fold ----------------------------------------------------------------------------


@triton.jit
def _unfold(
    x, out, length, length_out, channels, width,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row % length_out * STRIDE + column % TAPS - PADDING
    inside = (column < width) & (place >= 0) & (place < length)
    values = tl.load(x + (row // length_out * length + place) * channels + column // TAPS, mask=inside, other=0.0)
    tl.store(out + row * width + column, values, mask=column < width)


@triton.jit
def _fold(
    x, bias, out, length, length_out, channels,
    HAS_BIAS: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    found = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        found += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    step = row % length_out + column * 0
    for tap in tl.static_range(TAPS):
        reached = step + PADDING - tap
        place = reached // STRIDE
        is_seen = (reached >= 0) & (reached % STRIDE == 0) & (place < length)
        start = x + ((row // length_out * length + place) * channels + column) * TAPS + tap
        found += tl.load(start, mask=inside & is_seen, other=0.0).to(tl.float32)
    tl.store(out + row * channels + column, found, mask=inside)


def unfold(x: Tensor, taps: Taps, dtype: torch.dtype) -> Tensor:
    """`[B, T, C]` to `[B * T', C * k]`: for each step after the convolution, all that it sees."""
    batch, length, channels = x.shape
    if taps == (1, 1, 0):
        return x.reshape(-1, channels).to(dtype)
    after, width = taps.after(length), channels * taps.number
    out = torch.empty(batch * after, width, dtype=dtype, device=x.device)
    grid = (len(out), triton.cdiv(width, BLOCK))
    _unfold[grid](x, out, length, after, channels, width, *taps, BLOCK=BLOCK, num_warps=4)
    return out


def fold(unfolded: Tensor, bias: Tensor | None, batch: int, length: int, taps: Taps) -> Tensor:
    """`[B * T', C * k]` to `[B, T, C]`: for each step before the convolution, the sum over all who see it."""
    channels = unfolded.shape[1] // taps.number
    if taps == (1, 1, 0):
        return unfolded.view(batch, length, channels).float()
    out = torch.empty(batch, length, channels, device=unfolded.device)
    after, block = len(unfolded) // batch, min(256, triton.next_power_of_2(channels))
    _fold[(batch * length, triton.cdiv(channels, block))](
        unfolded, unfolded if bias is None else bias, out, after, length, channels, bias is not None, *taps,
        BLOCK=block, num_warps=max(1, block // 64),
    )  # fmt: skip
    return out


# --- norm, Mish, FiLM, residual -----------------------------------------------------------------


@triton.jit
def _norm_mish(
    pre, bias, weight, shift, film, residual, residual_bias, out, batch, length, channels, film_row, epsilon,
    SPLITS: tl.constexpr, RESIDUALS: tl.constexpr, HAS_FILM: tl.constexpr, HAS_RESIDUAL_BIAS: tl.constexpr,
    WIDTH: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0), tl.program_id(1)
    step, column = tl.arange(0, STEPS), tl.arange(0, BLOCK)
    channel = group * WIDTH + column
    is_channel = column < WIDTH
    inside = (step < length)[:, None] & is_channel[None, :]
    place = (row * length + step)[:, None] * channels + channel[None, :]
    x = tl.zeros([STEPS, BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        x += tl.load(pre + split * batch * length * channels + place, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + channel, mask=is_channel, other=0.0)[None, :]
    numbers = length * WIDTH
    mean = tl.sum(tl.where(inside, x, 0.0)) / numbers
    centred = tl.where(inside, x - mean, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred) / numbers + epsilon)
    y = normed * tl.load(weight + channel, mask=is_channel, other=0.0)[None, :]
    y, _ = mish(y + tl.load(shift + channel, mask=is_channel, other=0.0)[None, :])
    if HAS_FILM:
        start = film + row * film_row + channel
        y *= tl.load(start, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        y += tl.load(start + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for split in tl.static_range(RESIDUALS):
        y += tl.load(residual + split * batch * length * channels + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL_BIAS:
        y += tl.load(residual_bias + channel, mask=is_channel, other=0.0)[None, :]
    tl.store(out + place, y, mask=inside)


@triton.jit
def _norm_mish_backward(
    pre, bias, weight, shift, film, gradient, result, film_gradient, partial, batch, length, channels, film_row,
    epsilon, HAS_FILM: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    step, column = tl.arange(0, STEPS), tl.arange(0, BLOCK)
    channel = group * WIDTH + column
    is_channel = column < WIDTH
    inside = (step < length)[:, None] & is_channel[None, :]
    b = tl.load(bias + channel, mask=is_channel, other=0.0)[None, :]
    w = tl.load(weight + channel, mask=is_channel, other=0.0)[None, :]
    s = tl.load(shift + channel, mask=is_channel, other=0.0)[None, :]
    numbers = length * WIDTH
    bias_gradient = tl.zeros([BLOCK], tl.float32)
    weight_gradient = tl.zeros([BLOCK], tl.float32)
    shift_gradient = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), batch, tl.num_programs(0)):
        place = (row * length + step)[:, None] * channels + channel[None, :]
        x = tl.load(pre + place, mask=inside, other=0.0).to(tl.float32) + b
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(tl.where(inside, x, 0.0)) / numbers
        centred = tl.where(inside, x - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred) / numbers + epsilon)
        normed = centred * scale
        y, slope = mish(normed * w + s)
        if HAS_FILM:
            start = row * film_row + channel
            own = row * 2 * channels + channel
            tl.store(film_gradient + own, tl.sum(g * y, axis=0), mask=is_channel)
            tl.store(film_gradient + own + channels, tl.sum(g, axis=0), mask=is_channel)
            g *= tl.load(film + start, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        g *= slope
        shift_gradient += tl.sum(g, axis=0)
        weight_gradient += tl.sum(g * normed, axis=0)
        g *= w
        dx = scale * (g - tl.sum(g) / numbers - normed * (tl.sum(g * normed) / numbers))
        dx = tl.where(inside, dx, 0.0)
        bias_gradient += tl.sum(dx, axis=0)
        tl.store(result + place, dx, mask=inside)
    program = partial + tl.program_id(0) * 3 * channels + channel
    tl.store(program, bias_gradient, mask=is_channel)
    tl.store(program + channels, weight_gradient, mask=is_channel)
    tl.store(program + 2 * channels, shift_gradient, mask=is_channel)


MOST_ROWS = 64  # of programs for each group in the backward pass: 8 groups then fill an H200 about four times


def _tiles(length: int, channels: int, groups: int) -> dict[str, int]:
    width = channels // groups
    steps, block = triton.next_power_of_2(length), triton.next_power_of_2(width)
    return {"WIDTH": width, "STEPS": steps, "BLOCK": block, "num_warps": 4 if steps * block <= 2048 else 8}


def norm_mish(
    pre: Tensor,
    bias: Tensor,
    norm: nn.GroupNorm,
    film: Tensor | None,
    residual: Tensor | None,
    residual_bias: Tensor | None = None,
) -> Tensor:
    """`film_scale * mish(norm(pre + bias)) + film_shift + residual`, `[B, T, C]`, computed in float32. `pre` and
    `residual` are sums over their first axis."""
    splits, batch, length, channels = pre.shape
    out = torch.empty(batch, length, channels, device=pre.device)
    _norm_mish[(batch, norm.num_groups)](
        pre, bias, norm.weight, norm.bias, pre if film is None else film, pre if residual is None else residual,
        bias if residual_bias is None else residual_bias, out, batch, length, channels,
        0 if film is None else film.stride(0), norm.eps,
        SPLITS=splits, RESIDUALS=0 if residual is None else len(residual), HAS_FILM=film is not None,
        HAS_RESIDUAL_BIAS=residual_bias is not None, **_tiles(length, channels, norm.num_groups),
    )  # fmt: skip
    return out


class _Convolution(Function):
    """A convolution, and with a norm the rest of its layer: all between two products is one kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        film: Tensor | None,
        residual: Tensor | None,
        norm: nn.GroupNorm | None,
        taps: Taps,
        low: torch.dtype,
    ) -> Tensor:
        unfolded, matrix = unfold(x, taps, low), weight.flatten(1).to(low)
        pre = product(unfolded, matrix.t()).view(len(x), -1, len(weight))
        ctx.norm, ctx.taps, ctx.size, ctx.kernel = norm, taps, x.shape[:2], weight.shape
        ctx.save_for_backward(unfolded, matrix, *((pre, bias, norm_weight, norm_bias, film) if norm else ()))
        return pre + bias if norm is None else norm_mish(pre[None], bias, norm, film, _first(residual))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        unfolded, matrix, *normed = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_norm: list[Tensor | None] = [None, None, None]
        if ctx.norm is None:
            result = gradient.flatten(0, 1)
            of_bias = total(result.float())
            result = result.to(matrix.dtype)
        else:
            result, of_bias, *of_norm = _norm_backward(ctx.norm, gradient, normed, matrix.dtype)
        of_weight = product(result.t(), unfolded).view(ctx.kernel) if needs_weight else None
        of_x = None
        if needs_x:
            of_x = fold(product(result, matrix, matrix.dtype), None, ctx.size[0], ctx.size[1], ctx.taps)
        return of_x, of_weight, of_bias, *of_norm, gradient if ctx.needs_input_grad[6] else None, None, None, None


def _first(residual: Tensor | None) -> Tensor | None:
    return None if residual is None else residual[None]


def _norm_backward(
    norm: nn.GroupNorm, gradient: Tensor, saved: Sequence[Any], low: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the product, rows `[B * T, C]` in the precision of products, of bias, norm and film."""
    pre, bias, weight, shift, film = saved
    batch, length, channels = pre.shape
    programs = min(batch, MOST_ROWS)
    result = torch.empty(batch * length, channels, dtype=low, device=pre.device)
    of_film = None if film is None else torch.empty(film.shape, dtype=film.dtype, device=pre.device)
    partial = torch.empty(programs, 3, channels, device=pre.device)
    _norm_mish_backward[(programs, norm.num_groups)](
        pre, bias, weight, shift, pre if film is None else film, gradient, result, pre if of_film is None else of_film,
        partial, batch, length, channels, 0 if film is None else film.stride(0), norm.eps,
        HAS_FILM=film is not None, **_tiles(length, channels, norm.num_groups),
    )  # fmt: skip
    of_bias, of_weight, of_shift = total(partial).unbind()
    return result, of_bias, of_weight, of_shift, of_film


class _TransposedConvolution(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, taps: Taps, low: torch.dtype) -> Tensor:
        rows, matrix = x.flatten(0, 1).to(low), weight.flatten(1).to(low)
        ctx.taps, ctx.size, ctx.kernel = taps, x.shape, weight.shape
        ctx.save_for_backward(rows, matrix)
        return fold(product(rows, matrix), bias, len(x), taps.before(x.shape[1]), taps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, matrix = ctx.saved_tensors
        gradient = gradient.contiguous()
        unfolded = unfold(gradient, ctx.taps, matrix.dtype)
        of_x = product(unfolded, matrix.t()).view(ctx.size) if ctx.needs_input_grad[0] else None
        of_weight = product(rows.t(), unfolded).view(ctx.kernel) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, total(gradient.flatten(0, 1).float()), None, None


# --- the network --------------------------------------------------------------------------------


def forward(unet: Any, plan: Tensor, level: Tensor, features: Tensor) -> Tensor:
    """`ConditionalUNet.forward`."""
    hidden, skips = plan.contiguous(), []
    walk = _Walk(unet, hidden, level, features.flatten(1))
    for depth, blocks in enumerate(unet.down):
        hidden = walk.block(blocks[1], walk.block(blocks[0], hidden))
        skips.append(hidden)
        if depth < len(unet.shorten):
            hidden = walk.convolution(hidden, unet.shorten[depth])
    hidden = walk.block(unet.middle[1], walk.block(unet.middle[0], hidden))
    for blocks, lengthen in zip(unet.up, unet.lengthen, strict=True):
        hidden = torch.cat((hidden, skips.pop()), dim=-1)
        hidden = walk.block(blocks[1], walk.block(blocks[0], hidden))
        hidden = _TransposedConvolution.apply(hidden, lengthen.weight, lengthen.bias, Taps.of(lengthen), walk.low)  # type: ignore[no-untyped-call]
    hidden = walk.layer(hidden, unet.last)
    return F.linear(hidden, unet.output.weight.squeeze(-1), unet.output.bias)


def _few_films(embedding: Any, layers: Sequence[nn.Linear], level: Tensor, features: Tensor) -> Tensor | None:
    """What all blocks make of the condition, `[B, sum of 2 * C]`, for few rows: three kernels in place of many."""
    first, _, second = embedding.layers
    tiles = [tiles_of(each) for each in ([first], [second], layers)]
    if tiles[0] is None or tiles[1] is None or tiles[2] is None:
        return None
    angle = level.unsqueeze(-1) * embedding.frequencies
    waves, batch, size = torch.cat((angle.sin(), angle.cos()), dim=-1), len(level), second.out_features
    hidden = torch.empty(batch, first.out_features, device=level.device)
    condition = torch.empty(batch, size + features.shape[1], device=level.device)
    films = torch.empty(batch, sum(each.out_features for each in layers), device=level.device)
    condition[:, size:] = features
    linears(tiles[0], waves, hidden, has_mish=False)
    linears(tiles[1], hidden, condition, has_mish=True)
    linears(tiles[2], condition, films, has_mish=True)
    return films


class _Walk:
    """The parts of one forward pass, each with its precision and its share of the condition."""

    def __init__(self, unet: Any, plan: Tensor, level: Tensor, features: Tensor) -> None:
        self.low, self.is_tf32 = autocast_dtype(plan.device), is_tf32()
        blocks = [*(each for pair in (*unet.down, unet.middle, *unet.up) for each in pair)]
        layers = [each.film[1] for each in blocks]
        films = _few_films(unet.level, layers, level, features) if self._is_small(plan) else None
        if films is None:
            weight, bias = (torch.cat([getattr(each, name) for each in layers]) for name in ("weight", "bias"))
            films = F.linear(F.mish(torch.cat((unet.level(level), features), dim=-1)), weight, bias)
        shares = films.split([each.out_features for each in layers], dim=1)
        self.film_of = dict(zip(blocks, shares, strict=True))

    def block(self, block: Any, hidden: Tensor) -> Tensor:
        """`FiLMBlock.forward`."""
        first = self.layer(hidden, block.first, film=self.film_of[block])
        if isinstance(block.residual, nn.Identity):
            return self.layer(first, block.second, residual=hidden)
        if not self._is_small(hidden):
            return self.layer(first, block.second, residual=self.convolution(hidden, block.residual))
        parts = self._parts(hidden, block.residual)
        pre, (convolution, norm, _) = self._parts(first, block.second[0]), block.second
        return norm_mish(pre, convolution.bias, norm, None, parts, block.residual.bias)

    def layer(self, x: Tensor, layer: Any, *, film: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """A convolution, its norm and Mish, then film and residual."""
        convolution, norm, _ = layer
        if self._is_small(x):
            return norm_mish(self._parts(x, convolution), convolution.bias, norm, film, _first(residual))
        return _Convolution.apply(  # type: ignore[no-untyped-call, no-any-return]
            x, convolution.weight, convolution.bias, norm.weight, norm.bias, film, residual, norm,
            Taps.of(convolution), self.low,
        )  # fmt: skip

    def convolution(self, x: Tensor, layer: Any) -> Tensor:
        """Without a norm."""
        nothing = (None, None, None, None, None)
        return _Convolution.apply(x, layer.weight, layer.bias, *nothing, Taps.of(layer), self.low)  # type: ignore[no-untyped-call, no-any-return]

    def _is_small(self, x: Tensor) -> bool:
        return not torch.is_grad_enabled() and few_rows(x)

    def _parts(self, x: Tensor, layer: Any) -> Tensor:
        """A convolution without its bias, in parts `[parts, B, T, C]` that are yet to be added up."""
        taps = Taps.of(layer)
        return share_products(x, layer.weight, taps, taps.after(x.shape[1]), self.low, self.is_tf32)


# --- the sampler --------------------------------------------------------------------------------


@triton.jit
def _ddim_step(noisy, noise, kept, kept_after, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x, e = tl.load(noisy + place, mask=inside, other=0.0), tl.load(noise + place, mask=inside, other=0.0)
    now, then = tl.load(kept), tl.load(kept_after)
    clean = (x - tl.sqrt(1.0 - now) * e) / tl.sqrt(now)
    clean = tl.where(clean > 1.0, 1.0, tl.where(clean < -1.0, -1.0, clean))  # as torch's clamp, NaN stays NaN
    tl.store(out + place, tl.sqrt(then) * clean + tl.sqrt(1.0 - then) * e, mask=inside)


def ddim_step(sampler: Any, schedule: Any, noisy: Tensor, noise: Tensor, level: int, after: int) -> Tensor:
    """`DDIMSampler.step`."""
    noisy, noise = noisy.contiguous(), noise.contiguous()
    out = torch.empty_like(noisy)
    kept, count = schedule.kept, noisy.numel()
    grid = (triton.cdiv(count, BLOCK),)
    _ddim_step[grid](noisy, noise, kept[level + 1], kept[after + 1], out, count, BLOCK=BLOCK, num_warps=4)
    return out
