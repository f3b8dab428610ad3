"""What PPO minimises, apart from the entropy: the clipped surrogate and the squared error of the value.

    L_policy = -mean( min(r A, clip(r, 1 - eps, 1 + eps) A) ),   r = exp(log_prob - old_log_prob)
    L_value  =  mean( (V - R)^2 ), or with a clip range the larger of this and the error of V kept near its old value

Autograd keeps some sixteen small nodes for that and visits each twice: at a few hundred samples this takes as long as
half of the networks. For discrete actions on a CPU both losses are one node with its slopes written out:

    dL_policy/dlogit_k = -A r / M * (1[k = action] - p_k)    where r A is the lesser of the two, else 0: no reward for
    dL_value/dV        = 2 (V - R) / M                       moving the ratio further
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import Function

from rl_lab.components.distributions import Categorical
from rl_lab.components.statistics import mean
from rl_lab.types import Batch


@dataclass(frozen=True)
class ActorCriticLoss:
    """Two scalars to minimise, and the log-probabilities `[...]` of the actions, without gradient."""

    policy: Tensor
    value: Tensor
    log_prob: Tensor


def actor_critic_loss(
    policy: Any, value: Tensor, sample: Batch, *, clip_range: float, value_clip_range: float | None = None
) -> ActorCriticLoss:
    """`sample` has action, log_prob, advantage, return, value and, where not every sample counts, valid."""
    valid = sample.get("valid")
    if valid is None and value_clip_range is None and _can_write_out(policy, value):
        told = (sample[name] for name in ("action", "log_prob", "advantage", "return"))
        return ActorCriticLoss(*_WrittenOut.apply(policy.logits, value, *told, clip_range))  # type: ignore[no-untyped-call]
    log_prob = policy.log_prob(sample["action"])
    ratio = (log_prob - sample["log_prob"]).exp()
    advantage = sample["advantage"]
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    policy_loss = -mean(torch.minimum(advantage * ratio, advantage * clipped), valid)
    error = (value - sample["return"]).square()
    if value_clip_range is not None:
        near = sample["value"] + (value - sample["value"]).clamp(-value_clip_range, value_clip_range)
        error = torch.maximum(error, (near - sample["return"]).square())
    return ActorCriticLoss(policy_loss, mean(error, valid), log_prob.detach())


def _can_write_out(policy: Any, value: Tensor) -> bool:
    return (
        isinstance(policy, Categorical)
        and value.is_cpu
        and policy.logits.dtype is value.dtype is torch.float32
        and policy.logits.dim() == 2
    )


class _WrittenOut(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        value: Tensor,
        action: Tensor,
        old_log_prob: Tensor,
        advantage: Tensor,
        returns: Tensor,
        clip_range: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_probs = torch.log_softmax(logits, dim=-1).numpy()
        chosen = np.arange(len(log_probs)), action.numpy()
        log_prob, share = log_probs[chosen], 1.0 / len(log_probs)
        ratio = np.exp(log_prob - old_log_prob.numpy())
        gain = advantage.numpy()
        unclipped = ratio * gain
        clipped = np.minimum(np.maximum(ratio, 1.0 - clip_range), 1.0 + clip_range) * gain
        slope = unclipped * (unclipped <= clipped)
        slope *= -share
        logits_slope = np.exp(log_probs)
        logits_slope *= -slope[:, None]
        logits_slope[chosen] += slope
        error = value.detach().numpy() - returns.numpy()
        policy_loss = float(np.minimum(unclipped, clipped).sum()) * -share
        value_loss = float(error @ error) * share
        error *= 2.0 * share
        ctx.slopes = torch.from_numpy(logits_slope), torch.from_numpy(error)
        outputs = torch.tensor(policy_loss), torch.tensor(value_loss), torch.from_numpy(log_prob)
        ctx.mark_non_differentiable(outputs[2])
        return outputs

    @staticmethod
    def backward(ctx: Any, policy: Tensor, value: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits_slope, value_slope = ctx.slopes
        return logits_slope * policy, value_slope * value, None, None, None, None, None
