"""What PPO minimises: the clipped surrogate, the squared error of the value, and the entropy's opposite.

    L_policy = -mean( min(r A, clip(r, 1 - eps, 1 + eps) A) ),   r = exp(log_prob - old_log_prob)
    L_value  =  mean( (V - R)^2 ), or with a clip range the larger of this and the error of V kept near its old value

Autograd keeps some twenty small nodes for that and visits each twice: at a few hundred samples this takes as long as
the networks themselves. For discrete actions and plain networks on a CPU it is one node, its slopes written out:

    dL_policy/dlogit_k = -A r / M * (1[k = action] - p_k)    where r A is the lesser of the two, else 0: no reward for
    dL_value/dV        = 2 (V - R) / M                       moving the ratio further
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import Function

from rl_lab.components.heads.actor_critic import Actor, Critic, act_and_judge
from rl_lab.components.heads.distributions import Categorical
from rl_lab.components.returns.statistics import mean
from rl_lab.kernels import fused
from rl_lab.types import Batch


@dataclass(frozen=True)
class ActorCriticLoss:
    """Scalars to minimise, and the log-probabilities `[...]` of the actions, without gradient."""

    policy: Tensor
    value: Tensor
    entropy: Tensor  # negated
    log_prob: Tensor


def actor_critic_loss(
    actor: Callable[..., Any],
    critic: Callable[[Tensor], Tensor],
    features: Tensor,
    sample: Batch,
    *,
    critic_features: Tensor | None = None,
    clip_range: float,
    value_clip_range: float | None = None,
    wants_entropy: bool = True,
    learns_entropy: bool = True,
) -> ActorCriticLoss:
    """`sample` has action, log_prob, advantage, return, value and, where not every sample counts, valid.

    The critic reads `critic_features` where it has its own. Without `learns_entropy` it may come without a gradient.
    """
    valid, mask = sample.get("valid"), sample.get("action_mask")
    if valid is None and mask is None and critic_features is None and value_clip_range is None and not learns_entropy:
        stacks = _plain_stacks(actor, critic, features)
        if stacks is not None:
            return _in_one_node(stacks, features, sample, clip_range, wants_entropy)
    if critic_features is None:
        policy, value = act_and_judge(actor, critic, features, mask)
    else:
        policy, value = actor(features, mask), critic(critic_features)
    log_prob = policy.log_prob(sample["action"])
    ratio = (log_prob - sample["log_prob"]).exp()
    advantage = sample["advantage"]
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    policy_loss = -mean(torch.minimum(advantage * ratio, advantage * clipped), valid)
    error = (value - sample["return"]).square()
    if value_clip_range is not None:
        near = sample["value"] + (value - sample["value"]).clamp(-value_clip_range, value_clip_range)
        error = torch.maximum(error, (near - sample["return"]).square())
    entropy = -mean(policy.entropy(), valid) if wants_entropy else torch.zeros_like(policy_loss)
    return ActorCriticLoss(policy_loss, mean(error, valid), entropy, log_prob.detach())


def _plain_stacks(
    actor: Callable[..., Any], critic: Callable[[Tensor], Tensor], features: Tensor
) -> list[fused.Stack] | None:
    """Both networks as plain layers, if they are and the one node can stand for them."""
    if not (isinstance(actor, Actor) and isinstance(critic, Critic) and actor.kind == "discrete"):
        return None
    if features.requires_grad or features.dim() != 2 or not fused.can_fuse(features):
        return None
    stacks = [actor.network.stack(), critic.network.stack()]
    return None if None in stacks else stacks  # type: ignore[return-value]


def _in_one_node(
    stacks: list[fused.Stack], features: Tensor, sample: Batch, clip_range: float, wants_entropy: bool
) -> ActorCriticLoss:
    told = tuple(sample[name] for name in ("action", "log_prob", "advantage", "return"))
    learning = [tensor for stack in stacks for tensor in stack.layers if tensor.requires_grad]
    if not learning:  # a phase froze both
        learning = [features]
    policy, value, log_prob, logits = _OneNode.apply(learning[0], features, stacks, told, clip_range)  # type: ignore[no-untyped-call]
    entropy = -Categorical(logits).entropy().mean() if wants_entropy else torch.zeros(())
    return ActorCriticLoss(policy, value, entropy, log_prob)


class _OneNode(Function):
    """Networks and losses, there and back at once: what is left for the way back is a factor for each loss.

    It stands for all parameters but names only one of them to autograd (`fused.add_to_gradients`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        one_of_them: Tensor,
        features: Tensor,
        stacks: list[fused.Stack],
        told: tuple[Tensor, Tensor, Tensor, Tensor],
        clip_range: float,
    ) -> tuple[Tensor, ...]:
        (logits, value), inputs_of = fused.forward_stacks(features, stacks)
        policy_loss, value_loss, log_prob, slopes = _losses_and_slopes(logits, value, *told, clip_range)
        needed = [tensor.requires_grad for stack in stacks for tensor in stack.layers]
        ctx.stacks = stacks
        ctx.found, _ = fused.backward_stacks(stacks, inputs_of, slopes, needed, False)
        ctx.mark_non_differentiable(log_prob, logits)
        return policy_loss, value_loss, log_prob, logits

    @staticmethod
    def backward(ctx: Any, policy: Tensor, value: Tensor, *_: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        found = iter(ctx.found)
        for factor, stack in zip((policy, value), ctx.stacks, strict=True):
            fused.add_to_gradients(
                [(tensor, gradient) for tensor in stack.layers if (gradient := next(found)) is not None], factor
            )
        return None, None, None, None, None


def _losses_and_slopes(
    logits: Tensor,
    value: Tensor,
    action: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    returns: Tensor,
    clip_range: float,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Logits `[M, K]` and values `[M, 1]` to both losses, log-probabilities `[M]`, and slopes of logits and values."""
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
    error = value.numpy()[:, 0] - returns.numpy()
    policy_loss = float(np.minimum(unclipped, clipped).sum()) * -share
    value_loss = float(error @ error) * share
    error *= 2.0 * share
    slopes = [torch.from_numpy(logits_slope), torch.from_numpy(error).unsqueeze(1)]
    return torch.scalar_tensor(policy_loss), torch.scalar_tensor(value_loss), torch.from_numpy(log_prob), slopes
