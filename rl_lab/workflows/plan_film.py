"""Films of plans: what was done so far, the plan that is being followed, and how it came out of noise."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import torch

from rl_lab.types import Batch, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, Workflow
from rl_lab.workflows.diffusion_policy import Planned


class Planning(Protocol):
    """What is needed of a workflow."""

    first_executed: int
    after_executed: int

    def follow_plan(self, time_step: TimeStep, state: Any) -> Planned: ...


def makes_plans(workflow: Workflow) -> TypeGuard[Planning]:
    """Whether a workflow follows plans that can be shown."""
    return hasattr(workflow, "follow_plan")


class PlanWatcher:
    """A policy that notes the plans it follows, for the first environments of a vector."""

    def __init__(self, workflow: Planning, sequences: int) -> None:
        self.workflow, self.sequences = workflow, sequences
        self._newest: torch.Tensor | None = None  # how the plans under way came out of noise, [N, iterations + 1, T, A]
        self._kept: list[Batch] = []

    def __call__(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        planned = self.workflow.follow_plan(time_step, state)
        if planned.iterations is not None:
            if self._newest is None:
                self._newest = planned.iterations.new_zeros(time_step.num_envs, *planned.iterations.shape[1:])
            self._newest = self._newest.index_copy(0, planned.rows, planned.iterations)
        assert self._newest is not None, "the first answer makes plans"
        place = planned.step.state["next"] - 1
        self._kept.append({"iterations": self._newest[: self.sequences], "place": place[: self.sequences]})
        return planned.step

    def film(self, rows: Batch) -> Batch:
        """With the rows `[B, T]` that were played: `iterations [B, T, iterations + 1, steps, A]` of the plan followed
        in each row, `place [B, T]` of the action taken in it, `action [B, T, A]` and `is_over [B, T]`."""
        shown = {key: torch.stack([each[key] for each in self._kept], dim=1) for key in self._kept[0]}
        length = rows["action"].shape[1]
        ends = rows["is_last"][: self.sequences].to(torch.int64)
        is_over = ends.cumsum(dim=1) > 0  # no action is taken in the last row of an episode
        return {
            **{key: values[:, :length] for key, values in shown.items()},
            "action": rows["action"],
            "is_over": is_over,
        }
