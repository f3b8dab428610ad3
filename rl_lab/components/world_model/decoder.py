"""From a world model's features back to what was observed.

danijar/dreamerv3, rssm.py `Decoder`. Losses are sums over the elements of an observation, not means. Float vectors are
compared after symlog, discrete values by cross-entropy, images (scaled to 0..1) by squared error. `images: strided` are
the older convolutions of PlaNet, V1 and V2 (strided_images.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.networks.layers import ACTIVATIONS, choose
from rl_lab.components.networks.observations import module_name
from rl_lab.components.world_model.encoder import ObservationPart, convolution, joint_image_shape, stage_depths
from rl_lab.components.world_model.layers import BlockLinear, Layer, Stack, dense, make_norm
from rl_lab.components.world_model.strided_images import TransposedCNN
from rl_lab.components.world_model.two_hot import symexp, symlog
from rl_lab.kernels.door import fast_path
from rl_lab.types import ArraySpec, Batch, ConfigError


class ObservationDecoder(ObservationPart):
    """Features `[..., F]` (memory first, then the latent) to reconstructions and their losses."""

    def __init__(self, *, input_size: int, deter: int, blocks: int = 8, **settings: Any) -> None:
        super().__init__(**settings)
        if not 0 < deter < input_size:
            raise ConfigError(f"decoder: deter is {deter}, but the features have {input_size} numbers in all.")
        if self.vector_keys:
            self.stack = Stack(input_size, **self.stack_settings)
            self.outputs = nn.ModuleDict(
                {
                    module_name(key): dense(self.stack.output_size, _vector_size(self.specs[key]))
                    for key in self.vector_keys
                }
            )
        if self.image_keys:
            shape = joint_image_shape({key: self.specs[key] for key in self.image_keys})
            parts: dict[str, Any] = {"deter": deter, "stoch_size": input_size - deter, "blocks": blocks}
            self.image_network: DoublingCNN | TransposedCNN = (
                TransposedCNN(shape, input_size=input_size, **self.image_settings)
                if self.is_strided
                else DoublingCNN(shape, **parts, units=self.stack_settings["units"], **self.image_settings)  # type: ignore[arg-type]
            )

    def loss(self, features: Tensor, observation: Batch) -> Tensor:
        """How far the reconstructions are from the rows `[...]`, summed over elements and keys."""
        losses = []
        for key, output in self._vectors(features).items():
            output, target, spec = output.float(), observation[key], self.specs[key]
            if spec.is_discrete:
                losses.append(_cross_entropy(output, target, spec))
            else:
                target = target.flatten(-len(spec.shape)) if spec.shape else target.unsqueeze(-1)
                target = target.to(torch.float32) * (1.0 / 255.0 if spec.dtype == "uint8" else 1.0)
                error = (output - (symlog(target) if self.squashes(key) else target)).square()
                losses.append(error.sum(dim=-1))
        if self.image_keys:
            seen = [observation[key].reshape(-1, *self.specs[key].shape) for key in self.image_keys]
            target = seen[0] if len(seen) == 1 else torch.cat(seen, dim=-1)
            errors = self.image_network.error(features.reshape(-1, features.shape[-1]), target)
            losses.append(errors.view(features.shape[:-1]))
        total = losses[0]
        for each in losses[1:]:
            total = total + each
        return total

    def reconstruct(self, features: Tensor) -> Batch:
        """Observations as the environment would show them `[..., *shape]`, in its types."""
        shown: Batch = {}
        for key, output in self._outputs(features).items():
            output, spec = output.float(), self.specs[key]
            if spec.is_image:
                shown[key] = (output * 255.0).round().to(torch.uint8)
                continue
            if spec.is_discrete:
                parts = output.split(spec.num_values, dim=-1)
                output = torch.stack([part.argmax(dim=-1) for part in parts], dim=-1)
            elif spec.dtype == "uint8":
                output = (output.clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)
            elif self.squashes(key):
                output = symexp(output)
            shown[key] = output.reshape(*output.shape[:-1], *spec.shape)
        return shown

    def _outputs(self, features: Tensor) -> Batch:
        """Raw network outputs per key: `[..., size]`, images `[..., height, width, C]` on the scale 0..1."""
        outputs = self._vectors(features)
        if self.image_keys:
            images = self.image_network.draw(features.reshape(-1, features.shape[-1]))
            images = images.reshape(*features.shape[:-1], *images.shape[1:])
            channels = [self.specs[key].shape[2] for key in self.image_keys]
            outputs.update(zip(self.image_keys, images.split(channels, dim=-1), strict=True))
        return outputs

    def _vectors(self, features: Tensor) -> Batch:
        if not self.vector_keys:
            return {}
        hidden = self.stack(features)
        return {key: layer(hidden) for key, layer in zip(self.vector_keys, self.outputs.values(), strict=True)}


class DoublingCNN(nn.Module):
    """Features to images: memory and latent each draw a small image, whose sum is enlarged and refined by stages."""

    def __init__(
        self,
        image_shape: Sequence[int],
        *,
        deter: int,
        stoch_size: int,
        units: int,
        depth: int,
        multipliers: Sequence[int],
        kernel: int,
        blocks: int,
        activation: str,
        norm: str,
    ) -> None:
        super().__init__()
        depths = stage_depths(image_shape, depth=depth, multipliers=multipliers)
        self.deter, self.blocks = deter, math.gcd(blocks, depths[-1])  # each block draws as many channels
        self.side = (image_shape[0] >> len(depths), image_shape[1] >> len(depths))
        size = self.side[0] * self.side[1] * depths[-1]
        self.from_deter = BlockLinear(deter, size, blocks=self.blocks)
        self.from_stoch = Layer(stoch_size, 2 * units, activation=activation, norm=norm)
        self.stoch_output = dense(2 * units, size)
        self.first_norm = make_norm(norm, depths[-1])
        going_up = depths[::-1]
        self.convolutions = nn.ModuleList(
            convolution(before, after, kernel=kernel) for before, after in pairwise(going_up)
        )
        self.norms = nn.ModuleList(make_norm(norm, size) for size in going_up[1:])
        self.output = convolution(depths[0], image_shape[2], kernel=kernel)
        self.activation = choose(ACTIVATIONS, activation, place="decoder activation")

    def forward(self, features: Tensor) -> Tensor:
        """`[N, F]` to `[N, height, width, C]`, before the sigmoid."""
        deter, stoch = features.split((self.deter, features.shape[-1] - self.deter), dim=-1)
        height, width = self.side
        # Each block of the memory draws its own channels of the first small image.
        drawn = self.from_deter(deter).view(len(features), self.blocks, height, width, -1)
        drawn = drawn.permute(0, 2, 3, 1, 4).flatten(3)
        drawn = drawn + self.stoch_output(self.from_stoch(stoch)).view(drawn.shape)
        image = self.activation(self.first_norm(drawn)).permute(0, 3, 1, 2)
        for layer, norm in zip(self.convolutions, self.norms, strict=True):
            image = layer(F.interpolate(image, scale_factor=2, mode="nearest"))
            image = self.activation(norm(image.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return self.output(F.interpolate(image, scale_factor=2, mode="nearest")).permute(0, 2, 3, 1)

    def draw(self, features: Tensor) -> Tensor:
        """The same after it: on the scale 0..1."""
        return self(features).float().sigmoid()

    @fast_path("rl_lab.kernels.gpu:IMAGE_ERROR")
    def error(self, features: Tensor, target: Tensor) -> Tensor:
        """Squared errors `[N]` of the images drawn, against uint8 images `[N, height, width, C]`, on the scale 0..1."""
        error = self(features).float().sigmoid() - target.to(torch.float32) * (1.0 / 255.0)
        return error.square().sum(dim=(-3, -2, -1))


def _vector_size(spec: ArraySpec) -> int:
    return sum(spec.num_values) if spec.is_discrete else math.prod(spec.shape)


def _cross_entropy(logits: Tensor, target: Tensor, spec: ArraySpec) -> Tensor:
    """Nats `[...]`, summed over the elements of a discrete observation."""
    targets = target.reshape(*logits.shape[:-1], -1).unbind(dim=-1)
    parts = logits.split(spec.num_values, dim=-1)
    losses = [
        -torch.log_softmax(part, dim=-1).gather(-1, each.unsqueeze(-1)).squeeze(-1)
        for part, each in zip(parts, targets, strict=True)
    ]
    return torch.stack(losses).sum(dim=0)
