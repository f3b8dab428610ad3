"""Numbers of any size as targets: symlog, and a softmax over bins that grow exponentially.

"Mastering Diverse Domains through World Models" (Hafner et al. 2023, arXiv:2301.04104), equations 9 and 10. As in
the current danijar/dreamerv3 (embodied/jax/heads.py, `symexp_twohot`) the bins lie at symexp of an even grid and a
target is shared between its two neighbours there, so that the mean over the bins is unbiased.

     bins     symexp(-20) ... symexp(-0.16)   0   symexp(0.16) ... symexp(20)
     target                                   0 ..x.. 0.17         weights by closeness: 1 - x/0.17 and x/0.17
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_lab.kernels.door import fast_path
from rl_lab.types import ConfigError

LARGEST_SYMLOG = 20.0  # danijar/dreamerv3, heads.py: bins reach symexp(20), about 5e8


def symlog(values: Tensor) -> Tensor:
    """sign(x) * log(1 + |x|): nearly x for small values, logarithmic for large ones."""
    return torch.sign(values) * torch.log1p(values.abs())


def symexp(values: Tensor) -> Tensor:
    """The inverse of symlog."""
    return torch.sign(values) * torch.expm1(values.abs())


def symlog_bins(count: int, *, largest: float = LARGEST_SYMLOG) -> Tensor:
    """`count` even bins of symlog(x) up to `largest`, mirrored about 0 exactly; an odd number has 0 in the middle."""
    if count < 3 or count % 2 == 0:
        raise ConfigError(f"bins is {count}: write an odd whole number from 3 on, such as 255.")
    negative = torch.linspace(-largest, 0.0, count // 2 + 1)
    return torch.cat((negative, -negative[:-1].flip(0)))


def symexp_bins(count: int) -> Tensor:
    """The numbers at those bins."""
    return symexp(symlog_bins(count))


def two_hot_weights(target: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
    """The index of the bin below each target `[...]`, and the weight of the bin above it, both `[...]`.

    Targets outside the bins count as the outermost ones.
    """
    target = target.clamp(bins[0], bins[-1])
    below = (torch.searchsorted(bins, target.contiguous(), right=True) - 1).clamp(0, len(bins) - 2)
    low, high = bins[below], bins[below + 1]
    return below, (target - low) / (high - low)


class TwoHot:
    """A softmax over bins: logits `[..., bins]`."""

    def __init__(self, logits: Tensor, bins: Tensor) -> None:
        self.logits = logits
        self.bins = bins

    @fast_path("rl_lab.kernels.gpu:TWO_HOT_MEAN")
    def mean(self) -> Tensor:
        """The expected number `[...]`. Mirrored bins are summed in pairs, so that equal logits give exactly 0."""
        half = self.bins.shape[0] // 2
        weighted = torch.softmax(self.logits.float(), dim=-1) * self.bins
        return (weighted[..., :half].flip(-1) + weighted[..., half + 1 :]).sum(dim=-1) + weighted[..., half]

    @fast_path("rl_lab.kernels.gpu:TWO_HOT_LOSS")
    def loss(self, target: Tensor) -> Tensor:
        """Cross-entropy `[...]` to targets `[...]`."""
        assert target.shape == self.logits.shape[:-1], (target.shape, self.logits.shape)
        with torch.no_grad():
            below, weight_above = two_hot_weights(target.float(), self.bins)
            indices = torch.stack((below, below + 1), dim=-1)
            weights = torch.stack((1.0 - weight_above, weight_above), dim=-1)
        log_probs = torch.log_softmax(self.logits.float(), dim=-1)
        return -(log_probs.gather(-1, indices) * weights).sum(dim=-1)

    def until_last(self) -> TwoHot:
        """The predictions of all rows `[N, T]` but the last."""
        return type(self)(self.logits[:, :-1], self.bins)


class SymlogTwoHot(TwoHot):
    """A softmax over even bins of symlog(x): the mean is taken there and brought back by symexp, so that it lies below
    that of `TwoHot` where predictions are spread (danijar/dreamerv3 at 8fa35f8, 2023: `symlog_disc`)."""

    @fast_path("rl_lab.kernels.gpu:SYMLOG_TWO_HOT_MEAN")
    def mean(self) -> Tensor:
        return symexp(super().mean())

    def loss(self, target: Tensor) -> Tensor:
        return super().loss(symlog(target))
