"""Policies' distributions over actions: few kernels, and each result computed once.

They are small on purpose. `torch.distributions` spends more time in Python than a small network in its forward
pass; here a log-probability is one log-softmax (kept for the entropy) and one gather. All have

    sample(), mode()      actions: `[...]` one choice, `[..., K]` several, `[..., A]` numbers; samples have no gradient
    log_prob(action)      `[...]`
    entropy()             nats `[...]`
    draw(noise)           numbers alone: actions from normal noise `[..., A]`; gradients reach mean and log_std
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.kernels.door import fast_path

LOG_TWO_PI = math.log(2.0 * math.pi)
ITERATIONS_TO_PEAK = 32  # each shrinks the distance to it; by more, the further std^2 is from 1/2
FORBIDDEN_LOGIT = -1e30  # finite, so that gradients stay finite; exp of it is exactly 0 in every float format


class Categorical:
    """One of K actions. `mask [..., K]` (True: allowed) gives the others a probability of exactly 0."""

    def __init__(self, logits: Tensor, mask: Tensor | None = None) -> None:
        if mask is not None:
            logits = torch.where(mask.bool(), logits.float(), FORBIDDEN_LOGIT)
        self.logits = logits
        self._log_probs: Tensor | None = None

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities of all actions `[..., K]`; very negative where forbidden."""
        if self._log_probs is None:
            self._log_probs = torch.log_softmax(self.logits, dim=-1, dtype=torch.float32)
        return self._log_probs

    @property
    def probs(self) -> Tensor:
        return self.log_probs.exp()

    @fast_path("rl_lab.kernels.cpu_losses:CATEGORICAL_SAMPLE")
    def sample(self) -> Tensor:
        """argmax(logit - log(e)), e ~ Exp(1), is a draw from the softmax (Gumbel's trick)."""
        with torch.no_grad():
            noise = torch.empty_like(self.logits, dtype=torch.float32).exponential_()
            return (self.logits - noise.log()).argmax(dim=-1)

    def mode(self) -> Tensor:
        return self.logits.argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """A forbidden action adds 0 * (-1e30) = -0, never NaN."""
        log_probs = self.log_probs
        return -(log_probs.exp() * log_probs).sum(dim=-1)


class MultiCategorical:
    """Several independent choices at once: logits and mask `[..., sum(sizes)]`, actions `[..., K]`."""

    def __init__(self, logits: Tensor, sizes: Sequence[int], mask: Tensor | None = None) -> None:
        parts = logits.split(tuple(sizes), dim=-1)
        masks = mask.split(tuple(sizes), dim=-1) if mask is not None else [None] * len(parts)
        self.parts = [Categorical(part, allowed) for part, allowed in zip(parts, masks, strict=True)]

    def sample(self) -> Tensor:
        return torch.stack([part.sample() for part in self.parts], dim=-1)

    def mode(self) -> Tensor:
        return torch.stack([part.mode() for part in self.parts], dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        choices = action.unbind(dim=-1)
        return _total([part.log_prob(choice) for part, choice in zip(self.parts, choices, strict=True)])

    def entropy(self) -> Tensor:
        return _total([part.entropy() for part in self.parts])


class DiagonalGaussian:
    """Independent normals: mean `[..., A]`, log_std `[A]` or `[..., A]`, actions `[..., A]`."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean = mean
        self.log_std = log_std

    def sample(self) -> Tensor:
        with torch.no_grad():
            return self.draw(torch.randn_like(self.mean))

    def draw(self, noise: Tensor) -> Tensor:
        return torch.addcmul(self.mean, noise, self.log_std.exp())

    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        standardised = (action - self.mean) * torch.exp(-self.log_std)
        dimensions = self.mean.shape[-1]
        return (standardised.square() * -0.5 - self.log_std).sum(dim=-1) - 0.5 * LOG_TWO_PI * dimensions

    def entropy(self) -> Tensor:
        per_row = self.log_std.sum(dim=-1) + 0.5 * (1.0 + LOG_TWO_PI) * self.mean.shape[-1]
        return per_row.expand(self.mean.shape[:-1])


class SquashedGaussian:
    """A diagonal normal pressed into (-1, 1) by tanh."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.base = DiagonalGaussian(mean, log_std)

    def sample(self) -> Tensor:
        return self.base.sample().tanh_()

    def draw(self, noise: Tensor) -> Tensor:
        return torch.tanh(self.base.draw(noise))

    @fast_path("rl_lab.kernels.squashed:DRAW")
    def rsample_with_log_prob(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """From normal noise `[..., A]`, an action and its log-probability `[...]`; tanh is never inverted, which would
        lose digits near -1 and 1."""
        unsquashed = self.base.draw(noise)
        log_density = -0.5 * (noise.square() + LOG_TWO_PI) - self.base.log_std
        return torch.tanh(unsquashed), (log_density - log_tanh_derivative(unsquashed)).sum(dim=-1)

    def mode(self) -> Tensor:
        """tanh of the mean: the median of each dimension."""
        return torch.tanh(self.base.mean)

    def log_prob(self, action: Tensor) -> Tensor:
        """Actions at the very edge are moved inside by one float32 step."""
        edge = 1.0 - torch.finfo(torch.float32).eps
        unsquashed = torch.atanh(action.clamp(-edge, edge))
        return self.base.log_prob(unsquashed) - log_tanh_derivative(unsquashed).sum(dim=-1)

    def entropy(self) -> Tensor:
        """Estimated by one draw: there is no closed form."""
        return -self.rsample_with_log_prob(torch.randn_like(self.base.mean))[1]


class PeakedGaussian(SquashedGaussian):
    """The same, whose mode is where the actions' own density peaks: near the edges, if the normal is wide.

    log p(tanh u) = -(u - mean)^2 / 2 std^2 - log(1 - tanh(u)^2) + ...   is flat where   u = mean + 2 std^2 tanh(u)
    """

    def mode(self) -> Tensor:
        """That equation, iterated from the mean, which finds the higher peak of two."""
        reach = 2.0 * torch.exp(2.0 * self.base.log_std)
        place = self.base.mean
        for _ in range(ITERATIONS_TO_PEAK):
            place = torch.addcmul(self.base.mean, reach, torch.tanh(place))
        return torch.tanh(place)


class TruncatedGaussian:
    """Independent normals of which only what lies in [-1, 1] is drawn: mean in [-1, 1] and log_std, `[..., A]`.

    low = (-1 - mean) / std,   high = (1 - mean) / std,   mass = Phi(high) - Phi(low)
    """

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.base = DiagonalGaussian(mean, log_std)
        std = log_std.exp()
        self.low, self.high = (-1.0 - mean) / std, (1.0 - mean) / std
        self.below = torch.special.ndtr(self.low)
        self.mass = torch.special.ndtr(self.high) - self.below

    def sample(self) -> Tensor:
        with torch.no_grad():
            return self.draw(torch.randn_like(self.base.mean))

    def draw(self, noise: Tensor) -> Tensor:
        """As far through what is left as through a whole normal."""
        edge = torch.finfo(torch.float32).eps
        place = (self.below + torch.special.ndtr(noise) * self.mass).clamp(edge, 1.0 - edge)
        return self.base.draw(torch.special.ndtri(place)).clamp(-1.0, 1.0)

    def mode(self) -> Tensor:
        """The mean of the whole normals: where the density is largest."""
        return self.base.mean

    def log_prob(self, action: Tensor) -> Tensor:
        return self.base.log_prob(action) - self.mass.log().sum(dim=-1)

    def entropy(self) -> Tensor:
        """That of the whole normal, corrected for the mass that is left and for the two ends that are cut."""
        correction = (self.low * _density(self.low) - self.high * _density(self.high)) / (2.0 * self.mass)
        return self.base.entropy() + (self.mass.log() + correction).sum(dim=-1)


def log_tanh_derivative(unsquashed: Tensor) -> Tensor:
    """log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which neither overflows nor loses digits."""
    return 2.0 * (math.log(2.0) - unsquashed - F.softplus(-2.0 * unsquashed))


Distribution = Categorical | MultiCategorical | DiagonalGaussian | SquashedGaussian | TruncatedGaussian


def _density(x: Tensor) -> Tensor:
    """Of the standard normal."""
    return torch.exp(-0.5 * (x.square() + LOG_TWO_PI))


def _total(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
