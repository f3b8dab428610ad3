"""Open-loop videos of a world model: what it reconstructs and what it predicts, beside what was there.

    row               0 ... c-1            c ... T-1
    real              what the environment showed
    reconstruction    the model observes every row
    open loop         it observes          it only gets the actions that were taken

Posterior and prior give their likeliest states, so a film leaves the random generators of a run alone.

A model without states of its own (TD-MPC2) tells what it predicts and what its plans promise:

    reward, value     real: what came, and the return from there; the critics' mean at every row, and in the open loop
    planned reward    the rewards a plan promised for its H actions, and those that came in that time
    planned return    the same with what follows: the value at the plan's end, and the return that came
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from rl_lab.components.returns.returns import lambda_return
from rl_lab.types import Batch, ConfigError
from rl_lab.workflows.base import Workflow, WorldModelWorkflow
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.implicit_models import ImplicitModelWorkflow

Film = dict[str, Batch]
"""`real`, `reconstruction` and `open_loop`, each with observation keys `[B, T, ...]` and numbers `[B, T]`: reward,
continue and, of the two that the model makes, value. `real` also says where `is_over`: after an episode's last row."""

HEADS = {"reward": "reward_head", "continue": "continue_head", "value": "critic"}


class Dreaming(Protocol):
    """What is needed of a workflow; of HEADS, those it has are shown."""

    context: WorkflowContext
    encoder: Any
    dynamics: Any
    decoder: Any


def can_dream(workflow: Workflow) -> TypeGuard[Dreaming]:
    """Whether a workflow has a model that can imagine, and a decoder or predictions to show it with."""
    if not isinstance(workflow, WorldModelWorkflow):
        return False
    if isinstance(workflow, ImplicitModelWorkflow):
        return True
    methods = {"dynamics": ("observe", "imagine", "begin", "features"), "decoder": ("reconstruct",)}
    return hasattr(workflow, "encoder") and all(
        hasattr(getattr(workflow, part, None), method) for part, names in methods.items() for method in names
    )


def while_anybody_plays(rows: Batch, *, at_least: int) -> Batch:
    """The rows `[B, T]` up to the one in which the last of the first episodes ends, but `at_least` so many."""
    are_over = (rows["is_last"].cumsum(dim=1) > 0).all(dim=0)
    too_many = max(0, int(are_over.sum()) - 1)
    length = max(at_least, len(are_over) - too_many)
    return {key: values[:, :length] for key, values in rows.items()}


@torch.no_grad()
def make_film(workflow: Dreaming, rows: Batch, *, context: int) -> Film:
    """Rows `[B, T]` that begin with an episode; after `context` of them the open loop gets only the actions."""
    length = rows["reward"].shape[1]
    if not 1 <= context < length:
        raise ConfigError(f"context is {context}, but there are {length} rows: write a number from 1 to {length - 1}.")
    runtime, dynamics = workflow.context.runtime, workflow.dynamics
    rows = runtime.to_device(rows)
    if isinstance(workflow, ImplicitModelWorkflow):
        with runtime.autocast():
            return _tell(workflow, rows, context)
    with runtime.autocast():
        seen = _observe(workflow, rows)
        # Row c-1 is the last one seen: the action that answered it leads to row c.
        start = {key: values[:, context - 1] for key, values in seen.items()}
        taken = rows["action"][:, context - 1 :]
        dreamt, _ = dynamics.imagine(start, lambda _, step: taken[:, step], length - context, deterministic=True)
        joined = {
            key: torch.cat((values[:, :context], dreamt[key][:, 1:].to(values.dtype)), dim=1)
            for key, values in seen.items()
        }
        reconstruction, open_loop = (_show(workflow, dynamics.features(states)) for states in (seen, joined))
    real = {key: rows[key] for key in reconstruction if key in rows}
    return {"real": real | _ends(rows), "reconstruction": reconstruction, "open_loop": open_loop}


def _ends(rows: Batch) -> Batch:
    ends = rows["is_last"].to(torch.int64)
    return {"continue": (~rows["is_terminal"]).to(torch.float32), "is_over": ends.cumsum(dim=1) > ends}


def _observe(workflow: Dreaming, rows: Batch) -> Batch:
    """The likeliest states `[B, T, ...]` of a model that looks at every row."""
    dynamics = workflow.dynamics
    rows, state = dynamics.begin(rows)
    embeddings, outputs = workflow.encoder(rows), []
    for row in range(rows["is_first"].shape[1]):
        state, _ = dynamics.observe(
            embeddings[:, row], rows["previous_action"][:, row], state, rows["is_first"][:, row], deterministic=True
        )
        outputs.append(state)
    return {key: torch.stack([each[key] for each in outputs], dim=1) for key in state}


def _show(workflow: Dreaming, features: Tensor) -> Batch:
    """What states look like, and what they are worth."""
    heads = {name: getattr(workflow, head, None) for name, head in HEADS.items()}
    numbers = {name: head(features).mean() for name, head in heads.items() if head is not None}
    return {**workflow.decoder.reconstruct(features), **numbers}


# --- models without a decoder ------------------------------------------------------------------


def _tell(workflow: ImplicitModelWorkflow, rows: Batch, context: int) -> Film:
    """What a model without a decoder makes of rows `[B, T]`: predictions of rewards and values, and its plans.

    row t      0     1     ...      the reward of row t is what a_t-1 earned, predicted from the latent of row t-1
    """
    observed = {key: rows[key] for key in workflow.context.spec.observation}
    seen = workflow.encoder(observed)  # [B, T, Z]
    latents = list(seen[:, :context].unbind(dim=1))
    for action in rows["action"][:, context - 1 : -1].unbind(dim=1):
        latents.append(workflow.dynamics(latents[-1], action))
    views = {"reconstruction": seen, "open_loop": torch.stack(latents, dim=1)}
    film = {name: _numbers(workflow, latent, rows["action"]) for name, latent in views.items()}
    value = film["reconstruction"]["value"]
    steps = (rows["reward"], value, rows["is_last"], rows["is_terminal"])
    task = rows["task"][:, :1] if "task" in rows else None
    discount: Any = workflow.discount_at(task)  # a number, or of several tasks [B, 1]
    returns = lambda_return(*steps, discount=discount, lambda_=1.0)  # [B, T-1]; the film's end is bootstrapped
    real = {"reward": rows["reward"], "value": torch.cat((returns, value[:, -1:]), dim=1), **_ends(rows)}
    if "plan" in rows:
        film["reconstruction"] |= _promised(workflow, seen, rows["plan"], discount, rows.get("task"))
        horizon = rows["plan"].shape[2]
        came = [_later(rows["reward"], step + 1) * discount**step for step in range(horizon)]
        real |= {"planned reward": torch.stack(came).sum(dim=0), "planned return": real["value"]}
    return {"real": real, **film}


def _numbers(workflow: ImplicitModelWorkflow, latent: Tensor, action: Tensor) -> Batch:
    """What latents `[B, T, Z]` predict for the actions taken: numbers `[B, T]`."""
    reward = workflow.reward_head(latent, action).mean()
    numbers = {"reward": torch.cat((torch.zeros_like(reward[:, :1]), reward[:, :-1]), dim=1)}
    if workflow.continue_head is not None:
        numbers["continue"] = torch.sigmoid(workflow.continue_head(latent))
    return numbers | {"value": workflow.critic(latent, action).mean().mean(dim=0)}


def _promised(
    workflow: ImplicitModelWorkflow, latent: Tensor, plans: Tensor, discount: Any, task: Tensor | None
) -> Batch:
    """Of the plan made at each row, `[B, T, H, A]`: its discounted rewards, and these with the value at its end."""
    total = torch.zeros(latent.shape[:2], device=latent.device)
    for step, action in enumerate(plans.unbind(dim=2)):
        total = total + discount**step * workflow.reward_head(latent, action).mean()
        latent = workflow.dynamics(latent, action)
    value = workflow.critic(latent, workflow.policy_action(latent, task, sample=False)).mean().mean(dim=0)
    return {"planned reward": total, "planned return": total + discount ** plans.shape[2] * value}


def _later(values: Tensor, rows: int) -> Tensor:
    """Values `[B, T]` of so many rows later, 0 behind the film's end."""
    return torch.cat((values[:, rows:], torch.zeros_like(values[:, :rows])), dim=1)
