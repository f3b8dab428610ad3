"""The loss of PPO for small networks on a CPU: the clipped surrogate, the squared error of the value, the entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.kernels.cpu_mlp import (
    ByOutput,
    Networks,
    Scales,
    bring_gradients,
    differentiate,
    forward,
    learns_from,
    plain_mlp,
)
from rl_lab.kernels.door import FastPath, is_unchanged, takes_gradients
from rl_lab.kernels.formulas import ENCODER, HEADS, MLP, STEP, reads_one_vector
from rl_lab.types import LossOutput

_PPO = "rl_lab.workflows.ppo:PPO"
_PPO_TERMS = ("policy", "value", "entropy")


def _ppo_loss(
    actor: Any,
    critic: Any,
    features: Tensor,
    sample: dict[str, Tensor],
    *,
    critic_features: Tensor | None = None,
    clip_range: float,
    value_clip_range: float | None = None,
) -> dict[str, Tensor]:
    """For discrete actions, all of them allowed, from samples that all count; one encoder; an unclipped value."""
    if critic_features is not None or value_clip_range is not None or "valid" in sample or "action_mask" in sample:
        return NotImplemented
    modules = _actor_and_critic(actor, critic) if features.dim() == 2 and learns_from(features) else None
    if modules is None:
        return NotImplemented
    terms, log_prob = differentiate(modules, features, lambda outputs: _surrogate(outputs, sample, clip_range))
    return {**dict(zip(_PPO_TERMS, terms, strict=True)), "log_prob": torch.from_numpy(log_prob)}


def _ppo_step_loss(
    workflow: Any,
    sample: dict[str, Tensor],
    *,
    clip_range: float,
    value_clip_range: float | None,
    with_metrics: bool = True,
) -> LossOutput:
    """Where `ppo_loss` has a fast version and nothing but actor and critic learns. The result brings the gradients of
    both with it: no graph is made."""
    if not takes_gradients() or value_clip_range is not None or "valid" in sample or "action_mask" in sample:
        return NotImplemented
    modules = _ppo_parts(workflow)
    if modules is None:
        return NotImplemented
    features = workflow.features(sample)[0]
    if features.requires_grad or features.dim() != 2 or not learns_from(features):
        return NotImplemented
    rows = features.numpy()
    reached = [forward(each.members[0], rows) for each in modules]
    numbers, by_output, log_prob = _surrogate([each[-1] for each in reached], sample, clip_range)
    terms = dict(zip(_PPO_TERMS, map(torch.scalar_tensor, numbers), strict=True))
    metrics = {}
    if with_metrics:
        metrics = workflow.loss_metrics(terms, torch.from_numpy(log_prob), sample, clip_range)
    return LossOutput(terms, metrics, {}, bring_gradients(modules, reached, _PPO_TERMS, by_output))


def _surrogate(
    outputs: list[np.ndarray], sample: dict[str, Tensor], clip_range: float
) -> tuple[list[float], Callable[[Scales], ByOutput], np.ndarray]:
    """PPO's loss of the logits `[M, A]` and the value `[M, 1]`, and the log-probability `[M]` of the actions.

    d policy / d logit_k = -A r / M (1[k = action] - p_k) where r A is the lesser of the two, else 0
    d value / d V = 2 (V - R) / M;   d entropy / d logit_k = p_k (log p_k + H) / M, of the negated mean entropy
    """
    logits, value = np.ascontiguousarray(outputs[0].T), outputs[1][:, 0]  # [A, M]: sums over a few rows are fast
    count, advantage = len(value), sample["advantage"].numpy()
    per_row, chosen = np.float32(1.0 / count), sample["action"].numpy() * count + np.arange(count)
    logits -= np.maximum.reduce(logits)
    probs = np.exp(logits)
    total = np.add.reduce(probs)
    probs /= total
    log_probs = logits - np.log(total)
    log_prob = log_probs.take(chosen)
    ratio = np.exp(log_prob - sample["log_prob"].numpy())
    unclipped = ratio * advantage
    clipped = np.minimum(np.maximum(ratio, 1.0 - clip_range), 1.0 + clip_range) * advantage
    entropy = -np.add.reduce(probs * log_probs)
    error = value - sample["return"].numpy()

    def by_output(scales: Scales) -> ByOutput:
        policy, squared, negated_entropy = scales
        by_logits = by_value = None
        if policy is not None:
            d_log_prob = unclipped * (unclipped <= clipped)
            d_log_prob *= np.float32(-policy) * per_row
            by_logits = probs * -d_log_prob
            by_logits.reshape(-1)[chosen] += d_log_prob
        if negated_entropy is not None:
            d_entropy = (log_probs + entropy) * probs
            d_entropy *= np.float32(negated_entropy) * per_row
            by_logits = d_entropy if by_logits is None else by_logits + d_entropy
        if squared is not None:
            by_value = (error * (np.float32(2.0 * squared) * per_row))[:, None]
        return None if by_logits is None else by_logits.T, by_value

    sums = -np.add.reduce(np.minimum(unclipped, clipped)), error @ error, -np.add.reduce(entropy)
    return [float(each * per_row) for each in sums], by_output, log_prob


def _ppo_parts(workflow: Any) -> list[Networks] | None:
    """Actor and critic, where they are all that learns and the gradients of their loss reach them."""
    if not is_unchanged(workflow, _PPO, "loss", "gradient_step"):
        return None
    if not is_unchanged(workflow.optimizer, "rl_lab.training.optimizer:Optimizer", "apply"):
        return None
    if not reads_one_vector(workflow.encoder) or workflow.memory is not None or workflow.critic_encoder is not None:
        return None
    return _actor_and_critic(workflow.actor, workflow.critic)


def _actor_and_critic(actor: Any, critic: Any) -> list[Networks] | None:
    home = f"{HEADS}actor_critic:"
    if not is_unchanged(actor, f"{home}Actor", "forward", "distribution") or vars(actor)["kind"] != "discrete":
        return None
    if not is_unchanged(critic, f"{home}Critic", "forward"):
        return None
    found = [plain_mlp(vars(each)["_modules"]["network"]) for each in (actor, critic)]
    return None if None in found else found  # type: ignore[return-value]


_SURROGATE = (
    "rl_lab.workflows.ppo:ppo_loss",
    *(f"{HEADS}actor_critic:{name}" for name in ("Actor.forward", "Actor.distribution", "Critic.forward")),
    *(f"{HEADS}distributions:Categorical.{name}" for name in ("__init__", "log_probs", "log_prob", "entropy")),
    MLP,
)
PPO_LOSS = FastPath(_ppo_loss, _SURROGATE)
PPO_STEP_LOSS = FastPath(_ppo_step_loss, (f"{_PPO}.loss", f"{_PPO}.learn", f"{ENCODER}.forward", *_SURROGATE, *STEP))
