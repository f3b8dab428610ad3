"""The three parts of maximum-entropy learning: an actor that can be reparametrised, twin critics, a temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.heads.distributions import Categorical, SquashedGaussian
from rl_lab.components.networks.ensemble import EnsembleMLP
from rl_lab.types import ActionSpec, ConfigError

SoftPolicy = SquashedGaussian | Categorical


class SoftActor(nn.Module):
    """Features to a policy: a normal pressed into (-1, 1) by tanh, its std learnt per state, or a categorical.

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

    def noise(self, features: Tensor) -> Tensor:
        """For one draw per row `[B, A]`; a categorical needs none, since all of its actions are weighed."""
        size = self.network.output_size // 2 if self.is_continuous else 0
        return torch.randn(len(features), size, device=features.device)


class TwinCritic(nn.Module):
    """Action-value networks, usually two; the least value counts, since each alone learns to overestimate.

    target_subset (REDQ; Chen et al. 2021, arXiv:2101.05982): targets take the least of so many critics, drawn at random
    for each batch, and the policy follows the mean of all. null: the least of all, for both.
    """

    def __init__(
        self,
        *,
        input_size: int,
        action: ActionSpec,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: str = "relu",
        norm: str = "none",
        num_critics: int = 2,
        target_subset: int | None = None,
    ) -> None:
        super().__init__()
        _refuse_several_choices(action)
        if num_critics < 1:
            raise ConfigError(f"controllers.critic: num_critics is {num_critics}; write a whole number of at least 1.")
        if target_subset is not None and not 1 <= target_subset <= num_critics:
            raise ConfigError(
                f"controllers.critic: target_subset is {target_subset}; write a whole number from 1 to num_critics "
                f"({num_critics}), or null for all of them."
            )
        self.target_subset = target_subset
        self.is_continuous = action.kind == "continuous"
        num_numbers = action.sizes[0]
        self.networks = EnsembleMLP(
            size=num_critics,
            input_size=input_size + (num_numbers if self.is_continuous else 0),
            hidden_sizes=hidden_sizes,
            output_size=1 if self.is_continuous else num_numbers,
            activation=activation,
            norm=norm,
        )

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        """Values `[E, B]` of the actions taken: `[B, A]` in [-1, 1], or `[B]` choices."""
        if self.is_continuous:
            return self.networks(features, action).squeeze(-1)
        chosen = action.expand(self.networks.size, -1).unsqueeze(-1)
        return self.networks(features).gather(-1, chosen).squeeze(-1)

    def expect(
        self, features: Tensor, policy: SoftPolicy, noise: Tensor, *, is_target: bool = False
    ) -> tuple[Tensor, Tensor]:
        """E[Q(s, a)] under the policy and its entropy E[-log p(a|s)], `[B]` each: from one reparametrised draw of
        continuous actions, exactly over discrete ones."""
        if isinstance(policy, Categorical):
            value = self.combine(self.networks(features).float(), is_target=is_target)  # [B, A]
            return (policy.probs * value).sum(dim=-1), policy.entropy()
        action, log_prob = policy.rsample_with_log_prob(noise)
        return self.combine(self(features, action).float(), is_target=is_target), -log_prob

    def combine(self, values: Tensor, *, is_target: bool) -> Tensor:
        """The critics' values `[E, ...]` to one, `[...]`."""
        if self.target_subset is None:
            return values.amin(dim=0)
        if not is_target:
            return values.mean(dim=0)
        drawn = torch.rand(len(values), device=values.device).argsort()[: self.target_subset]
        return values.index_select(0, drawn).amin(dim=0)


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
