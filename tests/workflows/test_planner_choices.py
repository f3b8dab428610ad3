"""`planner=mppi`, `cem` or `none` for any workflow that learns a model: the block it makes, and who then acts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_lab.components.planners.cem import CEMPlanner
from rl_lab.components.planners.mppi import MPPIPlanner
from rl_lab.components.planners.plan import Search
from rl_lab.components.world_model.heads import Scalar
from rl_lab.config.compose import compose
from rl_lab.experiment.build import Agent, build_agent, build_runtime
from rl_lab.types import ActionSpec, ArraySpec, ConfigError, EnvSpec, TimeStep
from tests.tiny_dreamer import TINY_DREAMER
from tests.tiny_planet import TINY_MODEL
from tests.tiny_tdmpc2 import TINY_TDMPC2_MODEL

VECTOR = {"vector": ArraySpec((3,), "float32")}
CONTINUOUS = ActionSpec("continuous", (2,))
FEW = ["controllers.planner.candidates=16", "controllers.planner.best=4", "controllers.planner.iterations=2"]
SMALL = {
    "planet": [word for word in TINY_MODEL if "planner" not in word],
    "dreamer": TINY_DREAMER,
    "tdmpc2": [word for word in TINY_TDMPC2_MODEL if "planner" not in word],
}


def make(algorithm: str, *words: str, action: ActionSpec = CONTINUOUS) -> Agent:
    config = compose(f"rl_lab/PointMass-v0:{algorithm}", [*SMALL[algorithm], *words])
    return build_agent(config, EnvSpec("none", VECTOR, action, max_episode_steps=100), runtime=build_runtime(config))


def time_step(count: int, *, is_first: bool = True) -> TimeStep:
    nothing = torch.zeros(count, dtype=torch.bool)
    seen = {"vector": torch.randn(count, 3, generator=torch.Generator().manual_seed(1))}
    return TimeStep(seen, torch.zeros(count), torch.full((count,), is_first), nothing, nothing)


def watch(planner: Any) -> list[Tensor | None]:
    """The plans that searches are begun with."""
    seen: list[Tensor | None] = []
    original = planner.plan

    def watched(search: Search) -> Any:
        seen.append(search.previous)
        return original(search)

    planner.plan = watched
    return seen


# --- the block ---------------------------------------------------------------------------------


def test_a_planner_chosen_by_name_keeps_the_horizon_and_the_numbers_of_the_experiment() -> None:
    planner = compose("planet_pendulum", ["planner=mppi"])["controllers"]["planner"]
    assert planner["_target_"].endswith("MPPIPlanner") and planner["temperature"] == 0.5
    assert (planner["horizon"], planner["candidates"], planner["best"]) == (25, 200, 20)
    planner = compose("tdmpc2", ["planner=cem"])["controllers"]["planner"]
    assert planner.keys() == {"_target_", "candidates", "best", "iterations", "horizon", "minimum_std"}
    assert (planner["horizon"], planner["candidates"]) == (3, 1000)
    planner = compose("dreamer_v3_cartpole", ["planner=cem", "controllers.planner.best=7"])["controllers"]["planner"]
    assert (planner["best"], "horizon" in planner) == (7, False)  # its class has one


def test_no_planner_is_none_even_where_the_experiment_has_numbers_for_one() -> None:
    assert compose("tdmpc2_pendulum", ["planner=none"])["controllers"]["planner"] is None
    assert compose("tdmpc2_pendulum", ["planner=none", "preset=debug"])["controllers"]["planner"] is None


@pytest.mark.parametrize("experiment", ["dreamer_v3_pendulum", "dreamer_v2", "dreamer_v3_2023", "planet_pendulum"])
def test_the_debug_preset_shrinks_every_planner_and_brings_none(experiment: str) -> None:
    for planner in ("mppi", "cem"):
        words = ["preset=debug", f"planner={planner}"]
        found = compose(experiment, words)["controllers"]["planner"]
        assert (found["candidates"], found["best"], found["iterations"]) == (50, 5, 2)
    assert (compose(experiment, ["preset=debug"])["controllers"]["planner"] is None) == experiment.startswith("dreamer")
    own = compose(experiment, [*words, "controllers.planner.candidates=70"])["controllers"]["planner"]
    assert own["candidates"] == 70


def test_a_size_leaves_out_what_the_experiment_leaves_out() -> None:
    assert compose("tdmpc2_pendulum", ["size=tdmpc2/1m"])["components"]["continue_head"] is None
    assert compose("tdmpc2", ["size=tdmpc2/1m", "components.continue_head=null"])["components"]["continue_head"] is None


# --- who acts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["planet", "dreamer", "tdmpc2"])
@pytest.mark.parametrize("planner", ["mppi", "cem"])
def test_any_model_is_planned_in_with_any_planner(algorithm: str, planner: str) -> None:
    agent = make(algorithm, f"planner={planner}", *FEW)
    workflow: Any = agent.workflow
    assert isinstance(workflow.planner, MPPIPlanner if planner == "mppi" else CEMPlanner)
    previous = watch(workflow.planner)
    with torch.inference_mode():
        first = workflow.act(time_step(3), None, mode="train")
        second = workflow.act(time_step(3, is_first=False), first.state, mode="eval")
        workflow.act(time_step(3), second.state, mode="train")
    assert first.action.shape == (3, 2) and float(first.action.abs().max()) <= 1.0
    assert [None if each is None else bool(each.any()) for each in previous] == [False, True, False]
    assert torch.equal(previous[1], first.state["plan"])  # type: ignore[arg-type]
    assert workflow.not_exportable


def test_dreamers_policy_acts_where_nothing_plans() -> None:
    agent = make("dreamer", "planner=none")
    assert not agent.workflow.not_exportable
    assert "plan" not in agent.workflow.act(time_step(2), None, mode="eval").state


def test_the_return_of_a_plan_in_dreamer_by_hand() -> None:
    """Rewards 1, 2 with continues 0.5, 0.8 and a value of 10 at the end: 1 + 0.5 * 2 + 0.4 * 10 = 6."""
    workflow: Any = make("dreamer", "planner=cem", *FEW).workflow
    features = torch.tensor([[[1.0, 0.5], [2.0, 0.8]]])
    workflow.reward_head = lambda features: Scalar(features[..., :1])
    workflow.continue_head = lambda features: SimpleNamespace(mean=lambda: features[..., 1])
    workflow.critic = lambda features: Scalar(torch.full((*features.shape[:-1], 1), 10.0))
    assert workflow.planned_return(features).tolist() == pytest.approx([6.0])


def test_planners_refuse_discrete_actions_and_workflows_without_a_model_refuse_planners() -> None:
    with pytest.raises(
        ConfigError, match="controllers.planner plans with continuous actions, but those of none are di"
    ):
        make("dreamer", "planner=mppi", action=ActionSpec("discrete", (4,)))
    config = compose("ppo_pendulum", ["planner=mppi"])
    spec = EnvSpec("none", VECTOR, CONTINUOUS)
    with pytest.raises(ConfigError, match="controllers.planner is not used by PPO"):
        build_agent(config, spec, runtime=build_runtime(config))
