"""The three parts of maximum-entropy learning: an actor that can be reparametrised, twin critics, a temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from rl_lab.components.heads.distributions import Categorical, SquashedGaussian, squashed_draw, squashed_draw_back
from rl_lab.components.networks.ensemble import EnsembleMLP, run_layers, run_layers_back
from rl_lab.types import ActionSpec, ConfigError

_hardtanh_backward = torch.ops.aten.hardtanh_backward.default

SoftPolicy = SquashedGaussian | Categorical


@dataclass(frozen=True)
class Draw:
    """One action per row `[B, A]` through which gradients reach the policy, and its surprise `[B]`, -log p(action),
    which estimates the entropy."""

    action: Tensor
    entropy: Tensor


class SoftActor(nn.Module):
    """Features to a policy: a normal pressed into (-1, 1) by tanh, its deviation learnt per state, or a categorical.

    log_std is held within bounds: beyond them tanh leaves nothing to learn from, or the policy is a point.
    """

    def __init__(
        self,
        *,
        input_size: int,
        action: ActionSpec,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: str = "relu",
        log_std_bounds: tuple[float, float] = (-5.0, 2.0),
    ) -> None:
        super().__init__()
        _refuse_several_choices(action)
        if not -math.inf < log_std_bounds[0] < log_std_bounds[1] < math.inf:
            raise ConfigError(
                f"soft actor: log_std_bounds is {list(log_std_bounds)}; allowed is [lowest, highest]. "
                "Write log_std_bounds: [-5.0, 2.0]."
            )
        self.is_continuous = action.kind == "continuous"
        self.log_std_bounds = log_std_bounds
        self.network = EnsembleMLP(
            size=1,
            input_size=input_size,
            hidden_sizes=hidden_sizes,
            output_size=action.sizes[0] * (2 if self.is_continuous else 1),
            activation=activation,
        )

    def forward(self, features: Tensor, mask: Tensor | None = None) -> SoftPolicy:
        """Features `[B, F]` and, for discrete actions, the allowed ones `[B, A]`."""
        output = self.network(features).squeeze(0)
        if not self.is_continuous:
            return Categorical(output, mask)
        mean, log_std = output.float().chunk(2, dim=-1)
        return SquashedGaussian(mean, F.hardtanh(log_std, *self.log_std_bounds))

    def decide(
        self, now: Tensor, later: Tensor, mask: Tensor | None = None, later_mask: Tensor | None = None
    ) -> tuple[Draw | Categorical, Draw | Categorical]:
        """What to do in both rows of a transition: `now` with gradients, `later` without. Features `[B, F]` each."""
        if self.is_continuous and self.network.can_fuse(now):
            rows, parameters = torch.cat((now, later)), self.network.layers()
            settings = (len(now), self.log_std_bounds, self.network.activation_name)
            drawn = _DrawBoth.apply(*settings, rows, *parameters)  # type: ignore[no-untyped-call]
            return Draw(*drawn[:2]), Draw(*drawn[2:])
        with torch.no_grad():
            decision = _drawn(self(later, later_mask))
        return _drawn(self(now, mask)), decision


def _drawn(policy: SoftPolicy) -> Draw | Categorical:
    if isinstance(policy, Categorical):
        return policy  # all of its actions are judged, so none is drawn
    action, log_prob = policy.rsample_with_log_prob()
    return Draw(action, -log_prob)


class _DrawBoth(Function):
    """Network, bounds and draw of the rows that learn and of those behind them in one node: few kernels on a GPU, and
    no gradient is computed for the rows that do not learn."""

    @staticmethod
    def forward(
        ctx: Any, learning: int, bounds: tuple[float, float], activation: str, rows: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        output, hidden = run_layers(rows, parameters, activation)
        mean, unbounded = output[0].chunk(2, dim=1)
        action, entropy, deviation = squashed_draw(mean, F.hardtanh(unbounded, *bounds))
        ctx.bounds, ctx.activation, ctx.num_layers = bounds, activation, len(parameters) // 2
        learnt = [rows[:learning], *(layer[:, :learning] for layer in hidden), *parameters[: ctx.num_layers]]
        ctx.save_for_backward(*learnt, action[:learning], deviation[:learning], unbounded[:learning])
        ctx.set_materialize_grads(False)
        others = action[learning:], entropy[learning:]
        ctx.mark_non_differentiable(*others)
        return action[:learning], entropy[:learning], *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        *learnt, action, deviation, unbounded = ctx.saved_tensors
        for_action, for_entropy = (
            torch.zeros_like(like) if gradient is None else gradient
            for gradient, like in zip(gradients[:2], (action, action[:, 0]), strict=True)
        )
        for_mean, for_log_std = squashed_draw_back(for_action, for_entropy, action, deviation)
        for_unbounded = _hardtanh_backward(for_log_std, unbounded, *ctx.bounds)
        gradient = torch.cat((for_mean, for_unbounded), dim=1).unsqueeze(0)
        kept, weights = learnt[: ctx.num_layers], learnt[ctx.num_layers :]
        found, _ = run_layers_back(gradient, kept, weights, ctx.activation, ctx.needs_input_grad[4:])
        return (None, None, None, None, *found)


class TwinCritic(nn.Module):
    """Two action-value networks; the lesser of the two is believed, since each alone learns to overestimate."""

    def __init__(
        self,
        *,
        input_size: int,
        action: ActionSpec,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: str = "relu",
    ) -> None:
        super().__init__()
        _refuse_several_choices(action)
        self.is_continuous = action.kind == "continuous"
        num_numbers = action.sizes[0]
        self.networks = EnsembleMLP(
            size=2,
            input_size=input_size + (num_numbers if self.is_continuous else 0),
            hidden_sizes=hidden_sizes,
            output_size=1 if self.is_continuous else num_numbers,
            activation=activation,
        )

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        """Values `[2, B]` of the actions taken: `[B, A]` in [-1, 1], or `[B]` choices."""
        if self.is_continuous:
            return self.networks(features, action).squeeze(-1)
        chosen = action.expand(2, -1).unsqueeze(-1)
        return self.networks(features).gather(-1, chosen).squeeze(-1)

    def expect(self, features: Tensor, policy: Draw | Categorical) -> tuple[Tensor, Tensor]:
        """What the policy may hope for, `[B]`: E[min Q(s, a)] and its entropy E[-log p(a|s)].

        Gradients reach the policy (and never the critics): through one reparametrised draw for continuous actions,
        through the exact expectation over discrete ones.
        """
        if isinstance(policy, Draw):
            return self.networks.least(features, policy.action), policy.entropy
        lesser = self.networks(features, frozen=True).float().amin(dim=0)  # [B, A]
        return (policy.probs * lesser).sum(dim=-1), policy.entropy()


class Temperature(nn.Module):
    """How much an entropy of one nat is worth in reward; learnt so that the policy keeps the entropy it should.

    target_entropy null: minus the number of dimensions (continuous); `target_share` of the entropy of choosing evenly
    among the allowed actions (discrete).
    """

    def __init__(
        self,
        *,
        action: ActionSpec,
        initial: float = 1.0,
        target_entropy: float | None = None,
        target_share: float = 0.98,
    ) -> None:
        super().__init__()
        if not 0.0 < initial < math.inf:
            raise ConfigError(
                f"temperature: initial is {initial}; allowed is a finite number above 0. Write initial: 1.0."
            )
        if not 0.0 < target_share <= 1.0:
            raise ConfigError(f"temperature: target_share is {target_share}; allowed is above 0, up to 1. Write 0.98.")
        if target_entropy is not None and not math.isfinite(target_entropy):
            raise ConfigError(
                f"temperature: target_entropy is {target_entropy}; allowed is a finite number of nats. Write null for "
                "the usual one."
            )
        self.log_value = nn.Parameter(torch.tensor(math.log(initial)))
        self.target_share = target_share
        evenly = -float(action.sizes[0]) if action.kind == "continuous" else target_share * math.log(action.sizes[0])
        self.follows_mask = target_entropy is None and action.kind == "discrete"
        self.target_entropy = evenly if target_entropy is None else target_entropy

    def forward(self) -> Tensor:
        """The temperature, a number above 0 as a 0-dim tensor."""
        return self.log_value.exp()

    def loss(self, entropy: Tensor, mask: Tensor | None = None) -> Tensor:
        """`temperature * (entropy - target)` for the mean entropy of rows: it falls while there is more than asked."""
        target: float | Tensor = self.target_entropy
        if mask is not None and self.follows_mask:
            target = self.target_share * mask.sum(dim=-1).float().log().mean()
        return self() * (entropy.detach() - target)


def _refuse_several_choices(action: ActionSpec) -> None:
    if action.kind == "multi_discrete":
        raise ConfigError(
            f"SAC answers with continuous actions or with one discrete choice; this environment wants "
            f"{len(action.sizes)} choices at once. Use `algorithm: ppo`, or an environment with one choice."
        )
