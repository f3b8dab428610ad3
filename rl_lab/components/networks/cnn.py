"""Convolutional networks for images: Nature's, IMPALA's, Dreamer's and a small one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.networks.layers import HIDDEN_GAIN, choose, linear, orthogonal_
from rl_lab.types import ConfigError


class ImageNetwork(nn.Module):
    """Convolutions, then one layer to `image_features` numbers."""

    name: ClassVar[str]
    minimum_size: ClassVar[int] = 1  # pixels
    stages: ClassVar[tuple[tuple[int, int, int], ...]] = ()  # channels, kernel and stride of each convolution
    padding: ClassVar[int] = 0

    def __init__(self, *, image_shape: Sequence[int], image_features: int = 256) -> None:
        super().__init__()
        height, width, channels = image_shape
        if min(height, width) < self.minimum_size:
            raise ConfigError(
                f"image_network '{self.name}' needs images of at least {self.minimum_size}x{self.minimum_size} pixels; "
                f"this one is {height}x{width}. Write image_network: small."
            )
        self.convolutions = nn.Sequential(*self.layers(channels))
        with torch.no_grad():
            flat_size = self.convolutions(torch.zeros(1, channels, height, width)).numel()
        self.projection = linear(flat_size, image_features)
        self.output_size = image_features

    @classmethod
    def layers(cls, channels: int) -> list[nn.Module]:
        """The convolutions with their activations, for images of so many channels."""
        layers: list[nn.Module] = []
        for channels_out, kernel, stride in cls.stages:
            layers += [_convolution(channels, channels_out, kernel=kernel, stride=stride, padding=cls.padding)]
            layers += [nn.ReLU(inplace=True)]
            channels = channels_out
        return layers

    def forward(self, image: Tensor) -> Tensor:
        """Scaled images `[N, C, height, width]` to `[N, output_size]`."""
        return torch.relu(self.projection(self.convolutions(image).flatten(1)))


class NatureCNN(ImageNetwork):
    """The network of "Human-level control through deep reinforcement learning" (2015): 84x84 frames, fast."""

    name, minimum_size = "nature", 36  # 36 -> 8 -> 3 -> 1 after its three kernels
    stages = ((32, 8, 4), (64, 4, 2), (64, 3, 1))


class SmallCNN(ImageNetwork):
    """Three 3x3 convolutions, two of them halving: grid worlds and images below 36 pixels."""

    name, padding = "small", 1
    stages = ((16, 3, 1), (32, 3, 2), (64, 3, 2))


class DreamerCNN(ImageNetwork):
    """The encoder of "Dream to Control" (2020): four 4x4 convolutions of stride 2, the depth doubling at each."""

    name, minimum_size = "dreamer", 46  # 46 -> 22 -> 10 -> 4 -> 1 after its four kernels
    stages = ((32, 4, 2), (64, 4, 2), (128, 4, 2), (256, 4, 2))


class ImpalaCNN(ImageNetwork):
    """The residual network of "IMPALA" (2018): slower than Nature's and often better on procedural games."""

    name = "impala"

    @classmethod
    def layers(cls, channels: int) -> list[nn.Module]:
        stages = [_ImpalaStage(before, after) for before, after in pairwise([channels, 16, 32, 32])]
        return [*stages, nn.ReLU(inplace=True)]


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


IMAGE_NETWORKS = {network.name: network for network in (NatureCNN, ImpalaCNN, DreamerCNN, SmallCNN)}


def make_image_network(name: str, *, image_shape: Sequence[int], image_features: int) -> ImageNetwork:
    """The named network; `auto` is Nature's where the image is large enough for it, else the small one."""
    if name == "auto":
        name = "nature" if min(image_shape[:2]) >= NatureCNN.minimum_size else "small"
    network = choose({"auto": NatureCNN, **IMAGE_NETWORKS}, name, place="image_network")
    return network(image_shape=image_shape, image_features=image_features)


def _convolution(channels_in: int, channels_out: int, *, kernel: int, stride: int, padding: int) -> nn.Conv2d:
    layer = nn.Conv2d(channels_in, channels_out, kernel_size=kernel, stride=stride, padding=padding)
    orthogonal_(layer, HIDDEN_GAIN)
    return layer
