"""Multi-layer perceptrons, and the names of activations and norms.

Weights start orthogonal with gain sqrt(2) on hidden layers and zero biases, the start that on-policy methods
were tuned with ("The 37 implementation details of PPO", detail 2); a caller names the gain of the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.networks.noisy import NoisyLinear
from rl_lab.kernels.door import fast_path
from rl_lab.types import ConfigError, did_you_mean

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "silu": F.silu,
    "elu": F.elu,
    "gelu": F.gelu,
}
NORMS: dict[str, Callable[[int], nn.Module] | None] = {"none": None, "layer": nn.LayerNorm, "rms": nn.RMSNorm}
HIDDEN_GAIN = math.sqrt(2.0)

Choice = TypeVar("Choice")


def choose(choices: Mapping[str, Choice], name: str, *, place: str) -> Choice:
    """The entry called `name`, or an error that lists the allowed names and the nearest one."""
    if name not in choices:
        allowed = ", ".join(choices)
        raise ConfigError(f"{place}: '{name}' is not known; allowed: {allowed}.{did_you_mean(str(name), choices)}")
    return choices[name]


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


def linear(input_size: int, output_size: int, *, gain: float = HIDDEN_GAIN) -> nn.Linear:
    """A linear layer with orthogonal weights and zero bias."""
    layer = nn.Linear(input_size, output_size)
    orthogonal_(layer, gain)
    return layer


def orthogonal_(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


def _positive(hidden_sizes: Sequence[int]) -> list[int]:
    if isinstance(hidden_sizes, str) or any(not isinstance(size, int) or size < 1 for size in hidden_sizes):
        raise ConfigError(
            f"hidden_sizes is {hidden_sizes!r}; allowed is a list of whole numbers from 1 on. Write, say, [64, 64]."
        )
    return list(hidden_sizes)
