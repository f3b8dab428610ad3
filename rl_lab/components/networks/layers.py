"""Activations and norms by their names, and linear layers with orthogonal weights.

Weights start orthogonal with gain sqrt(2) on hidden layers and zero biases, the start that on-policy methods
were tuned with ("The 37 implementation details of PPO", detail 2); a caller names the gain of the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def linear(input_size: int, output_size: int, *, gain: float = HIDDEN_GAIN) -> nn.Linear:
    """A linear layer with orthogonal weights and zero bias."""
    layer = nn.Linear(input_size, output_size)
    orthogonal_(layer, gain)
    return layer


def orthogonal_(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
