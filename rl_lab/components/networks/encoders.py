"""From what an environment shows to one feature vector per row: the encoder, and the MLP it and the heads end with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from rl_lab.components.networks.cnn import make_image_network
from rl_lab.components.networks.layers import ACTIVATIONS, NORMS, choose, linear
from rl_lab.components.networks.noisy import NoisyLinear
from rl_lab.components.networks.observations import make_reader, module_name, selected_observation
from rl_lab.kernels.door import fast_path
from rl_lab.types import ArraySpec, Batch, ConfigError


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


def _through(network: nn.Module, image: Tensor) -> Tensor:
    """Images `[..., height, width, C]` uint8 to features `[..., F]`."""
    leading = image.shape[:-3]
    # Permuting the axes of [height, width, C] memory is free and is just what convolutions call channels_last.
    pixels = image.reshape(-1, *image.shape[-3:]).permute(0, 3, 1, 2)
    return network(pixels.to(torch.float32) * (1.0 / 255.0)).reshape(*leading, -1)


class MLP(nn.Module):
    """Linear, norm and activation for each hidden size; with `output_size`, one bare linear layer at the end.

    noisy: linear layers with learnt noise in their weights, which have a start of their own.
    """

    def __init__(
        self,
        *,
        input_size: int,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        norm: str = "none",
        output_size: int | None = None,
        output_gain: float = 1.0,
        noisy: bool = False,
    ) -> None:
        super().__init__()
        self.activation = choose(ACTIVATIONS, activation, place="MLP activation")
        make_norm = choose(NORMS, norm, place="MLP norm")
        sizes = [input_size, *_positive(hidden_sizes)]
        make_layer = NoisyLinear if noisy else linear
        self.hidden = nn.ModuleList(make_layer(before, after) for before, after in pairwise(sizes))
        self.norms = nn.ModuleList(make_norm(size) for size in sizes[1:]) if make_norm is not None else None
        self.output: nn.Linear | None = None
        if output_size is not None:
            self.output = (
                NoisyLinear(sizes[-1], output_size) if noisy else linear(sizes[-1], output_size, gain=output_gain)
            )
        self.output_size = sizes[-1] if output_size is None else output_size

    @fast_path("rl_lab.kernels.cpu_mlp:MLP_FORWARD")
    def forward(self, features: Tensor) -> Tensor:
        """`[..., input_size]` to `[..., output_size]`."""
        for index, layer in enumerate(self.hidden):
            features = layer(features)
            features = self.activation(features if self.norms is None else self.norms[index](features))
        return features if self.output is None else self.output(features)


def _positive(hidden_sizes: Sequence[int]) -> list[int]:
    if isinstance(hidden_sizes, str) or any(not isinstance(size, int) or size < 1 for size in hidden_sizes):
        raise ConfigError(
            f"hidden_sizes is {hidden_sizes!r}; allowed is a list of whole numbers from 1 on. Write, say, [64, 64]."
        )
    return list(hidden_sizes)
