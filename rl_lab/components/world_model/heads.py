"""Small networks that read a world model's features: reward, continuation, allowed actions, value and policy.

Sizes and starts are those of danijar/dreamerv3 (configs.yaml: rewhead, conhead, policy, value): reward and value
begin at exactly 0, the policy begins nearly uniform.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.heads.distributions import (
    Categorical,
    DiagonalGaussian,
    Distribution,
    MultiCategorical,
    PeakedGaussian,
    TruncatedGaussian,
)
from rl_lab.components.networks.layers import choose
from rl_lab.components.world_model.latents import unimix
from rl_lab.components.world_model.layers import Stack, dense
from rl_lab.components.world_model.two_hot import SymlogTwoHot, TwoHot, symexp_bins, symlog_bins
from rl_lab.kernels.door import fast_path
from rl_lab.types import ActionSpec, ArraySpec, ConfigError


class Scalar:
    """The mean of a normal with unit std, the prediction of PlaNet, DreamerV1 and V2."""

    def __init__(self, output: Tensor) -> None:
        self.output = output.float().squeeze(-1)

    def mean(self) -> Tensor:
        """`[...]`."""
        return self.output

    def loss(self, target: Tensor) -> Tensor:
        """Half the squared error `[...]`: a unit normal's negative log-likelihood without its constant."""
        return 0.5 * (self.output - target.detach()).square()

    def until_last(self) -> Scalar:
        """The predictions of all rows `[N, T]` but the last."""
        return Scalar(self.output[:, :-1].unsqueeze(-1))


class FeatureHead(nn.Module):
    """A stack that reads features `[..., F]`, and a linear layer to so many outputs; to none, no layers at all."""

    def __init__(
        self,
        outputs: int,
        scale: float = 1.0,
        /,
        *,
        input_size: int,
        layers: int = 1,
        units: int = 256,
        activation: str = "silu",
        norm: str = "rms",
    ) -> None:
        super().__init__()
        if outputs:
            self.stack = Stack(input_size, layers=layers, units=units, activation=activation, norm=norm)
            self.output = dense(self.stack.output_size, outputs, scale=scale)


class ScalarHead(FeatureHead):
    """Features to a prediction with `mean()` and `loss(target)`: rewards and values."""

    bins: Tensor
    kinds = {"two_hot": (TwoHot, symexp_bins), "symlog_two_hot": (SymlogTwoHot, symlog_bins), "normal": (Scalar, None)}

    def __init__(
        self, *, prediction: str = "two_hot", bins: int = 255, output_scale: float = 0.0, **network: Any
    ) -> None:
        kind, make_bins = choose(self.kinds, prediction, place="head prediction")
        super().__init__(bins if make_bins else 1, output_scale, **network)
        self.prediction = kind
        if make_bins:
            self.register_buffer("bins", make_bins(bins), persistent=False)  # known from their count

    def forward(self, features: Tensor) -> TwoHot | Scalar:
        """Features `[..., F]` to a prediction of one number per row."""
        hidden = self.stack(features)
        if self.prediction is not Scalar:
            return self.prediction(self.output(hidden), self.bins)
        # Not as a matrix product: bfloat16 cannot tell 79 from 79.2.
        number = (hidden.float() * self.output.weight[0]).sum(dim=-1, keepdim=True)
        return Scalar(number + self.output.bias)


class Continuation:
    """The probability that an episode goes on."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits.float()

    def mean(self) -> Tensor:
        """`[...]`."""
        return torch.sigmoid(self.logits)

    def loss(self, target: Tensor) -> Tensor:
        """Cross-entropy `[...]` to probabilities `[...]`."""
        return F.binary_cross_entropy_with_logits(self.logits, target.detach(), reduction="none")


class ContinueHead(FeatureHead):
    """Features to the probability of going on."""

    def __init__(self, **network: Any) -> None:
        super().__init__(1, **network)

    def forward(self, features: Tensor) -> Continuation:
        return Continuation(self.output(self.stack(features)).squeeze(-1))


class AllowedActions(Continuation):
    """The probability that each action is allowed `[..., sum(sizes)]`, each on its own."""

    def __init__(self, logits: Tensor, sizes: Sequence[int]) -> None:
        super().__init__(logits)
        self.sizes = tuple(sizes)

    def loss(self, target: Tensor) -> Tensor:
        """Cross-entropy `[...]` to masks `[..., sum(sizes)]`, summed over the actions."""
        return super().loss(target.float()).sum(dim=-1)

    def mask(self) -> Tensor:
        """What is likelier allowed than not; all of a choice's actions where none is."""
        parts = (self.logits > 0.0).split(self.sizes, dim=-1)
        return torch.cat([part | ~part.any(dim=-1, keepdim=True) for part in parts], dim=-1)


class ActionMaskHead(FeatureHead):
    """Features to the actions that the environment would allow; without layers where it allows all of them always."""

    def __init__(self, *, observation: Mapping[str, ArraySpec], action: ActionSpec, **network: Any) -> None:
        super().__init__(sum(action.sizes) if "action_mask" in observation else 0, **network)
        self.sizes = action.sizes

    def forward(self, features: Tensor) -> AllowedActions:
        return AllowedActions(self.output(self.stack(features)), self.sizes)


class LatentActor(nn.Module):
    """Features to a distribution over actions.

    Discrete: a softmax with 1 % of uniform. Continuous, each with its paper's way from an output x to a std:

         bounded      a normal whose mean is squashed into [-1, 1] by tanh; low + (high - low) sigmoid(x + 2)
                      (V3: `bounded_normal`, embodied/jax/heads.py)
         truncated    the same, of which only what lies in [-1, 1] is drawn; low + (high - low) sigmoid(x / 2)
                      (V2: `trunc_normal`, common/nets.py)
         tanh         a normal that is squashed into [-1, 1] as it is drawn; low + softplus(x), from `high` at x = 0
                      (V1: `tanh_normal`, models.py, whose mode is the likeliest of 100 draws)
    """

    def __init__(
        self,
        *,
        input_size: int,
        action: ActionSpec,
        layers: int = 3,
        units: int = 256,
        activation: str = "silu",
        norm: str = "rms",
        unimix: float = 0.01,
        distribution: Literal["bounded", "truncated", "tanh"] = "bounded",
        minimum_std: float = 0.1,
        maximum_std: float = 1.0,
        output_scale: float = 0.01,
    ) -> None:
        super().__init__()
        if not 0.0 < minimum_std <= maximum_std:
            raise ConfigError(
                f"actor: minimum_std is {minimum_std} and maximum_std {maximum_std}; write "
                "0 < minimum <= maximum, such as 0.1 and 1.0."
            )
        if not 0.0 <= unimix < 1.0:
            raise ConfigError(f"actor: unimix is {unimix}; write a number from 0 to below 1, such as 0.01.")
        self.action = action
        self.unimix, self.distribution = unimix, distribution
        self.stds = (minimum_std, maximum_std)
        self.stack = Stack(input_size, layers=layers, units=units, activation=activation, norm=norm)
        self.output = dense(self.stack.output_size, sum(action.sizes), scale=output_scale)
        if action.kind == "continuous":
            self.deviation_output = dense(self.stack.output_size, sum(action.sizes), scale=output_scale)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Distribution:
        """Features `[..., F]` and, for discrete actions, the allowed ones `[..., sum(sizes)]`."""
        hidden = self.stack(features)
        output = self.output(hidden).float()
        if self.action.kind == "discrete":
            return Categorical(self._log_probs(output), mask)
        if self.action.kind == "multi_discrete":
            parts = [self._log_probs(part) for part in output.split(self.action.sizes, dim=-1)]
            return MultiCategorical(torch.cat(parts, dim=-1), self.action.sizes, mask)
        return self._numbers(output, self.deviation_output(hidden).float())

    def _log_probs(self, logits: Tensor) -> Tensor:
        # Without unimix a probability may round to 0, whose logarithm is infinite.
        return torch.log_softmax(logits, dim=-1) if self.unimix == 0.0 else unimix(logits, self.unimix).log()

    def _numbers(self, output: Tensor, std: Tensor) -> Distribution:
        """Two outputs `[..., A]` to a distribution over continuous actions."""
        lowest, highest = self.stds
        if self.distribution == "tanh":
            # Beyond 5 tanh has no gradient left: the mean never goes there.
            start = math.log(math.expm1(highest))  # softplus of it is the std to begin with
            log_std = (lowest + F.softplus(std + start)).log()
            return PeakedGaussian(5.0 * torch.tanh(output / 5.0), log_std)
        if self.distribution == "truncated":
            log_std = (lowest + (highest - lowest) * torch.sigmoid(0.5 * std)).log()
            return TruncatedGaussian(torch.tanh(output), log_std)
        # + 2: begins near the largest std
        log_std = (lowest + (highest - lowest) * torch.sigmoid(std + 2.0)).log()
        return DiagonalGaussian(torch.tanh(output), log_std)

    def noise(self, *leading: int, device: torch.device) -> Tensor:
        """What `decide` needs to draw actions `[..., sum(sizes)]`: Gumbel's, or normal where they are numbers."""
        empty = torch.empty(*leading, sum(self.action.sizes), device=device)
        return empty.normal_() if self.action.kind == "continuous" else empty.exponential_().log_().neg_()

    @fast_path("rl_lab.kernels.gpu:DECIDE")
    def decide(self, features: Tensor, noise: Tensor) -> Tensor:
        """Actions drawn with noise from outside; where they are numbers, gradients reach mean and std."""
        policy = self(features)
        if isinstance(policy, Categorical):
            return (policy.logits + noise).argmax(dim=-1)
        if isinstance(policy, MultiCategorical):
            parts = zip(policy.parts, noise.split(self.action.sizes, dim=-1), strict=True)
            return torch.stack([(part.logits + each).argmax(dim=-1) for part, each in parts], dim=-1)
        return policy.draw(noise)
