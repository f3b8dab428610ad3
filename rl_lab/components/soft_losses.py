"""What SAC's critics and actor minimise.

    L_critic = mean over both critics of w (Q_i(s, a) - target)^2
    L_policy = -mean( min_i Q_i(s, a') + temperature * H ),   a' drawn by the policy, H its surprise at a'

For continuous actions and plain networks on a CPU each is one autograd node that goes there and back at once, since the
slopes of a mean are known beforehand: what is left for the way back is a factor. A dozen small nodes less for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rl_lab.components import fused
from rl_lab.components.ensembles import EnsembleMLP
from rl_lab.components.soft_actor_critic import Draw, TwinCritic


def critic_loss(
    critic: Callable[[Tensor, Tensor], Tensor], features: Tensor, action: Tensor, target: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The loss, and the values `[2, B]` without gradient. Target and weight, None where all count alike, are `[B]`."""
    networks = _plain_networks(critic, features)
    if networks is not None and not features.requires_grad and torch.is_grad_enabled():
        learning = [tensor for tensor in networks.layers() if tensor.requires_grad]
        if learning:
            rows = torch.cat((features, action), dim=1)
            return _CriticLoss.apply(learning[0], networks, rows, target, weight)  # type: ignore[no-untyped-call, no-any-return]
    values = critic(features, action).float()
    if weight is None:
        return F.mse_loss(values, target.expand_as(values)), values.detach()
    return ((values - target).square() * weight).mean(), values.detach()


def policy_loss(critic: Any, features: Tensor, policy: Any, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the policy's mean entropy without gradient. No gradient reaches the critics."""
    networks = _plain_networks(critic, features)
    if networks is not None and isinstance(policy, Draw) and policy.action.requires_grad:
        return _PolicyLoss.apply(policy.action, policy.entropy, temperature, features, networks)  # type: ignore[no-untyped-call, no-any-return]
    value, entropy = (each.mean() for each in critic.expect(features, policy))
    return -torch.addcmul(value, temperature, entropy), entropy.detach()


def _plain_networks(critic: Any, features: Tensor) -> EnsembleMLP | None:
    """The critics' networks, if one node can stand for them."""
    if isinstance(critic, TwinCritic) and critic.is_continuous and features.device.type == "cpu":
        return critic.networks if critic.networks.can_fuse(features) else None
    return None


class _CriticLoss(Function):
    """It stands for all parameters but names only one of them to autograd (`fused.add_to_gradients`)."""

    @staticmethod
    def forward(
        ctx: Any, one_of_them: Tensor, networks: EnsembleMLP, rows: Tensor, target: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        bench = networks.workbench(len(rows))
        values = bench.run(rows).squeeze(-1)  # [2, B]
        error = values - target
        slope = error if weight is None else error * weight
        loss = torch.dot(error.view(-1), slope.view(-1)) / error.numel()
        slopes = (slope * (2.0 / error.numel())).unsqueeze(-1)
        ctx.layers = networks.layers()
        ctx.found = bench.run_back(rows, slopes, [tensor.requires_grad for tensor in ctx.layers])
        ctx.mark_non_differentiable(values)
        return loss, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        fused.add_to_gradients(
            [pair for pair in zip(ctx.layers, ctx.found, strict=True) if pair[1] is not None], factor
        )
        return None, None, None, None, None


class _PolicyLoss(Function):
    """From the draw on; autograd goes on to the actor from there."""

    @staticmethod
    def forward(
        ctx: Any, action: Tensor, entropy: Tensor, temperature: Tensor, features: Tensor, networks: EnsembleMLP
    ) -> tuple[Tensor, Tensor]:
        bench = networks.workbench(len(action))
        least, network = bench.run(torch.cat((features, action), dim=1)).squeeze(-1).min(dim=0)
        columns = features.shape[1], features.shape[1] + action.shape[1]
        ctx.share, ctx.temperature = -1.0 / len(action), temperature
        ctx.slopes = bench.least_slopes(network, columns)
        mean_entropy = entropy.mean()
        ctx.mark_non_differentiable(mean_entropy)
        return -torch.addcmul(least.mean(), temperature, mean_entropy), mean_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        share = factor * ctx.share
        for_entropy = (share * ctx.temperature).expand(len(ctx.slopes))
        return ctx.slopes * share, for_entropy, None, None, None
