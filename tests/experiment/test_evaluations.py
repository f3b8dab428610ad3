"""Evaluations during training: on their grid, cheap, filmed on request, and never felt by the training."""

from __future__ import annotations

import bdb
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab import api
from rl_lab.config.compose import compose
from rl_lab.config.schema import read_settings
from rl_lab.experiment import session
from rl_lab.experiment.build import automatic_cadence, build_environment, build_evaluator, build_runtime
from rl_lab.experiment.debugger import is_debugged, simplified_if_debugged
from rl_lab.metrics.time_split import AFTERWARDS
from rl_lab.runs.metrics_file import read_metrics, series
from rl_lab.types import PolicyStep
from rl_lab.utils.seeding import untouched_randomness

TINY = ["environment.num_envs=4", "training.phases.train.collect_steps=16", "algorithm.minibatch_size=32"]
QUICK = ["evaluation.num_envs=2", "evaluation.episodes=2", "evaluation.final_episodes=2", "evaluation.timeout_steps=20"]
LITTLE = [*TINY, *QUICK, "total_timesteps=2000", "logging.tensorboard=false", "evaluation.video=false"]


def cadence_of(experiment: str, *words: str) -> tuple[int | None, int | None]:
    config = compose(experiment, words)
    environment = build_environment(config, stream="train_environment")
    try:
        found = automatic_cadence(read_settings(config), environment)
    finally:
        environment.close()
    return found.every_steps, found.every_updates


def test_a_run_is_evaluated_about_ten_times_by_its_planned_steps() -> None:
    every, by_updates = cadence_of("dqn_cartpole")
    assert every is not None and by_updates is None
    last = 49_985 + 4 * 4  # where the last cycle ends at the latest
    assert 9 * every < 49_985 and 10 * every >= last  # nine on the way, the tenth is the one at the end


def evaluations_of(experiment: str, steps: int) -> int:
    every, _ = cadence_of(experiment, f"total_timesteps={steps}")
    return steps // (every or steps) + 1  # the one at the end


def test_the_default_run_is_evaluated_ten_times_though_it_takes_two_seconds() -> None:
    assert evaluations_of("ppo_cartpole", 150_000) == 10


def test_evaluations_cost_a_quarter_of_training_at_most_unless_they_would_be_fewer_than_three() -> None:
    """An evaluation of CartPole takes up to 500 rounds, learning from a row of a rollout as long as 1/8 of a round."""
    assert evaluations_of("ppo_cartpole", 96_000) == 7  # 1,500 and 12,000 rounds, of which a quarter is 6.75 times 500
    assert evaluations_of("ppo_cartpole", 30_000) == 3
    assert evaluations_of("random_cartpole", 40_000) == 3  # 5,000 rounds: nothing is learnt
    assert evaluations_of("dreamer_v3_cartpole", 12_600) == 10  # 3,150 rounds, and 6,000 updates like 4 each


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ([], [10, 10, 30, 100]),  # all at once, as many as there are episodes
        (["evaluation.num_envs=4"], [4] * 4),
        (["environment.vectorization=sync"], [10] * 4),  # where each of them costs as much as the first
    ],
)
def test_environments_that_move_as_one_array_play_every_episode_at_once(words: list[str], sizes: list[int]) -> None:
    config = compose("ppo_cartpole", words)
    evaluator = build_evaluator(config, read_settings(config).evaluation, build_runtime(config))
    seen: list[int] = []

    def fall_over(time_step: Any, state: Any, *, mode: str) -> PolicyStep:
        seen.append(time_step.num_envs)
        return PolicyStep(torch.zeros(time_step.num_envs, dtype=torch.int64))

    def play(episodes: int) -> int:
        seen.clear()
        assert len(evaluator.play_episodes(fall_over, episodes=episodes)) == episodes
        assert len({*seen}) == 1
        return seen[0]

    assert [play(episodes) for episodes in (2, 10, 30, 300)] == sizes
    returns = [[each.episode_return for each in evaluator.play_episodes(fall_over, episodes=30)] for _ in range(2)]
    assert returns[0] == returns[1]
    evaluator.close()
    evaluator.close()


@pytest.mark.parametrize("word", ["evaluation.final_episodes=0", "preset=debug", "evaluation.every_updates=7"])
def test_auto_steps_back_where_something_else_is_asked_for(word: str) -> None:
    assert cadence_of("ppo_cartpole", word) == (None, 7 if "every_updates" in word else None)


def test_phases_that_count_updates_are_evaluated_by_updates() -> None:
    words = ["training.phases.train.duration_steps=null", "training.phases.train.duration_updates=100"]
    assert cadence_of("ppo_cartpole", *words) == (None, 11)


def test_training_does_not_feel_that_it_is_evaluated(tmp_path: Path) -> None:
    def train(*words: str) -> tuple[list[Any], dict[str, Any]]:
        run = api.train("ppo_cartpole", overrides=[*LITTLE, *words], runs_dir=tmp_path, quiet=True)
        rows = read_metrics(run.path / "metrics.jsonl")
        return [value for _, value in series(rows, "loss/policy")], {"rows": rows, "run": run}

    with_evaluations, seen = train()
    without, _ = train("evaluation.every_steps=null")
    assert with_evaluations == without
    assert len(series(seen["rows"], "eval/episode_return_mean")) in (9, 10, 11)
    assert seen["run"].status["best_score"] is not None


def test_whatever_is_drawn_while_looking_is_given_back() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with untouched_randomness():
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())


def test_a_video_is_recorded_at_every_so_many_evaluations(tmp_path: Path) -> None:
    words = [*LITTLE, "evaluation.every_steps=600", "evaluation.video_every=2"]
    run = api.train("ppo_cartpole", overrides=words, runs_dir=tmp_path, quiet=True)
    steps = [row["agent_steps"] for row, _ in series(read_metrics(run.path / "metrics.jsonl"), "eval/episodes")]
    assert [video.name for video in sorted((run.path / "videos").iterdir())] == [f"evaluation_{steps[1]:012d}.mp4"]


def test_under_a_debugger_there_is_one_environment_and_no_subprocess(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(bdb.Bdb):
        def trace_dispatch(self, frame: Any, event: str, arg: Any) -> None:
            return None

    config = compose("ppo_cartpole")
    assert not is_debugged() and simplified_if_debugged(config, []) is config
    former = sys.gettrace()
    sys.settrace(Silent().trace_dispatch)
    try:
        is_seen = is_debugged()
        simple = simplified_if_debugged(config, ["evaluation.num_envs=3"])
    finally:
        sys.settrace(former)
    assert is_seen
    assert (simple["environment"]["num_envs"], simple["environment"]["vectorization"]) == (1, "sync")
    assert (config["environment"]["num_envs"], simple["evaluation"]["num_envs"]) == (64, "auto")  # what one named stays
    assert caplog.messages == [
        "A debugger is attached, so this run uses environment.num_envs=1 environment.vectorization=sync; name them to "
        "keep yours."
    ]


def test_a_tracer_that_is_no_debugger_changes_nothing() -> None:
    former = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        is_seen = is_debugged()
    finally:
        sys.settrace(former)
    assert not is_seen


def test_waiting_for_the_sinks_when_training_is_over_is_no_overhead_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections, make_report = [], session._make_report

    def watched(experiment: Any, *arguments: Any, **keywords: Any) -> Any:
        note = lambda: sections.append(experiment.housekeeping.stopwatch.current)  # noqa: E731
        monkeypatch.setattr(experiment.logger, "flush", note)
        return make_report(experiment, *arguments, **keywords)

    monkeypatch.setattr(session, "_make_report", watched)
    api.train("ppo_cartpole", overrides=[*LITTLE, "total_timesteps=64"], runs_dir=tmp_path, quiet=True)
    assert sections and set(sections) <= set(AFTERWARDS)
