"""Bandits: a strategy's memory lives and dies with its episode, regret by hand, learning, and exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.components.heads.bandits import EpsilonGreedy
from rl_lab.config.compose import compose
from rl_lab.experiment.build import Experiment, build
from rl_lab.types import ActionSpec, Batch, CollectResult, Counts, Phase, TimeStep
from rl_lab.utils.tree import map_leaves
from rl_lab.workflows.bandit import Bandit
from tests.doubles import make_context
from tests.test_resume import COMMON, assert_same_run, run_to_the_end

PHASE = Phase("train", workflow_hooks=(), collect_steps=1, duration_cycles=1)
STRATEGIES = ("epsilon_greedy", "ucb", "gradient", "thompson", "thompson_bernoulli")


def step_of(reward: list[float], *, first: list[int], last: list[int], means: Any = None) -> TimeStep:
    observation: Batch = {} if means is None else {"arm_means": torch.tensor(means)}
    flags = [torch.tensor(flag, dtype=torch.bool) for flag in (first, last, last)]
    return TimeStep(observation, torch.tensor(reward), *flags)


def make(*, collector: Any = None, initial_value: float = 0.0) -> Bandit:
    workflow = Bandit()
    strategy = EpsilonGreedy(action=ActionSpec("discrete", (2,)), epsilon=0.0, initial_value=initial_value)
    workflow.initialize(make_context(components={"strategy": strategy}, collector=collector))
    return workflow


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_each_row_teaches_the_reward_of_the_last_arm_and_a_new_episode_forgets(mode: Any) -> None:
    workflow = make(initial_value=5.0)
    answer = workflow.act(step_of([0.0, 0.0], first=[1, 1], last=[0, 0]), None, mode=mode)
    first_arm = answer.action
    answer = workflow.act(step_of([1.0, 3.0], first=[0, 0], last=[0, 1]), answer.state, mode=mode)
    learnt = answer.state["statistics"]["value"].gather(1, first_arm.unsqueeze(1)).squeeze(1)
    assert learnt.tolist() == [1.0, 3.0]
    assert answer.action[0] != first_arm[0], "the arm that disappointed gives way to the untried one"
    answer = workflow.act(step_of([2.0, 0.0], first=[0, 1], last=[0, 0]), answer.state, mode=mode)
    assert answer.state["statistics"]["pulls"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert answer.state["statistics"]["value"][1].tolist() == [5.0, 5.0]


class TwoRows:
    """A collector that shows two rows; the second ends the episode of environment 1, whose answer pulls nothing."""

    def collect(self, policy: Any, *, phase: Phase) -> CollectResult:
        means = [[1.0, 4.0], [2.0, 2.0]]
        answer = policy(step_of([0.0, 0.0], first=[1, 1], last=[0, 0], means=means), None, mode="train")
        self.first = answer.action.tolist()
        answer = policy(step_of([9.0, 0.0], first=[0, 0], last=[0, 1], means=means), answer.state, mode="train")
        self.second = answer.action.tolist()
        return CollectResult(Counts(agent_steps=3), {"collect/environment_restarts": 0})


def test_regret_and_the_share_of_best_arms_by_hand() -> None:
    """Environment 0 pulls the same arm twice, since it paid 9; environment 1's arms are equally good."""
    collector = TwoRows()
    metrics = make(collector=collector).collect_step(0, phase=PHASE).metrics
    assert collector.first[0] == collector.second[0]
    is_best = collector.first[0]  # arm 1 of environment 0 is worth 4
    assert metrics["collect/optimal_arm_rate"].item() == pytest.approx((1 + 2 * is_best) / 3)
    assert metrics["collect/regret_mean"].item() == pytest.approx(2 * 3.0 * (1 - is_best) / 3)
    assert metrics["collect/environment_restarts"] == 0


class NothingToTell(TwoRows):
    def collect(self, policy: Any, *, phase: Phase) -> CollectResult:
        policy(step_of([0.0], first=[1], last=[0]), None, mode="train")
        return CollectResult(Counts(agent_steps=1))


def test_an_environment_that_does_not_tell_its_arms_gives_no_regret() -> None:
    assert make(collector=NothingToTell()).collect_step(0, phase=PHASE).metrics == {}


# --- whole runs ---


def finished(name: str, *overrides: str) -> Experiment:
    trained = build(compose(name, [*overrides]), run=None, quiet=True)
    trained.orchestrator.run()
    return trained


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_finds_a_clearly_better_arm(strategy: str) -> None:
    """Evaluation learns fresh bandits of its own, 100 pulls each; any arm at random would be worth 100 * .43."""
    trained = finished(
        f"bandit_{strategy}",
        "environment.num_envs=4",
        "environment.kwargs.steps=100",
        "+environment.kwargs.arm_means=[0.2, 0.9, 0.2]",
        "training.phases.train.duration_steps=400",
        "evaluation.final_episodes=20",
    )
    try:
        assert trained.housekeeping.last_score is not None and trained.housekeeping.last_score > 48
    finally:
        trained.close()


def test_the_logged_share_of_best_arms_is_the_hand_computed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms 50 deviations apart and optimistic values: each arm is tried once, then 1 - epsilon / 2 of the pulls."""
    seen: list[CollectResult] = []
    collect = Bandit.collect_step

    def remember(self: Bandit, step: int, *, phase: Phase) -> CollectResult:
        seen.append(collect(self, step, phase=phase))
        return seen[-1]

    monkeypatch.setattr(Bandit, "collect_step", remember)
    arms = ["environment.kwargs.steps=120", "+environment.kwargs.arm_means=[0.0, 50.0]"]
    length = ["training.phases.train.duration_steps=12000", "training.phases.train.collect_steps=20"]
    settings = ["components.strategy.initial_value=100.0", "components.strategy.epsilon=0.2"]
    finished("bandit_epsilon_greedy", *arms, *length, *settings, "evaluation.final_episodes=0").close()
    late = [result.metrics for result in seen[1:]]
    rate = sum(float(metrics["collect/optimal_arm_rate"]) for metrics in late) / len(late)
    assert rate == pytest.approx(0.9, abs=0.01)  # 10,000 pulls: three deviations are .009
    regret = sum(float(metrics["collect/regret_mean"]) for metrics in late) / len(late)
    assert regret == pytest.approx(50.0 * (1.0 - rate), rel=1e-4)


SMALL = ["environment.num_envs=3", "environment.kwargs={num_arms: 4, steps: 7}", "logging.every_steps=1"]
GOLDEN = {
    "epsilon_greedy": [16.174945, 54.742902],
    "ucb": [20.634644, 71.895698],
    "gradient": [16.796427, 77.261201],
    "thompson": [18.486611, 87.179940],
    "thompson_bernoulli": [20.0, 42.0],
}


def length(cycles: int) -> list[str]:
    train = "training.phases.train"
    return [f"{train}.duration_steps=null", f"{train}.duration_cycles={cycles}", f"{train}.collect_steps=5"]


@pytest.mark.parametrize("strategy", GOLDEN)
def test_the_statistics_after_a_few_pulls_are_the_golden_ones(strategy: str) -> None:
    """Sum and sum of squares of all that was learnt: a refactor that changes no maths changes neither."""
    trained = finished(f"bandit_{strategy}", *SMALL, *length(6), "evaluation.final_episodes=0")
    leaves: list[torch.Tensor] = []
    statistics = trained.targets["collector"].get_state()["policy_state"]["statistics"]
    map_leaves(lambda leaf: leaves.append(leaf.double()), statistics)
    trained.close()
    found = [sum(float(leaf.sum()) for leaf in leaves), sum(float(leaf.square().sum()) for leaf in leaves)]
    assert found == pytest.approx(GOLDEN[strategy], rel=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_cut_at_several_cycles_equals_the_uninterrupted_run(strategy: str, tmp_path: Path) -> None:
    """Cycles of 5 pulls, episodes of 7: the cuts fall inside episodes."""
    config = compose(f"bandit_{strategy}", [*COMMON, *SMALL, *length(7)])
    run_to_the_end(config, tmp_path / "whole", cuts=[])
    run_to_the_end(config, tmp_path / "cut", cuts=[1, 4, 5])
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
