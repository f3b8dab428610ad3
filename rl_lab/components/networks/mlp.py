"""Multi-layer perceptrons, and the names of activations and norms.

Weights start orthogonal with gain sqrt(2) on hidden layers and zero biases, the start that on-policy methods
were tuned with ("The 37 implementation details of PPO", detail 2); a caller names the gain of the last layer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.kernels import fused
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
    """Linear, norm and activation for each hidden size; with `output_size`, one bare linear layer at the end."""

    def __init__(
        self,
        *,
        input_size: int,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        norm: str = "none",
        output_size: int | None = None,
        output_gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.activation_name = activation
        self.activation = choose(ACTIVATIONS, activation, place="MLP activation")
        make_norm = choose(NORMS, norm, place="MLP norm")
        sizes = [input_size, *_positive(hidden_sizes)]
        self.hidden = nn.ModuleList(linear(before, after) for before, after in pairwise(sizes))
        self.norms = nn.ModuleList(make_norm(size) for size in sizes[1:]) if make_norm is not None else None
        self.output = linear(sizes[-1], output_size, gain=output_gain) if output_size is not None else None
        self.output_size = sizes[-1] if output_size is None else output_size
        # The dicts in which the layers keep weight and bias: reading these instead of calling the layers halves
        # the Python time of a small network, and moving, copying or loading the module leaves them valid.
        layers = [*self.hidden, *([] if self.output is None else [self.output])]
        self._layer_parameters = [layer._parameters for layer in layers]
        self._stack: fused.Stack | None = None

    def forward(self, features: Tensor) -> Tensor:
        """`[..., input_size]` to `[..., output_size]`."""
        if self.norms is not None:
            return self._forward_with_norms(features)
        if not self._layer_parameters:
            return features
        if fused.can_fuse(features) and (stack := self.stack()) is not None:
            return fused.fused_stacks(features, [stack])[0]
        if fused.can_only_act(features) and (stack := self.stack()) is not None:
            return fused.act_with(features, stack)
        layers = self._layers()
        for index in range(0, len(layers), 2):
            features = F.linear(features, layers[index], layers[index + 1])
            if self.output is None or index < len(layers) - 2:
                features = self.activation(features)
        return features

    def stack(self) -> fused.Stack | None:
        """The layers as they can be fused, None where they cannot (norms, other activations, no layers)."""
        if self.norms is not None or self.activation_name not in fused.ACTIVATIONS or not self._layer_parameters:
            return None
        layers = self._layers()
        if self._stack is None or any(map(operator.is_not, layers, self._stack.layers)):
            self._stack = fused.Stack(layers, self.activation_name, is_last_bare=self.output is not None)
        return self._stack

    def _layers(self) -> list[Tensor]:
        return [tensor for layer in self._layer_parameters for tensor in layer.values()]  # type: ignore[misc]

    def _forward_with_norms(self, features: Tensor) -> Tensor:
        assert self.norms is not None
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            features = self.activation(norm(layer(features)))
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
