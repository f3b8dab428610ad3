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
    """Whether it has two hidden layers, of whole eighths."""
    return (
        is_unchanged(mlp, f"{gpu.IMPLICIT}:NormedMLP", "forward")
        and len(mlp.weights) == 3
        and all(each.shape[1] % 8 == 0 and each.shape[1] <= WIDEST for each in mlp.weights[1:])
        and all(each.dtype is torch.float32 for each in mlp.weights)
    )


def fits_scores(workflow: Any, latent: Tensor, task: Tensor | None) -> bool:
    if not gpu.on_gpu(latent) or torch.is_grad_enabled() or task is not None or workflow.continue_head is not None:
        return False
    parts = {
        "LatentDynamics": (workflow.dynamics, "forward"),
        "ImplicitReward": (workflow.reward_head, "forward"),
        "PolicyPrior": (workflow.actor, "forward"),
        "CriticEnsemble": (workflow.critic, "value"),
    }
    if not is_unchanged(workflow, WORKFLOW, "value_of_plans", "policy_action", "masked", "discount_at") or not all(
        is_unchanged(part, f"{gpu.IMPLICIT}:{name}", method) and fits_mlp(part.mlp)
        for name, (part, method) in parts.items()
    ):
        return False
    reward, critic, simplex = workflow.reward_head, workflow.critic, workflow.dynamics.mlp.simplex_size
    return (
        workflow.dynamics.task_size == 0
        and latent.shape[-1] % 8 == 0
        and simplex & (simplex - 1) == 0
        and critic.members > 1
        and [each.shape[1:] for each in reward.mlp.weights] == [each.shape[1:] for each in critic.mlp.weights]
        and len(reward.bins) == len(critic.bins)  # so they are the same: bins are known from their count
    )


SCORES = FastPath(
    run=gpu.kernel("plans:scores"),
    fits=fits_scores,
    formulas=(
        f"{WORKFLOW}.scores",
        *(f"{WORKFLOW}.{each}" for each in ("value_of_plans", "policy_action", "masked", "discount_at")),
        *(
            f"{gpu.IMPLICIT}:{each}.forward"
            for each in ("LatentDynamics", "ImplicitReward", "PolicyPrior", "NormedMLP")
        ),
        f"{gpu.IMPLICIT}:CriticEnsemble.value",
        *(f"{gpu.TWO_HOT}:{each}.mean" for each in ("TwoHot", "SymlogTwoHot")),
        f"{gpu.DISTRIBUTIONS}:SquashedGaussian.sample",
        *(f"{gpu.DISTRIBUTIONS}:DiagonalGaussian.{each}" for each in ("sample", "draw")),
    ),
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
)
