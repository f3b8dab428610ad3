"""The cross-entropy method: good sequences of actions are searched for by a score, and no policy is learnt."""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.components.planners.plan import Plan, Search, best_of, refuse_impossible_counts
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
        refuse_impossible_counts(candidates, best)
        if iterations < 1 or horizon < 1 or minimum_std < 0.0:
            raise ConfigError(
                f"planner: iterations is {iterations}, horizon is {horizon} and minimum_std is "
                f"{minimum_std}; allowed are whole numbers from 1 and a std from 0. Write for example 10, "
                "12 and 0.001."
            )
        self.candidates, self.best = candidates, best
        self.iterations, self.horizon = iterations, horizon
        self.minimum_std = minimum_std

    def plan(self, search: Search) -> Plan:
        """Searched for anew whatever was planned before: the mean of the last round's best. Proposals compete beside
        the candidates; exploring adds nothing, since workflows add noise of their own."""
        mean = search.blank(self.horizon)
        std = torch.ones_like(mean)
        for _ in range(self.iterations):
            plans = search.draw(mean, std, self.candidates)
            if search.proposals is not None:
                plans = torch.cat((search.proposals, plans), dim=1)
            best, _ = best_of(plans, search.score(plans), self.best)
            mean = best.mean(dim=1)
            std = best.std(dim=1, correction=0).clamp(min=self.minimum_std)
        return Plan(mean[:, 0], search.whole(mean, self.horizon), std)
