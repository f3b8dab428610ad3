"""The random policy."""

from __future__ import annotations

import torch

from rl_lab.components.heads.actor_critic import RandomController
from rl_lab.types import ActionSpec, Batch, TimeStep
from rl_lab.workflows.random import RandomPolicy
from tests.doubles import make_context


def act(action: ActionSpec, observation: Batch, *, envs: int, mode: str = "train") -> torch.Tensor:
    workflow = RandomPolicy()
    workflow.initialize(make_context(controllers={"random": RandomController(action=action)}))
    no = torch.zeros(envs, dtype=torch.bool)
    step = workflow.act(TimeStep(observation, torch.zeros(envs), no, no, no), None, mode=mode)  # type: ignore[arg-type]
    assert step.state is None
    assert step.extras == {}
    return step.action


def test_every_action_is_taken() -> None:
    assert set(act(ActionSpec("discrete", (4,)), {}, envs=200).tolist()) == {0, 1, 2, 3}


def test_forbidden_actions_are_not() -> None:
    mask = torch.tensor([[True, False, False, True]]).repeat(200, 1)
    for mode in ("train", "eval"):
        assert set(act(ActionSpec("discrete", (4,)), {"action_mask": mask}, envs=200, mode=mode).tolist()) == {0, 3}


def test_continuous_actions_fill_their_range() -> None:
    action = act(ActionSpec("continuous", (3,)), {}, envs=200)
    assert action.shape == (200, 3)
    assert action.dtype == torch.float32
    assert bool((action.abs() <= 1.0).all())
    assert float(action.min()) < -0.9
    assert float(action.max()) > 0.9


def test_several_choices_keep_their_sizes() -> None:
    action = act(ActionSpec("multi_discrete", (2, 5)), {}, envs=200)
    assert action.amax(0).tolist() == [1, 4]


def test_it_offers_no_hook() -> None:
    assert RandomPolicy.hooks() == ()
