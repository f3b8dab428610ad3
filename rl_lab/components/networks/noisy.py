"""Noisy linear layers (Fortunato et al. 2018, arXiv:1706.10295): exploration that is learnt.

    y = (W + W_std * f(e_out) f(e_in)^T) x + b + b_std * f(e_out),   f(e) = sign(e) sqrt(|e|),   e ~ N(0, 1)

Factorised Gaussian noise: one number per input and per output, drawn anew at every call from torch's generator, so that
nothing of it has to be saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INITIAL_STD = 0.5  # of the paper, divided by sqrt(inputs)


class NoisyLinear(nn.Linear):
    """A linear layer whose weights and biases have a learnt std. `is_noisy` False: their means alone."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__(input_size, output_size)
        bound = 1.0 / math.sqrt(input_size)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)
        self.weight_std = nn.Parameter(torch.full_like(self.weight, INITIAL_STD * bound))
        self.bias_std = nn.Parameter(torch.full_like(self.bias, INITIAL_STD * bound))
        self.is_noisy = True

    def forward(self, features: Tensor) -> Tensor:
        """`[..., input_size]` to `[..., output_size]`; all rows of a call share one noise."""
        if not self.is_noisy:
            return F.linear(features, self.weight, self.bias)
        of_inputs, of_outputs = _factor(self.weight[0]), _factor(self.bias)
        weight = torch.addcmul(self.weight, self.weight_std, torch.outer(of_outputs, of_inputs))
        return F.linear(features, weight, torch.addcmul(self.bias, self.bias_std, of_outputs))


def _factor(like: Tensor) -> Tensor:
    drawn = torch.randn_like(like)
    return drawn.sign() * drawn.abs().sqrt()


@contextmanager
def without_noise(module: nn.Module) -> Iterator[None]:
    """Inside, every noisy layer of `module` uses the means of its weights."""
    layers = [layer for layer in module.modules() if isinstance(layer, NoisyLinear) and layer.is_noisy]
    for layer in layers:
        layer.is_noisy = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_noisy = True
