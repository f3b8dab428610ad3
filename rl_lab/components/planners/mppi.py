"""Model predictive path integral control: plans are weighted by how good they are, not only chosen or left."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_lab.components.planners.plan import Plan, Search, best_of, one_step_later, refuse_impossible_counts
from rl_lab.kernels.door import fast_path
from rl_lab.types import ConfigError


class Elite(NamedTuple):
    """The best plans of one iteration."""

    plans: Tensor  # [N, best, H, A], the best one first
    weights: Tensor  # [N, best]
    mean: Tensor  # [N, H, A]
    std: Tensor  # [N, H, A], within bounds


class MPPIPlanner(nn.Module):
    """MPPI as TD-MPC2 has it (Hansen et al. 2024, arXiv:2310.16828, section 3.2; Williams et al. 2015).

    Each iteration, with J the score of a plan and E the best of them:

        weight_i = exp(temperature * (J_i - max J)) / sum over E
        mean     = sum_E weight_i * plan_i               std = sqrt(sum_E weight_i * (plan_i - mean)^2), within bounds

    With `momentum` (the first TD-MPC) the mean keeps that part of what it was.
    The action is the first one of a plan drawn from E by its weight; exploring adds noise of that step's std. The
    search begins with the mean of one agent step ago, moved on by that step. It learns nothing and draws from torch's
    generator of the device.
    """

    def __init__(
        self,
        *,
        candidates: int = 512,
        best: int = 64,
        iterations: int = 6,
        horizon: int = 3,
        temperature: float = 0.5,
        minimum_std: float = 0.05,
        maximum_std: float = 2.0,
        momentum: float = 0.0,
    ) -> None:
        super().__init__()
        refuse_impossible_counts(candidates, best)
        if iterations < 1 or horizon < 1 or temperature < 0.0 or not 0.0 < minimum_std <= maximum_std:
            raise ConfigError(
                f"planner: iterations is {iterations}, horizon is {horizon}, temperature is {temperature} and std goes "
                f"from {minimum_std} to {maximum_std}; allowed are whole numbers from 1, a temperature from 0 and "
                "0 < minimum_std <= maximum_std. Write for example 6, 3, 0.5, 0.05 and 2.0."
            )
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(f"planner: momentum is {momentum}; write a number from 0 to below 1, such as 0.1.")
        self.candidates, self.best, self.momentum = candidates, best, momentum
        self.iterations, self.horizon = iterations, horizon
        self.temperature = temperature
        self.minimum_std, self.maximum_std = minimum_std, maximum_std

    def plan(self, search: Search) -> Plan:
        """Proposals take the places of as many candidates."""
        blank = search.blank(self.horizon)
        mean = blank if search.previous is None else one_step_later(search.previous)[:, : blank.shape[1]]
        std = torch.full_like(blank, self.maximum_std)
        proposed = blank.unsqueeze(1)[:, :0] if search.proposals is None else search.proposals
        for _ in range(self.iterations):
            drawn = search.draw(mean, std, self.candidates - proposed.shape[1])
            plans = torch.cat((proposed, drawn), dim=1)
            elite = self.refit(plans, search.score(plans), search.minimum_std)
            mean = elite.mean.lerp(mean, self.momentum) if self.momentum else elite.mean
            std = elite.std
        action = draw_by_weight(elite.plans, elite.weights)[:, 0]
        if search.explore:
            noise = torch.randn_like(action) if search.mask is None else torch.randn_like(action) * search.mask
            action = torch.addcmul(action, std[:, 0], noise).clamp(-1.0, 1.0)
        return Plan(action, search.whole(mean, self.horizon), std)

    @fast_path("rl_lab.kernels.gpu_plans:REFIT")
    def refit(self, plans: Tensor, scores: Tensor, least: Tensor | None) -> Elite:
        """The best of plans `[N, C, H, A]` with scores `[N, C]`."""
        best, scores = best_of(plans, scores.nan_to_num(0.0), self.best)
        weights = self.weights(scores)
        each = weights[:, :, None, None]
        mean = (each * best).sum(dim=1)
        spread = (each * (best - mean.unsqueeze(1)).square()).sum(dim=1).sqrt()
        return Elite(best, weights, mean, self.bounded(spread, least))

    def bounded(self, std: Tensor, least: Tensor | None) -> Tensor:
        if least is None:
            return std.clamp(self.minimum_std, self.maximum_std)
        return torch.maximum(std, least).clamp(max=self.maximum_std)

    def weights(self, scores: Tensor) -> Tensor:
        """Of the best plans' scores `[N, best]`; they sum to 1."""
        return torch.softmax(self.temperature * scores, dim=1)


def draw_by_weight(plans: Tensor, weights: Tensor) -> Tensor:
    """One of the plans `[N, E, H, A]` for each row, with probabilities `[N, E]`: `[N, H, A]`."""
    noise = torch.empty_like(weights).exponential_()  # argmax(log w - log e), e ~ Exp(1), is such a draw
    chosen = (weights.log() - noise.log()).argmax(dim=1)
    return plans[torch.arange(len(plans), device=plans.device), chosen]
