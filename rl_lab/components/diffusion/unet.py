"""A U-Net over the actions of a plan, each of its blocks scaled and shifted by what was observed (FiLM).

The convolutional denoiser of "Diffusion Policy" (Chi et al. 2023, arXiv:2303.04137), after "Planning with Diffusion for
Flexible Behavior Synthesis" (Janner et al. 2022, arXiv:2205.09991).

    T       plan ── 2 blocks ── halve                                          double ── layer ── noise
    T/2                            2 blocks ──┬── halve            double ── 2 blocks
    T/4                                       │      2 blocks ──┬── 2 blocks
                                              └─────────────────│──────────── joined at T/2
                                                                └──────────── joined at T/4
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from rl_lab.components.diffusion.embedding import LevelEmbedding, action_size
from rl_lab.kernels.door import fast_path
from rl_lab.types import ActionSpec, ConfigError


class ConditionalUNet(nn.Module):
    """Predicts the noise in plans of actions, from how noisy they are and the newest observations' features."""

    def __init__(
        self,
        *,
        input_size: int,
        action: ActionSpec,
        observation_steps: int = 2,
        prediction_steps: int = 16,
        channels: Sequence[int] = (256, 512, 1024),
        kernel_size: int = 5,
        groups: int = 8,
        level_size: int = 256,
    ) -> None:
        super().__init__()
        _check(channels, kernel_size, groups, prediction_steps)
        condition = level_size + observation_steps * input_size
        self.level = LevelEmbedding(level_size)

        def pair(before: int, after: int) -> nn.ModuleList:
            settings = {"condition": condition, "kernel_size": kernel_size, "groups": groups}
            return nn.ModuleList([FiLMBlock(before, after, **settings), FiLMBlock(after, after, **settings)])

        actions, widths = action_size(action), list(channels)
        self.down = nn.ModuleList(pair(before, after) for before, after in pairwise([actions, *widths]))
        self.shorten = nn.ModuleList(nn.Conv1d(width, width, 3, stride=2, padding=1) for width in widths[:-1])
        self.middle = pair(widths[-1], widths[-1])
        self.up = nn.ModuleList(pair(2 * before, after) for before, after in pairwise(reversed(widths)))
        self.lengthen = nn.ModuleList(
            nn.ConvTranspose1d(width, width, 4, stride=2, padding=1) for width in widths[-2::-1]
        )
        self.last = convolution(widths[0], widths[0], kernel_size, groups)
        self.output = nn.Conv1d(widths[0], actions, 1)

    @fast_path("rl_lab.kernels.gpu:UNET_FORWARD")
    def forward(self, plan: Tensor, level: Tensor, features: Tensor) -> Tensor:
        """Plans `[B, T, A]`, their levels `[B]` and features `[B, observation_steps, F]` to noise `[B, T, A]`."""
        condition = torch.cat((self.level(level), features.flatten(1)), dim=-1)
        hidden, skips = plan.transpose(1, 2), []  # convolutions go over the last axis
        for depth, blocks in enumerate(self.down):
            for block in blocks:  # type: ignore[attr-defined]
                hidden = block(hidden, condition)
            skips.append(hidden)
            if depth < len(self.shorten):
                hidden = self.shorten[depth](hidden)
        for block in self.middle:
            hidden = block(hidden, condition)
        for blocks, lengthen in zip(self.up, self.lengthen, strict=True):
            hidden = torch.cat((hidden, skips.pop()), dim=1)
            for block in blocks:  # type: ignore[attr-defined]
                hidden = block(hidden, condition)
            hidden = lengthen(hidden)
        return self.output(self.last(hidden)).transpose(1, 2)


class FiLMBlock(nn.Module):
    """Two convolutions with a residual; between them the condition scales and shifts every channel.

    "FiLM: Visual Reasoning with a General Conditioning Layer" (Perez et al. 2018, arXiv:1709.07871)
    """

    def __init__(self, before: int, after: int, *, condition: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.first = convolution(before, after, kernel_size, groups)
        self.film = nn.Sequential(nn.Mish(), nn.Linear(condition, 2 * after))
        self.second = convolution(after, after, kernel_size, groups)
        self.residual = nn.Conv1d(before, after, 1) if before != after else nn.Identity()

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        """`[B, before, T]` and `[B, condition]` to `[B, after, T]`."""
        scale, shift = self.film(condition).unsqueeze(-1).chunk(2, dim=1)
        return self.second(scale * self.first(hidden) + shift) + self.residual(hidden)


def convolution(before: int, after: int, kernel_size: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(before, after, kernel_size, padding=kernel_size // 2), nn.GroupNorm(groups, after), nn.Mish()
    )


def _check(channels: Sequence[int], kernel_size: int, groups: int, prediction_steps: int) -> None:
    if len(channels) < 2 or any(width < 1 or width % groups for width in channels):
        raise ConfigError(
            f"U-Net: channels is {list(channels)}; write at least two widths that groups ({groups}) divides, such as "
            "[256, 512, 1024]."
        )
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ConfigError(f"U-Net: kernel_size is {kernel_size}; write an odd number, such as 5.")
    halvings = 2 ** (len(channels) - 1)
    if prediction_steps % halvings:
        raise ConfigError(
            f"U-Net: prediction_steps is {prediction_steps}, but with {len(channels)} channels a plan is halved "
            f"{len(channels) - 1} times: write a multiple of {halvings}, or fewer channels."
        )
