"""Planning in the states of a recurrent model: a planner knows how plans are scored, and nothing of those states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from rl_lab.components.planners.plan import Plan, Search
from rl_lab.types import Batch
from rl_lab.workflows.base import Mode
from rl_lab.workflows.context import WorkflowContext

PLAN = "previous plan"  # beside a state, where a search goes on from


class Planner(Protocol):
    horizon: int
    plan: Callable[[Search], Plan]


class Planning(Protocol):
    """What is needed of a workflow."""

    context: WorkflowContext
    dynamics: Any
    planner: Planner | None
    exploration_noise: float

    def planned_return(self, features: Tensor) -> Tensor:
        """What plans promise `[N*C]` that lead through features `[N*C, H, F]`."""


def plan_before(before: Batch, is_first: Tensor) -> Batch:
    """The plan `[N, H, A]` of one agent step ago, zeros where an episode begins; none in older checkpoints."""
    return {PLAN: before["plan"].masked_fill(is_first[:, None, None], 0.0)} if "plan" in before else {}


def search_plans(workflow: Planning, batch: Batch, *, mode: Mode) -> Plan:
    """Plans from states `[N, ...]` and, if it is among them, the plan before."""
    assert workflow.planner is not None
    state = {key: value for key, value in batch.items() if key != PLAN}
    some_part = next(iter(state.values()))
    (size,) = workflow.context.spec.action.shape

    def score(plans: Tensor) -> Tensor:
        starts = {key: value.repeat_interleave(plans.shape[1], dim=0) for key, value in state.items()}
        steps = plans.flatten(0, 1).unbind(dim=1)
        states, _ = workflow.dynamics.imagine(starts, lambda seen, step: steps[step], len(steps))
        features = workflow.dynamics.features({key: value[:, 1:] for key, value in states.items()})
        return workflow.planned_return(features).view(plans.shape[:2])

    explores = mode == "train" and not workflow.exploration_noise  # where a workflow adds noise of its own, no more
    numbers = len(some_part), size, some_part.device
    return workflow.planner.plan(Search(score, *numbers, previous=batch.get(PLAN), explore=explores))
