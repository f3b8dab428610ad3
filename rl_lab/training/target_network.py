"""A slow copy of a network, for targets that do not run away from themselves."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.types import ConfigError


class TargetNetwork(nn.Module):
    """A copy that learns nothing and follows: `slow_critic.follow(critic)` after each update.

    rate 1 with every 500 is a hard update now and then; rate 0.005 with every 1 is a soft one each time.
    """

    def __init__(self, module: nn.Module, *, rate: float = 1.0, every: int = 1) -> None:
        super().__init__()
        if not 0.0 < rate <= 1.0 or every < 1:
            raise ConfigError(
                f"target network: rate is {rate} and every is {every}; allowed is 0 < rate <= 1 and every >= 1. "
                "Write rate: 0.005, every: 1 (soft) or rate: 1.0, every: 500 (hard)."
            )
        self.module = copy.deepcopy(module).requires_grad_(False)
        self.rate = rate
        self.every = every
        self.calls = 0

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the copy says."""
        return self.module(*inputs, **named)

    @torch.no_grad()
    def follow(self, module: nn.Module) -> None:
        """Every `every`-th call, move towards `module` by `rate`; buffers are copied."""
        self.calls += 1
        if self.calls % self.every != 0:
            return
        ours: list[Tensor] = list(self.module.parameters())
        theirs: list[Tensor] = list(module.parameters())
        if self.rate == 1.0:
            torch._foreach_copy_(ours, theirs)
        else:
            torch._foreach_lerp_(ours, theirs, self.rate)
        for mine, other in zip(self.module.buffers(), module.buffers(), strict=True):
            mine.copy_(other)

    def get_extra_state(self) -> Tensor:
        """The count of calls travels in the state_dict, so that `every` survives a resume."""
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)
