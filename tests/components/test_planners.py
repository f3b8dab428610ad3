"""Planners: they find the best plan, for each environment its own, within bounds and by seed; CEM and MPPI by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_lab.components.planners.cem import CEMPlanner
from rl_lab.components.planners.mppi import MPPIPlanner, draw_by_weight
from rl_lab.components.planners.plan import Plan, Search, one_step_later
from rl_lab.types import ConfigError

CPU = torch.device("cpu")


def plan(score: Any, *, count: int = 1, action_size: int = 1, seed: int = 0, **settings: Any) -> Tensor:
    torch.manual_seed(seed)
    found = CEMPlanner(**settings).plan(Search(score, count, action_size, CPU))
    assert torch.equal(found.action, found.mean[:, 0])
    return found.mean


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


def test_proposals_compete_with_what_cem_draws() -> None:
    def far_away(plans: Tensor) -> Tensor:
        return -(plans[..., 0, 0] - 0.9).abs() * 100.0

    torch.manual_seed(0)
    proposal = torch.full((1, 1, 1, 1), 0.9)
    planner = CEMPlanner(candidates=4, best=1, iterations=1, horizon=1)
    assert float(planner.plan(Search(far_away, 1, 1, CPU, proposals=proposal)).action) == pytest.approx(0.9)


# --- MPPI --------------------------------------------------------------------------------------


def mppi(
    score: Any, *, count: int = 1, action_size: int = 1, seed: int = 0, explore: bool = False, **settings: Any
) -> Plan:
    torch.manual_seed(seed)
    given = {key: settings.pop(key) for key in ("previous", "proposals") if key in settings}
    return MPPIPlanner(**settings).plan(Search(score, count, action_size, CPU, explore=explore, **given))


def test_one_iteration_of_mppi_equals_a_loop_in_float64() -> None:
    """N = 2 environments, C = 7 candidates of which 2 are proposed, E = 3, H = 2, A = 2."""
    count, candidates, best, horizon, size, temperature = 2, 7, 3, 2, 2, 0.8
    goal = torch.tensor([0.3, -0.6])

    def score(plans: Tensor) -> Tensor:
        return -(plans - goal).square().sum(dim=(2, 3)) * 2.0

    previous = torch.linspace(-0.5, 0.5, count * horizon * size).view(count, horizon, size)
    proposals = torch.linspace(-0.9, 0.9, count * 2 * horizon * size).view(count, 2, horizon, size)
    found = mppi(
        score, count=count, action_size=size, seed=4, previous=previous, proposals=proposals, candidates=candidates,
        best=best, iterations=1, horizon=horizon, temperature=temperature, minimum_std=0.05, maximum_std=2.0,
    )  # fmt: skip

    torch.manual_seed(4)
    noise = torch.randn(count, candidates - 2, horizon, size).double()
    for n in range(count):
        mean = torch.zeros(horizon, size, dtype=torch.float64)
        mean[0] = previous[n, 1]  # one agent step later, and nothing planned for the new last step
        plans = [plan.double() for plan in proposals[n]]
        plans += [(mean + 2.0 * noise[n, c]).clamp(-1.0, 1.0) for c in range(candidates - 2)]
        scores = [float(-((plan - goal) ** 2).sum() * 2.0) for plan in plans]
        elite = sorted(range(candidates), key=lambda c: -scores[c])[:best]
        weights = [torch.exp(torch.tensor(temperature * (scores[c] - scores[elite[0]]))).double() for c in elite]
        weights = [weight / sum(weights) for weight in weights]
        mean = sum(weight * plans[c] for weight, c in zip(weights, elite, strict=True))
        spread = sum(weight * (plans[c] - mean) ** 2 for weight, c in zip(weights, elite, strict=True)).sqrt()
        torch.testing.assert_close(found.mean[n].double(), mean, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found.std[n].double(), spread.clamp(0.05, 2.0), atol=1e-6, rtol=1e-6)
        assert any(torch.allclose(found.action[n].double(), plans[c][0], atol=1e-6) for c in elite)


def test_weights_by_hand_and_a_temperature_of_zero_weighs_all_alike() -> None:
    scores = torch.tensor([[1.0, 0.0]])
    assert MPPIPlanner(temperature=2.0).weights(scores)[0].tolist() == pytest.approx([0.880797, 0.119203], abs=1e-6)
    assert MPPIPlanner(temperature=0.0).weights(scores)[0].tolist() == [0.5, 0.5]


def test_mppi_finds_the_maximum_for_every_environment_and_a_nan_does_not_win() -> None:
    goal = torch.tensor([[[0.5, -0.5]], [[-0.7, 0.2]]])  # [N, 1, A]

    def score(plans: Tensor) -> Tensor:
        values = 30.0 - 30.0 * (plans - goal.unsqueeze(1)).square().sum(dim=(2, 3))
        return torch.where(plans[..., 0, 0] > 0.95, float("nan"), values)

    found = mppi(score, count=2, action_size=2, horizon=1, minimum_std=0.01)
    torch.testing.assert_close(found.mean, goal, atol=0.05, rtol=0.0)


def test_exploring_adds_noise_of_the_first_steps_std_and_stays_in_bounds() -> None:
    calm = mppi(lambda plans: plans.sum(dim=(2, 3)), count=4000, candidates=2, best=1, iterations=1, horizon=1)
    noisy = mppi(
        lambda plans: plans.sum(dim=(2, 3)), count=4000, candidates=2, best=1, iterations=1, horizon=1, explore=True
    )
    assert torch.equal(calm.mean, noisy.mean)
    inside = calm.action.abs() < 0.5
    assert float((noisy.action - calm.action)[inside].std()) == pytest.approx(0.05, rel=0.1)  # the least std
    assert float(noisy.action.abs().max()) <= 1.0


def test_an_elite_is_drawn_as_often_as_its_weight_says() -> None:
    plans = torch.arange(3.0).view(1, 3, 1, 1).expand(6000, -1, -1, -1)
    torch.manual_seed(0)
    drawn = draw_by_weight(plans, torch.tensor([0.2, 0.7, 0.1]).expand(6000, -1)).flatten()
    assert [float((drawn == index).float().mean()) for index in range(3)] == pytest.approx([0.2, 0.7, 0.1], abs=0.02)


def test_a_plan_moves_on_by_one_step() -> None:
    assert one_step_later(torch.tensor([[[1.0], [2.0], [3.0]]])).flatten().tolist() == [2.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"candidates": 10, "best": 11}, "planner: best is 11 of 10 candidates; write 1 <= best <= candidates"),
        ({"iterations": 0}, "planner: iterations is 0, horizon is 3, temperature is 0.5 and std goes from 0.05 to 2.0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"minimum_std": 3.0}, "0 < minimum_std <= maximum_std"),
    ],
)
def test_impossible_settings_of_mppi_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MPPIPlanner(**settings)
