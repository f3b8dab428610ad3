"""A mixture of Gaussians over actions: several ways of doing the same, each with its own mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.heads.distributions import Categorical, DiagonalGaussian
from rl_lab.components.networks.encoders import MLP
from rl_lab.types import ActionSpec, ConfigError


class GaussianMixture:
    """One of M diagonal normals: logits `[..., M]`, mean and log_std `[..., M, A]`, actions `[..., A]`."""

    def __init__(self, logits: Tensor, mean: Tensor, log_std: Tensor) -> None:
        self.component = Categorical(logits)
        self.base = DiagonalGaussian(mean, log_std)

    def sample(self) -> Tensor:
        return self._of(self.base.sample(), self.component.sample())

    def draw_mean(self) -> Tensor:
        """The mean of a component that is drawn: one of the ways, without the noise around it."""
        return self._of(self.base.mean, self.component.sample())

    def mode(self) -> Tensor:
        """The mean of the likeliest component."""
        return self._of(self.base.mean, self.component.mode())

    def log_prob(self, action: Tensor) -> Tensor:
        return torch.logsumexp(self.component.log_probs + self.base.log_prob(action.unsqueeze(-2)), dim=-1)

    def entropy(self) -> Tensor:
        """That of the choice and of the components, which is the mixture's where they do not overlap."""
        return self.component.entropy() + (self.component.probs * self.base.entropy()).sum(dim=-1)

    @staticmethod
    def _of(values: Tensor, component: Tensor) -> Tensor:
        chosen = component[..., None, None].expand(*component.shape, 1, values.shape[-1])  # take_along_dim fixes [...]
        return values.gather(-2, chosen).squeeze(-2)


class MixtureActor(nn.Module):
    """Features to a mixture of Gaussians, whose stds come from the network and never fall below `least_std`."""

    def __init__(
        self,
        *,
        input_size: int,
        action: ActionSpec,
        hidden_sizes: Sequence[int] = (),
        activation: str = "relu",
        components: int = 5,
        least_std: float = 0.01,
        output_gain: float = 1.0,
    ) -> None:
        super().__init__()
        if action.kind != "continuous":
            raise ConfigError(
                f"A mixture of Gaussians is for continuous actions, but those of this environment are {action.kind}: "
                "write `actor=gaussian`, whose actor takes any."
            )
        if components < 1 or not least_std > 0.0:
            raise ConfigError(
                f"controllers.actor.components is {components} and least_std is {least_std}: write a whole number from "
                "1 on and a number above 0, such as 5 and 0.01."
            )
        self.components, self.least_std, self.action_size = components, least_std, action.sizes[0]
        self.network = MLP(
            input_size=input_size,
            hidden_sizes=hidden_sizes,
            activation=activation,
            output_size=components * (1 + 2 * self.action_size),
            output_gain=output_gain,
        )

    def forward(self, features: Tensor, mask: Tensor | None = None) -> GaussianMixture:
        """Features `[..., F]`; there are no masks of continuous actions."""
        output = self.network(features).float().unflatten(-1, (self.components, 1 + 2 * self.action_size))
        logits, mean, spread = output.split((1, self.action_size, self.action_size), dim=-1)
        return GaussianMixture(logits.squeeze(-1), mean, (F.softplus(spread) + self.least_std).log())
