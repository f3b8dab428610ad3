"""What each action is worth: one expected return, a categorical distribution of returns, or their quantiles.

All three heads are used alike, so that an algorithm swaps one for another in YAML:

    output = head(features)                  [..., A] or [..., A, K]: what the network says about every action
    head.values(output)                      [..., A]: expected returns, to act by
    head.loss(predicted, following, ...)     the mean loss, and [B]: how wrong each transition was, its priority

`predicted` and `following` are the outputs for the action taken and for the next one (`of_action`). The target is
`reward + discount * following`; the discount is 0 after a terminal row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.networks.encoders import MLP
from rl_lab.types import ActionSpec, ConfigError, Metrics


class ActionNetwork(nn.Module):
    """Features `[..., F]` to K numbers per action: `[..., A, K]`, or `[..., A]` where K is 1.

    Dueling (Wang et al. 2016): output = V + advantage - mean of the advantages over the actions, two networks side by
    side. Subtracting the mean says which part is V; without it any number could move from one to the other.
    Noisy: layers that explore by noise in their weights (`networks.noisy`).
    """

    def __init__(
        self,
        numbers_per_action: int,
        /,
        *,
        input_size: int,
        action: ActionSpec,
        hidden_sizes: Sequence[int] = (),
        activation: str = "relu",
        dueling: bool = False,
        noisy: bool = False,
    ) -> None:
        super().__init__()
        self.numbers = numbers_per_action
        self.actions_axis = -1 if numbers_per_action == 1 else -2

        def network(output_size: int) -> MLP:
            return MLP(
                input_size=input_size,
                hidden_sizes=hidden_sizes,
                activation=activation,
                output_size=output_size,
                noisy=noisy,
            )

        self.advantage = network(_num_actions(action) * numbers_per_action)
        self.value = network(numbers_per_action) if dueling else None

    def forward(self, features: Tensor) -> Tensor:
        advantage = self._by_action(self.advantage(features))
        if self.value is None:
            return advantage
        value = self.value(features)
        if self.numbers > 1:
            value = value.unsqueeze(-2)
        return value + advantage - advantage.mean(self.actions_axis, keepdim=True)

    def metrics(self, following: Tensor, *, reward: Tensor, discount: Tensor) -> Metrics:
        """What is worth knowing about the targets, besides the loss."""
        return {}

    def _by_action(self, flat: Tensor) -> Tensor:
        return flat if self.numbers == 1 else flat.unflatten(-1, (-1, self.numbers))


class QValues(ActionNetwork):
    """The expected return of each action (Mnih et al. 2015).

    `huber_threshold` is where the squared error turns into a linear one; null: squared everywhere.
    """

    def __init__(self, *, huber_threshold: float | None = 1.0, **network: Any) -> None:
        super().__init__(1, **network)
        self.huber_threshold = None if huber_threshold is None else _above_zero("huber_threshold", huber_threshold)

    def values(self, output: Tensor) -> Tensor:
        """The output is the values already."""
        return output

    def loss(
        self, predicted: Tensor, following: Tensor, *, reward: Tensor, discount: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Huber or half the squared temporal-difference error, and its size."""
        target = torch.addcmul(reward, discount, following)
        reduction = "none" if weight is not None else "mean"  # the mean within: a node of the graph less
        if self.huber_threshold is None:
            loss = 0.5 * F.mse_loss(predicted, target, reduction=reduction)
        else:
            loss = F.huber_loss(predicted, target, reduction=reduction, delta=self.huber_threshold)
        priority = (predicted.detach() - target).abs_()
        return loss if weight is None else _weighted_mean(loss, weight), priority


class CategoricalQ(ActionNetwork):
    """Probabilities of `num_atoms` returns from `lowest` to `highest`, evenly spaced (C51; Bellemare et al. 2017)."""

    support: Tensor  # [K], the returns
    positions: Tensor  # [K], 0 … K-1

    def __init__(self, *, num_atoms: int = 51, lowest: float = -10.0, highest: float = 10.0, **network: Any) -> None:
        super().__init__(_at_least_two("num_atoms", num_atoms), **network)
        if not -math.inf < lowest < highest < math.inf:
            raise ConfigError(
                f"components.q_values: lowest is {lowest:g} and highest is {highest:g}; the first must be below the "
                "second, both finite. Write the smallest and the largest discounted return there can be."
            )
        self.lowest, self.highest = lowest, highest
        # Known from the settings, so not part of a checkpoint.
        self.register_buffer("support", torch.linspace(lowest, highest, num_atoms), persistent=False)
        self.register_buffer("positions", torch.arange(num_atoms, dtype=torch.float32), persistent=False)

    def values(self, output: Tensor) -> Tensor:
        """Mean returns: logits `[..., A, K]` to `[..., A]`."""
        return output.softmax(-1) @ self.support

    def loss(
        self, predicted: Tensor, following: Tensor, *, reward: Tensor, discount: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy to the projected target, and the divergence from it, which is 0 where nothing is to learn."""
        target = self.project(following.softmax(-1), reward, discount)
        loss = -(target * predicted.log_softmax(-1)).sum(-1)
        entropy = -torch.xlogy(target, target).sum(-1)
        priority = (loss.detach() - entropy).clamp_(min=0.0)  # rounding may leave it just below 0
        return _weighted_mean(loss, weight), priority

    @torch.no_grad()
    def metrics(self, following: Tensor, *, reward: Tensor, discount: Tensor) -> Metrics:
        """How much of the targets' probability lies outside the support, where `project` moves it to an end."""
        moved = reward.unsqueeze(-1) + discount.unsqueeze(-1) * self.support
        rounding = 1e-3 * (self.highest - self.lowest) / (len(self.support) - 1)  # of an atom
        outside = (moved < self.lowest - rounding) | (moved > self.highest + rounding)
        return {"train/clipped_target_fraction": (following.softmax(-1) * outside).sum(-1).mean()}

    def project(self, probability: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Probabilities `[B, K]` of `reward + discount * support`, divided between the two atoms next to each return.

        An atom at distance d, counted in atoms, gets 1 - d of the mass where d < 1: the same as rounding down and up,
        without the special case of a return that falls on an atom.
        """
        moved = (reward.unsqueeze(-1) + discount.unsqueeze(-1) * self.support).clamp(self.lowest, self.highest)
        place = (moved - self.lowest) * ((len(self.support) - 1) / (self.highest - self.lowest))  # [B, K]: 0 … K-1
        mass = (1.0 - (place.unsqueeze(-2) - self.positions.unsqueeze(-1)).abs()).clamp_(min=0.0)  # [B, K to, K from]
        return (mass @ probability.unsqueeze(-1)).squeeze(-1)


class QuantileQ(ActionNetwork):
    """Returns at `num_quantiles` evenly spaced quantiles (QR-DQN; Dabney et al. 2018)."""

    fractions: Tensor  # [K], the middle of each K-th

    def __init__(self, *, num_quantiles: int = 51, huber_threshold: float = 1.0, **network: Any) -> None:
        super().__init__(_at_least_two("num_quantiles", num_quantiles), **network)
        self.huber_threshold = _above_zero("huber_threshold", huber_threshold)
        fractions = (torch.arange(num_quantiles) + 0.5) / num_quantiles
        self.register_buffer("fractions", fractions, persistent=False)

    def values(self, output: Tensor) -> Tensor:
        """Mean returns: quantiles `[..., A, K]` to `[..., A]`."""
        return output.mean(-1)

    def loss(
        self, predicted: Tensor, following: Tensor, *, reward: Tensor, discount: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Quantile regression with a Huber error: every predicted quantile against every target one."""
        target = reward.unsqueeze(-1) + discount.unsqueeze(-1) * following  # [B, K]
        # [B, K predicted, K target]
        wide, tall = torch.broadcast_tensors(target.unsqueeze(-2), predicted.unsqueeze(-1))
        error = F.huber_loss(tall, wide, reduction="none", delta=self.huber_threshold) / self.huber_threshold
        quantile_weight = (self.fractions.unsqueeze(-1) - (wide < tall.detach()).to(error.dtype)).abs()
        priority = (predicted.detach().mean(-1) - target.mean(-1)).abs_()
        return _weighted_mean((quantile_weight * error).mean(-1).sum(-1), weight), priority


def _weighted_mean(loss: Tensor, weight: Tensor | None) -> Tensor:
    return loss.mean() if weight is None else (loss * weight).mean()


def of_action(output: Tensor, action: Tensor) -> Tensor:
    """What is said about one action per row: `[B, A]` to `[B]`, `[B, A, K]` to `[B, K]`."""
    if output.dim() == 2:
        return output.gather(1, action.unsqueeze(1)).squeeze(1)
    return output.gather(1, action.view(-1, 1, 1).expand(-1, 1, output.shape[-1])).squeeze(1)


def _num_actions(action: ActionSpec) -> int:
    if action.kind == "continuous":
        raise ConfigError(
            f"components.q_values: one value per action needs discrete actions, and this environment's are continuous "
            f"(of size {action.sizes[0]}). Use `rl-lab train ID:sac`, which has an actor for them."
        )
    if action.kind == "multi_discrete":
        raise ConfigError(
            f"components.q_values: one value per action needs a single discrete action, and this environment takes "
            f"{len(action.sizes)} at once (sizes {action.sizes}). Use `rl-lab train ID:ppo`, which acts with several."
        )
    return action.sizes[0]


def _at_least_two(name: str, value: int) -> int:
    if value < 2:
        raise ConfigError(f"components.q_values: {name} is {value}; write a whole number of at least 2, such as 51.")
    return value


def _above_zero(name: str, value: float) -> float:
    if not 0.0 < value < math.inf:
        raise ConfigError(f"components.q_values: {name} is {value:g}; write a finite number above 0, such as 1.0.")
    return value
