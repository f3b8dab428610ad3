"""When TD-MPC2 plans by kernels of their own: what then runs is in `triton/plans.py` and `triton/elite.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_lab.kernels import gpu
from rl_lab.kernels.door import FastPath, find, is_unchanged

WORKFLOW = "rl_lab.workflows.implicit_models:ImplicitModelWorkflow"
MPPI = "rl_lab.components.planners.mppi:MPPIPlanner"
MOST_CANDIDATES = 1024  # that one program compares
WIDEST = 1024  # numbers of a layer that a program normalises


def fits_mlp(mlp: Any) -> bool:
    """Whether it has two hidden layers, of whole sixteens."""
    return (
        is_unchanged(mlp, f"{gpu.IMPLICIT}:NormedMLP", "forward")
        and len(mlp.weights) == 3
        and all(each.shape[1] % 16 == 0 and each.shape[1] <= WIDEST for each in mlp.weights[1:])
        and all(each.dtype is torch.float32 and each.is_contiguous() for each in mlp.parameters())
    )


def has_standard_model(workflow: Any, latent: Tensor, task: Tensor | None) -> bool:
    """Whether dynamics and policy are those the kernels know, of one task."""
    if not gpu.on_gpu(latent) or torch.is_grad_enabled() or task is not None or latent.dim() != 2:
        return False
    dynamics, actor = workflow.dynamics, workflow.actor
    return (
        is_unchanged(workflow, WORKFLOW, "policy_action", "masked", "discount_at")
        and is_unchanged(dynamics, f"{gpu.IMPLICIT}:LatentDynamics", "forward")
        and is_unchanged(actor, f"{gpu.IMPLICIT}:PolicyPrior", "forward")
        and fits_mlp(dynamics.mlp)
        and fits_mlp(actor.mlp)
        and dynamics.task_size == 0
        and latent.shape[-1] % 16 == 0
        and dynamics.mlp.simplex_size & (dynamics.mlp.simplex_size - 1) == 0
    )


def fits_scores(workflow: Any, latent: Tensor, task: Tensor | None) -> bool:
    if workflow.continue_head is not None or not has_standard_model(workflow, latent, task):
        return False
    reward, critic = workflow.reward_head, workflow.critic
    return (
        is_unchanged(workflow, WORKFLOW, "value_of_plans")
        and is_unchanged(reward, f"{gpu.IMPLICIT}:ImplicitReward", "forward")
        and is_unchanged(critic, f"{gpu.IMPLICIT}:CriticEnsemble", "value")
        and fits_mlp(reward.mlp)
        and fits_mlp(critic.mlp)
        and critic.members > 1
        and [each.shape[1:] for each in reward.mlp.weights] == [each.shape[1:] for each in critic.mlp.weights]
        and len(reward.bins) == len(critic.bins)  # so they are the same: bins are known from their count
    )


def fits_proposed_plans(workflow: Any, latent: Tensor, horizon: int, task: Tensor | None = None) -> bool:
    return has_standard_model(workflow, latent, task)


MODEL_FORMULAS = (
    *(f"{WORKFLOW}.{each}" for each in ("policy_action", "masked", "discount_at")),
    *(f"{gpu.IMPLICIT}:{each}.forward" for each in ("LatentDynamics", "PolicyPrior", "NormedMLP")),
    f"{gpu.DISTRIBUTIONS}:SquashedGaussian.sample",
    *(f"{gpu.DISTRIBUTIONS}:DiagonalGaussian.{each}" for each in ("sample", "draw")),
)
SCORES = FastPath(
    run=gpu.kernel("plans:scores"),
    fits=fits_scores,
    formulas=(
        f"{WORKFLOW}.scores",
        f"{WORKFLOW}.value_of_plans",
        *MODEL_FORMULAS,
        f"{gpu.IMPLICIT}:ImplicitReward.forward",
        f"{gpu.IMPLICIT}:CriticEnsemble.value",
        *(f"{gpu.TWO_HOT}:{each}.mean" for each in ("TwoHot", "SymlogTwoHot")),
    ),
    is_measured=False,
)
PROPOSED_PLANS = FastPath(
    run=gpu.kernel("plans:proposed_plans"),
    fits=fits_proposed_plans,
    formulas=(f"{WORKFLOW}.proposed_plans", *MODEL_FORMULAS),
    is_measured=False,
)


def fits_refit(planner: Any, plans: Tensor, scores: Tensor, least: Tensor | None) -> bool:
    return (
        gpu.on_gpu(plans)
        and least is None
        and plans.shape[1] <= MOST_CANDIDATES
        and plans.dtype is scores.dtype is torch.float32
        and not torch.is_grad_enabled()
        and is_unchanged(planner, MPPI, "weights", "bounded")
    )


def refit(planner: Any, plans: Tensor, scores: Tensor, least: Tensor | None) -> Any:
    """Bounds that change while a run goes on are left to the formula."""
    return find("rl_lab.components.planners.mppi:Elite")(*gpu.kernel("elite:refit")(planner, plans, scores))


REFIT = FastPath(
    run=refit,
    fits=fits_refit,
    formulas=(f"{MPPI}.refit", f"{MPPI}.weights", f"{MPPI}.bounded", "rl_lab.components.planners.plan:best_of"),
    is_measured=False,
)
