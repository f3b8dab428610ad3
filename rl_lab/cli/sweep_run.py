"""From a sweep file's content to its best trial: checks, warm workers, the loop, the closing words."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_lab.cli.parsing import chosen, runs_dir_of
from rl_lab.cli.printing import format_value, say
from rl_lab.cli.sweep_table import TrialTable
from rl_lab.config.files import USER_CONFIGS, config_directories
from rl_lab.config.spelling import spell
from rl_lab.config.write import experiment_text
from rl_lab.experiment.trial_tasks import TrialCheck, TrialRun
from rl_lab.launch.pool import Pool
from rl_lab.launch.search import Trial, best_of, require_optuna
from rl_lab.launch.sweep import Sweep, Task, trial_from
from rl_lab.launch.sweep_plan import SweepPlan, read_plan, stored_plan
from rl_lab.runs.files import write_atomic
from rl_lab.runs.sweeps import SweepDirectory
from rl_lab.types import ConfigError, RunError
from rl_lab.utils.processes import available_cores

STOPPING = "\nstopping: each training saves first; three times to kill"
WORK = "rl_lab.experiment.trial:work"


def start(
    content: dict[str, Any], *, place: str, default_name: str, overrides: Sequence[str], arguments: argparse.Namespace
) -> int:
    """Start or resume the sweep that `content` describes; 0 when all its trials have ended."""
    given = chosen(arguments, "name", "trials", "minutes", "jobs", "best_config")
    content = {**content, **{name: value for name, value in given.items() if value is not None}}
    defaults: dict[str, Any] = {"default_name": default_name, "default_jobs": available_cores()}
    plan = read_plan(content, place=place, overrides=overrides, **defaults)
    if plan.is_dependent:  # TPE, CMA-ES and pruners are Optuna's
        require_optuna(plan)
    directory = SweepDirectory(runs_dir_of(arguments), plan.name)
    with directory.locked(), directory.discarded_if_empty():
        plan, recorded = _take_up(plan, directory, is_parallel_given="parallel" in content)
        table = TrialTable(plan, is_quiet=arguments.quiet)
        began = time.monotonic()
        with closing(_workers(plan, directory)) as pool:
            if not recorded:
                _check(plan, pool, arguments.config_dir)
            if not directory.exists() or directory.read()[0] != plan.as_dict():
                directory.append({"plan": plan.as_dict()})
            sweep = _sweep(plan, pool, directory, recorded, table, arguments.config_dir)
            signal_number = sweep.run()
        return _close(sweep, directory, signal_number, arguments, seconds=time.monotonic() - began)


def _take_up(
    plan: SweepPlan, directory: SweepDirectory, *, is_parallel_given: bool
) -> tuple[SweepPlan, dict[int, dict[str, Any]]]:
    """The plan beside what is on record of it; refused where they do not fit together."""
    stored, recorded = directory.read()
    if not stored:
        return plan, recorded
    if not is_parallel_given:  # it depends on the machine; the sweep keeps the one it began with
        plan = replace(plan, parallel=stored.get("parallel", plan.parallel))
    now, then = _facts(plan), _facts(stored_plan(stored))
    names = [name for name in {**then, **now} if now.get(name) != then.get(name)]
    if changed := [f"{name} was {then.get(name)}, now {now.get(name)}" for name in names]:
        raise ConfigError(
            f"Sweep {plan.name} exists with other settings, so it cannot go on:\n  "
            + "\n  ".join(changed)
            + "\n  Put them back, or give the new sweep another --name."
        )
    ended = [trial for trial in map(trial_from, recorded.values()) if trial.has_ended]
    if len(ended) > plan.trials:
        raise ConfigError(
            f"trials is {plan.trials}, but {len(ended)} trials of sweep {plan.name} have ended already: write at least "
            f"{len(ended)}, or give a new sweep another --name."
        )
    return plan, recorded


def _facts(plan: SweepPlan) -> dict[str, Any]:
    """What a resumed sweep must have in common with its beginning, one parameter at a time."""
    parameters = {f"parameters.{parameter.key}": parameter.short() for parameter in plan.parameters}
    return plan.identity() | {"parameters": [parameter.key for parameter in plan.parameters]} | parameters


def _workers(plan: SweepPlan, directory: SweepDirectory) -> Pool:
    at_a_time = plan.trials * len(plan.seeds)
    if plan.is_dependent:
        at_a_time = min(at_a_time, plan.parallel * (1 if plan.pruner != "none" else len(plan.seeds)))
    return Pool(WORK, min(plan.jobs, at_a_time), log_path=directory.log_path)


def _sweep(
    plan: SweepPlan,
    pool: Pool,
    directory: SweepDirectory,
    recorded: dict[int, dict[str, Any]],
    table: TrialTable,
    config_dir: Path | None,
) -> Sweep:
    def payload(task: Task, is_reporting: bool) -> TrialRun:
        return TrialRun(
            run_id=directory.run_id(task.trial.number, task.seed),
            experiment=plan.experiment,
            overrides=(*words_of(plan, task.trial.parameters), f"seed={task.seed}"),
            runs_dir=directory.path.parents[1],
            config_dir=config_dir,
            tag=directory.tag(),
            metric=plan.metric,
            score=plan.score,
            direction=plan.direction,
            is_reporting=is_reporting,
        )

    def is_retried(trial: Trial) -> bool:
        return not any(directory.run(trial.number, seed).exists() for seed in plan.seeds)

    return Sweep(
        plan=plan,
        pool=pool,
        payload=payload,
        record=directory.append,
        show=table.show,
        on_signal=lambda: table.say(STOPPING),
        recorded=recorded,
        is_retried=is_retried,
    )


def words_of(plan: SweepPlan, parameters: dict[str, Any], *, is_trial: bool = True) -> tuple[str, ...]:
    """The overrides of a trial, as `rl-lab train` takes them."""
    searched = [f"{key}={spell(value)}" for key, value in parameters.items()]
    return (*plan.overrides, *(plan.trial_overrides if is_trial else ()), *searched)


def check_points(plan: SweepPlan, config_dir: Path | None) -> list[TrialCheck]:
    """The middle of all ranges, then each parameter at its ends or at each of its choices."""
    middle = {each.key: each.at(0.0 if each.is_choice else 0.5) for each in plan.parameters}
    points = [("", middle)]
    for parameter in plan.parameters:
        values = [value for value in parameter.extremes() if value != middle[parameter.key]]
        points += [(f"parameters.{parameter.key}={spell(value)}", {**middle, parameter.key: value}) for value in values]
    has_pruner = plan.pruner != "none"
    return [
        TrialCheck(label, plan.experiment, words_of(plan, point), config_dir, plan.metric, has_pruner)
        for label, point in points
    ]


def _check(plan: SweepPlan, pool: Pool, config_dir: Path | None) -> None:
    """The workers build what is to be tried, as far as it is known, before the first trial starts."""
    waiting = check_points(plan, config_dir)
    problems: dict[str, str] = {}
    while waiting or pool.tasks():
        while waiting and pool.idle:
            pool.submit(waiting.pop(0))
        for event in pool.events(1.0):
            if event.kind == "died":
                raise RunError(f"A worker died while it checked {event.task.label or 'the base'} (code {event.value}).")
            if event.value:
                problems[event.task.label] = event.value
    if problems:  # what is wrong with the middle of all ranges is wrong with every trial
        shown = [problems[""]] if "" in problems else list(dict.fromkeys(problems.values()))
        raise ConfigError(f"Sweep {plan.name} cannot run, so nothing was started:\n  " + "\n  ".join(shown))


# --- the closing words -------------------------------------------------------------------------


def _close(
    sweep: Sweep, directory: SweepDirectory, signal_number: int | None, arguments: argparse.Namespace, *, seconds: float
) -> int:
    plan, best = sweep.plan, best_of(sweep.trials, sweep.plan)
    ended = sum(trial.has_ended for trial in sweep.trials)
    if not arguments.quiet:
        cores = min(plan.jobs, available_cores())
        on = "one core" if cores == 1 else f"{cores} cores"
        say(f"{ended} of {plan.trials} trials ended in {seconds:.1f} s on {on}")
    if best is not None:
        say(f"best: trial {best.number}, {plan.metric} {format_value(best.score)}")
        for key, value in best.parameters.items():
            say(f"  {key}={format_value(value) if isinstance(value, float) else spell(value)}")
        _write_best(plan, best, arguments)
    if signal_number is not None:
        say("interrupted: the same command goes on", file=sys.stderr)
        return 128 + signal_number
    if ended < plan.trials:
        say("out of time: the same command goes on")
    if best is None:
        say("no trial has finished yet, so there is no best one", file=sys.stderr)
        return 1
    if not arguments.quiet:
        say(f"look: rl-lab sweep show {plan.name}")
    return 0


def _write_best(plan: SweepPlan, best: Trial, arguments: argparse.Namespace) -> None:
    """The best parameters as an experiment of the user's own project."""
    name = f"{plan.name}_best"
    path = Path(plan.best_config or (arguments.config_dir or USER_CONFIGS) / "experiment" / f"{name}.yaml")
    words = words_of(plan, best.parameters, is_trial=False)
    seeds = f"over seeds {', '.join(map(str, plan.seeds))}" if len(plan.seeds) > 1 else f"with seed {plan.seeds[0]}"
    remarks = [f"Best of sweep {plan.name}, trial {best.number}: {plan.metric} {best.score:.6g} {seeds}"]
    try:
        text = experiment_text(path.stem, plan.experiment, words, remarks=remarks, config_dir=arguments.config_dir)
    except ConfigError as error:
        say(f"no best config: {error} Train it with: rl-lab train {' '.join([plan.experiment or '', *words])}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    folders = [directory / "experiment" for directory in config_directories(arguments.config_dir)]
    is_found = path.resolve().parent in [folder.resolve() for folder in folders]
    if not arguments.quiet:
        say(f"train it: rl-lab train {path.stem}" if is_found else f"best config: {path}")
