"""TD-MPC, the first one: its losses by hand, plans that grow, priorities, and what learns from what."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.components.planners.mppi import MPPIPlanner
from rl_lab.components.planners.plan import Search
from rl_lab.components.world_model.heads import Scalar
from rl_lab.components.world_model.told import IdentityEncoder, NoisyAction, StochasticDynamics, TwinCritics
from rl_lab.config.compose import compose
from rl_lab.experiment.build import Agent, build_agent, build_runtime
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, Counts, EnvSpec, Phase, Progress, TimeStep
from rl_lab.workflows.tdmpc import TDMPC
from tests.tiny_dreamer import random_rows
from tests.tiny_tdmpc import TINY_TDMPC_MODEL

VECTOR = {"vector": ArraySpec((3,), "float32")}
IMAGE = {"image": ArraySpec((64, 64, 3), "uint8")}
CONTINUOUS = ActionSpec("continuous", (2,))
PHASE = Phase(name="train", buffer="replay", progress=Progress(run=Counts(updates=1)))


@cache
def config_of(overrides: tuple[str, ...]) -> dict[str, Any]:
    return compose("rl_lab/PointMass-v0:tdmpc", list(overrides))


def make(observation: dict[str, ArraySpec] = VECTOR, *overrides: str) -> tuple[Any, Agent]:
    config = config_of((*TINY_TDMPC_MODEL, *overrides))
    agent = build_agent(config, EnvSpec("none", observation, CONTINUOUS), runtime=build_runtime(config))
    assert isinstance(agent.workflow, TDMPC)
    return agent.workflow, agent


def rows_of(observation: dict[str, ArraySpec] = VECTOR, size: int = 5) -> Batch:
    return {key: values[:, :6] for key, values in random_rows(observation, CONTINUOUS, size=size).items()}


def time_step(count: int = 2) -> TimeStep:
    nothing = torch.zeros(count, dtype=torch.bool)
    return TimeStep({"vector": torch.ones(count, 3)}, torch.zeros(count), ~nothing, nothing, nothing)


# --- planning ----------------------------------------------------------------------------------


def test_plans_grow_and_narrow_while_collecting_and_are_whole_in_evaluations() -> None:
    workflow, _ = make()
    seen: list[tuple[int | None, float]] = []
    search = workflow.planner.plan

    def watched(wanted: Search) -> Any:
        assert wanted.minimum_std is not None
        seen.append((wanted.horizon, round(float(wanted.minimum_std), 4)))
        assert wanted.proposals is not None and wanted.proposals.shape[2] == wanted.horizon
        return search(wanted)

    workflow.planner.plan = watched
    workflow.context = SimpleNamespace(
        **vars(workflow.context) | {"collector": SimpleNamespace(collect=lambda *_, **__: None)}
    )
    for steps in (0, 500, 1000):
        phase = Phase(name="train", buffer="replay", progress=Progress(run=Counts(agent_steps=steps)))
        workflow.collect_step(0, phase=phase)
        answer = workflow.act(time_step(), None, mode="train")
        assert answer.state["plan"].shape == (2, 5, 2)  # with zeros for what is not planned yet
    workflow._collecting = (1, 0.5)
    workflow.act(time_step(), answer.state, mode="eval")
    assert seen == [(1, 0.5), (3, 0.275), (5, 0.05), (5, 0.05)]


def test_a_shorter_search_with_momentum_and_a_least_std_by_hand() -> None:
    """One candidate of one action out of plans of three: the mean keeps a quarter of what it was, 0.8."""
    planner = MPPIPlanner(candidates=1, best=1, iterations=1, horizon=3, momentum=0.25)
    previous = torch.tensor([[[0.1], [0.8], [0.9]]])
    proposals = torch.full((1, 1, 1, 1), -0.4)
    search = Search(
        lambda plans: plans.sum(dim=(2, 3)),
        *(1, 1, torch.device("cpu")),
        previous=previous,
        proposals=proposals,
        horizon=1,
        minimum_std=torch.tensor(0.3),
    )
    plan = planner.plan(search)
    assert plan.mean.flatten().tolist() == pytest.approx([0.25 * 0.8 + 0.75 * -0.4, 0.0, 0.0])
    assert plan.std.flatten().tolist() == pytest.approx([0.3])
    assert float(plan.action) == pytest.approx(-0.4)
    with pytest.raises(ConfigError, match="planner: momentum is 1.0; write a number from 0 to below 1"):
        MPPIPlanner(momentum=1.0)


def test_the_policys_noise_is_cut_and_gradients_reach_the_mean() -> None:
    mean = torch.full((4000, 1), 0.9, requires_grad=True)
    drawn = NoisyAction(mean, 0.5, 0.3).sample()
    found = drawn.detach()
    assert float(found.min()) == pytest.approx(0.6) and float(found.max()) <= 1.0
    drawn.sum().backward()
    assert mean.grad is not None and (mean.grad == 1.0).all()


def test_both_critics_are_asked() -> None:
    critics = TwinCritics(input_size=1, action=ActionSpec("continuous", (1,)), units=4)
    critics.forward = lambda latent, action: Scalar(torch.tensor([[[1.0]], [[3.0]]]))  # type: ignore[method-assign]
    assert [float(critics.value(torch.zeros(1, 1), torch.zeros(1, 1), of_two=of)) for of in ("least", "mean")] == [
        1.0,
        2.0,
    ]


# --- learning ----------------------------------------------------------------------------------


def test_the_model_loss_by_hand() -> None:
    """One number per latent, two steps; row 1 ends, terminally, at its row 1. Weights 1 and 0.5.

    row t       0    1    2        latent 0 1 2 in both rows; the slow encoder sees twice the observation
    target      r_t + 0.9 * 10 * o_t+1, where nothing ended
    """
    workflow, _ = make()
    workflow.discount, workflow.rho = 0.9, 0.5
    latents = torch.tensor([[[0.0], [1.0], [2.0]], [[0.0], [1.0], [2.0]]])
    ended = torch.tensor([[False, False, False], [False, True, False]])
    rows = {
        "vector": torch.tensor([[[0.0], [1.0], [3.0]], [[0.0], [2.0], [9.0]]]),
        "action": torch.zeros(2, 3, 2),
        "reward": torch.tensor([[0.0, 1.0, 2.0], [0.0, 4.0, 9.0]]),
        "is_last": ended,
        "is_terminal": ended,
        "weight": torch.tensor([1.0, 0.5]),
    }
    valid = (~ended[:, :-1]).cumprod(dim=1)
    workflow.encoder = lambda observation: observation["vector"]
    workflow.slow_encoder = lambda observation: 2.0 * observation["vector"]
    workflow.actor = lambda latent: SimpleNamespace(sample=lambda: latent)
    workflow.slow_critic = SimpleNamespace(
        module=SimpleNamespace(value=lambda latent, action, of_two: 10.0 * latent.squeeze(-1))
    )
    workflow.reward_head = lambda latent, action: Scalar(latent)
    workflow.critic = lambda latent, action: Scalar(torch.stack((latent, latent + 1.0)))
    loss = workflow.model_loss(rows, latents, valid)
    # after 1, 2 against twice what was seen, 2 and 6; 1 against 4
    assert loss.terms["consistency"].item() == pytest.approx(((1.0 + 0.5 * 9.0) / 2 + 0.5 * 16.0) / 2)
    assert loss.terms["reward"].item() == pytest.approx(((1.0 + 0.5 * 16.0) / 2 + 0.5 * 1.0) / 2)
    # targets 1 + 9 = 10 and 2 + 27 = 29; after a terminal row 4. Critics say z and z + 1.
    first, second, other = 100.0 + 81.0, 28.0**2 + 27.0**2, 16.0 + 9.0
    assert loss.terms["value"].item() == pytest.approx(((first + 0.5 * other) / 2 + 0.5 * second) / 2)
    assert loss.aux["priority"].tolist() == pytest.approx([19.0 + 0.5 * 55.0, 7.0])


def test_the_policy_loss_by_hand() -> None:
    """The least of both critics, summed over steps, later ones by powers of 0.5; their parameters get no gradient."""
    workflow, _ = make()
    critic = nn.Module()
    critic.value = lambda latent, action, of_two: {"least": 3.0, "mean": 9.0}[of_two] * action[..., 0]  # type: ignore
    workflow.critic = critic
    workflow.actor = lambda latent: SimpleNamespace(sample=lambda: torch.ones(1, 6, 2))
    loss = workflow.policy_loss(torch.zeros(1, 6, 16), torch.ones(1, 5))
    assert loss.terms["policy"].item() == pytest.approx(-3.0 * sum(0.5**step for step in range(6)))


@pytest.mark.parametrize("observation", [VECTOR, IMAGE, {**VECTOR, **IMAGE}], ids=["state", "pixels", "both"])
def test_an_update_changes_every_part_and_slow_ones_every_other_time(observation: dict[str, ArraySpec]) -> None:
    workflow, agent = make(observation)
    parts = {**agent.components, **agent.controllers}
    learning = ("encoder", "dynamics", "reward_head", "critic", "actor", "slow_encoder", "slow_critic")

    def changed() -> set[str]:
        before = {name: [p.detach().clone() for p in parts[name].parameters()] for name in learning}
        batch = rows_of(observation)
        metrics = workflow.update(batch, phase=PHASE)
        assert batch["priority"].shape == (5,) and "priority" not in metrics
        assert all(torch.isfinite(torch.as_tensor(value)).all() for value in metrics.values())
        return {
            name
            for name in learning
            if any(not torch.equal(a, b) for a, b in zip(before[name], parts[name].parameters(), strict=True))
        }

    changed()
    assert changed() == set(learning)
    assert changed() == set(learning) - {"slow_encoder", "slow_critic"}


def test_what_was_seen_and_the_targets_teach_nothing() -> None:
    workflow, agent = make()
    rows = {key: value.clone().requires_grad_() if key == "vector" else value for key, value in rows_of().items()}
    loss = workflow.model_loss(rows, workflow.rollout(rows), torch.ones(5, 5))
    sum(loss.terms.values()).backward()
    gradient: Tensor = rows["vector"].grad  # type: ignore[assignment]
    assert gradient[:, 1:].abs().sum() == 0
    assert all(p.grad is None for p in agent.controllers["actor"].parameters())


def test_one_batch_can_be_learnt_by_heart() -> None:
    workflow, _ = make()
    rows = rows_of(size=8)
    losses = [float(workflow.update(dict(rows), phase=PHASE)["loss/reward"]) for _ in range(150)]
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "algorithm.policy_plans=-1",
            "algorithm.horizon is 5 and policy_plans is -1: write whole numbers from 1 and from 0",
        ),
        ("algorithm.plan_horizon=0.5", "algorithm.plan_horizon is 0.5: write a number or a schedule from 1 on"),
        ("algorithm.plan_std='linear(0.5, -1)'", "algorithm.plan_std is .*: write a number or a schedule from 0 on"),
        ("controllers.actor.std=-1", "controllers.actor: std is -1.0 and clip is 0.3; write numbers from 0"),
        ("components.dynamics.units=0", "write whole numbers from 1 on"),
        ("+algorithm.loss_scales.valeu=1", "algorithm.loss_scales.valeu is no loss of TD-MPC"),
    ],
)
def test_impossible_settings_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(VECTOR, override)


def test_discrete_actions_are_refused() -> None:
    config = config_of(tuple(TINY_TDMPC_MODEL))
    spec = EnvSpec("none", VECTOR, ActionSpec("discrete", (4,)))
    with pytest.raises(
        ConfigError, match="TD-MPC plans with continuous actions, but those of none are discrete: write"
    ):
        build_agent(config, spec, runtime=build_runtime(config))


# --- other models ------------------------------------------------------------------------------


def test_a_drawn_latent_and_its_likelihood_by_hand() -> None:
    dynamics = StochasticDynamics(input_size=2, action=ActionSpec("continuous", (1,)), units=4)
    bounds = dynamics.log_std_bounds
    dynamics.mlp.forward = lambda inputs: torch.tensor([[1.0, 2.0, 0.0, 0.0]]).expand(len(inputs), 4)  # type: ignore[method-assign]
    std = torch.tensor(0.5 * sum(bounds)).exp()
    torch.manual_seed(0)
    drawn = dynamics(torch.zeros(4000, 2), torch.zeros(4000, 1))
    assert drawn.mean(dim=0).tolist() == pytest.approx([1.0, 2.0], abs=0.02)
    assert drawn.std(dim=0).tolist() == pytest.approx([float(std)] * 2, rel=0.05)
    found = dynamics.error(torch.zeros(1, 2), torch.zeros(1, 1), torch.tensor([[1.0 + float(std), 2.0]]))
    assert float(found) == pytest.approx(0.25 + 0.5 * sum(bounds))
    with pytest.raises(ConfigError, match=r"log_std_bounds is \[1.0, 0.0\]: write \[lowest, highest\]"):
        StochasticDynamics(input_size=2, action=CONTINUOUS, log_std_bounds=(1.0, 0.0))


MODELS = "rl_lab.components.world_model.told"


def test_a_model_of_the_observations_themselves_learns_whether_drawn_or_not() -> None:
    model = [word for word in TINY_TDMPC_MODEL if not word.startswith("components.encoder")]
    model.append(f"components.encoder._target_={MODELS}.IdentityEncoder")
    for words in ((), (f"components.dynamics._target_={MODELS}.StochasticDynamics",)):
        config = config_of((*model, *words))
        workflow: Any = build_agent(config, EnvSpec("none", VECTOR, CONTINUOUS), runtime=build_runtime(config)).workflow
        rows = rows_of()
        assert torch.equal(workflow.encoder({"vector": rows["vector"]}), rows["vector"])
        found = [float(workflow.update(dict(rows), phase=PHASE)["loss/consistency"]) for _ in range(60)]
        assert found[-1] < found[0]
        assert workflow.act(time_step(), None, mode="train").action.shape == (2, 2)


def test_images_as_they_are_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="components.encoder: 'image' is an image, too many numbers to predict as they"
    ):
        IdentityEncoder(observation=IMAGE)
