"""What SAC's critics, actor and temperature minimise.

    L_critic      = mean over both critics of w (Q_i(s, a) - target)^2
    L_policy      = -mean( min_i Q_i(s, a') + temperature * H ),   a' drawn by the policy, H its surprise at a'
    L_temperature = temperature * (mean H - target entropy)

For continuous actions and plain networks on a CPU each loss comes with its gradients, since the slopes of a mean are
known beforehand: nobody asks autograd, whose dozens of small nodes take as long as a large matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.heads.distributions import squashed_draw, squashed_draw_back
from rl_lab.components.heads.soft_actor_critic import Draw, SoftActor, Temperature, TwinCritic
from rl_lab.components.networks.ensemble import EnsembleMLP
from rl_lab.kernels import fused
from rl_lab.kernels.fused import Known
from rl_lab.kernels.workbench import Workbench

_hardtanh_backward = torch.ops.aten.hardtanh_backward.default


class CriticLoss(NamedTuple):
    """The loss, the values `[2, B]` without gradient, and the gradients of the loss, where they are known already."""

    loss: Tensor
    values: Tensor
    known: Known | None = None


class PolicyLoss(NamedTuple):
    """The loss, the policy's mean entropy without gradient, and the gradients of the loss, where known already."""

    loss: Tensor
    entropy: Tensor
    known: Known | None = None


# --- critics -----------------------------------------------------------------------------------


def critic_loss(
    critic: Callable[[Tensor, Tensor], Tensor], features: Tensor, action: Tensor, target: Tensor, weight: Tensor | None
) -> CriticLoss:
    """Target and weight, None where all count alike, are `[B]`."""
    networks = _plain_networks(critic, features)
    if networks is not None:
        return _known_critic_loss(networks, torch.cat((features, action), dim=1), target, weight)
    values = critic(features, action).float()
    if weight is None:
        return CriticLoss(F.mse_loss(values, target.expand_as(values)), values.detach())
    return CriticLoss(((values - target).square() * weight).mean(), values.detach())


def _known_critic_loss(networks: EnsembleMLP, rows: Tensor, target: Tensor, weight: Tensor | None) -> CriticLoss:
    bench = networks.workbench(len(rows))
    values = bench.run(rows).squeeze(-1)  # [2, B]
    error = values - target
    slope = error if weight is None else error * weight
    loss = torch.dot(error.view(-1), slope.view(-1)) / error.numel()
    slopes = (slope * (2.0 / error.numel())).unsqueeze(-1)
    return CriticLoss(loss, values, bench.run_back(rows, slopes))


# --- the policy --------------------------------------------------------------------------------


@dataclass(frozen=True)
class KnownDraw(Draw):
    """A draw that knows its own way back to the actor; to be gone before the actor is asked again."""

    deviation: Tensor
    unbounded: Tensor
    bounds: tuple[float, float]
    rows: Tensor
    bench: Workbench

    def back(self, for_action: Tensor, for_entropy: Tensor) -> Known:
        """From the slopes of action `[B, A]` and entropy `[B]` to the actor's gradients."""
        for_mean, for_log_std = squashed_draw_back(for_action, for_entropy, self.action, self.deviation)
        for_unbounded = _hardtanh_backward(for_log_std, self.unbounded, *self.bounds)
        return self.bench.run_back(self.rows, torch.cat((for_mean, for_unbounded), dim=1).unsqueeze(0))


def decide(
    actor: Any, critic: Any, now: Tensor, later: Tensor, mask: Tensor | None = None, later_mask: Tensor | None = None
) -> tuple[Any, Any]:
    """`actor.decide`; the first policy is for `policy_loss` with this critic."""
    is_plain = isinstance(actor, SoftActor) and actor.is_continuous and actor.network.can_fuse(now)
    if not is_plain or _plain_networks(critic, now) is None:
        return actor.decide(now, later, mask, later_mask)
    bench, count = actor.network.workbench(len(now)), len(now)
    following = bench.run(later)[0]
    output = torch.cat((bench.run(now)[0], following))  # `now` was last: its hidden layers stay for the way back
    mean, unbounded = output.chunk(2, dim=1)
    action, entropy, deviation = squashed_draw(mean, F.hardtanh(unbounded, *actor.log_std_bounds))
    way_back = deviation[:count], unbounded[:count], actor.log_std_bounds, now, bench
    return KnownDraw(action[:count], entropy[:count], *way_back), Draw(action[count:], entropy[count:])


def policy_loss(critic: Any, features: Tensor, policy: Any, temperature: Tensor) -> PolicyLoss:
    """No gradient reaches the critics."""
    if isinstance(policy, KnownDraw):
        return _known_policy_loss(critic.networks, features, policy, temperature)
    value, entropy = (each.mean() for each in critic.expect(features, policy))
    return PolicyLoss(-torch.addcmul(value, temperature, entropy), entropy.detach())


def _known_policy_loss(networks: EnsembleMLP, features: Tensor, policy: KnownDraw, temperature: Tensor) -> PolicyLoss:
    bench, count = networks.workbench(len(features)), len(features)
    least, network = bench.run(torch.cat((features, policy.action), dim=1)).squeeze(-1).min(dim=0)
    slopes = bench.least_slopes(network, (features.shape[1], features.shape[1] + policy.action.shape[1]))
    known = policy.back(slopes.mul_(-1.0 / count), (temperature * (-1.0 / count)).expand(count))
    mean_entropy = policy.entropy.mean()
    return PolicyLoss(-torch.addcmul(least.mean(), temperature, mean_entropy), mean_entropy, known)


# --- the temperature ---------------------------------------------------------------------------


def temperature_loss(temperature: Any, entropy: Tensor, mask: Tensor | None) -> tuple[Tensor, Known | None]:
    """The loss, and its gradient where it is known: for temperature = exp(log_value), it is the loss itself."""
    if type(temperature) is not Temperature or not fused.is_plain(entropy) or not temperature.log_value.requires_grad:
        return temperature.loss(entropy, mask), None
    with torch.no_grad():
        loss = temperature.loss(entropy, mask)
    gradient = loss.clone()  # an optimizer may use it as scratch space
    return loss, Known([temperature.log_value], [gradient], gradient.view(1))


def _plain_networks(critic: Any, features: Tensor) -> EnsembleMLP | None:
    """The critics' networks, if they learn from plain rows and can do so without autograd."""
    is_plain = isinstance(critic, TwinCritic) and critic.is_continuous and features.is_cpu
    if not is_plain or features.requires_grad or not torch.is_grad_enabled():
        return None
    return critic.networks if critic.networks.can_fuse(features) else None
