"""`rl-lab sweep show`: the trials of a sweep, the best, what each parameter explains, and pictures."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_lab.cli.parsing import runs_dir_of
from rl_lab.cli.printing import answer, format_value, table
from rl_lab.launch.search import FINISHED, RUNNING, Trial, best_of
from rl_lab.launch.sweep import trial_from
from rl_lab.launch.sweep_plan import SweepPlan, stored_plan
from rl_lab.runs.sweep_figures import draw_importance, draw_parallel_coordinates, importance
from rl_lab.runs.sweeps import SweepDirectory, open_sweep
from rl_lab.utils.formatting import format_duration

STOPPED = "stopped"  # together with its sweep: the same command goes on
LEAST_TRIALS = 4  # finished ones, before fractions of variance mean anything


def show(name: str, arguments: argparse.Namespace) -> int:
    directory = open_sweep(name, runs_dir_of(arguments))
    stored, recorded = directory.read()
    plan = stored_plan(stored)
    trials = [trial_from(row) for _, row in sorted(recorded.items())]
    for trial in trials:
        if not trial.has_ended and any(directory.run(trial.number, seed).exists() for seed in plan.seeds):
            trial.state = RUNNING if directory.is_worked_on() else STOPPED
    best = best_of(trials, plan)
    finished = [trial for trial in trials if trial.state == FINISHED and trial.score is not None]
    fractions = importance([trial.parameters for trial in finished], [_score(trial) for trial in finished])
    fractions = fractions if len(finished) >= LEAST_TRIALS else {}
    pictures = draw(directory, plan, finished, fractions)
    found = "no trial has finished yet"
    if best is not None:
        run_id = directory.run_id(best.number, plan.seeds[0])
        found = f"best: trial {best.number}, {plan.metric} {format_value(best.score)}, run {run_id}"
    parts = [_table(plan, trials, best), found]
    if fractions:
        lines = [f"  {fraction:>5.0%}  {key}" for key, fraction in fractions.items()]
        if not any(fractions.values()):
            lines.append("  none explains more than chance would: more trials or seeds may tell")
        parts.append("\n".join(["fraction of the scores' variance that each parameter explains by itself", *lines]))
    if pictures:
        parts.append("\n".join(f"picture: {path}" for path in pictures))
    facts: dict[str, Any] = {"plan": stored, "trials": [asdict(trial) for trial in trials], "importance": fractions}
    facts |= {"best": None if best is None else best.number, "pictures": pictures}
    answer(arguments, facts, "\n\n".join(parts), brief=[found])
    return 0


def draw(directory: SweepDirectory, plan: SweepPlan, finished: list[Trial], fractions: dict[str, float]) -> list[Path]:
    if len(finished) < 2:
        return []
    paths = [directory.path / "parallel_coordinates.png"]
    draw_parallel_coordinates(
        paths[0],
        [trial.parameters for trial in finished],
        [_score(trial) for trial in finished],
        is_log={parameter.key: parameter.log for parameter in plan.parameters},
        metric=plan.metric,
        title=f"{plan.name}: {len(finished)} finished trials, the darker the better",
        is_maximized=plan.direction == "maximize",
    )
    if fractions:
        paths.append(directory.path / "importance.png")
        draw_importance(paths[1], fractions, title=f"{plan.name}: fraction of variance explained")
    return paths


def _table(plan: SweepPlan, trials: list[Trial], best: Trial | None) -> str:
    keys = [parameter.key for parameter in plan.parameters]
    headers = ["TRIAL", "STATE", "SCORE", "TIME", *(key.upper().rpartition(".")[2] for key in keys), "REMARK"]
    rows = [
        (
            *(trial.number, trial.state, trial.score, format_duration(trial.seconds)),
            *(trial.parameters.get(key) for key in keys),
            "best" if trial is best else trial.message,
        )
        for trial in trials
    ]
    return table(headers, rows)


def _score(trial: Trial) -> float:
    assert trial.score is not None
    return trial.score
