"""SAC: its three losses by hand, who learns from which, time limits and n steps, choices, pixels, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.components.heads.soft_actor_critic import SoftActor, Temperature, TwinCritic
from rl_lab.components.networks.encoders import ObservationEncoder
from rl_lab.components.networks.normalizers import ObservationNormalizer
from rl_lab.config.compose import compose
from rl_lab.experiment.build import build
from rl_lab.training.optimizer import Optimizer
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, Counts, EnvSpec, Phase, Progress, TimeStep
from rl_lab.workflows.sac import SAC
from tests.doubles import make_context

PHASE = Phase("train", buffer="replay", collect_steps=1, duration_cycles=1)
VECTOR = {"vector": ArraySpec((3,), "float32")}
CONTINUOUS, DISCRETE = ActionSpec("continuous", (2,)), ActionSpec("discrete", (3,))


def make(
    *,
    action: ActionSpec = CONTINUOUS,
    observation: dict[str, ArraySpec] | None = None,
    hidden: tuple[int, ...] = (),
    parts: dict[str, nn.Module] | None = None,
    with_temperature: bool = True,
    precision: str = "fp32",
    **settings: Any,
) -> SAC:
    """SAC with small parts; `parts` replaces some of them."""
    torch.manual_seed(0)
    observation = observation or VECTOR
    encoder = ObservationEncoder(observation=observation, hidden_sizes=hidden, activation="relu", image_features=16)
    built: dict[str, nn.Module] = {
        "observation_normalizer": ObservationNormalizer(observation=observation),
        "encoder": encoder,
        "temperature": Temperature(action=action, initial=0.5),
        "actor": SoftActor(input_size=encoder.output_size, action=action, hidden_sizes=(16,)),
        "critic": TwinCritic(input_size=encoder.output_size, action=action, hidden_sizes=(16,)),
        **(parts or {}),
    }
    learning = {"critic": ("encoder", "critic"), "actor": ("actor",), "temperature": ("temperature",)}
    optimizers = {
        name: Optimizer(parameters={part: built[part] for part in members}, learning_rate=1e-2)
        for name, members in learning.items()
        if name != "temperature" or with_temperature
    }
    controllers = {name: built.pop(name) for name in ("actor", "critic")}
    workflow = SAC(**settings)
    workflow.initialize(
        make_context(
            components=built,
            controllers=controllers,
            optimizers=optimizers,
            spec=EnvSpec("test", observation, action),
            precision=precision,
        )
    )
    return workflow


def rows(count: int = 8, length: int = 2, *, action: ActionSpec = CONTINUOUS, **given: Any) -> Batch:
    no = torch.zeros(count, length, dtype=torch.bool)
    shape = (count, length, *action.shape)
    drawn = torch.rand(shape) * 2 - 1 if action.kind == "continuous" else torch.randint(0, action.sizes[0], shape)
    batch = {"vector": torch.randn(count, length, 3), "action": drawn, "reward": torch.randn(count, length)}
    return {**batch, "is_first": no, "is_last": no, "is_terminal": no, **given}


class KnownActor(nn.Module):
    """Draws action 0 with an entropy that is its only parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.entropy = nn.Parameter(torch.tensor(0.4))

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.entropy.expand(len(features))

    def noise(self, features: Tensor) -> Tensor:
        return torch.zeros(len(features), 2)


class KnownCritic(nn.Module):
    """Twin values that are its only parameters, plus the first number that is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor([3.0, 2.0]))

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        return self.values[:, None] + features[:, 0]

    def expect(
        self, features: Tensor, policy: Tensor, noise: Tensor, *, is_target: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self(features, noise).amin(dim=0), policy


# --- the losses ---


@pytest.mark.parametrize(
    ("is_last", "is_terminal", "target"),
    [
        (0, 0, 1.0 + 0.9 * (2.0 + 10.0 + 0.5 * 0.4)),
        (1, 1, 1.0),
        (1, 0, 1.0 + 0.9 * (2.0 + 10.0 + 0.5 * 0.4)),
    ],
    ids=["on the way", "a terminal has no value after it", "a time limit keeps it"],
)
def test_losses_by_hand(is_last: int, is_terminal: int, target: float) -> None:
    """Values 3 and 2 plus what is seen: 0 now, 10 later. Temperature 0.5, entropy 0.4, target entropy -2."""
    workflow = make(parts={"actor": KnownActor(), "critic": KnownCritic()}, discount=0.9)
    batch = rows(
        1,
        vector=torch.tensor([[[0.0, 0, 0], [10.0, 0, 0]]]),
        reward=torch.tensor([[7.0, 1.0]]),
        is_last=torch.tensor([[0, is_last]]).bool(),
        is_terminal=torch.tensor([[0, is_terminal]]).bool(),
    )
    metrics = workflow.update_controller(batch, phase=PHASE)
    assert float(metrics["controller/value_mean"]) == pytest.approx(target)
    assert float(metrics["loss/critic"]) == pytest.approx(0.5 * (3 - target) ** 2 + 0.5 * (2 - target) ** 2)
    lesser = 2.0 + (0.01 if target > 2 else -0.01)  # Adam's first step moves each value by the learning rate
    assert float(metrics["loss/policy"]) == pytest.approx(-(lesser + 0.5 * 0.4), abs=1e-5)
    assert float(metrics["loss/temperature"]) == pytest.approx(0.5 * (0.4 + 2.0))
    assert float(metrics["controller/entropy"]) == pytest.approx(0.4)
    assert float(metrics["controller/temperature"]) == pytest.approx(0.5)
    assert "priority" not in batch
    actor: Any = workflow.actor
    assert float(actor.entropy.detach()) > 0.4  # more entropy is worth more
    assert float(workflow.temperature()) < 0.5  # there is more entropy than asked for


def test_n_step_targets_by_hand() -> None:
    """Three rewards, discount 0.5; the second row's episode ends at row 2 by a time limit."""
    workflow = make(parts={"actor": KnownActor(), "critic": KnownCritic()}, discount=0.5, n_step=3)
    seen = torch.zeros(2, 4, 3)
    seen[:, :, 0] = torch.tensor([0.0, 10.0, 20.0, 30.0])
    batch = rows(
        2,
        4,
        vector=seen,
        reward=torch.tensor([[9.0, 1.0, 2.0, 4.0]]).expand(2, 4),
        is_last=torch.tensor([[0, 0, 0, 0], [0, 0, 1, 0]]).bool(),
    )
    metrics = workflow.update_controller(batch, phase=PHASE)
    whole = 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * (2 + 30 + 0.2)
    cut = 1 + 0.5 * 2 + 0.25 * (2 + 20 + 0.2)
    assert float(metrics["controller/value_mean"]) == pytest.approx((whole + cut) / 2)


def test_one_step_equals_the_general_case() -> None:
    workflow, batch = make(), rows(6, is_terminal=torch.rand(6, 2) > 0.5)
    now, later, outcome = workflow.transition(batch)
    workflow.n_step = 2  # the general way, which reads the number of rows from the batch
    general_now, general_later, general = workflow.transition(batch)
    assert torch.equal(now["vector"], general_now["vector"])
    assert torch.equal(later["vector"], general_later["vector"])
    for name in ("reward", "discount"):
        torch.testing.assert_close(outcome[name], general[name])


def test_weights_and_priorities_of_prioritised_replay() -> None:
    workflow = make(parts={"actor": KnownActor(), "critic": KnownCritic()}, discount=0.0)
    batch = rows(2, vector=torch.zeros(2, 2, 3), reward=torch.tensor([[0.0, 1.0], [0.0, 5.0]]))
    batch["weight"] = torch.tensor([1.0, 0.5])
    metrics = workflow.update_controller(batch, phase=PHASE)
    assert float(metrics["loss/critic"]) == pytest.approx((4 + 1 + 0.5 * 4 + 0.5 * 9) / 4)
    assert batch["priority"].tolist() == pytest.approx([1.5, 2.5])
    assert "priority" not in metrics


# --- who learns from what ---


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_each_loss_reaches_its_own_parts_alone(action: ActionSpec) -> None:
    workflow = make(action=action, hidden=(8,))
    reached: dict[str, set[str]] = {}
    parts = {**workflow.context.components, **workflow.context.controllers}
    owners = {parameter: part for part, module in parts.items() for parameter in module.parameters()}

    def watch(name: str) -> Any:
        def apply(loss: Tensor) -> dict[str, Tensor]:
            learning = [parameter for parameter in owners if parameter.requires_grad]
            found = torch.autograd.grad(loss, learning, allow_unused=True, retain_graph=True)
            pairs = zip(learning, found, strict=True)
            reached[name] = {owners[each] for each, gradient in pairs if gradient is not None and gradient.any()}
            return {}

        return apply

    for name, optimizer in workflow.optimizers.items():
        optimizer.apply = watch(name)
    workflow.learn(rows(32, action=action), {}, with_policy=True)
    assert reached == {"critic": {"encoder", "critic"}, "actor": {"actor"}, "temperature": {"temperature"}}


def test_slow_copies_learn_nothing_and_follow() -> None:
    workflow = make(hidden=(8,), target_rate=0.25)
    before = [p.detach().clone() for p in workflow.slow_critic.parameters()]
    workflow.update_controller(rows(), phase=PHASE)
    critic: Any = workflow.critic
    for start, slow, fast in zip(before, workflow.slow_critic.parameters(), critic.parameters(), strict=True):
        assert not slow.requires_grad
        torch.testing.assert_close(slow, start + 0.25 * (fast.detach() - start))
    assert workflow.slow_encoder is not None
    assert {"slow_critic", "slow_encoder"} <= set(workflow.context.components), "a checkpoint must hold them"
    workflow.enter_phase(PHASE)
    assert not any(p.requires_grad for p in workflow.slow_critic.parameters())


def test_the_policy_may_learn_more_rarely() -> None:
    workflow, learnt = make(policy_every=3), []
    for updates in range(6):
        phase = replace(PHASE, progress=Progress(run=Counts(updates=updates)))
        learnt.append("loss/policy" in workflow.update_controller(rows(), phase=phase))
    assert learnt == [True, False, False, True, False, False]


def test_a_constant_temperature_stays() -> None:
    workflow = make(with_temperature=False)
    metrics = workflow.update_controller(rows(), phase=PHASE)
    assert "loss/temperature" not in metrics
    assert float(workflow.temperature()) == pytest.approx(0.5)


@pytest.mark.parametrize("frozen", ["actor", "critic", "temperature"])
def test_a_frozen_part_stays_and_the_others_learn(frozen: str) -> None:
    workflow = make()
    workflow.enter_phase(replace(PHASE, freeze=(frozen,)))
    parts = {**workflow.context.components, **workflow.context.controllers}
    watched = {name: [p.detach().clone() for p in parts[name].parameters()] for name in workflow.optimizers}
    workflow.update_controller(rows(), phase=PHASE)
    for name, before in watched.items():
        same = all(torch.equal(old, new) for old, new in zip(before, parts[name].parameters(), strict=True))
        assert same == (name == frozen), name


def test_lower_precision_learns_too() -> None:
    metrics = make(precision="bf16").update_controller(rows(), phase=PHASE)
    assert all(bool(torch.isfinite(torch.as_tensor(value))) for value in metrics.values())


# --- acting ---


def observe(count: int, mask: list[bool] | None = None) -> TimeStep:
    no = torch.zeros(count, dtype=torch.bool)
    observation = {"vector": torch.randn(count, 3)}
    if mask is not None:
        observation["action_mask"] = torch.tensor([mask] * count)
    return TimeStep(observation, torch.zeros(count), no, no, no)


def test_acting_stays_within_the_range_and_evaluation_repeats_itself() -> None:
    workflow, step = make(), observe(100)
    tried = workflow.act(step, None, mode="train").action
    assert tried.shape == (100, 2) and float(tried.abs().max()) <= 1.0
    assert not torch.equal(tried, workflow.act(step, None, mode="train").action)
    assert torch.equal(workflow.act(step, None, mode="eval").action, workflow.act(step, None, mode="eval").action)


def test_masked_choices_are_neither_taken_nor_learnt_from() -> None:
    observation = {**VECTOR, "action_mask": ArraySpec((3,), "bool")}
    workflow = make(action=DISCRETE, observation=observation)
    for mode in ("train", "eval"):
        taken = workflow.act(observe(60, [True, False, True]), None, mode=mode).action  # type: ignore[arg-type]
        assert not (taken == 1).any()
    mask = torch.tensor([True, False, True]).expand(8, 2, 3)
    metrics = workflow.update_controller(rows(action=DISCRETE, action_mask=mask), phase=PHASE)
    assert 0.0 < float(metrics["controller/entropy"]) <= 0.6932  # at most ln 2: one of three is forbidden
    assert torch.isfinite(metrics["loss/policy"])


def test_statistics_of_what_is_seen_are_learnt_while_acting() -> None:
    normalizer = ObservationNormalizer(observation=VECTOR, mode="rolling")
    workflow = make(parts={"observation_normalizer": normalizer})
    workflow.act(observe(50), None, mode="eval")
    assert torch.equal(normalizer.scales[0].center, torch.zeros(3))
    workflow.act(observe(50), None, mode="train")
    assert not torch.equal(normalizer.scales[0].center, torch.zeros(3))


def test_rows_that_another_controller_collects_count_in_the_statistics() -> None:
    run = build(
        compose(
            "sac_pendulum",
            [
                "components.observation_normalizer.mode=rolling",
                "training.phases.prefill.duration_steps=100",
                "training.phases.train.duration_steps=4",
                "evaluation.final_episodes=0",
            ],
        ),
        run=None,
        quiet=True,
    )
    counts: list[float] = []
    workflow: Any = run.agent.workflow
    update = workflow.update_controller
    moments = workflow.observation_normalizer.scales[0].moments

    def watched(batch: Batch, *, phase: Phase) -> Any:
        counts.append(float(moments.count))
        return update(batch, phase=phase)

    workflow.update_controller = watched
    try:
        run.orchestrator.run()
    finally:
        run.close()
    assert counts[0] == 104, "at the first update: 100 rows of the prefill, 4 of the policy"


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE])
def test_many_normalised_critics_learn(action: ActionSpec) -> None:
    settings = {"norm": "layer", "num_critics": 5, "target_subset": 2}
    critic = TwinCritic(input_size=3, action=action, hidden_sizes=(16,), **settings)  # type: ignore[arg-type]
    workflow = make(action=action, parts={"critic": critic})
    before = [parameter.detach().clone() for parameter in critic.parameters()]
    workflow.update_controller(rows(action=action), phase=PHASE)
    assert len(before) == 6, "weights and biases of two layers, scale and shift of one"
    assert all(not torch.equal(old, new) for old, new in zip(before, critic.parameters(), strict=True))


# --- refusals ---


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="algorithm.n_step is 0: write a whole number of at least 1"):
        SAC(n_step=0)
    with pytest.raises(ConfigError, match="algorithm.policy_every is -1"):
        SAC(policy_every=-1)
    with pytest.raises(ConfigError, match="algorithm.discount is 1.5: write a number from 0 to 1"):
        SAC(discount=1.5)
    with pytest.raises(ConfigError, match="target network: rate is 0.0"):
        make(target_rate=0.0)


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"SAC learns from 2 rows .* 'replay' gives 4: write `buffers.replay.n_step"):
        make().update_controller(rows(length=4), phase=PHASE)


# --- whole runs ---


@pytest.mark.parametrize("experiment", ["sac_pixels", "sac_cartpole"])
def test_an_experiment_runs(experiment: str) -> None:
    config = compose(
        experiment,
        [
            "environment.num_envs=2",
            "buffers.replay.batch_size=8",
            "training.phases.prefill.duration_steps=40",
            "training.phases.train.duration_steps=null",
            "training.phases.train.duration_updates=3",
            "evaluation.final_episodes=0",
        ],
    )
    trained = build(config, run=None, quiet=True)
    try:
        parts = {**trained.agent.components, **trained.agent.controllers}
        learning = [p for name in ("encoder", "critic", "actor", "temperature") for p in parts[name].parameters()]
        before = [p.detach().clone() for p in learning]
        trained.orchestrator.run()
        assert trained.housekeeping.counts.updates == 3
        assert all(not torch.equal(old, new) for old, new in zip(before, learning, strict=True))
    finally:
        trained.close()
