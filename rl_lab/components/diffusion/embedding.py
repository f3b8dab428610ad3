"""What both denoisers share: how many numbers an action has, and how noisy a plan is."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rl_lab.types import ActionSpec, ConfigError

LONGEST_WAVE = 10_000.0  # "Attention Is All You Need" (2017), section 3.5


class LevelEmbedding(nn.Module):
    """A noise level as sines and cosines of wavelengths from 1 to 10,000, and two layers; or the waves alone."""

    frequencies: Tensor

    def __init__(self, size: int, *, has_layers: bool = True) -> None:
        super().__init__()
        if size < 4 or size % 2:
            raise ConfigError(f"denoiser: level_size is {size}; write an even number of at least 4, such as 128.")
        half = size // 2
        frequencies = torch.exp(torch.arange(half) * (-math.log(LONGEST_WAVE) / (half - 1)))
        self.register_buffer("frequencies", frequencies, persistent=False)
        layers = [nn.Linear(size, 4 * size), nn.Mish(), nn.Linear(4 * size, size)] if has_layers else []
        self.layers = nn.Sequential(*layers)

    def forward(self, level: Tensor) -> Tensor:
        """Levels `[B]` to `[B, size]`."""
        angle = level.unsqueeze(-1) * self.frequencies
        return self.layers(torch.cat((angle.sin(), angle.cos()), dim=-1))


def action_size(action: ActionSpec) -> int:
    """Numbers of one action; choices cannot be a little noisy."""
    if action.kind != "continuous":
        raise ConfigError(
            f"A denoiser plans continuous actions, but those of this environment are {action.kind}: write "
            "`algorithm=bc`, which takes any."
        )
    return action.sizes[0]
