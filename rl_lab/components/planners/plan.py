"""What every planner takes and answers with: `planner.plan(search) -> Plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.types import ConfigError


@dataclass(frozen=True)
class Search:
    """What to plan for: N environments at once. All a planner knows of a model is how it scores plans."""

    score: Callable[[Tensor], Tensor]  # plans [N, C, H, A] to numbers [N, C], larger being better
    count: int  # N
    action_size: int  # A
    device: torch.device
    previous: Tensor | None = None  # the mean [N, H, A] of the plan made one agent step ago, zeros where there was none
    proposals: Tensor | None = (
        None  # plans [N, P, H, A] from elsewhere, such as a policy, that compete with those drawn
    )
    explore: bool = False  # whether the action may be noisy, as while collecting
    mask: Tensor | None = None  # of several tasks, 1 for the action numbers [N, A] that a row's own takes, else 0

    horizon: int | None = None  # actions of these plans; None: as many as the planner's have, and never more
    minimum_std: Tensor | None = None  # in the place of the planner's own

    def blank(self, horizon: int) -> Tensor:
        """No plan yet, `[N, H, A]`."""
        return torch.zeros(self.count, self.horizon or horizon, self.action_size, device=self.device)

    def whole(self, plan: Tensor, horizon: int) -> Tensor:
        """A plan `[N, H, A]` with zeros for the actions that were not planned yet."""
        return F.pad(plan, (0, 0, 0, horizon - plan.shape[1])) if horizon > plan.shape[1] else plan

    def draw(self, mean: Tensor, std: Tensor, count: int) -> Tensor:
        """`count` plans `[N, count, H, A]` around a mean `[N, H, A]`, with 0 where a task takes no number."""
        plans = draw_plans(mean, std, count)
        return plans if self.mask is None else plans * self.mask[:, None, None]


class Plan(NamedTuple):
    """N plans at once."""

    action: Tensor  # [N, A], what to do now
    mean: Tensor  # [N, H, A], around which the last plans were drawn; what the next search may begin with
    std: Tensor  # [N, H, A]


def one_step_later(previous: Tensor) -> Tensor:
    """A plan `[N, H, A]` after its first action was taken: the rest of it, and zeros for the new last step."""
    return torch.cat((previous[:, 1:], torch.zeros_like(previous[:, :1])), dim=1)


def best_of(plans: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of plans `[N, C, H, A]` the `count` with the highest scores, and these `[N, count]`."""
    chosen = scores.topk(count, dim=1)
    return plans.gather(1, chosen.indices[:, :, None, None].expand(-1, -1, *plans.shape[2:])), chosen.values


def draw_plans(mean: Tensor, std: Tensor, count: int) -> Tensor:
    """`count` plans `[N, count, H, A]` around a mean `[N, H, A]`, with actions in [-1, 1]."""
    noise = torch.randn(mean.shape[0], count, *mean.shape[1:], device=mean.device)
    return torch.addcmul(mean.unsqueeze(1), std.unsqueeze(1), noise).clamp(-1.0, 1.0)


def refuse_impossible_counts(candidates: int, best: int) -> None:
    if not 1 <= best <= candidates:
        raise ConfigError(
            f"planner: best is {best} of {candidates} candidates; write 1 <= best <= candidates, such as 64 of 512."
        )
