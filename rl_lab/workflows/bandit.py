"""Multi-armed bandits: a probe of exploration whose right answers are known.

An episode is one bandit. What a strategy learns about its arms is the policy's state: it begins anew with every
is_first row, takes in the reward that arrives with each other row, and is saved and restored as a memory is.

    row        0          1                2
    reward     -          of arm 0         of arm 1       each row brings the reward of the last arm
    arm        0          1                2              chosen from all rewards so far
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_lab.types import Batch, CollectResult, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, Workflow
from rl_lab.workflows.context import WorkflowContext

TRUTH = "arm_means"  # the observation that says what every arm is worth; only the measurement of regret reads it


class Strategy(Protocol):
    def initial(self, num_bandits: int, *, device: torch.device) -> Batch:
        """What is known before the first pull: tensors with leading axis N."""

    def learn(self, statistics: Batch, arm: Tensor, reward: Tensor) -> Batch:
        """The statistics after pulling `arm` `[N]` and getting `reward` `[N]`; what was handed in stays as it is."""

    def choose(self, statistics: Batch) -> Tensor:
        """The arm to pull, `[N]`."""


class Bandit(Workflow):
    """Explores in evaluation as in training: a bandit policy is its way of learning. It has no update hooks."""

    not_exportable = "it learns from the reward of every pull while it acts"

    def __init__(self) -> None:
        self._tally: Tensor | None = None  # pulls, pulls of the best arm, regret: of the collection under way

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        self.strategy: Strategy = context.components.require("strategy", Strategy)

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        fresh = self.strategy.initial(time_step.num_envs, device=time_step.reward.device)
        statistics = fresh
        if state is not None:
            learnt = self.strategy.learn(state["statistics"], state["arm"], time_step.reward)
            statistics = {name: _where(time_step.is_first, fresh[name], value) for name, value in learnt.items()}
        arm = self.strategy.choose(statistics)
        if mode == "train" and TRUTH in time_step.observation:
            self._count(time_step, arm)
        return PolicyStep(arm, {"statistics": statistics, "arm": arm})

    def collect_step(self, step: int, *, phase: Phase) -> CollectResult:
        """The shared collection, and how good its pulls were; both figures need an environment that tells."""
        self._tally = None
        result = super().collect_step(step, phase=phase)
        if self._tally is None:
            return result
        pulls, best, regret = self._tally.unbind()
        quality = {"collect/optimal_arm_rate": best / pulls, "collect/regret_mean": regret / pulls}
        return replace(result, metrics={**result.metrics, **quality})

    def _count(self, time_step: TimeStep, arm: Tensor) -> None:
        """Add this row's pulls; an is_last row's answer pulls nothing."""
        means = time_step.observation[TRUTH]
        regret = means.amax(1) - means.gather(1, arm.unsqueeze(1)).squeeze(1)  # [N], 0 for each of equally good arms
        pulls = (~time_step.is_last).to(regret.dtype)
        tally = torch.stack([pulls.sum(), (pulls * (regret == 0)).sum(), (pulls * regret).sum()])
        self._tally = tally if self._tally is None else self._tally + tally


def _where(is_first: Tensor, fresh: Tensor, learnt: Tensor) -> Tensor:
    return torch.where(is_first.view(-1, *[1] * (fresh.dim() - 1)), fresh, learnt)
