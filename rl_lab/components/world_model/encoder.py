"""The encoder of a world model: vectors through a normed stack, images through convolutions.

danijar/dreamerv3, rssm.py `Encoder`: 5x5 convolutions, each followed by a 2x2 maximum, an RMS norm over the channels
and SiLU; channels grow by `multipliers`. Unlike `ObservationEncoder` nothing is mixed at the end: the posterior's
first layer reads all of it. `images: strided` are the older convolutions of PlaNet, V1 and V2 (strided_images.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.networks.layers import ACTIVATIONS, choose
from rl_lab.components.networks.observations import make_reader, module_name, selected_observation
from rl_lab.components.world_model.layers import Stack, make_norm, truncated_normal_
from rl_lab.components.world_model.strided_images import StridedCNN
from rl_lab.components.world_model.two_hot import symlog
from rl_lab.kernels.door import fast_path
from rl_lab.types import ArraySpec, Batch, ConfigError

MOST_CHANNELS = 4  # an image with no more rows and more channels than this has them the wrong way round
SMALLEST_SIDE, LARGEST_SIDE = 3, 16  # pixels left after the last halving (danijar/dreamerv3, rssm.py asserts so)


class ObservationPart(nn.Module):
    """Which observations encoder and decoder work with, and the settings of their layers."""

    def __init__(
        self,
        *,
        observation: dict[str, ArraySpec],
        layers: int = 3,
        units: int = 256,
        images: Literal["halving", "strided"] = "halving",
        depth: int = 16,
        multipliers: Sequence[int] = (2, 3, 4, 4),
        kernel: int = 5,
        symlog_vectors: bool = True,
        activation: str = "silu",
        norm: str = "rms",
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.specs = selected_observation(observation, keys)
        self.image_keys = tuple(key for key, spec in self.specs.items() if spec.is_image)
        self.vector_keys = tuple(key for key, spec in self.specs.items() if not spec.is_image)
        self.symlog_vectors, self.is_strided = symlog_vectors, images == "strided"
        style = {"activation": activation, "norm": norm}
        self.stack_settings: dict[str, Any] = {"layers": layers, "units": units, **style}
        self.image_settings: dict[str, Any] = {"depth": depth, "multipliers": multipliers, **style}
        if not self.is_strided:
            self.image_settings["kernel"] = kernel

    def squashes(self, key: str) -> bool:
        """Whether this vector is read, and predicted, after symlog."""
        return self.symlog_vectors and self.specs[key].dtype.startswith("float")


class WorldModelEncoder(ObservationPart):
    """Observations with any leading axes to one embedding per row."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.readers = nn.ModuleDict({module_name(key): make_reader(key, self.specs[key]) for key in self.vector_keys})
        self.output_size = 0
        if self.vector_keys:
            width = sum(reader.output_size for reader in self.readers.values())  # type: ignore[misc]
            self.stack = Stack(width, **self.stack_settings)
            self.output_size += self.stack.output_size
        if self.image_keys:
            shape = joint_image_shape({key: self.specs[key] for key in self.image_keys})
            network: type[HalvingCNN | StridedCNN] = StridedCNN if self.is_strided else HalvingCNN
            self.image_network = network(shape, **self.image_settings)
            self.output_size += self.image_network.output_size

    def forward(self, observation: Batch) -> Tensor:
        """`[..., *shape]` per key to `[..., output_size]`."""
        parts = []
        if self.vector_keys:
            vectors = [
                symlog(reader(observation[key])) if self.squashes(key) else reader(observation[key])
                for key, reader in zip(self.vector_keys, self.readers.values(), strict=True)
            ]
            parts.append(self.stack(vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=-1)))
        if self.image_keys:
            images = [observation[key] for key in self.image_keys]
            image = images[0] if len(images) == 1 else torch.cat(images, dim=-1)
            leading = image.shape[:-3]
            parts.append(self.image_network(image.reshape(-1, *image.shape[-3:])).reshape(*leading, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class HalvingCNN(nn.Module):
    """Convolution, 2x2 maximum, norm, activation per stage; channels last in memory from end to end."""

    def __init__(
        self,
        image_shape: Sequence[int],
        *,
        depth: int,
        multipliers: Sequence[int],
        kernel: int,
        activation: str,
        norm: str,
    ) -> None:
        super().__init__()
        height, width, channels = image_shape
        depths = stage_depths(image_shape, depth=depth, multipliers=multipliers)
        self.convolutions = nn.ModuleList(
            convolution(before, after, kernel=kernel) for before, after in pairwise([channels, *depths])
        )
        self.norms = nn.ModuleList(make_norm(norm, size) for size in depths)
        self.activation = choose(ACTIVATIONS, activation, place="encoder activation")
        self.output_size = (height >> len(depths)) * (width >> len(depths)) * depths[-1]

    @fast_path("rl_lab.kernels.gpu:ENCODE_IMAGES")
    def forward(self, image: Tensor) -> Tensor:
        """uint8 images `[N, height, width, C]` to `[N, output_size]`."""
        pixels = (image.to(torch.float32) * (1.0 / 255.0) - 0.5).permute(0, 3, 1, 2)
        for layer, norm in zip(self.convolutions, self.norms, strict=True):
            pixels = F.max_pool2d(layer(pixels), kernel_size=2)
            pixels = self.activation(norm(pixels.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return pixels.permute(0, 2, 3, 1).flatten(1)


def convolution(channels_in: int, channels_out: int, *, kernel: int) -> nn.Conv2d:
    """One that keeps the image's size, with truncated-normal weights, channels last in memory."""
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"kernel is {kernel}: write an odd number, such as 5, so that images keep their size.")
    layer = nn.Conv2d(channels_in, channels_out, kernel_size=kernel, padding=kernel // 2)
    truncated_normal_(layer.weight, fan_in=channels_in * kernel * kernel)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def stage_depths(image_shape: Sequence[int], *, depth: int, multipliers: Sequence[int]) -> list[int]:
    """Channels of each stage: as many of the multipliers as the image can be halved, at least one."""
    height, width, _ = image_shape
    stages = 0
    while stages < len(multipliers) and height % 2 == width % 2 == 0 and min(height, width) // 2 >= SMALLEST_SIDE:
        height, width, stages = height // 2, width // 2, stages + 1
    if stages == 0:
        cure = "Resize them with a wrapper, best to 64x64."
        if image_shape[0] <= MOST_CHANNELS < image_shape[2]:
            cure = "Move their channels, which come first, last."
        raise ConfigError(
            f"Images of {image_shape[0]}x{image_shape[1]} cannot be halved for the world model: both sides must be "
            f"even and at least {2 * SMALLEST_SIDE} pixels. {cure}"
        )
    if max(height, width) > LARGEST_SIDE:
        raise ConfigError(
            f"Images of {image_shape[0]}x{image_shape[1]} can be halved for the world model down to {height}x{width}, "
            f"more than {LARGEST_SIDE} pixels, which would make it huge. Resize them with a wrapper, best to 64x64."
        )
    return [depth * multiplier for multiplier in multipliers[:stages]]


def joint_image_shape(specs: dict[str, ArraySpec]) -> tuple[int, int, int]:
    """The shape of all images laid over each other; they must be of one size."""
    sizes = {spec.shape[:2] for spec in specs.values()}
    if len(sizes) > 1:
        shown = ", ".join(f"{key} {spec.shape[0]}x{spec.shape[1]}" for key, spec in specs.items())
        raise ConfigError(
            f"The world model reads images of one size, but these differ: {shown}. Choose some with `keys:` or resize."
        )
    height, width = sizes.pop()
    return height, width, sum(spec.shape[2] for spec in specs.values())
