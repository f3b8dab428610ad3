"""What stands before, between and after the convolutions of a world model, as single GPU kernels; the numbers are those
of `image_stages.py`. Images are most of what an update reads and writes, so each is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_lab.kernels.triton.elementwise import MOST_PROGRAMS, total

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
    image, bias, weight, gradient, slope, partial, rows, height, width, epsilon,
    IS_POOL: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    is_channel = column < WIDTH
    b = tl.load(bias + column, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    w = tl.load(weight + column, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    bias_slope = tl.zeros([BLOCK], tl.float32)
    weight_slope = tl.zeros([BLOCK], tl.float32)
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
        weight_slope += tl.sum(g * normed, axis=0)
        g = g * w
        dx = scale * (g - normed * (tl.sum(g * normed, axis=1) / WIDTH)[:, None])
        bias_slope += tl.sum(tl.where(inside, dx, 0.0), axis=0)
        if IS_POOL:
            is0 = x0 == largest
            is1 = (x1 == largest) & ~is0
            is2 = (x2 == largest) & ~is0 & ~is1
            is3 = ~is0 & ~is1 & ~is2
            tl.store(slope + offset, tl.where(is0, dx, 0.0), mask=inside)
            tl.store(slope + offset + WIDTH, tl.where(is1, dx, 0.0), mask=inside)
            tl.store(slope + below, tl.where(is2, dx, 0.0), mask=inside)
            tl.store(slope + below + WIDTH, tl.where(is3, dx, 0.0), mask=inside)
        else:
            tl.store(slope + offset, dx, mask=inside)
    program = partial + tl.program_id(0) * 2 * WIDTH + column
    tl.store(program, bias_slope, mask=is_channel)
    tl.store(program + WIDTH, weight_slope, mask=is_channel)


def pool_norm_silu(image: Tensor, bias: Tensor, weight: Tensor, out: Tensor, *, epsilon: float) -> None:
    """See `plain_kernels.pool_norm_silu`."""
    count, height, width, _ = out.shape
    _run_stage(image, bias, weight, out, count * height * width, height, width, epsilon, is_pool=True)


def spread_norm_silu(phases: Tensor, bias: Tensor, weight: Tensor, out: Tensor, *, epsilon: float) -> None:
    """See `plain_kernels.spread_norm_silu`."""
    count, height, width = phases.shape[:3]
    _run_stage(phases, bias, weight, out, count * height * width * 4, height, width, epsilon, is_pool=False)


def _run_stage(
    image: Tensor,
    bias: Tensor,
    weight: Tensor,
    out: Tensor,
    rows: int,
    height: int,
    width: int,
    epsilon: float,
    *,
    is_pool: bool,
) -> None:
    channels = image.shape[-1]
    tile = _tile_rows(channels)
    _stage[(triton.cdiv(rows, tile),)](
        image, bias, weight, out, rows, height, width, epsilon,
        IS_POOL=is_pool, WIDTH=channels, ROWS=tile, BLOCK=triton.next_power_of_2(channels), num_warps=4,
    )  # fmt: skip


def pool_norm_silu_backward(
    image: Tensor, bias: Tensor, weight: Tensor, gradient: Tensor, slope: Tensor, *, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `plain_kernels.pool_norm_silu_backward`."""
    count, height, width, _ = gradient.shape
    rows = count * height * width
    return _run_stage_backward(image, bias, weight, gradient, slope, rows, height, width, epsilon, is_pool=True)


def spread_norm_silu_backward(
    phases: Tensor, bias: Tensor, weight: Tensor, gradient: Tensor, slope: Tensor, *, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `plain_kernels.spread_norm_silu_backward`."""
    count, height, width = phases.shape[:3]
    rows = count * height * width * 4
    return _run_stage_backward(phases, bias, weight, gradient, slope, rows, height, width, epsilon, is_pool=False)


def _run_stage_backward(
    image: Tensor,
    bias: Tensor,
    weight: Tensor,
    gradient: Tensor,
    slope: Tensor,
    rows: int,
    height: int,
    width: int,
    epsilon: float,
    *,
    is_pool: bool,
) -> tuple[Tensor, Tensor]:
    channels = image.shape[-1]
    tile = _tile_rows(channels)
    programs = min(triton.cdiv(rows, tile), 4 * MOST_PROGRAMS)
    partial = image.new_empty((programs, 2, channels), dtype=torch.float32)
    _stage_backward[(programs,)](
        image, bias, weight, gradient, slope, partial, rows, height, width, epsilon,
        IS_POOL=is_pool, WIDTH=channels, ROWS=tile, BLOCK=triton.next_power_of_2(channels), num_warps=4,
    )  # fmt: skip
    bias_slope, weight_slope = total(partial).unbind()
    return bias_slope, weight_slope


def _tile_rows(channels: int) -> int:
    """Rows that one program holds: about a thousand numbers, eight per thread."""
    return max(1, 1024 // triton.next_power_of_2(channels))


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
    phases, bias, target, gradient, slope, partial, size, width, pixel_step,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image_id = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    b = tl.load(bias + column % CHANNELS, mask=column < 4 * CHANNELS, other=0.0)[None, :]
    g = 2.0 * tl.load(gradient + image_id)
    bias_slope = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, PIXELS):
        pixel, column, is_drawn, place = _places(image_id, start, size, width, CHANNELS, PIXELS, BLOCK)
        row = (image_id * size + pixel)[:, None] * pixel_step
        x = tl.load(phases + row + column[None, :], mask=is_drawn, other=0.0).to(tl.float32) + b
        t = tl.load(target + place, mask=is_drawn, other=0).to(tl.float32) * (1.0 / 255.0)
        drawn = tl.sigmoid(x)
        dx = tl.where(is_drawn, g * (drawn - t) * drawn * (1.0 - drawn), 0.0)
        bias_slope += tl.sum(dx, axis=0)
        is_here = (pixel < size)[:, None] & (column < pixel_step)[None, :]  # what was filled up gets zeros
        tl.store(slope + row + column[None, :], dx, mask=is_here)
    tl.store(partial + image_id * 4 * CHANNELS + column, bias_slope, mask=column < 4 * CHANNELS)


def image_error(phases: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """See `image_stages.image_error`: `[N]`."""
    errors = torch.empty(len(phases), device=phases.device)
    _image_error[(len(phases),)](phases, bias, target, errors, *_sizes(phases), **_tiles(phases, bias))
    return errors


def image_error_backward(phases: Tensor, bias: Tensor, target: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of phases and bias from that of the errors `[N]`."""
    slope = torch.empty_like(phases)
    partial = torch.empty(len(phases), 4 * len(bias), device=phases.device)
    told = (phases, bias, target, gradient.contiguous(), slope, partial)
    _image_error_backward[(len(phases),)](*told, *_sizes(phases), **_tiles(phases, bias))
    return slope, total(partial).view(4, -1).sum(dim=0)


def _sizes(phases: Tensor) -> tuple[int, int, int]:
    """Pixels of an image, how many of them in a line, and numbers per pixel."""
    _, height, width, step = phases.shape
    return height * width, width, step


def _tiles(phases: Tensor, bias: Tensor) -> dict[str, int]:
    block = triton.next_power_of_2(phases.shape[-1])
    return {"CHANNELS": len(bias), "PIXELS": max(1, 1024 // block), "BLOCK": block}
