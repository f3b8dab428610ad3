"""Layers of world models: truncated-normal initialization, norms in float32, block-diagonal products, normed stacks.

Every weight is initialized as in danijar/dreamerv3 (embodied/jax/nets.py, `Initializer`, `trunc_normal_in`).
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.networks.layers import ACTIVATIONS, choose
from rl_lab.kernels.door import fast_path
from rl_lab.types import ConfigError

TRUNCATED_STD = 0.87962566  # of a standard normal cut at -2 and 2; dividing by it restores unit std
NORM_EPSILON = 1e-4  # danijar/dreamerv3, nets.py `Norm.eps`; large enough for bfloat16


@torch.no_grad()
def truncated_normal_(weight: Tensor, *, fan_in: float, scale: float = 1.0) -> Tensor:
    """In place: a normal cut at two stds, with std `scale / sqrt(fan_in)`."""
    nn.init.trunc_normal_(weight, mean=0.0, std=1.0, a=-2.0, b=2.0)
    return weight.mul_(scale / (TRUNCATED_STD * fan_in**0.5))


def dense(input_size: int, output_size: int, *, scale: float = 1.0, bias: bool = True) -> nn.Linear:
    """A linear layer with truncated-normal weights and zero bias; scale 0 makes it answer 0 at the start."""
    layer = nn.Linear(input_size, output_size, bias=bias)
    truncated_normal_(layer.weight, fan_in=input_size, scale=scale)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last axis. Computed in float32 whatever comes in."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, features: Tensor) -> Tensor:
        wide = features.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + NORM_EPSILON)
        return (wide * scale * self.weight).to(features.dtype)


class LayerNorm(nn.Module):
    """Zero mean and unit std over the last axis, computed in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, features: Tensor) -> Tensor:
        shape = (features.shape[-1],)
        return F.layer_norm(features.float(), shape, self.weight, self.bias, NORM_EPSILON).to(features.dtype)


NORMS: dict[str, type[nn.Module]] = {"none": nn.Identity, "rms": RMSNorm, "layer": LayerNorm}


def make_norm(name: str, size: int) -> nn.Module:
    return choose(NORMS, name, place="norm")(size)


class Layer(nn.Module):
    """Linear, norm, activation: the unit every part of a world model is built of."""

    def __init__(self, input_size: int, output_size: int, *, activation: str = "silu", norm: str = "rms") -> None:
        super().__init__()
        self.linear = dense(input_size, output_size)
        self.norm = make_norm(norm, output_size)
        self.activation = choose(ACTIVATIONS, activation, place="activation")

    @fast_path("rl_lab.kernels.gpu:LAYER")
    def forward(self, features: Tensor) -> Tensor:
        return self.activation(self.norm(self.linear(features)))


class Stack(nn.Module):
    """Several layers of `units` each."""

    def __init__(
        self, input_size: int, *, layers: int, units: int, activation: str = "silu", norm: str = "rms"
    ) -> None:
        super().__init__()
        if layers < 0 or units < 1:
            raise ConfigError(f"layers is {layers} and units is {units}: write layers from 0 and units from 1 on.")
        sizes = [input_size, *[units] * layers]
        self.layers = nn.ModuleList(
            Layer(before, after, activation=activation, norm=norm) for before, after in pairwise(sizes)
        )
        self.output_size = sizes[-1]

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.layers:
            features = layer(features)
        return features


class BlockLinear(nn.Module):
    """A linear layer whose matrix is block-diagonal: each of G blocks sees only its own part of the input.

    weight `[G, input_size / G, output_size / G]`. Initialization divides by the root of the whole input size, not of
    a block's, as danijar/dreamerv3 does (nets.py, `Initializer.compute_fans` of a kernel with three axes).
    """

    def __init__(self, input_size: int, output_size: int, *, blocks: int) -> None:
        super().__init__()
        if blocks < 1 or input_size % blocks or output_size % blocks:
            raise ConfigError(
                f"blocks is {blocks}, which does not divide {input_size} and {output_size}: write a divisor of both."
            )
        self.blocks = blocks
        self.weight = nn.Parameter(torch.empty(blocks, input_size // blocks, output_size // blocks))
        self.bias = nn.Parameter(torch.zeros(output_size))
        truncated_normal_(self.weight.data, fan_in=input_size)

    def forward(self, features: Tensor) -> Tensor:
        """`[N, input_size]` to `[N, output_size]`."""
        grouped = features.unflatten(-1, (self.blocks, -1)).transpose(0, 1)  # [G, N, input_size / G]
        return torch.bmm(grouped, self.weight).transpose(0, 1).flatten(1) + self.bias
