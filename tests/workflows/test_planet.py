"""PlaNet: it plans what its model promises, explores while collecting, and only the model learns."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rl_lab
from rl_lab import api
from rl_lab.components.world_model.heads import Scalar
from rl_lab.config.compose import compose
from rl_lab.experiment.build import Agent, build_agent, build_runtime
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, Counts, EnvSpec, Phase, Progress, TimeStep
from rl_lab.workflows.planet import PlaNet
from tests.tiny_dreamer import random_rows
from tests.tiny_planet import TINY_MODEL, TINY_PLANET

VECTOR = {"vector": ArraySpec((3,), "float32")}
IMAGE = {"image": ArraySpec((64, 64, 3), "uint8")}
CONTINUOUS = ActionSpec("continuous", (2,))
PHASE = Phase(name="train", buffer="replay", progress=Progress(run=Counts(updates=1)))
MODEL = ("encoder", "dynamics", "decoder", "reward_head")


@cache
def config_of(overrides: tuple[str, ...]) -> dict[str, Any]:
    return compose("rl_lab/PointMass-v0:planet", list(overrides))


def make(
    observation: dict[str, ArraySpec] = VECTOR, action: ActionSpec = CONTINUOUS, *, overrides: tuple[str, ...] = ()
) -> tuple[PlaNet, Agent]:
    """A tiny PlaNet for an environment that need not exist."""
    config = config_of((*TINY_MODEL, *overrides))
    agent = build_agent(config, EnvSpec("none", observation, action), runtime=build_runtime(config))
    assert isinstance(agent.workflow, PlaNet)
    return agent.workflow, agent


def time_step(count: int, *, is_first: bool = True) -> TimeStep:
    nothing = torch.zeros(count, dtype=torch.bool)
    seen = {"vector": torch.randn(count, 3, generator=torch.Generator().manual_seed(1))}
    return TimeStep(seen, torch.zeros(count), torch.full((count,), is_first), nothing, nothing)


# --- planning ----------------------------------------------------------------------------------


class Wishes:
    """Dynamics whose features are the last action taken, and a reward head that wants it near 0.5 and -0.25."""

    goal = torch.tensor([0.5, -0.25])

    @staticmethod
    def imagine(start: Batch, policy: Any, horizon: int) -> tuple[Batch, Tensor]:
        actions = torch.stack([policy(start["deter"], step) for step in range(horizon)], dim=1)
        return {"deter": torch.cat((torch.zeros_like(actions[:, :1]), actions), dim=1)}, actions

    @staticmethod
    def features(state: Batch) -> Tensor:
        return state["deter"]

    def reward(self, features: Tensor) -> Scalar:
        return Scalar(-(features - self.goal).square().sum(dim=-1, keepdim=True))


def test_the_plan_is_what_promises_the_most_reward() -> None:
    workflow, _ = make(overrides=("controllers.planner.candidates=500", "controllers.planner.iterations=8"))
    wishes = Wishes()
    workflow.dynamics, workflow.reward_head = wishes, wishes.reward  # type: ignore[assignment]
    torch.manual_seed(0)
    action = workflow.plan({"deter": torch.zeros(3, 2)}, {})["action"]
    assert torch.allclose(action, wishes.goal.expand(3, 2), atol=0.05)


def test_a_plan_is_scored_from_its_own_environments_state() -> None:
    """The first environment is promised reward for 1, the second for -1."""
    workflow, _ = make()

    def imagine(start: Batch, policy: Any, horizon: int) -> tuple[Batch, Tensor]:
        actions = torch.stack([policy(start["deter"], step) for step in range(horizon)], dim=1)
        good = actions.sum(dim=-1, keepdim=True) * start["deter"].unsqueeze(1)
        return {"deter": torch.cat((torch.full_like(good[:, :1], 1e6), good), dim=1)}, actions

    workflow.dynamics.imagine = imagine  # type: ignore[assignment, method-assign]
    workflow.dynamics.features = lambda state: state["deter"]  # type: ignore[method-assign]
    workflow.reward_head = Scalar  # type: ignore[assignment]
    torch.manual_seed(0)
    action = workflow.plan({"deter": torch.tensor([[1.0], [-1.0]])}, {})["action"]
    assert float(action[0].min()) > 0.4 and float(action[1].max()) < -0.4


def test_noise_is_added_while_collecting_alone_and_the_action_stays_in_bounds() -> None:
    workflow, _ = make()
    planned = torch.tensor([[0.0, 0.95]]).repeat(4000, 1)
    workflow.plan = lambda batch, numbers, mode: {"action": planned, "plan": planned}  # type: ignore[method-assign]
    torch.manual_seed(0)
    explored = workflow.act(time_step(4000), None, mode="train")
    assert float(explored.action[:, 0].std()) == pytest.approx(0.3, rel=0.05)
    assert float(explored.action.max()) == 1.0
    assert torch.equal(explored.state["action"], explored.action), "the model is told what was done, not what was meant"
    assert torch.equal(workflow.act(time_step(4000), None, mode="eval").action, planned)


def test_it_replans_from_a_state_that_follows_the_episode() -> None:
    workflow, _ = make()
    first = workflow.act(time_step(2), None, mode="train")
    assert {key: tuple(value.shape) for key, value in first.extras.items()} == {
        "context_deter": (2, 32),
        "context_stoch": (2, 4),
    }
    later = workflow.act(time_step(2, is_first=False), first.state, mode="eval")
    anew = workflow.act(time_step(2), later.state, mode="eval")
    blank = workflow.act(time_step(2), None, mode="eval")
    assert not torch.allclose(later.state["deter"], anew.state["deter"])
    assert torch.equal(anew.state["deter"], blank.state["deter"])
    assert later.extras == {}


def test_rows_of_the_random_controller_keep_a_blank_context() -> None:
    workflow, _ = make()
    answer = workflow.policy("random")(time_step(2), None, mode="train")
    assert answer.extras["context_stoch"].tolist() == [[0.0] * 4] * 2


# --- learning ----------------------------------------------------------------------------------


@pytest.mark.parametrize("observation", [VECTOR, IMAGE, {**VECTOR, **IMAGE}], ids=["state", "pixels", "both"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_changes_every_part_of_the_model(observation: dict[str, ArraySpec], precision: str) -> None:
    workflow, agent = make(observation, overrides=(f"runtime.precision={precision}", "runtime.device=cpu"))
    modules: dict[str, nn.Module] = {name: agent.components[name] for name in MODEL}
    before = {name: [p.detach().clone() for p in part.parameters()] for name, part in modules.items()}
    metrics = workflow.update_world_model(random_rows(observation, CONTINUOUS), phase=PHASE)
    for name, part in modules.items():
        assert any(not torch.equal(a, b) for a, b in zip(before[name], part.parameters(), strict=True)), name
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in metrics.values())
    names = {name.removeprefix("loss/") for name in metrics if name.startswith("loss/")}
    assert names == set(workflow.loss_scales)


def test_planning_leaves_no_gradient() -> None:
    workflow, _ = make()
    start = workflow.dynamics.initial_state(2, torch.device("cpu"))
    assert not workflow.plan(start, {})["action"].requires_grad


def test_contexts_are_renewed_for_the_buffer() -> None:
    workflow, _ = make()
    size, length = 3, 7
    blank = workflow.dynamics.pack(workflow.dynamics.initial_state(size, torch.device("cpu")))
    batch = random_rows(VECTOR, CONTINUOUS) | {
        key: value.unsqueeze(1).repeat(1, length, 1) for key, value in blank.items()
    }
    workflow.update_world_model(batch, phase=PHASE)
    assert not bool(batch["context_stoch"][:, 0].any()) and bool(batch["context_stoch"][:, 1:].any())


def test_a_batch_is_learnt_by_heart() -> None:
    workflow, _ = make(overrides=("optimizers.world_model.learning_rate=1e-2",))
    batch = random_rows(VECTOR, CONTINUOUS)
    losses = [workflow.update_world_model(dict(batch), phase=PHASE) for _ in range(150)]
    for name in ("loss/reconstruction", "loss/reward"):
        assert float(losses[-1][name]) < 0.2 * float(losses[0][name]), name


# --- dreaming, and what rows cost --------------------------------------------------------------


def test_imagine_plans_at_every_step_and_tells_what_it_expects() -> None:
    workflow, _ = make()
    state = workflow.act(time_step(2), None, mode="eval").state
    dream = workflow.imagine(state, horizon=5)
    assert {key: tuple(value.shape) for key, value in dream.items()} == {
        "vector": (2, 6, 3),
        "deter": (2, 6, 32),
        "stoch": (2, 6, 4),
        "reward": (2, 6),
        "action": (2, 5, 2),
    }
    assert torch.equal(dream["deter"][:, 0], state["deter"])


def test_a_row_costs_what_act_keeps_with_it() -> None:
    workflow, _ = make()
    kept = workflow.act(time_step(1), None, mode="train").extras
    assert workflow.extra_bytes_per_row == sum(value.nbytes for value in kept.values()) == 2 * 32 + 2 * 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    short = ["preset=debug", "training.phases.prefill.duration_steps=40", "training.phases.train.duration_steps=20"]
    runs_dir: Path = tmp_path_factory.mktemp("runs")
    overrides = [*TINY_PLANET, "buffers.replay.sequence_length=5", *short]
    return api.train("rl_lab/PointMass-v0:planet", overrides=overrides, runs_dir=runs_dir, quiet=True)


def test_a_loaded_policy_dreams_on_from_what_it_saw(run: api.Run) -> None:
    policy = rl_lab.load(run)
    with pytest.raises(ConfigError, match=r"imagine\(\) goes on from what the policy has seen: call policy.act"):
        policy.imagine()
    env = gymnasium.make("rl_lab/PointMass-v0")
    observation, _ = env.reset(seed=0)
    assert env.action_space.contains(np.asarray(policy.act(observation), np.float32))
    with pytest.raises(ConfigError, match=r"imagine\(horizon=0\): a dream has at least 1 step"):
        policy.imagine(horizon=0)
    dream = policy.imagine(horizon=4)
    assert dream["reward"].shape == (1, 5) and dream["vector"].shape == (1, 5, 2)


# --- what is refused ---------------------------------------------------------------------------


def test_choices_are_left_to_dreamer() -> None:
    with pytest.raises(ConfigError, match="PlaNet plans with continuous actions, but those of none are discrete: wri"):
        make(action=ActionSpec("discrete", (3,)))
    with pytest.raises(ConfigError, match=r"write `algorithm=dreamer`, which takes any\."):
        make(action=ActionSpec("multi_discrete", (2, 3)))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.free_nats=-1.0", "algorithm.free_nats is -1.0 and exploration_noise is 0.3: write numbers from 0"),
        ("algorithm.exploration_noise=-0.1", "exploration_noise is -0.1: write numbers from 0, such as 3.0 and 0.3"),
        ("+algorithm.loss_scales.policy=1.0", "algorithm.loss_scales.policy is no loss of PlaNet"),
        ("controllers.planner=null", "The workflow needs controllers.planner, which the config does not have"),
    ],
)
def test_impossible_settings_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(overrides=(override,))


def test_there_is_no_controller_to_update() -> None:
    workflow, _ = make()
    with pytest.raises(ConfigError, match="hook 'update_controller', which PlaNet does not have.* Its hooks: update_"):
        workflow.check_phase(Phase(name="train", buffer="replay", workflow_hooks=("update_controller",)))
