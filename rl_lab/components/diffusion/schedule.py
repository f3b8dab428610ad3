"""Noise that is added to plans of actions, and the two ways of taking it away again.

"Denoising Diffusion Probabilistic Models" (Ho et al. 2020, arXiv:2006.11239), the squared cosine schedule of "Improved
DDPM" (Nichol & Dhariwal 2021, arXiv:2102.09672) and "Denoising Diffusion Implicit Models" (Song et al. 2021,
arXiv:2010.02502), for networks that predict the noise, or the plan: either follows from the other.

    level k      -1        0         ...        K-1        the data are level -1
    kept         1         a_0                  a_K-1      alpha bar: how much of the data's variance is left
    noisy        x0        x_k = sqrt(a_k) x0 + sqrt(1 - a_k) noise

The squared error of the noise is a_k / (1 - a_k) times that of the plan: next to nothing at the levels where it is
decided which plan is made. Predicted plans are learnt alike at every level.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from rl_lab.kernels.door import fast_path
from rl_lab.types import ConfigError

MOST_NOISE = 0.999  # of one level: the last one of the cosine would take everything, and a division by 0 would follow
COSINE_OFFSET = 0.008  # keeps the first levels from adding next to nothing (arXiv:2102.09672, equation 17)


class SquaredCosineSchedule(nn.Module):
    """How noisy each of K levels is. Its numbers follow from K, so no checkpoint holds them."""

    kept: Tensor

    def __init__(self, *, levels: int = 100, predicts: Literal["noise", "plan"] = "noise") -> None:
        super().__init__()
        if levels < 1:
            raise ConfigError(f"noise schedule: levels is {levels}; write a whole number of at least 1, such as 100.")
        if predicts not in ("noise", "plan"):
            raise ConfigError(f"noise schedule: predicts is '{predicts}'; write noise or plan.")
        self.levels, self.predicts = levels, predicts
        signal = [
            math.cos((k / levels + COSINE_OFFSET) / (1 + COSINE_OFFSET) * math.pi / 2) ** 2 for k in range(levels)
        ]
        signal.append(0.0)
        added = [min(1.0 - after / before, MOST_NOISE) for before, after in pairwise(signal)]
        kept = torch.cumprod(1.0 - torch.tensor(added, dtype=torch.float64), dim=0)
        # A level before the first one, so that index k + 1 also reads level -1: the data.
        whole = torch.cat((torch.ones(1, dtype=torch.float64), kept))
        self.register_buffer("kept", whole.to(torch.float32), persistent=False)

    def kept_at(self, level: Tensor | int) -> Tensor:
        """Alpha bar of levels from -1 on, each broadcast over a plan: `[B]` to `[B, 1, 1]`, a number to a scalar."""
        kept = self.kept[level + 1]
        return kept.reshape(-1, 1, 1) if kept.dim() else kept

    def add_noise(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Clean plans `[B, T, A]` at levels `[B]`."""
        kept = self.kept_at(level)
        return kept.sqrt() * clean + (1.0 - kept).sqrt() * noise

    def target(self, clean: Tensor, noise: Tensor) -> Tensor:
        """What a denoiser learns to predict."""
        return noise if self.predicts == "noise" else clean

    def predicted_noise(self, noisy: Tensor, predicted: Tensor, level: int) -> Tensor:
        """The noise that a denoiser's prediction implies."""
        if self.predicts == "noise":
            return predicted
        kept = self.kept_at(level)
        return (noisy - kept.sqrt() * predicted) / (1.0 - kept).sqrt()

    def remove_noise(self, noisy: Tensor, noise: Tensor, level: int) -> Tensor:
        """The clean plan that the predicted noise implies, within the range of the data."""
        kept = self.kept_at(level)
        return ((noisy - (1.0 - kept).sqrt() * noise) / kept.sqrt()).clamp(-1.0, 1.0)


class _Sampler:
    """From noise to a plan over `steps` of the schedule's levels, spread evenly from 0 on."""

    def __init__(self, *, steps: int) -> None:
        if steps < 1:
            raise ConfigError(f"controllers.sampler.steps is {steps}: write a whole number of at least 1.")
        self.steps = steps

    def levels(self, schedule: SquaredCosineSchedule) -> list[tuple[int, int]]:
        """Pairs of a level and the one that follows it, the noisiest first; -1 is the data."""
        if self.steps > schedule.levels:
            raise ConfigError(
                f"controllers.sampler.steps is {self.steps}, but the schedule has {schedule.levels} levels: write at "
                f"most {schedule.levels}, or raise components.schedule.levels."
            )
        stride = schedule.levels // self.steps
        return [(number * stride, number * stride - stride if number else -1) for number in reversed(range(self.steps))]


class DDPMSampler(_Sampler):
    """Draws from the posterior q(x_after | x_level, x0) (arXiv:2006.11239, equations 6 and 7)."""

    def __init__(self, *, steps: int = 100) -> None:
        super().__init__(steps=steps)

    def step(self, schedule: SquaredCosineSchedule, noisy: Tensor, noise: Tensor, level: int, after: int) -> Tensor:
        """Noisy plans `[B, T, A]` and the noise predicted in them, to plans at the level `after`."""
        clean = schedule.remove_noise(noisy, noise, level)
        kept, kept_after = schedule.kept_at(level), schedule.kept_at(after)
        alpha = kept / kept_after  # of the levels in between, taken together
        mean = kept_after.sqrt() * (1.0 - alpha) / (1.0 - kept) * clean
        mean = mean + alpha.sqrt() * (1.0 - kept_after) / (1.0 - kept) * noisy
        if after < 0:
            return mean
        variance = (1.0 - kept_after) / (1.0 - kept) * (1.0 - alpha)
        return mean + variance.sqrt() * torch.randn_like(noisy)


class DDIMSampler(_Sampler):
    """Draws nothing after the first noise, so that few steps suffice (arXiv:2010.02502, equation 12 with sigma 0)."""

    def __init__(self, *, steps: int = 10) -> None:
        super().__init__(steps=steps)

    @fast_path("rl_lab.kernels.gpu:DDIM_STEP")
    def step(self, schedule: SquaredCosineSchedule, noisy: Tensor, noise: Tensor, level: int, after: int) -> Tensor:
        """Noisy plans `[B, T, A]` and the noise predicted in them, to plans at the level `after`."""
        clean, kept_after = schedule.remove_noise(noisy, noise, level), schedule.kept_at(after)
        return kept_after.sqrt() * clean + (1.0 - kept_after).sqrt() * noise
