"""Tabular learning: the three targets by hand, terminals and time limits, learning, and exact resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.components.heads.tables import ValueTable
from rl_lab.config.compose import compose
from rl_lab.experiment.build import build
from rl_lab.training.schedules import Schedule
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, Phase, Progress, TimeStep
from rl_lab.workflows.q_learning import TabularQ
from tests.doubles import batch_of, make_context
from tests.test_resume import COMMON, assert_same_run, run_to_the_end

PHASE = Phase("train", collect_steps=2, duration_cycles=1)
OBSERVATION = {"discrete": ArraySpec((), "int64", num_values=(4,))}
START = [[0.0, 0.0], [2.0, 4.0], [6.0, 1.0], [8.0, 8.0]]  # values of four states and two actions


def make(target: str = "q_learning", **settings: Any) -> TabularQ:
    defaults = {"discount": 0.5, "learning_rate": 0.5, "epsilon": 0.2}
    workflow = TabularQ(target=target, **{**defaults, **settings})  # type: ignore[arg-type]
    table = ValueTable(observation=OBSERVATION, action=ActionSpec("discrete", (2,)))
    table.values.copy_(torch.tensor(START))
    workflow.initialize(make_context(components={"table": table}))
    return workflow


def rows(states: list[list[int]], actions: list[list[int]], rewards: list[list[float]], **flags: Any) -> Batch:
    nothing = torch.zeros_like(torch.tensor(states)).tolist()
    named = {name: flags.get(name, nothing) for name in ("is_first", "is_last", "is_terminal")}
    return {**batch_of(reward=rewards, action=actions, **named), "discrete": torch.tensor(states)}


def learnt(workflow: TabularQ, batch: Batch, phase: Phase = PHASE) -> list[list[float]]:
    workflow.update_controller(batch, phase=phase)
    return workflow.table.values.tolist()


@pytest.mark.parametrize(
    ("target", "first", "second"),
    [
        # s0 -a0-> s1, reward 10; s1 -a0-> s2, reward 1; s2 is pending. The first target reads s1 before it moves.
        ("q_learning", 10 + 0.5 * 4.0, 1 + 0.5 * 6.0),
        ("sarsa", 10 + 0.5 * 2.0, 1 + 0.5 * (0.9 * 6.0 + 0.1 * 1.0)),  # the pending row counts with its mean
        ("expected_sarsa", 10 + 0.5 * (0.1 * 2.0 + 0.9 * 4.0), 1 + 0.5 * (0.9 * 6.0 + 0.1 * 1.0)),
    ],
)
def test_each_target_by_hand(target: str, first: float, second: float) -> None:
    workflow = make(target)
    values = learnt(workflow, rows([[0, 1, 2]], [[0, 0, 0]], [[0.0, 10.0, 1.0]]))
    assert values[0] == pytest.approx([0.5 * first, 0.0])
    assert values[1] == pytest.approx([2.0 + 0.5 * (second - 2.0), 4.0])
    assert values[2:] == START[2:]


@pytest.mark.parametrize(
    ("is_terminal", "target"),
    [(1, 10.0), (0, 10.0 + 0.5 * 4.0)],
    ids=["a terminal has no value after it", "a time limit keeps it"],
)
def test_the_end_of_an_episode(is_terminal: int, target: float) -> None:
    """s0 -a0-> s1, the end; the answer to the last row is no transition; a new episode begins in s3."""
    batch = rows(
        [[0, 1, 3, 3]],
        [[0, 0, 1, 0]],
        [[0.0, 10.0, 0.0, 2.0]],
        is_first=[[1, 0, 1, 0]],
        is_last=[[0, 1, 0, 0]],
        is_terminal=[[0, is_terminal, 0, 0]],
    )
    values = learnt(make(), batch)
    assert values[0] == pytest.approx([0.5 * target, 0.0])
    assert values[1] == START[1]
    assert values[3] == pytest.approx([8.0, 8.0 + 0.5 * (2.0 + 0.5 * 8.0 - 8.0)])


def test_sarsa_bootstraps_a_time_limit_with_the_answer_to_the_last_row() -> None:
    batch = rows([[0, 1, 3]], [[0, 0, 0]], [[0.0, 10.0, 0.0]], is_last=[[0, 1, 0]])
    assert learnt(make("sarsa"), batch)[0][0] == pytest.approx(0.5 * (10.0 + 0.5 * 2.0))


def test_what_one_time_step_taught_is_known_to_the_next() -> None:
    """s1 -a1-> s1 twice with reward 4: 4 -> 4 + .5 (4 + .5*4 - 4) = 5, then 5 + .5 (4 + .5*5 - 5) = 5.75."""
    assert learnt(make(), rows([[1, 1, 1]], [[1, 1, 0]], [[0.0, 4.0, 4.0]]))[1][1] == pytest.approx(5.75)


def test_environments_that_share_an_entry_move_it_one_after_the_other() -> None:
    """From 0, rate 1/2, next values 0 (terminal): targets 4 then 8 give 2 then 5, not 6."""
    batch = rows([[0, 1], [0, 1]], [[0, 0], [0, 0]], [[0.0, 4.0], [0.0, 8.0]], is_terminal=[[0, 1], [0, 1]])
    workflow = make()
    metrics = workflow.update_controller(batch, phase=PHASE)
    assert workflow.table.values[0, 0] == 5.0
    assert metrics["loss/value"] == (16 + 64) / 2
    assert metrics["controller/epsilon"] == 0.2


def test_masked_actions_are_neither_taken_nor_counted() -> None:
    batch = rows([[0, 1]], [[0, 0]], [[0.0, 10.0]])
    batch["action_mask"] = torch.tensor([[[True, True], [True, False]]])
    assert learnt(make(), batch)[0][0] == pytest.approx(0.5 * (10.0 + 0.5 * 2.0))
    assert learnt(make("expected_sarsa"), batch)[0][0] == pytest.approx(0.5 * (10.0 + 0.5 * 2.0))
    workflow = make(epsilon=1.0)
    for mode in ("train", "eval"):
        assert actions(workflow, [1] * 50, mode=mode, mask=[True, False]) == [0] * 50


def actions(workflow: TabularQ, states: list[int], *, mode: Any, mask: list[bool] | None = None) -> list[int]:
    no = torch.zeros(len(states), dtype=torch.bool)
    observation = {"discrete": torch.tensor(states)}
    if mask is not None:
        observation["action_mask"] = torch.tensor([mask] * len(states))
    step = TimeStep(observation, torch.zeros(len(states)), no, no, no)
    return workflow.act(step, None, mode=mode).action.tolist()


def test_evaluation_is_greedy_and_takes_the_first_of_equals() -> None:
    assert actions(make(epsilon=1.0), [0, 1, 2, 3], mode="eval") == [0, 1, 0, 0]


def test_training_explores_as_often_as_epsilon_says() -> None:
    torch.manual_seed(0)
    taken = actions(make(), [1] * 10_000, mode="train")
    assert sum(taken) / len(taken) == pytest.approx(0.9, abs=0.01)
    ties = actions(make(epsilon=0.0), [3] * 10_000, mode="train")
    assert sum(ties) / len(ties) == pytest.approx(0.5, abs=0.02)


def test_schedules_follow_the_phase() -> None:
    workflow = make(learning_rate=Schedule("linear", 1.0, 0.0), epsilon=Schedule("linear", 1.0, 0.0))
    half = replace(PHASE, progress=Progress(fraction=0.75))
    batch = rows([[0, 1]], [[0, 0]], [[0.0, 10.0]], is_terminal=[[0, 1]])
    assert learnt(workflow, batch, half)[0][0] == pytest.approx(2.5)
    assert workflow.update_controller(batch, phase=half)["controller/epsilon"] == 0.25


def test_a_frozen_table_stays() -> None:
    batch = rows([[0, 1]], [[0, 0]], [[0.0, 10.0]])
    assert learnt(make(), batch, replace(PHASE, freeze=("table",))) == START


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"discount": 1.1}, r"algorithm\.discount is 1\.1: write a number from 0 to 1"),
        ({"epsilon": -0.1}, r"algorithm\.epsilon is -0\.1: write a number from 0 to 1"),
        ({"learning_rate": Schedule("linear", 2.0, 0.0)}, r"algorithm\.learning_rate is 2\.0: write a number"),
        ({"epsilon": Schedule("linear", 1.0, -1.0)}, r"algorithm\.epsilon is -1\.0: write a number"),
    ],
)
def test_numbers_outside_their_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**settings)


# --- whole runs ---

QUICK = ["environment.num_envs=4", "training.phases.train.duration_steps=null", "training.phases.train.collect_steps=8"]


@pytest.mark.parametrize("target", ["q_learning", "sarsa", "expected_sarsa"])
def test_each_target_learns_to_cross_the_ice(target: str) -> None:
    config = compose(
        "q_learning_frozenlake",
        [
            f"algorithm.target={target}",
            "+environment.kwargs.is_slippery=false",
            "algorithm.learning_rate='linear(0.5, 0.05)'",
            "training.phases.train.duration_steps=12000",
            "evaluation.final_episodes=10",
        ],
    )
    trained = build(config, run=None, quiet=True)
    try:
        trained.orchestrator.run()
        assert trained.housekeeping.last_score == 1.0
    finally:
        trained.close()


GOLDEN = {
    "q_learning": [-639.427926, 3162.044416],
    "sarsa": [-763.967824, 4287.747581],
    "expected_sarsa": [-732.558410, 3826.598190],
}


@pytest.mark.parametrize("target", GOLDEN)
def test_the_table_after_a_few_updates_is_the_golden_one(target: str) -> None:
    """Sum and sum of squares: a refactor that changes no maths changes neither."""
    overrides = [*QUICK, f"algorithm.target={target}", "training.phases.train.duration_cycles=20"]
    trained = build(compose("q_learning_taxi", [*overrides, "evaluation.final_episodes=0"]), run=None, quiet=True)
    try:
        trained.orchestrator.run()
        values = trained.agent.components["table"].values.double()
        assert [float(values.sum()), float(values.square().sum())] == pytest.approx(GOLDEN[target], rel=1e-4)
    finally:
        trained.close()


def test_a_run_cut_at_several_cycles_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    own = ["training.phases.train.duration_updates=7", "algorithm.target=sarsa", "components.table.initial_value=1.0"]
    config = compose("q_learning_frozenlake", [*COMMON, *QUICK, *own, "logging.every_steps=1"])
    run_to_the_end(config, tmp_path / "whole", cuts=[])
    run_to_the_end(config, tmp_path / "cut", cuts=[1, 4, 5])
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
