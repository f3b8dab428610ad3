"""The best plans of a search, their weights, mean and std, as one kernel: to pick and to weigh so few takes no time, to
launch fifteen kernels does."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max
NUMBERS = 32  # of a plan, for one program


@triton.jit
def _finite(score, LARGEST: tl.constexpr):
    """`nan_to_num(0.0)`."""
    return tl.minimum(tl.maximum(tl.where(score != score, 0.0, score), -LARGEST), LARGEST)


@triton.jit
def _refit(
    plans, scores, best, weights, means, stds, candidates, temperature, lowest, highest, LARGEST: tl.constexpr,
    BEST: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    c, d = tl.arange(0, C), tl.program_id(1) * D + tl.arange(0, D)
    is_one = c < candidates
    score = _finite(tl.load(scores + row * candidates + c, mask=is_one, other=0.0), LARGEST)
    better = tl.zeros([C], tl.int32)  # how many are, or as good and before it
    for start in range(0, candidates, PART):
        other = start + tl.arange(0, PART)
        there = other < candidates
        its = _finite(tl.load(scores + row * candidates + other, mask=there, other=0.0), LARGEST)
        is_before = (its[None, :] > score[:, None]) | ((its[None, :] == score[:, None]) & (other[None, :] < c[:, None]))
        better += tl.sum((is_before & there[None, :]).to(tl.int32), axis=1)
    is_best = is_one & (better < BEST)
    largest = tl.max(tl.where(is_best, score, -LARGEST), axis=0)
    weight = tl.where(is_best, tl.exp(temperature * score - temperature * largest), 0.0)
    weight = weight / tl.sum(weight, axis=0)
    inside = is_best[:, None] & (d < SIZE)[None, :]
    plan = tl.load(plans + (row * candidates + c[:, None]) * SIZE + d[None, :], mask=inside, other=0.0)
    mean = tl.sum(weight[:, None] * plan, axis=0)
    apart = tl.where(inside, plan - mean[None, :], 0.0)
    std = tl.sqrt(tl.sum(weight[:, None] * apart * apart, axis=0))
    std = tl.maximum(std, lowest, propagate_nan=tl.PropagateNan.ALL)
    std = tl.minimum(std, highest, propagate_nan=tl.PropagateNan.ALL)
    tl.store(means + row * SIZE + d, mean, mask=d < SIZE)
    tl.store(stds + row * SIZE + d, std, mask=d < SIZE)
    place = row * BEST + better
    tl.store(best + place[:, None] * SIZE + d[None, :], plan, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(weights + place, weight, mask=is_best)


def refit(planner: Any, plans: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best plans, their weights, their mean and std: what `MPPIPlanner.refit` answers with."""
    count, candidates, *shape = plans.shape
    plans, scores = plans.contiguous(), scores.contiguous()
    size = plans[0, 0].numel()
    best, weights = plans.new_empty(count, planner.best, *shape), plans.new_empty(count, planner.best)
    mean, std = plans.new_empty(2, count, *shape).unbind()
    _refit[(count, triton.cdiv(size, NUMBERS))](
        plans, scores, best, weights, mean, std, candidates, float(planner.temperature), float(planner.minimum_std),
        float(planner.maximum_std), LARGEST=LARGEST, BEST=planner.best, SIZE=size,
        C=triton.next_power_of_2(candidates), D=NUMBERS, PART=32, num_warps=8,
    )  # fmt: skip
    return best, weights, mean, std
