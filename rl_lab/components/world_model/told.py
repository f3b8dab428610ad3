"""The task-oriented latent dynamics of the first TD-MPC (TOLD): plain networks without simplices, bins or layer norms.

    "Temporal Difference Learning for Model Predictive Control" (Hansen et al. 2022, arXiv:2203.04955), section 3

    encoder   z = h(o)          dynamics  z' = d(z, a)          reward  r = R(z, a)
    critics   q = Q_i(z, a)     actor     a = p(z), with a little noise that is cut at both ends

Layers are linear and ELU, as in nicklashansen/tdmpc (src/algorithm/helper.py), with orthogonal weights and biases 0;
the last layers of reward and critics begin at 0. A critic's first layer is normed and passes through tanh.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from rl_lab.components.networks.observations import make_reader, module_name, selected_observation
from rl_lab.components.world_model.heads import Scalar
from rl_lab.components.world_model.implicit import ImageTower
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError

LARGEST_ACTION = 1.0 - 1e-6  # noisy actions stay inside: nicklashansen/tdmpc, helper.py TruncatedNormal


def elu_mlp(sizes: Sequence[int], *, starts_at_zero: bool = False) -> nn.Sequential:
    """Linear layers with ELU between them."""
    if any(size < 1 for size in sizes):
        raise ConfigError(f"layers are {list(sizes)}: write whole numbers from 1 on.")
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [orthogonal(nn.Linear(before, after)), nn.ELU()]
    network = nn.Sequential(*layers[:-1])
    if starts_at_zero:
        nn.init.zeros_(network[-1].weight)  # type: ignore[arg-type]
    return network


def orthogonal(layer: nn.Linear) -> nn.Linear:
    nn.init.orthogonal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class TOLDEncoder(nn.Module):
    """Observations to latents `[..., latent_size]`: vectors through two layers, images through four convolutions."""

    def __init__(
        self,
        *,
        observation: dict[str, ArraySpec],
        latent_size: int = 50,
        units: int = 256,
        channels: int = 32,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        specs = selected_observation(observation, keys)
        self.keys = tuple(specs)
        self.readers = nn.ModuleDict(
            {
                module_name(key): ImageTower(spec, channels) if spec.is_image else make_reader(key, spec)
                for key, spec in specs.items()
            }
        )
        width = sum(reader.output_size for reader in self.readers.values())  # type: ignore[misc]
        hidden = [] if all(spec.is_image for spec in specs.values()) else [units]
        self.mlp = elu_mlp([width, *hidden, latent_size])
        self.latent_size = self.output_size = latent_size

    def forward(self, observation: Batch) -> Tensor:
        readers = zip(self.keys, self.readers.values(), strict=True)
        return self.mlp(torch.cat([reader(observation[key]) for key, reader in readers], dim=-1))


class IdentityEncoder(nn.Module):
    """Observations as they are, side by side: the latent of a model that learns the environment's own numbers."""

    def __init__(self, *, observation: dict[str, ArraySpec], keys: Sequence[str] | None = None) -> None:
        super().__init__()
        specs = selected_observation(observation, keys)
        if images := [key for key, spec in specs.items() if spec.is_image]:
            raise ConfigError(
                f"components.encoder: '{images[0]}' is an image, too many numbers to predict as they are. Name "
                "others in `components.encoder.keys`, or write an encoder that learns."
            )
        self.keys = tuple(specs)
        self.readers = nn.ModuleDict({module_name(key): make_reader(key, spec) for key, spec in specs.items()})
        self.latent_size = self.output_size = sum(reader.output_size for reader in self.readers.values())  # type: ignore[misc]

    def forward(self, observation: Batch) -> Tensor:
        readers = zip(self.keys, self.readers.values(), strict=True)
        return torch.cat([reader(observation[key]) for key, reader in readers], dim=-1)


class TOLDDynamics(nn.Module):
    """`d(z, a)`: the latent one agent step later."""

    def __init__(self, *, input_size: int, action: ActionSpec, units: int = 512) -> None:
        super().__init__()
        self.mlp = elu_mlp([input_size + sum(action.sizes), units, units, input_size])
        self.output_size = input_size

    def forward(self, latent: Tensor, action: Tensor) -> Tensor:
        return self.mlp(torch.cat((latent, action), dim=-1))


class StochasticDynamics(nn.Module):
    """A normal over the latent one agent step later, for each number of its own; rollouts draw from it."""

    def __init__(
        self,
        *,
        input_size: int,
        action: ActionSpec,
        units: int = 512,
        log_std_bounds: tuple[float, float] = (-5.0, 1.0),
    ) -> None:
        super().__init__()
        if log_std_bounds[0] >= log_std_bounds[1]:
            raise ConfigError(
                f"components.dynamics.log_std_bounds is {list(log_std_bounds)}: write [lowest, highest], such as "
                "[-5.0, 1.0]."
            )
        self.mlp = elu_mlp([input_size + sum(action.sizes), units, units, 2 * input_size])
        self.output_size, self.log_std_bounds = input_size, log_std_bounds

    def predict(self, latent: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log of the std, `[..., Z]` each."""
        mean, spread = self.mlp(torch.cat((latent, action), dim=-1)).float().chunk(2, dim=-1)
        lowest, highest = self.log_std_bounds
        return mean, lowest + 0.5 * (highest - lowest) * (torch.tanh(spread) + 1.0)

    def forward(self, latent: Tensor, action: Tensor) -> Tensor:
        mean, log_std = self.predict(latent, action)
        return torch.addcmul(mean, log_std.exp(), torch.randn_like(mean))

    def error(self, latent: Tensor, action: Tensor, seen: Tensor) -> Tensor:
        """The negative log-likelihood `[...]` of what was seen, without its constant, mean over its numbers."""
        mean, log_std = self.predict(latent, action)
        return (0.5 * ((seen - mean) * (-log_std).exp()).square() + log_std).mean(dim=-1)


class TOLDReward(nn.Module):
    """`R(z, a)`: one number."""

    def __init__(self, *, input_size: int, action: ActionSpec, units: int = 512) -> None:
        super().__init__()
        self.mlp = elu_mlp([input_size + sum(action.sizes), units, units, 1], starts_at_zero=True)

    def forward(self, latent: Tensor, action: Tensor) -> Scalar:
        return Scalar(self.mlp(torch.cat((latent, action), dim=-1)))


class NoisyAction:
    """An action `[..., A]` in (-1, 1) with normal noise of `std` that is cut at `clip`; gradients reach the mean."""

    def __init__(self, mean: Tensor, std: float, clip: float) -> None:
        self.mean, self.std, self.clip = mean, std, clip

    def mode(self) -> Tensor:
        return self.mean

    def sample(self) -> Tensor:
        noisy = self.mean + (self.std * torch.randn_like(self.mean)).clamp(-self.clip, self.clip)
        return noisy + (noisy.clamp(-LARGEST_ACTION, LARGEST_ACTION) - noisy).detach()


class TOLDPolicy(nn.Module):
    """`p(z)`: an action, and the noise with which it is tried."""

    def __init__(
        self, *, input_size: int, action: ActionSpec, units: int = 512, std: float = 0.05, clip: float = 0.3
    ) -> None:
        super().__init__()
        if std < 0.0 or clip < 0.0:
            raise ConfigError(f"controllers.actor: std is {std} and clip is {clip}; write numbers from 0.")
        self.mlp = elu_mlp([input_size, units, units, sum(action.sizes)])
        self.std, self.clip = std, clip

    def forward(self, latent: Tensor) -> NoisyAction:
        return NoisyAction(torch.tanh(self.mlp(latent).float()), self.std, self.clip)


class TwinCritics(nn.Module):
    """`Q_1(z, a)` and `Q_2(z, a)`."""

    def __init__(self, *, input_size: int, action: ActionSpec, units: int = 512) -> None:
        super().__init__()
        self.critics = nn.ModuleList(_critic(input_size + sum(action.sizes), units) for _ in range(2))

    def forward(self, latent: Tensor, action: Tensor) -> Scalar:
        """Predictions of `[2, ...]`."""
        inputs = torch.cat((latent, action), dim=-1)
        return Scalar(torch.stack([critic(inputs) for critic in self.critics]))

    def value(self, latent: Tensor, action: Tensor, *, of_two: Literal["least", "mean"]) -> Tensor:
        """The least or the mean `[...]` of both."""
        values = self(latent, action).mean()
        return values.amin(dim=0) if of_two == "least" else values.mean(dim=0)


def _critic(inputs: int, units: int) -> nn.Sequential:
    first = [orthogonal(nn.Linear(inputs, units)), nn.LayerNorm(units), nn.Tanh()]
    return nn.Sequential(*first, *elu_mlp([units, units, 1], starts_at_zero=True))
