"""Behaviour cloning: its loss by hand, mixtures, choices, and what is refused."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch

from rl_lab.components.heads.mixture import GaussianMixture, MixtureActor
from rl_lab.config.compose import compose
from rl_lab.experiment.build import Agent, build_agent, build_runtime
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, EnvSpec, Phase, TimeStep
from rl_lab.workflows.bc import BehaviorCloning

VECTOR = {"vector": ArraySpec((3,), "float32")}
CONTINUOUS, DISCRETE = ActionSpec("continuous", (2,)), ActionSpec("discrete", (4,))
PHASE = Phase("train", buffer="demonstrations")


@cache
def config_of(overrides: tuple[str, ...]) -> dict[str, Any]:
    small = ["controllers.actor.hidden_sizes=[32]", "optimizers.controller.learning_rate=1e-2"]
    return compose("rl_lab/PointMass-v0:bc", [*small, *overrides])


def make(*overrides: str, action: ActionSpec = CONTINUOUS) -> tuple[BehaviorCloning, Agent]:
    config = config_of(overrides)
    agent = build_agent(config, EnvSpec("none", VECTOR, action), runtime=build_runtime(config))
    assert isinstance(agent.workflow, BehaviorCloning)
    return agent.workflow, agent


def batch_of(action: ActionSpec = CONTINUOUS, size: int = 8) -> Batch:
    random = torch.Generator().manual_seed(2)
    vector = torch.randn(size, 1, 3, generator=random)
    ranges = {"vector_range": torch.tensor([[-1.0] * 3, [1.0] * 3])}
    if action.kind == "discrete":
        return {"vector": vector, "action": torch.randint(4, (size, 1), generator=random), **ranges}
    ranges["action_range"] = torch.tensor([[0.0, -1.0], [0.5, 1.0]])
    return {"vector": vector, "action": torch.rand(size, 1, 2, generator=random) / 2, **ranges}


def time_step(vector: torch.Tensor) -> TimeStep:
    nothing = torch.zeros(len(vector), dtype=torch.bool)
    return TimeStep({"vector": vector}, torch.zeros(len(vector)), nothing, nothing, nothing)


def test_the_loss_is_the_gaussians_on_the_scale_of_the_data() -> None:
    workflow, _ = make()
    batch = batch_of()
    workflow.normalizer.learn(batch)
    policy = workflow.policy_of({"vector": batch["vector"][:, 0]})
    scaled = (batch["action"][:, 0] - torch.tensor([0.25, 0.0])) / torch.tensor([0.25, 1.0])
    error = (scaled - policy.mean) / policy.log_std.exp()
    expected = (0.5 * error.square() + policy.log_std + 0.5 * math.log(2 * math.pi)).sum(dim=-1).mean()
    assert float(workflow.loss(batch).terms["cloning"].detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_a_mixture_by_hand() -> None:
    """A quarter around (0, 0) with std 1, three quarters around (2, 2) with std 0.5."""
    logits = torch.tensor([1.0, 3.0]).log()
    mean = torch.tensor([[0.0, 0.0], [2.0, 2.0]])
    mixture = GaussianMixture(logits, mean, torch.tensor([[0.0, 0.0], [math.log(0.5)] * 2]))
    first = math.exp(-0.5 * 2) / (2 * math.pi)
    second = math.exp(-0.5 * 8) / (2 * math.pi * 0.25)
    found = mixture.log_prob(torch.tensor([1.0, 1.0]))
    assert float(found) == pytest.approx(math.log(0.25 * first + 0.75 * second), rel=1e-5)
    assert mixture.mode().tolist() == [2.0, 2.0]
    many = GaussianMixture(logits.expand(4000, 2), mean.expand(4000, 2, 2), torch.full((4000, 2, 2), -3.0))
    ways = many.draw_mean()
    assert set(map(tuple, ways.tolist())) == {(0.0, 0.0), (2.0, 2.0)}
    assert float(ways.mean()) == pytest.approx(1.5, abs=0.1)
    assert float((many.sample() - 1.0).abs().mean()) == pytest.approx(1.0, abs=0.02)
    choice = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    normals = math.log(2 * math.pi * math.e) + 0.75 * 2 * math.log(0.5)
    assert float(mixture.entropy()) == pytest.approx(choice + normals, rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "action"), [((), CONTINUOUS), (("actor=mixture",), CONTINUOUS), ((), DISCRETE)], ids=str
)
def test_one_batch_is_learnt_by_heart_and_answered(overrides: tuple[str, ...], action: ActionSpec) -> None:
    workflow, agent = make(*overrides, action=action)
    batch = batch_of(action)
    before = [p.detach().clone() for p in agent.controllers["actor"].parameters()]
    losses = [float(workflow.update_controller(batch, phase=PHASE)["loss/cloning"]) for _ in range(150)]
    assert losses[-1] < losses[0] - 1.0
    assert all(not torch.equal(a, b) for a, b in zip(before, agent.controllers["actor"].parameters(), strict=True))
    workflow.sample_in_evaluations = False
    answer = workflow.act(time_step(batch["vector"][:, 0]), None, mode="eval").action
    wrong = (answer.detach().float() - batch["action"][:, 0].float()).abs().mean()
    assert float(wrong) < 0.1


def test_evaluations_draw_one_of_the_ways_of_a_mixture_and_training_the_noise_as_well() -> None:
    workflow, _ = make("actor=mixture")
    same = time_step(torch.ones(200, 3))
    assert workflow.sample_in_evaluations
    ways = workflow.act(same, None, mode="eval").action.detach()
    assert 1 < len((ways * 1e4).round().unique(dim=0)) <= 5
    assert len(workflow.act(same, None, mode="train").action.unique(dim=0)) == 200
    workflow.sample_in_evaluations = False
    assert len((workflow.act(same, None, mode="eval").action * 1e4).round().unique(dim=0)) == 1


def test_what_does_not_fit_is_refused() -> None:
    workflow, _ = make()
    with pytest.raises(ConfigError, match="learns from one row at a time, but buffer 'replay' gives 16: use a"):
        workflow.check_rows(16, buffer="replay")
    with pytest.raises(ConfigError, match="are discrete: write `actor=gaussian`, whose actor takes any"):
        make("actor=mixture", action=DISCRETE)
    with pytest.raises(ConfigError, match="components is 0 and least_std is 0.01: write a whole number from 1 on"):
        MixtureActor(input_size=3, action=CONTINUOUS, components=0)
