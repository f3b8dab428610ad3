"""The image networks of "World Models" (Ha and Schmidhuber 2018), which PlaNet and Dreamer V1 and V2 took over.

     encoder    64 x 64 -> 31 -> 14 -> 6 -> 2       four 4x4 convolutions of stride 2
     decoder    1 -> 5 -> 13 -> 30 -> 64 x 64       a dense layer, then transposed ones of 5x5, 5x5, 6x6 and 6x6

Channels grow by `multipliers`, 1, 2, 4 and 8 times `depth` in the papers, and shrink likewise; the dense layer makes
four times the largest (google-research/planet, conv_ha.py; danijar/dreamer and danijar/dreamerv2 with other depths).
What is drawn is the mean of a normal around pixels on the scale -0.5..0.5, not clamped to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from rl_lab.components.networks.layers import ACTIVATIONS, choose
from rl_lab.components.world_model.layers import dense, make_norm, truncated_normal_
from rl_lab.types import ConfigError

SIDE = 64  # pixels: the kernels below fit no other size
KERNELS_DOWN = (4, 4, 4, 4)
KERNELS_UP = (5, 5, 6, 6)
SMALLEST = 2  # pixels left on each side


class StridedCNN(nn.Module):
    """Convolutions that step two pixels at a time, each with a norm and an activation."""

    def __init__(
        self, image_shape: Sequence[int], *, depth: int, multipliers: Sequence[int], activation: str, norm: str
    ) -> None:
        super().__init__()
        depths = _depths(image_shape, depth=depth, multipliers=multipliers)
        pairs = zip(pairwise([image_shape[2], *depths]), KERNELS_DOWN, strict=True)
        self.convolutions = nn.ModuleList(
            _started(nn.Conv2d(*pair, kernel, stride=2), places=kernel * kernel) for pair, kernel in pairs
        )
        self.norms = nn.ModuleList(make_norm(norm, size) for size in depths)
        self.activation = choose(ACTIVATIONS, activation, place="encoder activation")
        self.output_size = SMALLEST * SMALLEST * depths[-1]

    def forward(self, image: Tensor) -> Tensor:
        """uint8 images `[N, 64, 64, C]` to `[N, output_size]`."""
        pixels = image.to(torch.float32) * (1.0 / 255.0) - 0.5
        for layer, norm in zip(self.convolutions, self.norms, strict=True):
            pixels = self.activation(norm(layer(pixels.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)))
        return pixels.flatten(1)


class TransposedCNN(nn.Module):
    """Features to images: one dense layer, then convolutions that write two pixels further at each step."""

    def __init__(
        self,
        image_shape: Sequence[int],
        *,
        input_size: int,
        depth: int,
        multipliers: Sequence[int],
        activation: str,
        norm: str,
    ) -> None:
        super().__init__()
        *smaller, largest = _depths(image_shape, depth=depth, multipliers=multipliers)
        self.first = dense(input_size, 4 * largest)
        channels = [4 * largest, *reversed(smaller), image_shape[2]]
        # A pixel is written by a quarter of the kernel's places, of a first image of one pixel by one.
        written = [kernel * kernel / 4 if index else 1.0 for index, kernel in enumerate(KERNELS_UP)]
        pairs = zip(pairwise(channels), KERNELS_UP, written, strict=True)
        self.convolutions = nn.ModuleList(
            _started(nn.ConvTranspose2d(*pair, kernel, stride=2), places=places) for pair, kernel, places in pairs
        )
        self.norms = nn.ModuleList(make_norm(norm, size) for size in channels[1:-1])
        self.activation = choose(ACTIVATIONS, activation, place="decoder activation")

    def forward(self, features: Tensor) -> Tensor:
        """`[N, F]` to pixels `[N, 64, 64, C]` around 0."""
        image = self.first(features)[:, None, None]
        for index, layer in enumerate(self.convolutions):
            image = layer(image.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            if index < len(self.norms):
                image = self.activation(self.norms[index](image))
        return image

    def draw(self, features: Tensor) -> Tensor:
        """The same on the scale 0..1."""
        return (self(features).float() + 0.5).clamp(0.0, 1.0)

    def error(self, features: Tensor, target: Tensor) -> Tensor:
        """Squared distances `[N]` of the images drawn to uint8 images `[N, 64, 64, C]`, on the scale 0..1."""
        error = self(features).float() - (target.to(torch.float32) * (1.0 / 255.0) - 0.5)
        return error.square().sum(dim=(-3, -2, -1))


def _depths(image_shape: Sequence[int], *, depth: int, multipliers: Sequence[int]) -> list[int]:
    if tuple(image_shape[:2]) != (SIDE, SIDE):
        raise ConfigError(
            f"images: strided reads {SIDE}x{SIDE} pixels alone, but these have {image_shape[0]}x{image_shape[1]}. "
            "Resize them with a wrapper, or write `images: halving` for encoder and decoder."
        )
    if len(multipliers) != len(KERNELS_DOWN):
        raise ConfigError(
            f"images: strided has four layers, but multipliers is {list(multipliers)}: write four numbers."
        )
    return [depth * multiplier for multiplier in multipliers]


def _started(layer: nn.Conv2d | nn.ConvTranspose2d, *, places: float) -> nn.Module:
    """Truncated-normal weights for outputs that see so many places of the kernel, no bias, channels last in memory."""
    truncated_normal_(layer.weight, fan_in=layer.in_channels * places)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
