"""The runs of a sweep's trials: trained once, continued where they were cut, pruned cleanly, never mixed up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_lab.experiment.trial import TrialRun, run_trial
from rl_lab.orchestration.housekeeping import Housekeeping
from rl_lab.runs.metrics_file import read_metrics
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import RunError

METRIC = "eval/episode_return_mean"
WORDS = (
    *("environment.num_envs=4", "+environment.kwargs.is_slippery=false", "training.phases.train.duration_steps=600"),
    *("evaluation.every_steps=100", "evaluation.episodes=4", "evaluation.final_episodes=4", "evaluation.num_envs=4"),
    *("evaluation.video=false", "logging.tensorboard=false", "training.checkpoint.every_updates=1", "seed=0"),
)


@pytest.fixture
def task(tmp_path: Path) -> TrialRun:
    return TrialRun(
        run_id="s-0000-s0",
        experiment="q_learning_frozenlake",
        overrides=WORDS,
        runs_dir=tmp_path,
        config_dir=None,
        tag="sweep:s",
        metric=METRIC,
        score="last",
        direction="maximize",
        is_reporting=True,
    )


def run_of(task: TrialRun) -> RunDirectory:
    return RunDirectory(Path(task.runs_dir) / task.run_id)


def test_a_run_reports_every_value_and_is_not_trained_twice(task: TrialRun) -> None:
    reports: list[list[float]] = []
    result = run_trial(task, reports.append)
    assert result.state == "finished" and len(result.values) > 3 and result.score == result.values[-1]
    assert reports == [list(result.values[: count + 1]) for count in range(len(reports))]
    assert 3 < len(reports) < len(result.values), "nobody asks about the last row"
    assert run_of(task).read_tags()["tags"] == ["sweep:s"]
    identity = run_of(task).identity()
    assert run_trial(task, lambda values: pytest.fail("it ended already")) == result
    assert run_of(task).identity() == identity
    best = run_trial(replace(task, score="best", direction="minimize"), reports.append)
    assert best.score == min(result.values)
    missing = run_trial(replace(task, metric="loss/none"), reports.append)
    assert missing.score is None and METRIC in missing.logged


def test_a_pruned_run_stops_at_once_and_says_so(task: TrialRun) -> None:
    result = run_trial(task, lambda values: len(values) == 2)
    assert (result.state, len(result.values)) == ("pruned", 2)
    assert METRIC in result.message and "is behind earlier trials" in result.message
    run = run_of(task)
    status = run.read_status()
    assert status["state"] == "pruned" and status["message"].startswith("pruned: ")
    assert status["counts"]["agent_steps"] < 600 and run.report_path.exists()
    assert len([row for row in read_metrics(run.metrics_path) if METRIC in row]) == 2, "there is no final evaluation"
    assert run_trial(task, lambda values: False) == result, "a sweep that goes on leaves it as it is"


def test_a_run_that_was_cut_tells_its_earlier_values_again(task: TrialRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a kill: the pruner of the resumed run must see what that of an uninterrupted one sees."""
    whole: list[list[float]] = []
    run_trial(replace(task, run_id="whole"), whole.append)
    write_row, rows = Housekeeping.write_row, 0

    def cut(self: Housekeeping) -> Any:
        nonlocal rows
        rows += 1
        if rows == 5:
            raise KeyboardInterrupt
        return write_row(self)

    parts: list[list[float]] = []
    with monkeypatch.context() as patched:
        patched.setattr(Housekeeping, "write_row", cut)
        assert run_trial(task, parts.append).state == "interrupted"
    before = len(parts)
    assert run_trial(task, parts.append).state == "finished"
    assert 0 < before < len(whole) and parts[before:] == whole[len(whole) - len(parts[before:]) :]


def test_a_run_with_other_settings_in_its_place_is_refused(task: TrialRun) -> None:
    run_trial(task, lambda values: True)
    other = replace(task, overrides=(*WORDS, "algorithm.discount=0.5"))
    result = run_trial(other, lambda values: False)
    assert result.state == "refused" and "Run s-0000-s0 is there already with other settings" in result.message


def test_settings_that_cannot_be_built_are_a_failed_trial(task: TrialRun) -> None:
    result = run_trial(replace(task, overrides=(*WORDS, "algorithm.discount=2")), lambda values: False)
    assert result.state == "failed" and "algorithm.discount is 2" in result.message
    assert not run_of(task).exists()


def test_a_training_that_fails_is_a_failed_trial_and_stays_one(task: TrialRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Housekeeping) -> None:
        raise RunError("loss/value is not finite")

    with monkeypatch.context() as patched:
        patched.setattr(Housekeeping, "write_row", fail)
        assert run_trial(task, lambda values: False).state == "failed"
    again = run_trial(task, lambda values: False)
    assert again.state == "failed" and "loss/value is not finite" in again.message
