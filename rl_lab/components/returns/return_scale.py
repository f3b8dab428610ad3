"""How large returns are, so that one entropy scale suits every task.

arXiv:2301.04104, equation 7: advantages are divided by the range from the 5th to the 95th percentile of the imagined
returns, averaged over updates with decay 0.99, but never by less than 1: small returns are not blown up to noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rl_lab.types import ConfigError


class PercentileScale(nn.Module):
    """`update(returns)`, then divide by `scale()`. The statistics are buffers, saved with the policy.

    decay 1 never moves: everything is divided by `smallest_scale`.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        *,
        low_percentile: float = 5.0,
        high_percentile: float = 95.0,
        decay: float = 0.99,
        smallest_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if not 0.0 <= low_percentile < high_percentile <= 100.0 or not 0.0 <= decay <= 1.0 or smallest_scale <= 0.0:
            raise ConfigError(
                f"return scale: percentiles are {low_percentile} and {high_percentile}, decay is {decay} and "
                f"smallest_scale is {smallest_scale}; allowed is 0 <= low < high <= 100, 0 <= decay <= 1 and a "
                "smallest scale above 0. Write for example 5, 95, 0.99 and 1.0."
            )
        self.percentiles = (low_percentile, high_percentile)
        self.decay = decay
        self.smallest_scale = smallest_scale
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    @torch.no_grad()
    def update(self, returns: Tensor) -> None:
        """Move towards the percentiles of these returns, of any shape."""
        ordered = returns.detach().float().flatten().sort().values
        for running, percent in zip((self.low, self.high), self.percentiles, strict=True):
            running.lerp_(percentile(ordered, percent), 1.0 - self.decay)

    def scale(self) -> Tensor:
        """What to divide by: a number of at least `smallest_scale`."""
        return (self.high - self.low).clamp(min=self.smallest_scale)


def percentile(ordered: Tensor, percent: float) -> Tensor:
    """Of sorted numbers `[M]`, interpolated linearly. Its places are known beforehand, so a GPU need not wait."""
    position = percent / 100.0 * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], position - below)
