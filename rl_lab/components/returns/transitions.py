"""From sampled rows to transitions: n rewards in one, and the row whose value stands for everything after them.

row t            0       1       2       3 = n
reward           .       r1      r2      r3       arrives WITH the row, so action 0 earned r1
is_last          0       0       1       0        the episode ends at row 2; row 3 belongs to the next one
is_terminal      0       0       1/0     0
------------------------------------------------------------------------------------------------
reward    = r1 + discount * r2                    only what this episode brought
next_row  = 2                                     whose value bootstraps
discount  = discount ** 2 * (1 - is_terminal2)    0: nothing after has value; a time limit bootstraps
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_lab.types import Batch


def n_step_transitions(batch: Batch, discount: float) -> Batch:
    """What the action of row 0 led to within n steps, from rows `[B, n+1]`; the target is
    `reward + discount * value(next_row)`.

    reward    float [B]   discounted sum of the rewards up to next_row
    discount  float [B]   the factor of the value of next_row
    next_row  int64 [B]   n, or where the episode ended before; 0 where row 0 is_last (then nothing was decided)
    is_valid  bool  [B]   ~is_last of row 0
    """
    reward = batch["reward"][:, 1:]
    continues = (~batch["is_last"][:, :-1]).cumprod(dim=1)  # [B, n]: 1 while the transition t -> t+1 is the episode's
    powers = discount ** torch.arange(reward.shape[1], dtype=reward.dtype, device=reward.device)
    next_row = continues.sum(dim=1)
    survives = 1.0 - rows_at(batch["is_terminal"], next_row).to(reward.dtype)
    return {
        "reward": (reward * continues * powers).sum(dim=1),
        "discount": survives * discount ** next_row.to(reward.dtype),
        "next_row": next_row,
        "is_valid": continues[:, 0].bool(),
    }


def transition_and_following(batch: Batch, discount: float, keys: Sequence[str]) -> tuple[Batch, Batch]:
    """`reward` and `discount` `[B]` of replayed rows `[B, n+1]`, and the observation `[B, ...]` they led to.

    With one step, row 1 always follows, since replay starts nowhere an episode ends: a tenth of the operations.
    """
    if batch["reward"].shape[1] == 2:
        transition = {"reward": batch["reward"][:, 1], "discount": ~batch["is_terminal"][:, 1] * discount}
        return transition, {key: batch[key][:, 1] for key in keys}
    transition = n_step_transitions(batch, discount)
    return transition, {key: rows_at(batch[key], transition["next_row"]) for key in keys}


def rows_at(values: Tensor, row: Tensor) -> Tensor:
    """`values[b, row[b]]` for each b: `[B, T, ...]` and `[B]` to `[B, ...]`."""
    return values[torch.arange(len(row), device=row.device), row]
