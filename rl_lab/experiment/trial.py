"""One run of a sweep's trial, in a warm worker: trained, continued or, where it is done already, only read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_lab.config.compose import compose, to_yaml
from rl_lab.config.schema import EvaluationBlock, read_settings
from rl_lab.experiment.build import check
from rl_lab.experiment.session import DONE, continue_run, start_run
from rl_lab.experiment.trial_tasks import TrialCheck, TrialResult, TrialRun
from rl_lab.experiment.trust import foreign_packages, remember_consent
from rl_lab.metrics.names import NAMES, meaning_of
from rl_lab.orchestration.housekeeping import Prune, go_on
from rl_lab.runs.manifest import config_hash
from rl_lab.runs.metrics_file import read_metrics
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.sweeps import finite_values
from rl_lab.types import ConfigError, RLLabError, RunError, did_you_mean


def work(task: TrialRun | TrialCheck, report: Callable[[Any], Any]) -> TrialResult | str:
    """What a worker does: a run, or a check whose answer is what is wrong (empty: nothing)."""
    if isinstance(task, TrialCheck):
        return check_trial(task)
    began = time.monotonic()
    result = run_trial(task, report)
    return replace(result, task_seconds=time.monotonic() - began)


def check_trial(task: TrialCheck) -> str:
    try:
        config = compose(task.experiment, task.overrides, config_dir=task.config_dir)
        settings = read_settings(config)
        if problem := _metric_problem(task, settings.evaluation):
            return problem
        check(config)
    except RLLabError as error:
        return f"{task.label}: {error}".removeprefix(": ")
    return ""


def _metric_problem(task: TrialCheck, evaluation: EvaluationBlock) -> str:
    """A metric that these settings never log, as far as that can be known beforehand."""
    steps = evaluation.every_steps if evaluation.every_steps != "auto" or evaluation.final_episodes > 0 else None
    is_evaluated = steps is not None or evaluation.every_updates is not None
    if task.metric.startswith("eval/") and not is_evaluated:
        if evaluation.final_episodes == 0:
            asked = evaluation.every_steps or "null"
            return f"metric {task.metric} is never logged: evaluation.final_episodes is 0, every_steps is {asked}."
        if task.has_pruner:
            return "a pruner compares evaluations during training, and there are none: set evaluation.every_steps."
    if meaning_of(task.metric) is None and (hint := did_you_mean(task.metric, NAMES)):
        return f"metric {task.metric} is not known.{hint} docs/metrics.md lists all of them."
    return ""


def run_trial(task: TrialRun, report: Callable[[Any], Any]) -> TrialResult:
    """Bring one run to its end and read its score."""
    run = RunDirectory(Path(task.runs_dir) / task.run_id)
    try:
        _train(task, run, _Pruner(task.metric, run, report) if task.is_reporting else go_on)
    except (KeyboardInterrupt, SystemExit):
        return TrialResult("interrupted")
    except _RefusedError as error:
        return TrialResult("refused", message=str(error))
    except RLLabError as error:
        has_begun = run.exists() and run.read_status()["state"] == "failed"
        return TrialResult("failed" if has_begun or isinstance(error, ConfigError) else "refused", message=str(error))
    return read_result(task, run)


def read_result(task: TrialRun, run: RunDirectory) -> TrialResult:
    status = run.read_status()
    rows = read_metrics(run.metrics_path)
    values = tuple(finite_values(rows, task.metric))
    scores = values[-1:] if task.score == "last" else values
    score = (max if task.direction == "maximize" else min)(scores, default=None)
    logged = () if values else tuple(sorted({name for row in rows for name in row if "/" in name}))
    state = status["state"] if status["state"] in ("pruned", "failed") else "finished"
    message = status["message"].removeprefix("pruned: ") if state != "finished" else ""
    return TrialResult(state, score, values, logged, message, float(status["wall_s"] or 0.0))


def _train(task: TrialRun, run: RunDirectory, prune: Prune) -> None:
    config = compose(task.experiment, task.overrides, config_dir=task.config_dir)
    if not run.exists():
        remember_consent(config)
        start_run(
            config,
            overrides=task.overrides,
            run_id=task.run_id,
            runs_dir=task.runs_dir,
            quiet=True,
            tags=[task.tag],
            prune=prune,
            is_drawn=False,  # pictures would take longer than anything else around a short training
        )
    elif run.read_manifest().get("config_hash") != config_hash(to_yaml(config)):
        raise _RefusedError(
            f"Run {run.id} is there already with other settings than those of this trial: remove it, or give the sweep "
            "another --name."
        )
    elif run.read_status()["state"] not in (*DONE, "failed"):
        continue_run(run, trust=[*foreign_packages(config)], quiet=True, prune=prune, is_drawn=False)


class _RefusedError(RunError):
    """The place of this run is taken."""


class _Pruner:
    """Asks the parent at every new value of the metric. A resumed run tells the values before it first, so that the
    answer is that of a run without interruption."""

    def __init__(self, metric: str, run: RunDirectory, report: Callable[[Any], Any]) -> None:
        self._metric = metric
        self._run = run
        self._report = report
        self._values: list[float] = []

    def __call__(self, row: dict[str, Any]) -> str | None:
        if not (new := finite_values([row], self._metric)):
            return None
        # The first time, all rows are read: this one, and those before a restart.
        self._values += new if self._values else finite_values(read_metrics(self._run.metrics_path), self._metric)
        if not self._report(list(self._values)):
            return None
        return f"{self._metric} {self._values[-1]:.4g} at {row['agent_steps']:,} agent steps is behind earlier trials"
