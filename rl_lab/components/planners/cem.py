"""Planning: good sequences of actions are searched for by a score, and no policy is learnt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rl_lab.types import ConfigError


class CEMPlanner(nn.Module):
    """The cross-entropy method (algorithm 2 of PlaNet, arXiv:1811.04551): draw plans, keep the best, draw around them.

    Each action of the plan is drawn from a normal, at first standard; after every iteration it is fitted to the best
    candidates. Actions lie in [-1, 1]. It learns nothing and draws from torch's generator of the device.
    """

    def __init__(
        self,
        *,
        candidates: int = 1000,
        best: int = 100,
        iterations: int = 10,
        horizon: int = 12,
        minimum_std: float = 1e-3,
    ) -> None:
        super().__init__()
        if not 1 <= best <= candidates:
            raise ConfigError(
                f"planner: best is {best} of {candidates} candidates; write 1 <= best <= candidates, such as 100 "
                "of 1000."
            )
        if iterations < 1 or horizon < 1 or minimum_std < 0.0:
            raise ConfigError(
                f"planner: iterations is {iterations}, horizon is {horizon} and minimum_std is "
                f"{minimum_std}; allowed are whole numbers from 1 and a std from 0. Write for example 10, "
                "12 and 0.001."
            )
        self.candidates, self.best = candidates, best
        self.iterations, self.horizon = iterations, horizon
        self.minimum_std = minimum_std

    def plan(self, score: Callable[[Tensor], Tensor], *, count: int, action_size: int, device: torch.device) -> Tensor:
        """`count` plans at once: the mean of the last iteration's best, `[N, H, A]`.

        `score` rates plans `[N, candidates, H, A]` by numbers `[N, candidates]`, larger being better.
        """
        mean = torch.zeros(count, self.horizon, action_size, device=device)
        std = torch.ones_like(mean)
        for _ in range(self.iterations):
            noise = torch.randn(count, self.candidates, self.horizon, action_size, device=device)
            plans = torch.addcmul(mean.unsqueeze(1), std.unsqueeze(1), noise).clamp(-1.0, 1.0)
            chosen = score(plans).topk(self.best, dim=1, sorted=False).indices  # [N, best]
            best = plans.gather(1, chosen[:, :, None, None].expand(-1, -1, *plans.shape[2:]))
            mean = best.mean(dim=1)
            std = best.std(dim=1, correction=0).clamp(min=self.minimum_std)
        return mean
