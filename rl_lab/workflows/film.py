"""Open-loop videos of a world model: what it reconstructs and what it predicts, beside what was there.

    row               0 ... c-1            c ... T-1
    real              what the environment showed
    reconstruction    the model observes every row
    open loop         it observes          it only gets the actions that were taken

Posterior and prior give their likeliest states, so a film leaves the random generators of a run alone.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from rl_lab.types import Batch, ConfigError
from rl_lab.workflows.base import Workflow, WorldModelWorkflow
from rl_lab.workflows.context import WorkflowContext

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
    """Whether a workflow has a model that can imagine and a decoder to show it with."""
    if not isinstance(workflow, WorldModelWorkflow):
        return False
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
    real["continue"] = (~rows["is_terminal"]).to(torch.float32)
    ends = rows["is_last"].to(torch.int64)
    real["is_over"] = ends.cumsum(dim=1) > ends
    return {"real": real, "reconstruction": reconstruction, "open_loop": open_loop}


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
