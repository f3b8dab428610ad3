"""What stands between the convolutions of a world model, as one autograd node each.

     pool_norm_silu      [N, 2h, 2w, C]     -> [N, h, w, C]      2x2 maximum, bias, RMS norm over the channels, SiLU
     spread_norm_silu    [N, h, w, 2, 2, C] -> [N, 2h, 2w, C]    four phases to their places, bias, RMS norm, SiLU
     image_error         [N, h, w, 2, 2, C] -> [N]               the last phases as an image, against the one seen

and the convolution that makes those phases:

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
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rl_lab.kernels.plain import image_kernels_for

CHANNELS_AT_ONCE = 8  # 16 bytes of bfloat16: what a GPU's matrix units load at once


def pool_norm_silu(image: Tensor, bias: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """`[N, 2h, 2w, C]` to `[N, h, w, C]`."""
    return _Stage.apply(image.contiguous(), bias, weight, epsilon, "pool")  # type: ignore[no-untyped-call]


def spread_norm_silu(phases: Tensor, bias: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """`[N, h, w, 2, 2, C]` to `[N, 2h, 2w, C]`."""
    return _Stage.apply(phases.contiguous(), bias, weight, epsilon, "spread")  # type: ignore[no-untyped-call]


class _Stage(Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, bias: Tensor, weight: Tensor, epsilon: float, kind: str) -> Tensor:
        count, height, width = image.shape[:3]
        size = (height // 2, width // 2) if kind == "pool" else (2 * height, 2 * width)
        out = torch.empty(count, *size, image.shape[-1], dtype=image.dtype, device=image.device)
        kernels = image_kernels_for(image.device)
        forward = kernels.pool_norm_silu if kind == "pool" else kernels.spread_norm_silu
        forward(image, bias, weight, out, epsilon=epsilon)
        ctx.save_for_backward(image, bias, weight)
        ctx.epsilon, ctx.kind = epsilon, kind
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        image, bias, weight = ctx.saved_tensors
        kernels = image_kernels_for(image.device)
        backward = kernels.pool_norm_silu_backward if ctx.kind == "pool" else kernels.spread_norm_silu_backward
        slope = torch.empty_like(image)
        bias_slope, weight_slope = backward(image, bias, weight, gradient.contiguous(), slope, epsilon=ctx.epsilon)
        return slope, bias_slope, weight_slope, None, None


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


def doubling_convolution(image: Tensor, weight: Tensor) -> Tensor:
    """`[N, h, w, I]` to the four phases `[N, h, w, 2, 2, O]` of the doubled, convolved image, without a bias."""
    return _phases_of(filled_phases(image, weight), len(weight))


def filled_phases(image: Tensor, weight: Tensor) -> Tensor:
    """The same as `[N, h, w, 4 * O]`; on a GPU with zeros up to a multiple of eight."""
    kernel = _filled_up(phase_weights(weight), axis=0).contiguous(memory_format=torch.channels_last)
    phases = F.conv2d(image.permute(0, 3, 1, 2), kernel, padding=kernel.shape[-1] // 2)
    return phases.permute(0, 2, 3, 1)


def _phases_of(filled: Tensor, channels: int) -> Tensor:
    # A slice of everything would still cost a copy on the way back.
    own = filled if filled.shape[-1] == 4 * channels else filled[..., : 4 * channels]
    return own.unflatten(-1, (2, 2, -1))


def draw_image(filled: Tensor, bias: Tensor) -> Tensor:
    """What `filled_phases` gave, each phase at its places, and a bias: `[N, 2h, 2w, O]`, before the sigmoid."""
    return spread(_phases_of(filled, len(bias))) + bias


def image_error(filled: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """The squared distances `[N]` between the sigmoid of the image drawn so and uint8 images `[N, 2h, 2w, O]` on the
    scale 0..1, summed over everything."""
    assert target.shape == (len(filled), 2 * filled.shape[1], 2 * filled.shape[2], len(bias)), target.shape
    if filled.is_cuda:
        return _ImageError.apply(filled.contiguous(), bias, target.contiguous())  # type: ignore[no-untyped-call]
    return distance_to_image(draw_image(filled, bias), target)


def distance_to_image(drawn: Tensor, target: Tensor) -> Tensor:
    """`[N]` from images before the sigmoid and uint8 images, both `[N, height, width, C]`."""
    error = drawn.float().sigmoid() - target.to(torch.float32) * (1.0 / 255.0)
    return error.square().sum(dim=(-3, -2, -1))


class _ImageError(Function):
    """On GPUs: what was drawn is read once there and once back, where it lies."""

    @staticmethod
    def forward(ctx: Any, filled: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        from rl_lab.kernels.triton import images as image_kernels

        ctx.save_for_backward(filled, bias, target)
        return image_kernels.image_error(filled, bias, target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from rl_lab.kernels.triton import images as image_kernels

        filled, bias, target = ctx.saved_tensors
        return *image_kernels.image_error_backward(filled, bias, target, gradient), None


def convolution_of_images(image: Tensor, weight: Tensor) -> Tensor:
    """uint8 images `[N, height, width, I]`, centred and scaled to -0.5..0.5, convolved to `[N, height, width, O]`.

    At the border zeros are added: middle grey. A GPU's matrix units want channels in eights: three are filled up
    with others that the kernel ignores.
    """
    kernel = _filled_up(weight, axis=1)
    if image.is_cuda:
        from rl_lab.kernels.triton import images as image_kernels

        low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32
        pixels = image_kernels.pixels(image, kernel.shape[1], low)
    else:
        pixels = image.to(torch.float32) * (1.0 / 255.0) - 0.5
    return F.conv2d(pixels.permute(0, 3, 1, 2), kernel, padding=weight.shape[-1] // 2).permute(0, 2, 3, 1)


def _filled_up(kernel: Tensor, *, axis: int) -> Tensor:
    """On a GPU, zeros up to a multiple of eight channels: the rest run on slow kernels made for any number."""
    missing = -kernel.shape[axis] % CHANNELS_AT_ONCE if kernel.is_cuda else 0
    return F.pad(kernel, (0, 0, 0, 0, *((0, 0) if axis == 0 else ()), 0, missing)) if missing else kernel


def spread(phases: Tensor) -> Tensor:
    """`[N, h, w, 2, 2, C]` to `[N, 2h, 2w, C]`."""
    return phases.permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)
