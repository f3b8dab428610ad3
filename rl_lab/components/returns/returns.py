"""What an action was worth: from rows of rewards and values to one target per action.

Every function here takes rows 0..T (`[B, T+1]`, docs/time_steps.md) and answers for rows 0..T-1 (`[B, T]`):

     row t            0       1       2       3       4 = T
     reward           0       r1      r2      0       r4       arrives WITH the row, so action 0 earned r1
     value            V0      V1      V2      V3      V4       the critic's value of that row's observation
     is_first         1       0       0       1       0
     is_last          0       0       1       0       0        row 2 ends an episode
     is_terminal      0       0       1/0     0       0        1: V2 is worth nothing; 0 (time limit): V2 counts
     ------------------------------------------------------------------------------------------------------
     return           R0      R1     (R2)     R3               Rt answers: what was action t worth?

     R3 = r4 + discount * V4                      the rows end, not the episode: the last row bootstraps
    (R2) row 2 is_last: no action was taken there, so whatever stands here is masked by the caller (`~is_last[:, :-1]`)
     R1 = r2 + discount * (1 - is_terminal2) * V2 the episode ends at row 2: nothing flows back from row 3
     R0 = r1 + discount * ((1 - lambda_) * V1 + lambda_ * R1)

Gradients flow where the inputs carry them (an actor trained through a learned model needs that); stored rows
carry none, so a rollout costs no graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rl_lab.types import ConfigError


def lambda_return(
    reward: Tensor, value: Tensor, is_last: Tensor, is_terminal: Tensor, *, discount: float, lambda_: float
) -> Tensor:
    """TD(lambda) targets `[B, T]` from rows `[B, T+1]`; bootstraps at time limits and at the last row.

    With n meaning row t+1:  Rt = rn + discount * (1 - is_terminal_n) * mix_n, where
        mix_n = (1 - lambda_) * Vn + lambda_ * Rn   inside an episode, and
        mix_n = Vn                                  where is_last_n, and at the last row.

    GAE is `lambda_return - value[:, :-1]`.
    """
    next_value = value[:, 1:]
    survival = (1.0 - is_terminal[:, 1:].to(value.dtype)) * discount  # is_terminal: a bool or a probability
    carry = survival * ((~is_last[:, 1:]).to(value.dtype) * lambda_)  # how much of Rn reaches Rt
    base = reward[:, 1:] + (survival - carry) * next_value
    base = torch.cat((base[:, :-1], base[:, -1:] + carry[:, -1:] * next_value[:, -1:]), dim=1)
    return scan_from_the_end(base, carry)


def reward_to_go(reward: Tensor, is_last: Tensor, *, discount: float = 1.0) -> Tensor:
    """Discounted rewards from here to the end of the episode or of the rows `[B, T]`; no critic involved."""
    carry = (~is_last[:, 1:]).to(reward.dtype) * discount
    return scan_from_the_end(reward[:, 1:], carry)


def episode_return(reward: Tensor, is_last: Tensor, *, discount: float = 1.0) -> Tensor:
    """The whole episode's return, the same for each of its rows `[B, T]`: only of the rows that are
    here, where an episode began before row 0 or continues after row T."""
    to_go = reward_to_go(reward, is_last, discount=discount)
    row = torch.arange(to_go.shape[1], device=reward.device).expand_as(to_go)
    begins = torch.cat((torch.ones_like(is_last[:, :1]), is_last[:, :-2]), dim=1)
    first_row = torch.where(begins, row, 0).cummax(dim=1).values
    return to_go.gather(1, first_row)


def scan_from_the_end(base: Tensor, carry: Tensor) -> Tensor:
    """Solve Rt = base_t + carry_t * R(t+1) with R(T) = 0, in log2(T) vectorised rounds.

    After the round of `reach`, base_t sums 2*reach rows and carry_t is the product of their carries, so a row
    takes over what the row `reach` later already knows. Faster than a loop over T on CPU from about T = 32 and
    on a GPU always. Rows lead inside, because slices of the leading axis stay contiguous.
    """
    base, carry = base.t().contiguous(), carry.t().contiguous()
    length, reach = base.shape[0], 1
    while reach < length:
        head = torch.addcmul(base[:-reach], carry[: length - reach], base[reach:])
        base = torch.cat((head, base[-reach:]))
        carry = carry[:-reach] * carry[reach:]
        reach *= 2
    return base.t()


# --- statistics of samples that count -------------------------------------------------------------


def mean(values: Tensor, valid: Tensor | None) -> Tensor:
    """The mean over valid samples; None: every sample counts."""
    return values.mean() if valid is None else (values * valid).sum() / valid.sum()


def standardize(values: Tensor, valid: Tensor | None) -> Tensor:
    """Zero mean and unit std over valid samples; fewer than two have no std and are only centred."""
    chosen = values if valid is None else values[valid]
    if chosen.numel() < 2:
        return values - chosen.mean()
    return (values - chosen.mean()) / (chosen.std() + 1e-8)


class PercentileScale(nn.Module):
    """`update(returns)`, then divide by `scale()`. The statistics are buffers, saved with the policy.

    arXiv:2301.04104, equation 7: advantages are divided by the range from the 5th to the 95th percentile of the
    imagined returns, averaged over updates with decay 0.99, but never by less than 1: one entropy scale fits all.

    decay 1 never moves: everything is divided by `smallest_scale`.
    starts_at_zero: the average begins with 0, which suits returns, whose range below 1 does not matter; if not, with
    the first percentiles, so that the first range is that of what was seen.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        *,
        low_percentile: float = 5.0,
        high_percentile: float = 95.0,
        decay: float = 0.99,
        smallest_scale: float = 1.0,
        starts_at_zero: bool = True,
    ) -> None:
        super().__init__()
        if not 0.0 <= low_percentile < high_percentile <= 100.0 or not 0.0 <= decay <= 1.0 or smallest_scale <= 0.0:
            raise ConfigError(
                f"return scale: percentiles are {low_percentile} and {high_percentile}, decay is {decay} and "
                f"smallest_scale is {smallest_scale}; allowed is 0 <= low < high <= 100, 0 <= decay <= 1 and a "
                "smallest scale above 0. Write for example 5, 95, 0.99 and 1.0."
            )
        self.percentiles = (low_percentile, high_percentile)
        self.decay = decay
        self.smallest_scale, self.starts_at_zero = smallest_scale, starts_at_zero
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    @torch.no_grad()
    def update(self, returns: Tensor) -> None:
        """Move towards the percentiles of these returns, of any shape."""
        ordered = returns.detach().float().flatten().sort().values
        rate = torch.full_like(self.low, 1.0 - self.decay)
        if not self.starts_at_zero and self.decay < 1.0:
            rate = torch.where((self.low == 0.0) & (self.high == 0.0), 1.0, rate)  # nothing was seen yet
        for running, percent in zip((self.low, self.high), self.percentiles, strict=True):
            running.lerp_(percentile(ordered, percent), rate)

    def scale(self) -> Tensor:
        """What to divide by: a number of at least `smallest_scale`."""
        return (self.high - self.low).clamp(min=self.smallest_scale)


def percentile(ordered: Tensor, percent: float) -> Tensor:
    """Of sorted numbers `[M]`, interpolated linearly. Its places are known beforehand, so a GPU need not wait."""
    position = percent / 100.0 * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], position - below)
