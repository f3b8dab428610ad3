"""What every workflow has: hooks, phases, named parts."""

from __future__ import annotations

from typing import Any, Protocol

import pytest
import torch
from torch import nn

from rl_lab.types import Batch, ConfigError, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Workflow, checked_fraction, checked_scales, named
from rl_lab.workflows.context import Parts
from rl_lab.workflows.ppo import PPO
from rl_lab.workflows.reinforce import Reinforce
from tests.doubles import make_context


class Doing(Workflow):
    def act(self, time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        return PolicyStep(torch.zeros(time_step.num_envs, dtype=torch.int64))

    def update_vae(self, batch: Batch, *, phase: Phase) -> Metrics:
        return {}

    def update(self, batch: Batch, *, phase: Phase) -> Metrics:
        return {}


class Acting:
    """A controller that acts by itself, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def sample(self, batch_size: int, *, device: Any, mask: Any = None) -> torch.Tensor:
        self.asked.append((batch_size, mask))
        return torch.full((batch_size,), 7)


def time_step(**observation: Any) -> TimeStep:
    no = torch.zeros(3, dtype=torch.bool)
    return TimeStep(observation, torch.zeros(3), no, no, no)


def phase(**settings: Any) -> Phase:
    return Phase("train", collect_steps=1, duration_cycles=1, **settings)


def test_every_update_method_is_a_hook_and_nothing_else_is() -> None:
    assert Doing.hooks() == ("update", "update_vae")


def test_a_phase_may_let_a_controller_act_alone() -> None:
    workflow, controller = Doing(), Acting()
    workflow.initialize(make_context(controllers={"random": controller}))
    mask = torch.ones(3, 2, dtype=torch.bool)
    step = workflow.policy("random")(time_step(action_mask=mask), None, mode="train")
    assert step.action.tolist() == [7, 7, 7]
    assert controller.asked == [(3, mask)]
    assert workflow.policy(None) == workflow.act


def test_a_controller_may_remember_what_it_did() -> None:
    class Remembering(Acting):
        def answer(self, time_step: TimeStep, before: Any) -> PolicyStep:
            action = torch.full((3,), 7) if before is None else before + 1
            return PolicyStep(action, action)

    workflow = Doing()
    workflow.initialize(make_context(controllers={"random": Remembering()}))
    policy = workflow.policy("random")
    first = policy(time_step(), None, mode="train")
    assert first.action.tolist() == [7, 7, 7]
    assert policy(time_step(), first.state, mode="train").action.tolist() == [8, 8, 8]


def test_a_controller_that_cannot_act_is_refused_by_name() -> None:
    workflow = Doing()
    workflow.initialize(make_context(controllers={"critic": nn.Linear(1, 1)}))
    message = "controllers.critic is a Linear, which lacks sample: the workflow needs what ActingController describes"
    with pytest.raises(ConfigError, match=message):
        workflow.check_phase(phase(controller="critic", workflow_hooks=()))


def test_an_on_policy_workflow_learns_from_nobody_else() -> None:
    class OnPolicy(Doing):
        is_on_policy = True

    workflow = OnPolicy()
    workflow.initialize(make_context(controllers={"random": Acting()}))
    workflow.check_phase(phase(controller="random", workflow_hooks=()))
    with pytest.raises(ConfigError) as refusal:
        workflow.check_phase(phase(controller="random", workflow_hooks=("update",)))
    assert str(refusal.value) == (
        "Phase 'train' lets 'random' act and update learn, but OnPolicy learns only from its own actions: "
        "write `workflow_hooks: []` or leave `controller` out."
    )


@pytest.mark.parametrize("workflow", [PPO, Reinforce])
def test_ppo_and_reinforce_are_on_policy(workflow: type[Workflow]) -> None:
    assert workflow.is_on_policy


def test_entering_a_phase_freezes_only_what_it_names() -> None:
    workflow = Doing()
    encoder, actor = nn.Linear(1, 1), nn.Linear(1, 1)
    workflow.initialize(make_context(components={"encoder": encoder}, controllers={"actor": actor, "random": Acting()}))
    workflow.enter_phase(phase(freeze=("encoder",)))
    assert [encoder.weight.requires_grad, actor.weight.requires_grad] == [False, True]
    workflow.enter_phase(phase(freeze=("actor",)))
    assert [encoder.weight.requires_grad, actor.weight.requires_grad] == [True, False]


def test_a_workflow_without_counters_has_nothing_to_save() -> None:
    assert Doing().get_state() == {}
    Doing().set_state({})
    with pytest.raises(AssertionError, match=r"Doing keeps no state of its own, yet the checkpoint has \['steps'\]"):
        Doing().set_state({"steps": 1})


def test_collecting_and_evaluating_go_through_the_context() -> None:
    class Answers:
        def collect(self, policy: Any, *, phase: Phase) -> Any:
            return ("collected", policy, phase.name)

        def evaluate(self, policy: Any, *, episodes: int) -> Any:
            return ("evaluated", policy, episodes)

    workflow = Doing()
    workflow.initialize(make_context(collector=Answers(), evaluator=Answers()))
    collected: Any = workflow.collect_step(0, phase=phase())
    evaluated: Any = workflow.evaluate(episodes=3)
    assert collected == ("collected", workflow.act, "train")
    assert evaluated == ("evaluated", workflow.act, 3)


def test_what_an_optimizer_reports_gets_its_name_in_the_log() -> None:
    taken = {"grad_norm": 1.0, "grad_norm/actor": 2.0}
    assert named(taken) == {"train/grad_norm": 1.0, "train/grad_norm/actor": 2.0}
    assert named({"grad_norm": 1.0}, "model") == {"train/model_grad_norm": 1.0}


def test_scales_must_name_every_term_and_no_other() -> None:
    assert checked_scales({"a": 1.0, "b": 2.0}, algorithm="X", terms=("b", "a")) == {"a": 1.0, "b": 2.0}
    with pytest.raises(ConfigError, match=r"algorithm\.loss_scales\.c is no loss of X\. Its terms are: a, b"):
        checked_scales({"a": 1.0, "b": 1.0, "c": 1.0}, algorithm="X", terms=("a", "b"))
    with pytest.raises(ConfigError, match=r"algorithm\.loss_scales lacks 'b': X's terms are a, b"):
        checked_scales({"a": 1.0}, algorithm="X", terms=("a", "b"))


# --- named parts -------------------------------------------------------------------------------


class Encoder(Protocol):
    output_size: int

    def __call__(self, observation: Batch) -> torch.Tensor: ...


def test_parts_are_a_mapping() -> None:
    parts = Parts("components", {"encoder": 1, "memory": 2})
    assert (len(parts), list(parts), parts["memory"], "actor" in parts) == (2, ["encoder", "memory"], 2, False)
    assert parts.require("encoder") == 1
    assert parts.optional("actor") is None


def test_a_part_that_the_workflow_makes_joins_the_others_once() -> None:
    parts = Parts("components", {"encoder": 1})
    parts.add("slow_encoder", 2)
    assert dict(parts) == {"encoder": 1, "slow_encoder": 2}
    assert "slow_encoder" in parts.asked
    with pytest.raises(AssertionError, match="components.encoder is there already"):
        parts.add("encoder", 3)


def test_a_missing_part_is_refused_with_the_nearest_name() -> None:
    parts = Parts("components", {"encoder": 1})
    with pytest.raises(ConfigError) as refusal:
        parts.require("encodr")
    assert str(refusal.value) == (
        "The workflow needs components.encodr, which the config does not have (it has: encoder). Did you mean "
        "'encoder'? Add a block `components.encodr:` with a `_target_`."
    )


def test_a_part_must_have_what_its_user_calls() -> None:
    with pytest.raises(ConfigError, match=r"components\.encoder is a int, which lacks __call__, output_size: the work"):
        Parts("components", {"encoder": 1}).require("encoder", Encoder)
    with pytest.raises(ConfigError, match="which lacks output_size"):
        Parts("components", {"encoder": nn.Linear(1, 1)}).optional("encoder", Encoder)


@pytest.mark.parametrize("value", [-0.1, 1.01, 2.0])
def test_a_discount_beyond_0_to_1_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.discount is {value}: write a number from 0 to 1"):
        checked_fraction("discount", value)
