"""DQN: targets by hand, what learns and what does not, exploration, every switch, resume and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.components.heads.q_values import QValues
from rl_lab.config.compose import compose
from rl_lab.config.construct import parameters_of
from rl_lab.experiment.build import build, check
from rl_lab.training.optimizer import Optimizer
from rl_lab.training.schedules import Schedule
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, EnvSpec, Phase, Progress, TimeStep
from rl_lab.workflows.dqn import DQN
from tests.doubles import batch_of, make_context

PHASE = Phase("train", buffer="replay", collect_steps=1, duration_cycles=1)
SPEC = EnvSpec("hand", {"vector": ArraySpec((2,), "float32")}, ActionSpec("discrete", (2,)))


class Reads(nn.Module):
    """An encoder that shows the observation as it is."""

    def forward(self, observation: Batch) -> Tensor:
        return observation["vector"]


def make(*, masked: bool = False, learning_rate: float = 0.1, **settings: Any) -> DQN:
    """Values are the observation itself, those of the target network ten times as large."""
    workflow = DQN(**{"discount": 0.5, "double": False, "target_every": 1000, **settings})
    q_values = QValues(input_size=2, action=SPEC.action, huber_threshold=None)
    encoder = Reads()
    optimizer = Optimizer(parameters={"q_values": q_values}, name="sgd", learning_rate=learning_rate)
    extra = {"action_mask": ArraySpec((2,), "bool")} if masked else {}
    workflow.initialize(
        make_context(
            components={"encoder": encoder, "q_values": q_values},
            optimizers={"controller": optimizer},
            spec=replace(SPEC, observation={**SPEC.observation, **extra}),
        )
    )
    with torch.no_grad():
        for module, size in ((workflow.network, 1.0), (workflow.target.module, 10.0)):
            weight, bias = module.parameters()
            weight.copy_(torch.eye(2) * size)
            bias.zero_()
    return workflow


def rows(vectors: list[list[float]], rewards: list[float], *, action: int = 0, **flags: list[int]) -> Batch:
    """One transition: its rows, one after the other."""
    nothing = [0] * len(rewards)
    named = {name: [flags.get(name, nothing)] for name in ("is_first", "is_last", "is_terminal")}
    return batch_of(vector=[vectors], reward=[rewards], action=[[action] * len(rewards)], **named)


def error(workflow: DQN, batch: Batch) -> float:
    """How far the value of the action taken, which is the first row's number, lies from its target."""
    return float(workflow.loss(batch).aux["priority"])


# --- targets by hand ---


def test_the_target_network_chooses_and_values_the_next_action() -> None:
    """1 + 0.5 * 10 * max(3, 4) = 21 against 2."""
    assert error(make(), rows([[2, 0], [3, 4]], [0, 1])) == 19.0


def test_double_lets_the_online_network_choose_what_the_target_network_values() -> None:
    workflow = make(double=True)
    with torch.no_grad():
        next(workflow.network.parameters()).copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))  # it prefers the first
    assert error(workflow, rows([[2, 0], [3, 4]], [0, 1])) == 1 + 0.5 * 30 - 2
    workflow.double = False
    assert error(workflow, rows([[2, 0], [3, 4]], [0, 1])) == 1 + 0.5 * 40 - 2


@pytest.mark.parametrize(
    ("is_terminal", "target"), [(1, 1.0), (0, 1 + 0.5 * 40)], ids=["a terminal has no value", "a time limit has"]
)
def test_the_end_of_an_episode(is_terminal: int, target: float) -> None:
    batch = rows([[0, 0], [3, 4]], [0, 1], is_last=[0, 1], is_terminal=[0, is_terminal])
    assert error(make(), batch) == target


@pytest.mark.parametrize(
    ("flags", "target"),
    [
        ({}, 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 80),  # three rewards, then the value of the row after them
        ({"is_last": [0, 0, 1, 0]}, 1 + 0.5 * 2 + 0.25 * 60),  # a time limit at row 2: its own value, no third reward
        ({"is_last": [0, 0, 1, 0], "is_terminal": [0, 0, 1, 0]}, 1 + 0.5 * 2),
        ({"is_last": [0, 0, 0, 1], "is_terminal": [0, 0, 0, 1]}, 1 + 0.5 * 2 + 0.25 * 4),
    ],
    ids=["goes on", "time limit", "terminal", "terminal at the last row"],
)
def test_several_rewards_before_the_next_value(flags: dict[str, list[int]], target: float) -> None:
    batch = rows([[0, 0], [5, 5], [6, 0], [0, 8]], [0, 1, 2, 4], **flags)
    assert error(make(n_step=3), batch) == target


@pytest.mark.parametrize("n_step", [1, 2])
@pytest.mark.parametrize("double", [False, True])
def test_forbidden_actions_do_not_count_as_the_next_one(n_step: int, double: bool) -> None:
    workflow = make(masked=True, n_step=n_step, double=double)
    vectors, rewards = [[2.0, 0.0], [3.0, 4.0], [3.0, 4.0]], [0.0, 1.0, 0.0]
    batch = rows(vectors[: n_step + 1], rewards[: n_step + 1])
    allowed = [[True, True], [True, False], [True, False]][: n_step + 1]
    batch["action_mask"] = torch.tensor([allowed])
    assert error(workflow, batch) == 1 + 0.5**n_step * 30 - 2


def test_a_terminal_row_that_allows_nothing_has_no_value_and_is_no_error() -> None:
    workflow = make(masked=True)
    batch = rows([[2, 0], [3, 4]], [0, 1], is_last=[0, 1], is_terminal=[0, 1])
    batch["action_mask"] = torch.tensor([[[True, True], [False, False]]])
    assert error(workflow, batch) == 1.0


def test_rewards_are_cut_one_by_one_before_they_are_summed() -> None:
    """0.5 instead of 3, -0.5 instead of -2: 0.5 - 0.25 + 0.25 * 10 * 8."""
    assert error(make(n_step=2, reward_clip=0.5), rows([[0, 0], [5, 5], [0, 8]], [9, 3, -2])) == 20.25


def test_weights_scale_each_transition_and_priorities_are_noted_in_the_batch() -> None:
    parts = [rows([[2, 0], [3, 4]], [0, 1]), rows([[0, 1], [1, 1]], [0, 1], action=1)]
    batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    batch["weight"] = torch.tensor([0.5, 1.0])
    metrics = make().update_controller(batch, phase=PHASE)
    assert batch["priority"].tolist() == [19.0, 5.0]
    assert metrics["loss/value"] == pytest.approx((0.5 * 19.0**2 / 2 + 5.0**2 / 2) / 2)
    assert "priority" not in metrics


# --- what learns ---


def test_one_step_follows_the_gradient_of_the_action_taken() -> None:
    """Error -1 with input [2, 0]: the weight of that input rises by rate * 1 * 2, the bias by rate * 1."""
    workflow = make(discount=0.0)
    workflow.update_controller(rows([[2, 0], [3, 4]], [0, 3]), phase=PHASE)
    weight, bias = workflow.network.parameters()
    assert weight.tolist() == [[pytest.approx(1.2), 0.0], [0.0, 1.0]]
    assert bias.tolist() == [pytest.approx(0.1), 0.0]


@pytest.mark.parametrize("double", [False, True])
def test_no_gradient_reaches_the_target_network_or_flows_through_the_target(double: bool) -> None:
    workflow = make(double=double)
    batch = rows([[2, 0], [3, 4]], [0, 1])
    loss = workflow.loss(batch).terms["value"]
    assert all(not parameter.requires_grad for parameter in workflow.target.parameters())
    weight = torch.autograd.grad(loss, list(workflow.network.parameters()))[0]
    assert weight.tolist() == [[-38.0, 0.0], [0.0, 0.0]], "only through the value of the row that was left"
    before = [parameter.clone() for parameter in workflow.target.parameters()]
    workflow.update_controller(batch, phase=PHASE)
    assert all(torch.equal(one, other) for one, other in zip(before, workflow.target.parameters(), strict=True))


@pytest.mark.parametrize(("every", "rate", "expected"), [(2, 1.0, [10.0, 1.0, 1.0]), (1, 0.5, [5.5, 3.25, 2.125])])
def test_the_target_network_follows_now_and_then_or_slowly(every: int, rate: float, expected: list[float]) -> None:
    workflow = make(target_every=every, target_rate=rate, learning_rate=0.0)
    found = []
    for _ in range(3):
        workflow.update_controller(rows([[2, 0], [3, 4]], [0, 1]), phase=PHASE)
        found.append(float(next(workflow.target.parameters())[0, 0]))
    assert found == pytest.approx(expected)


def test_what_a_phase_freezes_does_not_learn() -> None:
    workflow = make()
    frozen = replace(PHASE, freeze=("q_values", "encoder"))
    workflow.enter_phase(frozen)
    metrics = workflow.update_controller(rows([[2, 0], [3, 4]], [0, 1]), phase=frozen)
    assert next(workflow.network.parameters()).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert "train/grad_norm" not in metrics
    workflow.enter_phase(PHASE)
    assert "train/grad_norm" in workflow.update_controller(rows([[2, 0], [3, 4]], [0, 1]), phase=PHASE)
    assert not any(parameter.requires_grad for parameter in workflow.target.parameters())


# --- acting ---


def actions(workflow: DQN, vectors: list[list[float]], *, mode: Any, mask: list[bool] | None = None) -> list[int]:
    no = torch.zeros(len(vectors), dtype=torch.bool)
    observation = {"vector": torch.tensor(vectors)}
    if mask is not None:
        observation["action_mask"] = torch.tensor([mask] * len(vectors))
    step = TimeStep(observation, torch.zeros(len(vectors)), no, no, no)
    with torch.inference_mode():
        return workflow.act(step, None, mode=mode).action.tolist()


def test_evaluation_takes_the_best_action() -> None:
    assert actions(make(epsilon=1.0), [[1.0, 2.0], [2.0, 1.0]], mode="eval") == [1, 0]


def test_training_explores_as_often_as_epsilon_says() -> None:
    torch.manual_seed(0)
    taken = actions(make(epsilon=0.4), [[1.0, 2.0]] * 10_000, mode="train")
    assert sum(taken) / len(taken) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_forbidden_actions_are_never_taken(mode: str) -> None:
    for epsilon in (0.0, 1.0):
        assert actions(make(epsilon=epsilon), [[1.0, 2.0]] * 50, mode=mode, mask=[True, False]) == [0] * 50


def test_epsilon_follows_its_schedule_while_collecting_and_in_the_log() -> None:
    workflow = make(epsilon=Schedule("linear", 1.0, 0.0))
    collected: list[float] = []

    class Collects:
        def collect(self, policy: Any, *, phase: Phase) -> Any:
            collected.append(workflow._acting_epsilon)

    object.__setattr__(workflow.context, "collector", Collects())
    later = replace(PHASE, progress=Progress(fraction=0.75))
    workflow.collect_step(0, phase=later)
    assert collected == [0.25]
    metrics = workflow.update_controller(rows([[2, 0], [3, 4]], [0, 1]), phase=later)
    assert metrics["controller/epsilon"] == 0.25


# --- refusals ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"discount": 1.5}, r"algorithm\.discount is 1\.5: write a number from 0 to 1"),
        ({"epsilon": -0.1}, r"algorithm\.epsilon is -0\.1: write a number from 0 to 1"),
        ({"epsilon": Schedule("linear", 1.0, -1.0)}, r"algorithm\.epsilon is -1\.0: write a number"),
        ({"epsilon": Schedule("linear", 2.0, 0.0)}, r"algorithm\.epsilon is 2\.0: write a number"),
        ({"n_step": 0}, r"algorithm\.n_step is 0: write a whole number of at least 1"),
        ({"reward_clip": 0.0}, r"algorithm\.reward_clip is 0: write a number above 0, or null"),
        ({"target_every": 0}, r"rate is 1\.0 and every is 0; allowed is"),
    ],
)
def test_numbers_outside_their_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**settings)


def test_a_buffer_that_gives_another_number_of_rows_is_refused() -> None:
    message = (
        r"n_step is 1, so DQN learns from 2 rows at a time, but buffer 'replay' gives 3: write `buffers\.replay\.n"
    )
    with pytest.raises(ConfigError, match=message):
        make().update_controller(rows([[2, 0], [3, 4], [5, 6]], [0, 1, 2]), phase=PHASE)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("rl_lab/PointMass-v0", r"continuous \(of size \d\)\. Use `rl-lab train ID:sac`"),
        ("rl_lab/MultiTarget-v0", r"takes \d at once .* Use `rl-lab train ID:ppo`"),
    ],
)
def test_environments_with_other_actions_are_refused(environment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(compose(f"{environment}:dqn"))


# --- whole runs ---

QUICK = [
    "environment.num_envs=4",
    "buffers.replay.minimum_rows=32",
    "buffers.replay.batch_size=16",
    "components.q_values.hidden_sizes=[16]",
    "algorithm.target_every=3",
    "training.phases.train.duration_steps=null",
    "training.phases.train.duration_cycles=6",
    "evaluation.final_episodes=0",
]
HEADS = ("expected", "categorical", "quantile")


def trained(experiment: str, *overrides: str) -> Any:
    experiment_built = build(compose(experiment, [*QUICK, *overrides]), run=None, quiet=True)
    try:
        experiment_built.orchestrator.run()
    finally:
        experiment_built.close()
    assert experiment_built.housekeeping.counts.updates > 0
    return experiment_built


# Nothing, each switch alone, everything: with every head.
SWITCHES = [
    (False, 1, False, "uniform"),
    (True, 1, False, "uniform"),
    (False, 3, False, "uniform"),
    (False, 1, True, "uniform"),
    (False, 1, False, "prioritized"),
    (True, 3, True, "prioritized"),
]


@pytest.mark.parametrize("q_values", HEADS)
@pytest.mark.parametrize(("double", "n_step", "dueling", "replay"), SWITCHES)
def test_every_switch_goes_with_every_head(
    double: bool, n_step: int, dueling: bool, replay: str, q_values: str
) -> None:
    switches = [f"algorithm.double={double}", f"algorithm.n_step={n_step}", f"components.q_values.dueling={dueling}"]
    run = trained("CartPole-v1:dqn", *switches, f"replay={replay}", f"q_values={q_values}")
    workflow = run.agent.workflow
    assert (workflow.double, workflow.n_step) == (double, n_step)
    assert (workflow.head.value is not None) == dueling
    assert type(run.orchestrator.buffers["replay"]).__name__.startswith("Prioritized") == (replay == "prioritized")


@pytest.mark.parametrize("q_values", HEADS)
def test_noisy_layers_learn_with_every_head_and_evaluate_without_noise(q_values: str) -> None:
    run = trained("CartPole-v1:dqn", "components.q_values.noisy=true", "algorithm.epsilon=0.0", f"q_values={q_values}")
    workflow = run.agent.workflow
    layer = workflow.head.advantage.hidden[0]
    assert float(layer.weight_std.detach().std()) > 0, "the std is learnt: it started the same everywhere"
    no = torch.zeros(64, dtype=torch.bool)
    step = TimeStep({"vector": torch.randn(64, 4)}, torch.zeros(64), no, no, no)
    key = next(iter(workflow.context.spec.observation))
    step = replace(step, observation={key: step.observation["vector"]})
    answers = [workflow.act(step, None, mode="eval").action for _ in range(5)]
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert layer.is_noisy


def test_observations_are_normalised_by_everything_collected() -> None:
    run = trained("CartPole-v1:dqn", "components.observation_normalizer.mode=rolling")
    workflow, batch = run.agent.workflow, run.orchestrator.buffers["replay"].sample(None)
    moments = workflow.observation_normalizer.scales[0].moments
    assert float(moments.count) > 0
    key = next(iter(workflow.context.spec.observation))
    read: list[Tensor] = []
    workflow.network[0].register_forward_hook(lambda module, inputs, output: read.append(inputs[0][key]))
    workflow.loss(batch)
    expected = workflow.observation_normalizer({key: batch[key][:, 0]})[key]
    assert torch.equal(read[0], expected) and not torch.equal(read[0], batch[key][:, 0])


def test_prioritised_replay_learns_the_priorities_of_the_batch() -> None:
    run = trained("CartPole-v1:dqn", "replay=prioritized")
    masses = run.orchestrator.buffers["replay"]._priorities.tree.leaves
    assert len(set(masses[masses > 0].tolist())) > 10, "priorities differ once batches were learnt from"


@pytest.mark.parametrize("q_values", HEADS)
def test_images_and_masks_are_learnt_from(q_values: str) -> None:
    small = ["components.encoder.image_features=16", f"q_values={q_values}"]
    trained("rl_lab/PixelCatch-v0:dqn", *small)
    trained("rl_lab/MaskedChain-v0:dqn", *small, "algorithm.n_step=2")


@pytest.mark.parametrize("file", ["expected", "categorical", "quantile"])
def test_every_option_of_a_head_can_be_overridden(file: str) -> None:
    """Hydra refuses to override what no YAML lists, so every constructor parameter must be listed."""
    config = compose("CartPole-v1:dqn", [f"q_values={file}"])
    block = config["components"]["q_values"]
    target = type(build_head(config))
    offered = set(parameters_of(target)[0]) - {"action", "input_size"} | {"input"}
    assert block.keys() - {"_target_"} == offered


def build_head(config: dict[str, Any]) -> Any:
    built = build(config, run=None, quiet=True)
    built.close()
    return built.agent.components["q_values"]


def test_a_replay_group_is_refused_where_there_is_no_replay() -> None:
    with pytest.raises(ConfigError, match="Could not override 'replay'"):
        compose("ppo_cartpole", ["replay=prioritized"])


def test_the_target_network_is_saved_with_the_components() -> None:
    run = trained("CartPole-v1:dqn")
    assert run.agent.state_targets()["components"]["target"] is run.agent.workflow.target
