"""Parts that explore: an actor that draws uniformly, and an ensemble that disagrees about what is not known yet.

"Planning to Explore via Self-Supervised World Models" (Sekar et al. 2020, arXiv:2005.05960), section 3:

     row t          0            1            2
     features       f0           f1           f2           memory and latent, as heads read them
     action         a0           a1                        a1 answers row 1
     embedding      e0           e1           e2           what the encoder made of the row's observation
     prediction     w_k(f0, a0)  w_k(f1, a1)               of the next embedding e_t+1, by each of K networks
     loss           |w_k - e1|^2 |w_k - e2|^2              half of it, as of a normal with unit std
     disagreement   D0           D1                        D_t = mean over the embedding of Var_k w_k(f_t, a_t)

All networks learn from the same rows and begin differently. Where they have seen enough they agree on the mean, however
noisy what follows is: noise alone earns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from rl_lab.components.heads.actor_critic import RandomController
from rl_lab.components.networks.ensemble import EnsembleMLP
from rl_lab.components.returns.returns import mean
from rl_lab.types import ActionSpec, ConfigError


@dataclass(frozen=True)
class Draws:
    """A distribution that can only be drawn from."""

    sample: Callable[[], Tensor]


class UniformActor(RandomController):
    """Every allowed action equally likely, whatever the features say; continuous ones uniform in [-1, 1]."""

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Draws:
        """Features `[N, F]` and, for discrete actions, the allowed ones `[N, sum(sizes)]`."""
        return Draws(partial(self.sample, features.shape[0], features.device, mask))


class Disagreement(nn.Module):
    """`networks` predictions of the next embedding from features and an encoded action, and how far they are apart."""

    def __init__(
        self,
        *,
        input_size: int,
        action: ActionSpec,
        target_size: int,
        networks: int = 10,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: str = "silu",
        norm: str = "layer",
    ) -> None:
        super().__init__()
        if networks < 2:
            raise ConfigError(
                f"components.disagreement.networks is {networks}: it takes two to disagree. Write a whole number from "
                "2 on, such as 10."
            )
        self.ensemble = EnsembleMLP(
            size=networks,
            input_size=input_size + sum(action.sizes),
            hidden_sizes=hidden_sizes,
            output_size=target_size,
            activation=activation,
            norm=norm,
        )

    def predictions(self, features: Tensor, action: Tensor) -> Tensor:
        """Features `[B, T, F]` and encoded actions `[B, T, A]` to embeddings `[K, B, T, E]`."""
        return self.ensemble(features.flatten(0, 1), action.flatten(0, 1)).unflatten(1, features.shape[:2]).float()

    def loss(self, features: Tensor, action: Tensor, embedding: Tensor, is_last: Tensor) -> Tensor:
        """Rows `[B, T, ...]` to one number. Gradients reach the ensemble alone; nothing follows an is_last row."""
        predictions = self.predictions(features.detach()[:, :-1], action[:, :-1])  # [K, B, T-1, E]
        error = 0.5 * (predictions - embedding.detach()[:, 1:]).square().sum(dim=-1)
        return mean(error.sum(dim=0), ~is_last[:, :-1])

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        """What each action earns `[B, T]`: the variance of its predictions, meant over the embedding."""
        return self.predictions(features, action).var(dim=0, unbiased=False).mean(dim=-1)
