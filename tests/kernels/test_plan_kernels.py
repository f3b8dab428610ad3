"""Plans scored by kernels promise what the formula says, on a CPU through Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from rl_lab.components.planners.mppi import MPPIPlanner
from rl_lab.kernels import door, gpu
from rl_lab.kernels.triton import plans as kernels
from rl_lab.types import ArraySpec
from tests.kernels.kernel_harness import Call, Inputs, Variant, check, shaken
from tests.workflows.test_tdmpc2 import make

SETTINGS = ("components.continue_head=null", "controllers.critic.members=5", "runtime.precision=tf32")
OTHERS = {
    "a continue head": ("controllers.critic.members=5",),
    "another depth": (*SETTINGS, "components.dynamics.layers=1"),
    "odd widths": (*SETTINGS, "controllers.actor.units=12"),
    "one critic": (*SETTINGS, "controllers.critic.members=1"),
}


@pytest.fixture(autouse=True)
def everything_is_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(kernels, "product_dtype", lambda: torch.float16)
    door.open_door(True, takes_unmeasured=True)
    yield
    door.open_door(True)


def workflow_of(settings: tuple[str, ...] = SETTINGS) -> Any:
    """With weights and biases that all matter, and values of some size."""
    workflow, _ = make({"vector": ArraySpec((3,), "float32")}, overrides=(*settings, "runtime.fast_paths=all"))
    for number, part in enumerate((workflow.dynamics, workflow.reward_head, workflow.critic, workflow.actor)):
        shaken(part, number)
    return workflow


@torch.no_grad()
def both(workflow: Any, latent: Tensor, plans: Tensor, *, times: int = 1) -> list[list[Tensor]]:
    """By kernels and as written, one search after another, and where the random generator stands."""
    found = []
    for is_plain in (False, True):
        torch.manual_seed(1)
        with door.plain_formulas() if is_plain else torch.no_grad():
            score = workflow.scores(latent, None)
            found.append([*(score(plans) for _ in range(times)), torch.get_rng_state()])
    return found


@pytest.mark.parametrize("many", [0, 10**6], ids=["many", "few"])
@pytest.mark.parametrize(("count", "candidates", "horizon"), [(1, 1, 1), (1, 33, 2), (2, 2, 3)])
def test_plans_promise_the_same(
    count: int, candidates: int, horizon: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MANY_ROWS", many)
    workflow = workflow_of()
    latent = torch.softmax(torch.randn(count, 4, 4), dim=-1).flatten(1)
    plans = torch.rand(count, horizon, 2, candidates).permute(0, 3, 1, 2) * 2.0 - 1.0  # not as they lie in memory
    before = [each.clone() for each in (latent, plans, *workflow.critic.parameters())]
    door.open_door(True, takes_unmeasured=True)
    fast, plain = both(workflow, latent, plans)
    assert "gpu_plans:SCORES" in door.in_use()
    assert torch.equal(fast.pop(), plain.pop()), "the two draw different random numbers"
    for ours, theirs in zip(fast, plain, strict=True):
        assert ours.shape == theirs.shape == (count, candidates)
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * max(1.0, float(theirs.abs().max())))
    after = (latent, plans, *workflow.critic.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize(("count", "horizon"), [(1, 1), (2, 3)])
@torch.no_grad()
def test_plans_of_the_policy(count: int, horizon: int) -> None:
    workflow = workflow_of()
    latent, found = torch.softmax(torch.randn(count, 4, 4), dim=-1).flatten(1), []
    door.open_door(True, takes_unmeasured=True)
    for is_plain in (False, True):
        torch.manual_seed(1)
        with door.plain_formulas() if is_plain else torch.no_grad():
            found.append((workflow.proposed_plans(latent, horizon), torch.get_rng_state()))
    assert "gpu_plans:PROPOSED_PLANS" in door.in_use()
    assert torch.equal(found[0][1], found[1][1]), "the two draw different random numbers"
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-2, atol=2e-2)


def test_the_least_of_two_values() -> None:
    workflow = workflow_of()
    workflow.plan_value = "least"
    fast, plain = both(workflow, torch.rand(1, 16), torch.rand(1, 3, 2, 2))
    torch.testing.assert_close(fast[0], plain[0], rtol=2e-2, atol=2e-2)


def test_a_plan_with_nan_spoils_only_itself() -> None:
    plans = torch.rand(1, 3, 2, 2)
    plans[0, 1, 1] = torch.nan
    for side in both(workflow_of(), torch.rand(1, 16), plans):
        assert side[0].isnan().nonzero().tolist() == [[0, 1]]


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
@torch.no_grad()
def test_other_models_run_as_they_are_written(settings: tuple[str, ...]) -> None:
    workflow = workflow_of(settings)
    door.open_door(True, takes_unmeasured=True)
    assert not isinstance(workflow.scores(torch.rand(1, 16), None), kernels.Scores)


@torch.no_grad()
def test_products_in_fp32_run_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "product_dtype", lambda: None)
    assert not isinstance(workflow_of().scores(torch.rand(1, 16), None), kernels.Scores)


def test_products_read_what_autocast_says_or_fp16_for_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert kernels.product_dtype() is None
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    assert kernels.product_dtype() is torch.bfloat16


def refit_call(inputs: Inputs, *, scale: float = 3.0) -> Call:
    planner = MPPIPlanner(candidates=37, best=7, iterations=1)
    scores = inputs.normal(37, scale=scale)
    return Call(planner.refit, [inputs.normal(37, 3, 13).clamp(-1.0, 1.0), scores, None])  # 39 numbers: two programs


@pytest.mark.parametrize(
    "variant",
    [
        *(Variant(rows=rows) for rows in (1, 3)),
        *(Variant(rows=2, layout=layout) for layout in ("strided", "transposed")),
        Variant(rows=2, values="saturated"),
    ],
    ids=str,
)
@torch.no_grad()
def test_the_best_plans(variant: Variant) -> None:
    check("rl_lab.kernels.gpu_plans:REFIT", refit_call, variant)


@torch.no_grad()
def test_scores_that_are_no_numbers_count_as_zero_and_infinite_ones_as_largest() -> None:
    planner, plans = MPPIPlanner(candidates=8, best=4), torch.rand(1, 8, 3, 2)
    for scores in (
        [-1.0, torch.nan, -3.0, 2.0, -4.0, -5.0, -6.0, 1.0],
        [torch.inf, -torch.inf, *[0.5 + i for i in range(6)]],
    ):
        call = lambda inputs, scores=scores: Call(planner.refit, [plans, torch.tensor([scores]), None])  # noqa: E731
        check("rl_lab.kernels.gpu_plans:REFIT", call, Variant(rows=1))


@torch.no_grad()
def test_as_many_candidates_as_are_kept_and_all_equally_good() -> None:
    planner, plans = MPPIPlanner(candidates=5, best=5), torch.rand(2, 5, 3, 2)
    best, weights, mean, _ = planner.refit(plans, torch.zeros(2, 5), None)
    assert torch.equal(best, plans) and weights.tolist() == [[pytest.approx(0.2)] * 5] * 2
    torch.testing.assert_close(mean, plans.mean(dim=1))


@torch.no_grad()
def test_bounds_of_a_schedule_run_as_they_are_written() -> None:
    planner, plans, scores = MPPIPlanner(candidates=8, best=4), torch.rand(1, 8, 3, 2), torch.rand(1, 8)
    call = lambda inputs: Call(planner.refit, [plans, scores, torch.tensor(0.1)])  # noqa: E731
    check("rl_lab.kernels.gpu_plans:REFIT", call, Variant(rows=1), is_used=False)
