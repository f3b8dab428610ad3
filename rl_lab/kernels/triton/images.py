"""`HalvingCNN.forward` and `DoublingCNN.error` with one kernel each before, between and after the convolutions.

Images are most of what an update reads and writes: here each is read once and written once. And the decoder convolves
the small images instead of the doubled ones:

     "double the image by repeating pixels, then convolve 5x5" reads each pixel up to six times. The pixels at even and
     odd places of the result each see only 3x3 pixels of the small image, with weights that are sums of the 5x5 ones:

         place 0    taps 0 1 | 2 3 | 4     of the row above, this row, the row below
         place 1    taps 0 | 1 2 | 3 4

     so four 3x3 convolutions of the small image, one per place, give the same numbers for 9/25 of the work.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rl_lab.kernels.triton.elementwise import MOST_PROGRAMS, NORM_EPSILON, NormSilu, autocast_dtype, total

CHANNELS_AT_ONCE = 8  # 16 bytes of bfloat16: what a GPU's matrix units load at once

# --- before -------------------------------------------------------------------------------------


@triton.jit
def _pixels(
    image, out, pixels, CHANNELS: tl.constexpr, FILLED: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr
):
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, BLOCK)
    inside = (pixel < pixels)[:, None] & (channel < CHANNELS)[None, :]
    x = tl.load(image + pixel[:, None] * CHANNELS + channel[None, :], mask=inside, other=0).to(tl.float32)
    x = tl.where(inside, x * (1.0 / 255.0) - 0.5, 0.0)
    is_here = (pixel < pixels)[:, None] & (channel < FILLED)[None, :]
    tl.store(out + pixel[:, None] * FILLED + channel[None, :], x, mask=is_here)


def pixels(image: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """uint8 images `[..., C]`, centred and scaled to -0.5..0.5, with channels of zeros up to `channels`."""
    out = torch.empty(*image.shape[:-1], channels, dtype=dtype, device=image.device)
    count = out.numel() // channels
    sizes = {"CHANNELS": image.shape[-1], "FILLED": channels, "BLOCK": triton.next_power_of_2(channels), "PIXELS": 512}
    _pixels[(triton.cdiv(count, 512),)](image.contiguous(), out, count, **sizes)
    return out


# --- between ------------------------------------------------------------------------------------


@triton.jit
def _stage(
    image, bias, weight, out, rows, height, width, epsilon,
    IS_POOL: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    if IS_POOL:  # height and width are those of the result
        corner = ((row // (height * width) * 2 * height + row // width % height * 2) * width + row % width) * 2
        place = image + corner[:, None] * WIDTH + column[None, :]
        x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        x = tl.maximum(x, tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32))
        place += 2 * width * WIDTH
        x = tl.maximum(x, tl.load(place, mask=inside, other=0.0).to(tl.float32))
        x = tl.maximum(x, tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32))
        target = row
    else:  # height and width are those of the phases
        x = tl.load(image + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0).to(tl.float32)
        pixel = row // 4
        target = (pixel // width * 2 + row // 2 % 2) * (2 * width) + pixel % width * 2 + row % 2
    x += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + epsilon)
    y = x * scale[:, None] * tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(out + target[:, None] * WIDTH + column[None, :], y * tl.sigmoid(y), mask=inside)


@triton.jit
def _stage_backward(
    image, bias, weight, gradient, result, partial, rows, height, width, epsilon,
    IS_POOL: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    is_channel = column < WIDTH
    b = tl.load(bias + column, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    w = tl.load(weight + column, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    bias_gradient = tl.zeros([BLOCK], tl.float32)
    weight_gradient = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & is_channel[None, :]
        if IS_POOL:
            corner = ((row // (height * width) * 2 * height + row // width % height * 2) * width + row % width) * 2
            offset = corner[:, None] * WIDTH + column[None, :]
            below = offset + 2 * width * WIDTH
            x0 = tl.load(image + offset, mask=inside, other=0.0).to(tl.float32)
            x1 = tl.load(image + offset + WIDTH, mask=inside, other=0.0).to(tl.float32)
            x2 = tl.load(image + below, mask=inside, other=0.0).to(tl.float32)
            x3 = tl.load(image + below + WIDTH, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
            x = largest + b
            source = row
        else:
            offset = row[:, None] * WIDTH + column[None, :]
            x = tl.load(image + offset, mask=inside, other=0.0).to(tl.float32) + b
            pixel = row // 4
            source = (pixel // width * 2 + row // 2 % 2) * (2 * width) + pixel % width * 2 + row % 2
        g = tl.load(gradient + source[:, None] * WIDTH + column[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x, 0.0)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + epsilon)[:, None]
        normed = x * scale
        y = normed * w
        sigmoid = tl.sigmoid(y)
        g = g * sigmoid * (1.0 + y * (1.0 - sigmoid))
        weight_gradient += tl.sum(g * normed, axis=0)
        g = g * w
        dx = scale * (g - normed * (tl.sum(g * normed, axis=1) / WIDTH)[:, None])
        bias_gradient += tl.sum(tl.where(inside, dx, 0.0), axis=0)
        if IS_POOL:
            is0 = x0 == largest
            is1 = (x1 == largest) & ~is0
            is2 = (x2 == largest) & ~is0 & ~is1
            is3 = ~is0 & ~is1 & ~is2
            tl.store(result + offset, tl.where(is0, dx, 0.0), mask=inside)
            tl.store(result + offset + WIDTH, tl.where(is1, dx, 0.0), mask=inside)
            tl.store(result + below, tl.where(is2, dx, 0.0), mask=inside)
            tl.store(result + below + WIDTH, tl.where(is3, dx, 0.0), mask=inside)
        else:
            tl.store(result + offset, dx, mask=inside)
    program = partial + tl.program_id(0) * 2 * WIDTH + column
    tl.store(program, bias_gradient, mask=is_channel)
    tl.store(program + WIDTH, weight_gradient, mask=is_channel)


class _Stage(Function):
    """What stands between two convolutions, computed in float32:

    pool      [N, 2h, 2w, C]     -> [N, h, w, C]      2x2 maximum, bias, RMS norm over the channels, SiLU
    spread    [N, h, w, 2, 2, C] -> [N, 2h, 2w, C]    four phases to their places, bias, RMS norm, SiLU
    """

    @staticmethod
    def forward(ctx: Any, image: Tensor, bias: Tensor, weight: Tensor, is_pool: bool) -> Tensor:
        count, height, width = image.shape[:3]
        size = (height // 2, width // 2) if is_pool else (2 * height, 2 * width)
        out = image.new_empty(count, *size, image.shape[-1])
        rows, place, tiles = _stage_sizes(image, is_pool)
        grid = (triton.cdiv(rows, tiles["ROWS"]),)
        _stage[grid](image, bias, weight, out, rows, *place, NORM_EPSILON, **tiles)
        ctx.save_for_backward(image, bias, weight)
        ctx.is_pool = is_pool
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        image, bias, weight = ctx.saved_tensors
        rows, place, tiles = _stage_sizes(image, ctx.is_pool)
        programs = min(triton.cdiv(rows, tiles["ROWS"]), 4 * MOST_PROGRAMS)
        result = torch.empty_like(image)
        partial = image.new_empty((programs, 2, image.shape[-1]), dtype=torch.float32)
        _stage_backward[(programs,)](
            image, bias, weight, gradient.contiguous(), result, partial, rows, *place, NORM_EPSILON, **tiles
        )
        return result, *total(partial).unbind(), None


def _stage_sizes(image: Tensor, is_pool: bool) -> tuple[int, tuple[int, int], dict[str, Any]]:
    """Rows of channels that are normed, height and width as the kernels count them, and their constants."""
    count, height, width = image.shape[:3]
    height, width = (height // 2, width // 2) if is_pool else (height, width)
    channels = image.shape[-1]
    block = triton.next_power_of_2(channels)
    tile = max(1, 1024 // block)  # rows that one program holds: about a thousand numbers, eight per thread
    constants = {"IS_POOL": is_pool, "WIDTH": channels, "ROWS": tile, "BLOCK": block, "num_warps": 4}
    return count * height * width * (1 if is_pool else 4), (height, width), constants


# --- after --------------------------------------------------------------------------------------


@triton.jit
def _places(image_id, start, size, width, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr):
    """Which numbers of an image's phases a program holds, which of them count, and where their pixels lie in it."""
    pixel, column = start + tl.arange(0, PIXELS), tl.arange(0, BLOCK)
    is_drawn = (pixel < size)[:, None] & (column < 4 * CHANNELS)[None, :]
    phase, channel = column // CHANNELS, column % CHANNELS
    line = (pixel // width * 2)[:, None] + (phase // 2)[None, :]
    place = (line * (2 * width) + (pixel % width * 2)[:, None] + (phase % 2)[None, :]) * CHANNELS + channel[None, :]
    return pixel, column, is_drawn, image_id * size * 4 * CHANNELS + place


@triton.jit
def _image_error(
    phases, bias, target, errors, size, width, pixel_step,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image_id = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    b = tl.load(bias + column % CHANNELS, mask=column < 4 * CHANNELS, other=0.0)[None, :]
    found = tl.zeros([PIXELS, BLOCK], tl.float32)
    for start in range(0, size, PIXELS):
        pixel, column, is_drawn, place = _places(image_id, start, size, width, CHANNELS, PIXELS, BLOCK)
        row = (image_id * size + pixel)[:, None] * pixel_step
        x = tl.load(phases + row + column[None, :], mask=is_drawn, other=0.0).to(tl.float32) + b
        t = tl.load(target + place, mask=is_drawn, other=0).to(tl.float32) * (1.0 / 255.0)
        distance = tl.where(is_drawn, tl.sigmoid(x) - t, 0.0)
        found += distance * distance
    tl.store(errors + image_id, tl.sum(found))


@triton.jit
def _image_error_backward(
    phases, bias, target, gradient, result, partial, size, width, pixel_step,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image_id = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    b = tl.load(bias + column % CHANNELS, mask=column < 4 * CHANNELS, other=0.0)[None, :]
    g = 2.0 * tl.load(gradient + image_id)
    bias_gradient = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, PIXELS):
        pixel, column, is_drawn, place = _places(image_id, start, size, width, CHANNELS, PIXELS, BLOCK)
        row = (image_id * size + pixel)[:, None] * pixel_step
        x = tl.load(phases + row + column[None, :], mask=is_drawn, other=0.0).to(tl.float32) + b
        t = tl.load(target + place, mask=is_drawn, other=0).to(tl.float32) * (1.0 / 255.0)
        drawn = tl.sigmoid(x)
        dx = tl.where(is_drawn, g * (drawn - t) * drawn * (1.0 - drawn), 0.0)
        bias_gradient += tl.sum(dx, axis=0)
        is_here = (pixel < size)[:, None] & (column < pixel_step)[None, :]  # what was filled up gets zeros
        tl.store(result + row + column[None, :], dx, mask=is_here)
    tl.store(partial + image_id * 4 * CHANNELS + column, bias_gradient, mask=column < 4 * CHANNELS)


class _ImageError(Function):
    """Squared errors `[N]` between the sigmoid of the last phases `[N, h, w, 4 * C or more]`, each at its places and
    with its bias, and uint8 images `[N, 2h, 2w, C]` on the scale 0..1."""

    @staticmethod
    def forward(ctx: Any, phases: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        assert target.shape == (len(phases), 2 * phases.shape[1], 2 * phases.shape[2], len(bias)), target.shape
        errors = torch.empty(len(phases), device=phases.device)
        _image_error[(len(phases),)](phases, bias, target, errors, *_sizes(phases), **_tiles(phases, bias))
        ctx.save_for_backward(phases, bias, target)
        return errors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        phases, bias, target = ctx.saved_tensors
        result = torch.empty_like(phases)
        partial = torch.empty(len(phases), 4 * len(bias), device=phases.device)
        args = (phases, bias, target, gradient.contiguous(), result, partial)
        _image_error_backward[(len(phases),)](*args, *_sizes(phases), **_tiles(phases, bias))
        return result, total(partial).view(4, -1).sum(dim=0), None


def _sizes(phases: Tensor) -> tuple[int, int, int]:
    """Pixels of an image, how many of them in a line, and numbers per pixel."""
    _, height, width, step = phases.shape
    return height * width, width, step


def _tiles(phases: Tensor, bias: Tensor) -> dict[str, int]:
    block = triton.next_power_of_2(phases.shape[-1])
    return {"CHANNELS": len(bias), "PIXELS": max(1, 1024 // block), "BLOCK": block}


# --- the two networks ---------------------------------------------------------------------------


def encode(network: Any, image: Tensor) -> Tensor:
    """`HalvingCNN.forward`. Images have too few channels for a GPU's matrix units: zeros fill them up."""
    for index, (layer, norm) in enumerate(zip(network.convolutions, network.norms, strict=True)):
        weight = layer.weight
        if index == 0:
            weight = _filled_up(weight, axis=1)
            low = autocast_dtype(image.device)
            image = pixels(image, weight.shape[1], low)
        image = F.conv2d(image.permute(0, 3, 1, 2), weight, padding=layer.padding).permute(0, 2, 3, 1)
        image = _Stage.apply(image.contiguous(), layer.bias, norm.weight, True)  # type: ignore[no-untyped-call]
    return image.flatten(1)


def error(network: Any, features: Tensor, target: Tensor) -> Tensor:
    """`DoublingCNN.error`."""
    deter, stoch = features.split((network.deter, features.shape[-1] - network.deter), dim=-1)
    drawn = network.from_deter(deter).view(len(features), network.blocks, *network.side, -1)
    drawn = drawn.permute(0, 2, 3, 1, 4).flatten(3)
    drawn = drawn + network.stoch_output(network.from_stoch(stoch)).view(drawn.shape)
    image = NormSilu.apply(drawn, None, network.first_norm.weight, NORM_EPSILON)  # type: ignore[no-untyped-call]
    for layer, norm in zip(network.convolutions, network.norms, strict=True):
        channels = len(layer.weight)
        phases = _phases(image, layer.weight)
        # A slice of everything would still cost a copy in the backward pass.
        phases = phases if phases.shape[-1] == 4 * channels else phases[..., : 4 * channels]
        phases = phases.unflatten(-1, (2, 2, -1)).contiguous()
        image = _Stage.apply(phases, layer.bias, norm.weight, False)  # type: ignore[no-untyped-call]
    phases = _phases(image, network.output.weight).contiguous()
    return _ImageError.apply(phases, network.output.bias, target.contiguous())  # type: ignore[no-untyped-call]


def _phases(image: Tensor, weight: Tensor) -> Tensor:
    """`[N, h, w, I]` to the four phases `[N, h, w, 4 * O]` of the doubled, convolved image, and zeros up to a multiple
    of eight; without a bias."""
    kernel = _filled_up(phase_weights(weight), axis=0).contiguous(memory_format=torch.channels_last)
    phases = F.conv2d(image.permute(0, 3, 1, 2), kernel, padding=kernel.shape[-1] // 2)
    return phases.permute(0, 2, 3, 1)


def phase_weights(weight: Tensor) -> Tensor:
    """A kernel `[O, I, K, K]` for doubled images (K odd) as one `[4 * O, I, k, k]` for the small ones."""
    places = _rows_of_taps(weight.shape[-1], weight.device).to(weight.dtype)
    return torch.einsum("apk,bql,oikl->aboipq", places, places, weight).flatten(0, 2)


@cache
def _rows_of_taps(taps: int, device: torch.device) -> Tensor:
    """`[2, k, taps]`: for an even and an odd place, which row of the small image each tap falls on."""
    reach = taps // 2
    low = -((reach + 1) // 2)  # the first small row that an even place sees
    places = torch.zeros(2, 2 * -low + 1, taps)
    for place in (0, 1):
        for tap in range(taps):
            places[place, (place + tap - reach) // 2 - low, tap] = 1.0
    return places.to(device)


def _filled_up(kernel: Tensor, *, axis: int) -> Tensor:
    """Zeros up to a multiple of eight channels: other numbers run on slow kernels made for any."""
    missing = -kernel.shape[axis] % CHANNELS_AT_ONCE
    return F.pad(kernel, (0, 0, 0, 0, *((0, 0) if axis == 0 else ()), 0, missing)) if missing else kernel
