"""Convolutional networks for images: Nature's, IMPALA's, Dreamer's and a small one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.networks.mlp import HIDDEN_GAIN, choose, linear, orthogonal_
from rl_lab.types import ConfigError


class NatureCNN(nn.Module):
    """The network of "Human-level control through deep reinforcement learning" (2015): 84x84 frames, fast."""

    minimum_size = 36  # pixels: 36 -> 8 -> 3 -> 1 after its three kernels

    def __init__(self, *, image_shape: Sequence[int], image_features: int = 256) -> None:
        super().__init__()
        height, width, channels = image_shape
        if min(height, width) < self.minimum_size:
            raise ConfigError(
                f"image_network 'nature' needs images of at least {self.minimum_size}x{self.minimum_size} pixels; "
                f"this one is {height}x{width}. Write image_network: small."
            )
        self.convolutions = nn.Sequential(
            _convolution(channels, 32, kernel=8, stride=4),
            nn.ReLU(inplace=True),
            _convolution(32, 64, kernel=4, stride=2),
            nn.ReLU(inplace=True),
            _convolution(64, 64, kernel=3, stride=1),
            nn.ReLU(inplace=True),
        )
        self.projection = linear(_flat_size(self.convolutions, image_shape), image_features)
        self.output_size = image_features

    def forward(self, image: Tensor) -> Tensor:
        """Scaled images `[N, C, height, width]` to `[N, output_size]`."""
        return torch.relu(self.projection(self.convolutions(image).flatten(1)))


class SmallCNN(NatureCNN):
    """Three 3x3 convolutions, two of them halving: grid worlds and images below 36 pixels."""

    def __init__(self, *, image_shape: Sequence[int], image_features: int = 256) -> None:
        nn.Module.__init__(self)
        self.convolutions = nn.Sequential(
            _convolution(image_shape[2], 16, kernel=3, stride=1, padding=1),
            nn.ReLU(inplace=True),
            _convolution(16, 32, kernel=3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            _convolution(32, 64, kernel=3, stride=2, padding=1),
            nn.ReLU(inplace=True),
        )
        self.projection = linear(_flat_size(self.convolutions, image_shape), image_features)
        self.output_size = image_features


class DreamerCNN(NatureCNN):
    """The encoder of "Dream to Control" (2020): four 4x4 convolutions of stride 2, the depth doubling at each."""

    minimum_size = 46  # pixels: 46 -> 22 -> 10 -> 4 -> 1 after its four kernels

    def __init__(self, *, image_shape: Sequence[int], image_features: int = 256, depth: int = 32) -> None:
        nn.Module.__init__(self)
        height, width, channels = image_shape
        if min(height, width) < self.minimum_size:
            raise ConfigError(
                f"image_network 'dreamer' needs images of at least {self.minimum_size}x{self.minimum_size} pixels; "
                f"this one is {height}x{width}. Write image_network: small."
            )
        depths = [channels, depth, 2 * depth, 4 * depth, 8 * depth]
        layers = [
            (_convolution(before, after, kernel=4, stride=2), nn.ReLU(inplace=True))
            for before, after in pairwise(depths)
        ]
        self.convolutions = nn.Sequential(*(layer for pair in layers for layer in pair))
        self.projection = linear(_flat_size(self.convolutions, image_shape), image_features)
        self.output_size = image_features


class ImpalaCNN(nn.Module):
    """The residual network of "IMPALA" (2018): slower than Nature's and often better on procedural games."""

    def __init__(
        self, *, image_shape: Sequence[int], image_features: int = 256, channels: Sequence[int] = (16, 32, 32)
    ) -> None:
        super().__init__()
        depths = [image_shape[2], *channels]
        stages = [_ImpalaStage(before, after) for before, after in pairwise(depths)]
        self.convolutions = nn.Sequential(*stages, nn.ReLU(inplace=True))
        self.projection = linear(_flat_size(self.convolutions, image_shape), image_features)
        self.output_size = image_features

    def forward(self, image: Tensor) -> Tensor:
        """Scaled images `[N, C, height, width]` to `[N, output_size]`."""
        return torch.relu(self.projection(self.convolutions(image).flatten(1)))


class _ImpalaStage(nn.Module):
    """Convolution, halving max-pool, two residual blocks."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.entry = _convolution(channels_in, channels_out, kernel=3, stride=1, padding=1)
        self.residuals = nn.ModuleList(
            _convolution(channels_out, channels_out, kernel=3, stride=1, padding=1) for _ in range(4)
        )

    def forward(self, image: Tensor) -> Tensor:
        image = F.max_pool2d(self.entry(image), kernel_size=3, stride=2, padding=1)
        first, second, third, fourth = self.residuals
        image = image + second(torch.relu(first(torch.relu(image))))
        return image + fourth(torch.relu(third(torch.relu(image))))


IMAGE_NETWORKS: dict[str, type[NatureCNN] | type[ImpalaCNN]] = {
    "nature": NatureCNN,
    "impala": ImpalaCNN,
    "dreamer": DreamerCNN,
    "small": SmallCNN,
}


def make_image_network(name: str, *, image_shape: Sequence[int], image_features: int) -> NatureCNN | ImpalaCNN:
    """The named network; `auto` is Nature's where the image is large enough for it, else the small one."""
    if name == "auto":
        name = "nature" if min(image_shape[:2]) >= NatureCNN.minimum_size else "small"
    network = choose({"auto": NatureCNN, **IMAGE_NETWORKS}, name, place="image_network")
    return network(image_shape=image_shape, image_features=image_features)


def _convolution(channels_in: int, channels_out: int, *, kernel: int, stride: int, padding: int = 0) -> nn.Conv2d:
    layer = nn.Conv2d(channels_in, channels_out, kernel_size=kernel, stride=stride, padding=padding)
    orthogonal_(layer, HIDDEN_GAIN)
    return layer


def _flat_size(convolutions: nn.Module, image_shape: Sequence[int]) -> int:
    height, width, channels = image_shape
    with torch.no_grad():
        return convolutions(torch.zeros(1, channels, height, width)).numel()
