"""The cross-entropy method: it finds the best plan, for each environment its own, within bounds and by seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_lab.components.planners.cem import CEMPlanner
from rl_lab.types import ConfigError

CPU = torch.device("cpu")


def plan(score: Any, *, count: int = 1, action_size: int = 1, seed: int = 0, **settings: Any) -> Tensor:
    torch.manual_seed(seed)
    return CEMPlanner(**settings).plan(score, count=count, action_size=action_size, device=CPU)


def test_it_finds_the_maximum_of_a_known_function_for_every_environment_and_step() -> None:
    goal = torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(5)) * 1.6 - 0.8  # [N, H, A]
    found = plan(lambda plans: -(plans - goal.unsqueeze(1)).square().sum(dim=(2, 3)), count=3, action_size=2, horizon=4)
    assert found.shape == (3, 4, 2)
    assert torch.allclose(found, goal, atol=0.02)


def test_it_leaves_a_lesser_peak_for_the_greater_one() -> None:
    def two_peaks(plans: Tensor) -> Tensor:
        action = plans[..., 0, 0]
        return torch.exp(-50.0 * (action + 0.6).square()) + 2.0 * torch.exp(-50.0 * (action - 0.5).square())

    assert float(plan(two_peaks, horizon=1)) == pytest.approx(0.5, abs=0.01)


def test_plans_stay_within_bounds_even_where_the_score_rises_beyond_them() -> None:
    seen: list[Tensor] = []

    def more_is_better(plans: Tensor) -> Tensor:
        seen.append(plans)
        return plans.sum(dim=(2, 3))

    found = plan(more_is_better, count=2, action_size=3, horizon=2, candidates=50, best=5, iterations=7)
    assert len(seen) == 7
    assert {tuple(plans.shape) for plans in seen} == {(2, 50, 2, 3)}
    assert all(float(plans.abs().max()) <= 1.0 for plans in seen)
    assert float(found.min()) > 0.8 and float(found.max()) <= 1.0


def test_one_round_is_the_mean_of_the_best_draws() -> None:
    torch.manual_seed(3)
    draws = torch.randn(1, 6, 1, 1).clamp(-1.0, 1.0)
    expected = float(draws.flatten().topk(2).values.mean())
    found = plan(lambda plans: plans[..., 0, 0], seed=3, candidates=6, best=2, iterations=1, horizon=1)
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_drawing_never_becomes_narrower_than_asked() -> None:
    rounds: list[Tensor] = []

    def peak(plans: Tensor) -> Tensor:
        rounds.append(plans)
        return -plans[..., 0, 0].square()

    plan(peak, candidates=500, best=1, iterations=4, horizon=1, minimum_std=0.2)
    assert float(rounds[-1].std()) == pytest.approx(0.2, rel=0.15)


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    plans = [plan(lambda plans: plans.sum(dim=(2, 3)), seed=seed, iterations=1) for seed in (1, 1, 2)]
    assert torch.equal(plans[0], plans[1])
    assert not torch.equal(plans[0], plans[2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"candidates": 10, "best": 11}, "planner: best is 11 of 10 candidates; write 1 <= best <= candidates"),
        ({"best": 0}, "planner: best is 0 of 1000 candidates"),
        ({"iterations": 0}, "planner: iterations is 0, horizon is 12 and minimum_std is 0.001; allowed are"),
        ({"horizon": 0}, "horizon is 0 and"),
        ({"minimum_std": -0.1}, "minimum_std is -0.1; allowed are whole numbers from 1 and a std"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CEMPlanner(**settings)
