"""The stochastic part of a world model's state: a sample from a distribution, as one flat vector.

A latent turns parameters (the output of a network) into samples `[..., size]` through which gradients flow, and
compares two distributions. Noise is drawn by the caller, for all time steps at once.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.types import ConfigError


def unimix(logits: Tensor, fraction: float) -> Tensor:
    """Probabilities `[..., K]`: a softmax with a `fraction` of a uniform distribution mixed in, in float32.

    No class is ever impossible, so that no KL divergence and no log-probability explodes (arXiv:2301.04104, 1 %).
    """
    probs = torch.softmax(logits.float(), dim=-1)
    return probs if fraction == 0.0 else probs * (1.0 - fraction) + fraction / logits.shape[-1]


class CategoricalLatent(nn.Module):
    """`groups` independent choices of one of `classes` each, as one-hot vectors side by side.

    Gradients pass straight through the choice to its probabilities (DreamerV2, arXiv:2010.02193, algorithm 1).
    """

    class_ids: Tensor

    def __init__(self, *, groups: int = 32, classes: int = 16, unimix: float = 0.01) -> None:
        super().__init__()
        if groups < 1 or not 2 <= classes <= 256 or not 0.0 <= unimix < 1.0:
            raise ConfigError(
                f"latent: groups is {groups}, classes is {classes} and unimix is {unimix}; allowed is groups from 1, "
                "classes from 2 to 256 and unimix from 0 to below 1. Write for example 32, 16 and 0.01."
            )
        self.groups = groups
        self.classes = classes
        self.unimix = unimix
        self.size = self.parameter_size = groups * classes
        self.register_buffer("class_ids", torch.arange(classes), persistent=False)

    def noise(self, *leading: int, device: torch.device) -> Tensor:
        """Exponential noise `[..., groups, classes]`: argmax(p / e) is a draw from p (Gumbel's trick without logs)."""
        return torch.empty(*leading, self.groups, self.classes, device=device).exponential_()

    def sample(self, parameters: Tensor, noise: Tensor | None) -> Tensor:
        """`[..., size]`; without noise, the likeliest classes."""
        probs = self.probs(parameters)
        choice = (probs if noise is None else probs / noise).argmax(dim=-1, keepdim=True)
        one_hot = (choice == self.class_ids).to(probs.dtype)
        if probs.requires_grad:
            one_hot = one_hot + (probs - probs.detach())
        return one_hot.flatten(-2)

    def probs(self, parameters: Tensor) -> Tensor:
        """Probabilities `[..., groups, classes]`."""
        return unimix(parameters.unflatten(-1, (self.groups, self.classes)), self.unimix)

    def log_probs(self, parameters: Tensor) -> Tensor:
        """`[..., groups, classes]`; without unimix a class may be so unlikely that only its logarithm is a number."""
        if self.unimix == 0.0:
            return torch.log_softmax(parameters.unflatten(-1, (self.groups, self.classes)).float(), dim=-1)
        return self.probs(parameters).log()

    def kl(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """KL(ours || theirs) in nats, summed over the groups `[...]`."""
        return (self.probs(ours) * (self.log_probs(ours) - self.log_probs(theirs))).sum(dim=(-2, -1))

    def entropy(self, parameters: Tensor) -> Tensor:
        """Nats, summed over the groups `[...]`."""
        return -(self.probs(parameters) * self.log_probs(parameters)).sum(dim=(-2, -1))

    def pack(self, sample: Tensor) -> Tensor:
        """The chosen classes `[..., groups]` in one byte each: what a replay row keeps."""
        return sample.unflatten(-1, (self.groups, self.classes)).argmax(dim=-1).to(torch.uint8)

    def unpack(self, packed: Tensor) -> Tensor:
        """The sample `[..., size]` that was packed."""
        return (packed.unsqueeze(-1) == self.class_ids).to(torch.float32).flatten(-2)


class GaussianLatent(nn.Module):
    """Independent normals, their std never below `minimum_std` (PlaNet, arXiv:1811.04551, 0.1)."""

    def __init__(self, *, size: int = 30, minimum_std: float = 0.1) -> None:
        super().__init__()
        if size < 1 or minimum_std <= 0.0:
            raise ConfigError(
                f"latent: size is {size} and minimum_std is {minimum_std}; allowed is size from 1 and a "
                "std above 0. Write for example 30 and 0.1."
            )
        self.size = size
        self.parameter_size = 2 * size
        self.minimum_std = minimum_std

    def noise(self, *leading: int, device: torch.device) -> Tensor:
        """Standard normal noise `[..., size]`."""
        return torch.randn(*leading, self.size, device=device)

    def sample(self, parameters: Tensor, noise: Tensor | None) -> Tensor:
        """`[..., size]`; without noise, the mean."""
        mean, std = self.moments(parameters)
        return mean if noise is None else torch.addcmul(mean, std, noise)

    def moments(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std `[..., size]`."""
        mean, raw = parameters.float().chunk(2, dim=-1)
        return mean, F.softplus(raw) + self.minimum_std

    def kl(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """KL(ours || theirs) in nats, summed over the dimensions `[...]`."""
        (mean, std), (other_mean, other_std) = self.moments(ours), self.moments(theirs)
        ratio = std / other_std
        distance = (mean - other_mean) / other_std
        return (0.5 * (ratio.square() + distance.square() - 1.0) - ratio.log()).sum(dim=-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Nats `[...]`."""
        _, std = self.moments(parameters)
        return (std.log() + 0.5 * math.log(2.0 * math.pi * math.e)).sum(dim=-1)

    def pack(self, sample: Tensor) -> Tensor:
        """The sample in half precision."""
        return sample.to(torch.float16)

    def unpack(self, packed: Tensor) -> Tensor:
        """The sample again, rounded."""
        return packed.to(torch.float32)
