"""From what an environment shows to one feature vector per row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_lab.components.networks.cnn import make_image_network
from rl_lab.components.networks.mlp import MLP
from rl_lab.types import ArraySpec, Batch, ConfigError, did_you_mean

NOT_FOR_NETWORKS = ("action_mask",)  # says which actions are allowed, for the actor alone


class ObservationEncoder(nn.Module):
    """Images through a convolutional network, discrete values as one-hots, vectors as they are; then one MLP.

    dtype decides (docs/time_steps.md): uint8 is scaled by 1/255 here and nowhere else. `keys` picks some of the
    observation's keys; by default all are used.
    """

    def __init__(
        self,
        *,
        observation: dict[str, ArraySpec],
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        norm: str = "none",
        image_network: str = "auto",
        image_features: int = 256,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        specs = selected_observation(observation, keys)
        self.image_keys = tuple(key for key, spec in specs.items() if spec.is_image)
        self.image_networks = nn.ModuleList(
            make_image_network(image_network, image_shape=specs[key].shape, image_features=image_features)
            for key in self.image_keys
        )
        self.vectors = nn.ModuleDict(
            {module_name(key): make_reader(key, spec) for key, spec in specs.items() if not spec.is_image}
        )
        self.vector_keys = tuple(key for key, spec in specs.items() if not spec.is_image)
        width = len(self.image_keys) * image_features
        width += sum(reader.output_size for reader in self.vectors.values())  # type: ignore[misc]
        self.mlp = MLP(input_size=width, hidden_sizes=hidden_sizes, activation=activation, norm=norm)
        self.output_size = self.mlp.output_size
        self.has_layers = len(hidden_sizes) > 0
        only = next(iter(specs.items()))
        # The common case skips every loop: one float vector goes straight into the MLP.
        is_plain = len(specs) == 1 and only[1].dtype == "float32" and len(only[1].shape) == 1
        self.plain_key = only[0] if is_plain else None

    def forward(self, observation: Batch) -> Tensor:
        """Rows with any leading axes, `[..., *shape]` per key, to `[..., output_size]`."""
        if self.plain_key is not None:
            plain = observation[self.plain_key]
            return self.mlp(plain) if self.has_layers else plain
        parts = [
            _through(network, observation[key])
            for key, network in zip(self.image_keys, self.image_networks, strict=True)
        ]
        parts += [reader(observation[key]) for key, reader in zip(self.vector_keys, self.vectors.values(), strict=True)]
        return self.mlp(parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))


class _VectorReader(nn.Module):
    """A number array as one flat float vector; bytes are scaled like pixels."""

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        self.axes = len(spec.shape)
        self.scale = 1.0 / 255.0 if spec.dtype == "uint8" else None
        self.output_size = math.prod(spec.shape)

    def forward(self, array: Tensor) -> Tensor:
        flat = _flat(array, self.axes).to(torch.float32)
        return flat if self.scale is None else flat * self.scale


class _OneHotReader(nn.Module):
    """Discrete values as one-hots, side by side."""

    starts: Tensor

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        self.axes = len(spec.shape)
        self.output_size = sum(spec.num_values)
        starts = torch.tensor([0, *spec.num_values[:-1]]).cumsum(0)
        self.register_buffer("starts", starts, persistent=False)  # known from the spec, so not part of a checkpoint

    def forward(self, array: Tensor) -> Tensor:
        index = _flat(array, self.axes) + self.starts
        return torch.zeros(*index.shape[:-1], self.output_size, device=index.device).scatter_(-1, index, 1.0)


def make_reader(key: str, spec: ArraySpec) -> nn.Module:
    if not spec.is_discrete:
        return _VectorReader(spec)
    if len(spec.num_values) != math.prod(spec.shape):
        raise ConfigError(
            f"observation '{key}' is discrete with shape {spec.shape} but its spec counts values for "
            f"{len(spec.num_values)} elements; give num_values one count per element."
        )
    return _OneHotReader(spec)


def _through(network: nn.Module, image: Tensor) -> Tensor:
    """Images `[..., height, width, C]` uint8 to features `[..., F]`."""
    leading = image.shape[:-3]
    # Permuting the axes of [height, width, C] memory is free and is just what convolutions call channels_last.
    pixels = image.reshape(-1, *image.shape[-3:]).permute(0, 3, 1, 2)
    return network(pixels.to(torch.float32) * (1.0 / 255.0)).reshape(*leading, -1)


def _flat(array: Tensor, axes: int) -> Tensor:
    """`[..., *shape]` to `[..., elements]`."""
    if axes == 1:
        return array
    return array.unsqueeze(-1) if axes == 0 else array.flatten(-axes)


def selected_observation(
    observation: Mapping[str, ArraySpec], keys: Sequence[str] | None, *, place: str = "encoder keys"
) -> dict[str, ArraySpec]:
    """What `keys` name, or everything but action masks."""
    usable = {key: spec for key, spec in observation.items() if key not in NOT_FOR_NETWORKS}
    for key in keys or ():
        if key not in usable:
            raise ConfigError(
                f"{place}: this environment has no observation '{key}'; it has {', '.join(usable)}."
                f"{did_you_mean(key, usable)}"
            )
    selected = usable if keys is None else {key: usable[key] for key in keys}
    if not selected:
        raise ConfigError(f"{place}: no observation is left to look at. Name at least one, or write null for all.")
    return selected


def module_name(key: str) -> str:
    return key.replace(".", "_")  # torch allows no dots in the names of modules
