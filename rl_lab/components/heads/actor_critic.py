"""Actor, critic, and the controller that acts at random."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_lab.components.heads.distributions import (
    Categorical,
    DiagonalGaussian,
    Distribution,
    MultiCategorical,
    SquashedGaussian,
)
from rl_lab.components.networks.encoders import MLP
from rl_lab.components.networks.layers import choose
from rl_lab.types import ActionSpec, ConfigError, PolicyStep, TimeStep

LOG_STD_BOUNDS = (-5.0, 2.0)  # of a std per state, as in the soft actor


class Actor(nn.Module):
    """Features to a distribution over actions.

    A small `output_gain` starts the policy near uniform (discrete) or near the middle of the range (continuous).
    Continuous actions: `std` is `shared`, one learnt number per dimension for all states, or `state`, from the network;
    `squashed` presses them into (-1, 1) by tanh, else the environment clips those that leave the range.
    """

    def __init__(
        self,
        *,
        input_size: int,
        action: ActionSpec,
        hidden_sizes: Sequence[int] = (),
        activation: str = "tanh",
        initial_log_std: float = 0.0,
        std: str = "shared",
        squashed: bool = False,
        output_gain: float = 0.01,
    ) -> None:
        super().__init__()
        self.kind = action.kind
        self.sizes = action.sizes
        self.squashed = squashed
        has_state_std = choose({"shared": False, "state": True}, std, place="controllers.actor.std")
        self.initial_log_std = initial_log_std
        self.network = MLP(
            input_size=input_size,
            hidden_sizes=hidden_sizes,
            activation=activation,
            output_size=sum(action.sizes) * (2 if has_state_std and action.kind == "continuous" else 1),
            output_gain=output_gain,
        )
        self.log_std: Tensor | None = None
        if action.kind == "continuous" and not has_state_std:
            self.log_std = nn.Parameter(torch.full((action.sizes[0],), float(initial_log_std)))

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Distribution:
        """Features `[..., F]` and, for discrete actions, the allowed ones `[..., sum(sizes)]`."""
        return self.distribution(self.network(features), mask)

    def distribution(self, output: Tensor, mask: Tensor | None) -> Distribution:
        """The distribution that the network's output describes."""
        if self.kind == "discrete":
            return Categorical(output, mask)
        if self.kind == "multi_discrete":
            return MultiCategorical(output, self.sizes, mask)
        mean, log_std = output, self.log_std
        if log_std is None:
            mean, change = output.float().chunk(2, dim=-1)
            log_std = (change + self.initial_log_std).clamp(*LOG_STD_BOUNDS)
        return SquashedGaussian(mean, log_std.expand_as(mean)) if self.squashed else DiagonalGaussian(mean, log_std)


class Critic(nn.Module):
    """Features to one value per row."""

    def __init__(self, *, input_size: int, hidden_sizes: Sequence[int] = (), activation: str = "tanh") -> None:
        super().__init__()
        self.network = MLP(
            input_size=input_size, hidden_sizes=hidden_sizes, activation=activation, output_size=1, output_gain=1.0
        )

    def forward(self, features: Tensor) -> Tensor:
        """Features `[..., F]` to values `[...]`."""
        return self.network(features).squeeze(-1)


class RandomController(nn.Module):
    """Every allowed action equally likely; continuous ones uniform in [-1, 1]. It has nothing to learn."""

    def __init__(self, *, action: ActionSpec) -> None:
        super().__init__()
        self.action = action

    def sample(self, batch_size: int, device: torch.device | str = "cpu", mask: Tensor | None = None) -> Tensor:
        """Actions for `batch_size` rows, shaped and typed as the action spec says."""
        if self.action.kind == "continuous":
            return torch.rand(batch_size, self.action.sizes[0], device=device) * 2.0 - 1.0
        logits = torch.zeros(batch_size, sum(self.action.sizes), device=device)
        if self.action.kind == "discrete":
            return Categorical(logits, mask).sample()
        return MultiCategorical(logits, self.action.sizes, mask).sample()


class RepeatingRandomController(RandomController):
    """Random actions that last: with `repeat` as probability an environment is answered as it was the last time.

    Independent draws of `left` and `right` cancel each other out; these lead somewhere.
    """

    def __init__(self, *, action: ActionSpec, repeat: float = 0.75) -> None:
        super().__init__(action=action)
        if not 0.0 <= repeat < 1.0:
            raise ConfigError(f"controllers.random.repeat is {repeat}: write a probability from 0 to below 1, as 0.75.")
        self.repeat = repeat

    def answer(self, time_step: TimeStep, before: Tensor | None) -> PolicyStep:
        """Actions `[N, ...]`: new ones, or those of the rows before unless an episode begins or actions are masked."""
        mask = time_step.observation.get("action_mask")
        action = self.sample(time_step.num_envs, time_step.reward.device, mask)
        if before is not None and mask is None:
            is_repeated = (torch.rand(len(action), device=action.device) < self.repeat) & ~time_step.is_first
            action = torch.where(is_repeated.view(-1, *[1] * (action.dim() - 1)), before, action)
        return PolicyStep(action, action)
