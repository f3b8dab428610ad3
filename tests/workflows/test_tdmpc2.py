"""TD-MPC2: its losses and the value of a plan by hand, what learns from what, plans that outlive a step."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.components.planners.plan import Search
from rl_lab.components.world_model.heads import Scalar
from rl_lab.config.compose import compose
from rl_lab.experiment.build import Agent, build_agent, build_runtime
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, Counts, EnvSpec, Phase, Progress, TimeStep
from rl_lab.workflows.tdmpc2 import TDMPC2, discount_of
from tests.tiny_dreamer import random_rows
from tests.tiny_tdmpc2 import TINY_TDMPC2_MODEL

VECTOR = {"vector": ArraySpec((3,), "float32")}
IMAGE = {"image": ArraySpec((64, 64, 3), "uint8")}
CONTINUOUS = ActionSpec("continuous", (2,))
PHASE = Phase(name="train", buffer="replay", progress=Progress(run=Counts(updates=1)))
MODEL = ("encoder", "dynamics", "reward_head", "continue_head")


@cache
def config_of(overrides: tuple[str, ...]) -> dict[str, Any]:
    return compose("rl_lab/PointMass-v0:tdmpc2", list(overrides))


def make(
    observation: dict[str, ArraySpec] = VECTOR, action: ActionSpec = CONTINUOUS, *, overrides: tuple[str, ...] = ()
) -> tuple[TDMPC2, Agent]:
    """A tiny TD-MPC2 for an environment that need not exist."""
    config = config_of((*TINY_TDMPC2_MODEL, *overrides))
    agent = build_agent(
        config, EnvSpec("none", observation, action, max_episode_steps=100), runtime=build_runtime(config)
    )
    assert isinstance(agent.workflow, TDMPC2)
    return agent.workflow, agent


def time_step(count: int, *, is_first: bool = True) -> TimeStep:
    nothing = torch.zeros(count, dtype=torch.bool)
    seen = {"vector": torch.randn(count, 3, generator=torch.Generator().manual_seed(1))}
    return TimeStep(seen, torch.zeros(count), torch.full((count,), is_first), nothing, nothing)


def rows_of(observation: dict[str, ArraySpec] = VECTOR, size: int = 5) -> Batch:
    """An episode ends in the last of the four rows."""
    return {key: values[:, :4] for key, values in random_rows(observation, CONTINUOUS, size=size).items()}


def test_only_the_two_critics_that_were_drawn_are_asked() -> None:
    workflow, _ = make(overrides=("controllers.critic.members=5",))
    critic, latent, action = workflow.critic, torch.rand(3, 4, 16), torch.rand(3, 4, 2)
    with torch.no_grad():
        critic.mlp.weights[-1].normal_()  # type: ignore[attr-defined]
        torch.manual_seed(0)
        least = critic.value(latent, action, of_two="least")
        torch.manual_seed(0)
        drawn = torch.rand(5).argsort()[:2]
        torch.testing.assert_close(least, critic(latent, action).mean()[drawn].amin(dim=0))
        for index in set(range(5)) - set(drawn.tolist()):
            critic.mlp.weights[0][index] = torch.nan  # type: ignore[attr-defined]
        torch.manual_seed(0)
        assert torch.equal(critic.value(latent, action, of_two="least"), least)


# --- planning ----------------------------------------------------------------------------------


def test_the_value_of_a_plan_by_hand() -> None:
    """A latent counts the actions' sum; the reward is the latent, the value ten times it; both see what they should.

    latent   1   3   6      actions 2, 3      rewards 1, 3      value 60      discount 0.5
    total    1 + 0.5 * 3 + 0.25 * 60 = 17.5
    """
    workflow, _ = make(action=ActionSpec("continuous", (1,)))
    workflow.discount, workflow.continue_head = 0.5, None
    workflow.dynamics = lambda latent, action: latent + action  # type: ignore[assignment]
    workflow.reward_head = lambda latent, action: Scalar(latent)  # type: ignore[assignment]
    workflow.actor = lambda latent: SimpleNamespace(sample=lambda: latent)  # type: ignore[assignment]
    workflow.critic = SimpleNamespace(value=lambda latent, action, of_two: (9 * latent + action).squeeze(-1))  # type: ignore[assignment]
    plans = torch.tensor([2.0, 3.0]).view(1, 1, 2, 1)
    assert workflow.value_of_plans(torch.ones(1, 1), plans).item() == pytest.approx(17.5)
    workflow.continue_head = lambda latent: 5.0 - latent.squeeze(-1)  # type: ignore[assignment] # 6: it is over
    assert workflow.value_of_plans(torch.ones(1, 1), plans).item() == pytest.approx(2.5)
    workflow.continue_head = lambda latent: 6.0 - latent.squeeze(-1)  # type: ignore[assignment] # 6: as likely as not
    assert workflow.value_of_plans(torch.ones(1, 1), plans).item() == pytest.approx(17.5)


def test_the_policys_plans_follow_the_model() -> None:
    workflow, _ = make(action=ActionSpec("continuous", (1,)), overrides=("algorithm.policy_plans=2",))
    workflow.dynamics = lambda latent, action: latent + action  # type: ignore[assignment]
    workflow.actor = lambda latent: SimpleNamespace(sample=lambda: latent * 0.5)  # type: ignore[assignment]
    plans = workflow.proposed_plans(torch.tensor([[1.0], [2.0]]), 3)
    assert plans.shape == (2, 2, 3, 1)
    assert plans[:, 0, :, 0].tolist() == [[0.5, 0.75, 1.125], [1.0, 1.5, 2.25]]


def test_a_search_begins_where_the_last_one_ended_unless_an_episode_begins() -> None:
    workflow, _ = make()
    seen: list[Tensor] = []
    assert workflow.planner is not None
    search = workflow.planner.plan

    def watched(wanted: Search) -> Any:
        assert wanted.previous is not None
        seen.append(wanted.previous)
        return search(wanted)

    workflow.planner.plan = watched  # type: ignore[method-assign]
    first = workflow.act(time_step(2), None, mode="train")
    workflow.act(time_step(2, is_first=False), first.state, mode="train")
    workflow.act(time_step(2), first.state, mode="train")
    assert first.action.shape == (2, 2) and float(first.action.abs().max()) <= 1.0
    assert [bool(previous.any()) for previous in seen] == [False, True, False]
    assert torch.equal(seen[1], first.state["plan"])


def test_without_a_planner_the_policy_acts() -> None:
    workflow, _ = make(overrides=("controllers.planner=null",))
    answers = [workflow.act(time_step(3), None, mode=mode) for mode in ("train", "train", "eval", "eval")]
    assert not torch.equal(answers[0].action, answers[1].action)
    assert torch.equal(answers[2].action, answers[3].action)
    assert answers[0].state is None


# --- learning ----------------------------------------------------------------------------------


def test_the_model_loss_by_hand() -> None:
    """One number per latent, horizon 3, the episode of row 1 ends at its row 1: its later steps do not count."""
    workflow, _ = make()
    workflow.continue_head = None
    workflow.discount, workflow.rho = 0.9, 0.5
    latents = torch.tensor([[[0.0], [1.0], [2.0], [3.0]], [[0.0], [1.0], [2.0], [3.0]]])
    rows = {
        "vector": torch.tensor([[[0.0], [1.5], [2.0], [4.0]], [[0.0], [1.0], [9.0], [9.0]]]),
        "action": torch.zeros(2, 4, 2),
        "reward": torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 4.0, 9.0, 9.0]]),
        "is_last": torch.tensor([[False, False, False, False], [False, True, False, False]]),
        "is_terminal": torch.tensor([[False, False, False, False], [False, True, False, False]]),
    }
    valid = (~rows["is_last"][:, :-1]).cumprod(dim=1)
    assert valid.tolist() == [[1, 1, 1], [1, 0, 0]]
    workflow.encoder = lambda observation: observation["vector"]  # type: ignore[assignment]
    workflow.actor = lambda latent: SimpleNamespace(sample=lambda: latent)  # type: ignore[assignment]
    workflow.slow_critic = SimpleNamespace(  # type: ignore[assignment]
        module=SimpleNamespace(value=lambda latent, action, of_two: 10.0 * latent.squeeze(-1))
    )
    workflow.reward_head = lambda latent, action: Scalar(latent)  # type: ignore[assignment]

    class Critics:
        logits = torch.zeros(2, 1)

        def loss(self, target: Tensor) -> Tensor:
            return torch.stack((target[0], 3.0 * target[1]))  # their mean is twice the target

    workflow.critic = lambda latent, action, drop: Critics()  # type: ignore[assignment]
    loss = workflow.model_loss(rows, latents, valid)
    # consistency: (1 - 1.5)^2 and (1 - 1)^2; then row 0 alone: 0; (3 - 4)^2
    assert loss.terms["consistency"].item() == pytest.approx((0.125 + 0.5 * 0.0 + 0.25 * 1.0) / 3)
    # reward, half the squared error: (0 - 1)^2 / 2 and (0 - 4)^2 / 2; (1 - 2)^2 / 2; (2 - 3)^2 / 2
    assert loss.terms["reward"].item() == pytest.approx((4.25 + 0.5 * 0.5 + 0.25 * 0.5) / 3)
    # targets: 1 + 9 * 1.5 and, after a terminal row, 4; 2 + 9 * 2; 3 + 9 * 4
    assert loss.terms["value"].item() == pytest.approx(2.0 * ((14.5 + 4.0) / 2 + 0.5 * 20.0 + 0.25 * 39.0) / 3)


def test_rows_that_all_ended_teach_nothing() -> None:
    """A batch whose sequences all begin with an episode's last row has losses of 0, not 0 / 0."""
    workflow, _ = make()
    rows = rows_of() | {"is_last": torch.ones(5, 4, dtype=torch.bool)}
    valid = (~rows["is_last"][:, :-1]).cumprod(dim=1)
    latents = workflow.rollout(rows)
    terms = workflow.model_loss(rows, latents, valid).terms | workflow.policy_loss(latents.detach(), valid).terms
    assert {name: float(term.detach()) for name, term in terms.items()} == dict.fromkeys(workflow.loss_scales, 0.0)


def test_the_policy_loss_by_hand() -> None:
    """Value 6 over a scale of 2, entropy of a standard normal's draw before tanh times the number of actions."""
    workflow, _ = make()
    workflow.rho = 0.5
    critic = nn.Module()
    critic.value = lambda latent, action, of_two, drop: 6.0 * torch.ones(latent.shape[:2])  # type: ignore[assignment]
    workflow.critic = critic  # type: ignore[assignment]
    workflow.value_scale = SimpleNamespace(update=lambda values: None, scale=lambda: torch.tensor(2.0))
    base = SimpleNamespace(mean=torch.zeros(1, 4, 2), log_std=torch.full((1, 4, 2), 0.25))
    workflow.actor = lambda latent: SimpleNamespace(base=base, draw=lambda noise: noise)  # type: ignore[assignment]
    torch.manual_seed(0)
    loss = workflow.policy_loss(torch.zeros(1, 4, 16), torch.ones(1, 3))
    powers = torch.tensor([1.0, 0.5, 0.25, 0.125])
    assert loss.terms["policy"].item() == pytest.approx(-3.0 * float(powers.mean()))
    torch.manual_seed(0)
    noise = torch.randn(1, 4, 2)
    entropy = 2.0 * (0.5 * noise.square() + 0.9189385 + 0.25).sum(dim=-1)[0]
    assert loss.terms["entropy"].item() == pytest.approx(-float((entropy * powers).mean()), rel=1e-5)


@pytest.mark.parametrize("observation", [VECTOR, IMAGE, {**VECTOR, **IMAGE}], ids=["state", "pixels", "both"])
def test_an_update_changes_every_part(observation: dict[str, ArraySpec]) -> None:
    shift = ()
    if "image" in observation:
        shift = ("components.augmentation={_target_: rl_lab.components.networks.augmentation.RandomShift, pixels: 3}",)
    workflow, agent = make(observation, overrides=shift)
    rows, parts = rows_of(observation), {**agent.components, **agent.controllers}
    learning = (*MODEL, "critic", "actor", "slow_critic")
    for _ in range(2):  # critics begin at 0, so that the first update teaches their last layer and no policy
        before = {name: [p.detach().clone() for p in parts[name].parameters()] for name in learning}
        metrics = workflow.update(rows, phase=PHASE)
    for name in learning:
        assert any(not torch.equal(a, b) for a, b in zip(before[name], parts[name].parameters(), strict=True)), name
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in metrics.values())
    assert {name.removeprefix("loss/") for name in metrics if name.startswith("loss/")} == set(workflow.loss_scales)


def test_hooks_teach_the_model_or_the_policy_alone() -> None:
    workflow, agent = make()
    workflow.update(rows_of(), phase=PHASE)
    parts = {**agent.components, **agent.controllers}

    def changed_by(hook: Any) -> set[str]:
        before = {name: [p.detach().clone() for p in parts[name].parameters()] for name in (*MODEL, "critic", "actor")}
        hook(rows_of(), phase=PHASE)
        return {
            name
            for name, values in before.items()
            if any(not torch.equal(a, b) for a, b in zip(values, parts[name].parameters(), strict=True))
        }

    assert changed_by(workflow.update_world_model) == {*MODEL, "critic"}
    assert changed_by(workflow.update_controller) == {"actor"}


def test_what_was_seen_and_the_targets_teach_nothing() -> None:
    """Gradients reach the encoder through row 0 alone, and the slow critics and the policy not at all."""
    workflow, agent = make()
    rows = {key: value.clone().requires_grad_() if key == "vector" else value for key, value in rows_of().items()}
    latents = workflow.rollout(rows)
    loss = workflow.model_loss(rows, latents, torch.ones(5, 3))
    sum(loss.terms.values()).backward()  # type: ignore[union-attr]
    gradient = rows["vector"].grad
    assert gradient is not None and gradient[:, 0].abs().sum() > 0 and gradient[:, 1:].abs().sum() == 0
    assert all(p.grad is None for name in ("actor",) for p in agent.controllers[name].parameters())


def test_one_batch_can_be_learnt_by_heart() -> None:
    workflow, _ = make(overrides=("optimizers.world_model.learning_rate=3e-3",))
    rows = rows_of(size=8)
    losses = [float(workflow.update(rows, phase=PHASE)["loss/reward"]) for _ in range(150)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_discount_follows_the_length_of_an_episode() -> None:
    assert [discount_of(steps) for steps in (50, 100, 500, 1000, 5000, None)] == pytest.approx(
        [0.95, 0.95, 0.99, 0.995, 0.995, 0.995]
    )
    workflow, _ = make()
    assert workflow.discount == pytest.approx(0.95)
    assert make(overrides=("algorithm.discount=0.9",))[0].discount == 0.9


def test_it_imagines_what_its_policy_would_do() -> None:
    workflow, _ = make()
    dream = workflow.imagine({"vector": torch.randn(4, 3)}, horizon=5)
    shapes = {key: tuple(value.shape) for key, value in dream.items()}
    assert shapes == {"latent": (4, 6, 16), "value": (4, 6), "reward": (4, 6), "action": (4, 5, 2)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.policy_plans=-1",), "algorithm.horizon is 3 and policy_plans is -1: write whole numbers from 1"),
        (
            ("algorithm.policy_plans=33",),
            "algorithm.policy_plans is 33, but the planner tries 32 plans: write at most 32, or raise .*candidates",
        ),
        (("algorithm.rho=1.5",), "algorithm.rho is 1.5: write a number from 0 to 1"),
        (("algorithm.discount=2",), "algorithm.discount is 2.0: write a number from 0 to 1"),
        (("+algorithm.loss_scales.valeu=1",), "algorithm.loss_scales.valeu is no loss of TD-MPC2"),
    ],
)
def test_impossible_settings_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(overrides=overrides)


def test_discrete_actions_are_refused_with_another_algorithm() -> None:
    with pytest.raises(
        ConfigError, match="TD-MPC2 plans with continuous actions, but those of none are discrete: write"
    ):
        make(action=ActionSpec("discrete", (4,)))
