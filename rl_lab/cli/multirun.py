"""`rl-lab train -m`: names and command lines for several trainings, what they print, and a closing table."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from rl_lab.cli.parsing import runs_dir_of
from rl_lab.cli.printing import BEST_SCORE, best_score, format_value, say, table
from rl_lab.launch.local import Member, Supervisor, default_jobs
from rl_lab.launch.table import LiveTable, short_label

STOPPING = "\nstopping: each training saves first; again to hurry, three times to kill"


def train_all(sweep: Sequence[tuple[str, list[str]]], arguments: argparse.Namespace) -> int:
    """Train every (experiment, overrides) of `sweep`; 0 only if all of them finished."""
    members = plan(sweep, arguments)
    jobs = min(arguments.jobs or default_jobs(), len(members))
    if not arguments.quiet:
        say(f"{len(members)} trainings, {jobs} at a time")
    signal_number = _supervise(members, jobs, quiet=arguments.quiet)
    if not arguments.quiet:
        say(summary(members, runs_dir_of(arguments)))
        if over_seeds := seeds_summary(members, runs_dir_of(arguments)):
            say("", over_seeds, sep="\n")
    if signal_number is not None:
        say("interrupted: the same command with --run-id and --resume goes on", file=sys.stderr)
        return 128 + signal_number
    return 0 if all(member.exit_code == 0 for member in members) else 1


def _supervise(members: Sequence[Member], jobs: int, *, quiet: bool) -> int | None:
    """On a terminal one table shows all of them; elsewhere each writes lines."""
    if quiet or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return Supervisor(members, jobs, show=_show, on_signal=lambda: say(STOPPING, file=sys.stderr)).run()
    live = LiveTable(members, jobs, sys.stdout)
    supervisor = Supervisor(
        members, jobs, show=live.say, on_signal=lambda: live.above.append(STOPPING.strip()), tick=live.tick
    )
    try:
        return supervisor.run()
    finally:
        live.close()


def plan(sweep: Sequence[tuple[str, list[str]]], arguments: argparse.Namespace) -> list[Member]:
    """Name each training by what it does not share with the others, and write its command line."""
    from rl_lab.runs.run_directory import slug

    shared = {word for word in sweep[0][1] if all(word in overrides for _, overrides in sweep)}
    several_experiments = len({experiment for experiment, _ in sweep}) > 1
    stamp = time.strftime("%Y%m%d-%H%M%S")
    members: list[Member] = []
    for index, (experiment, overrides) in enumerate(sweep):
        own = [experiment] * several_experiments + [word for word in overrides if word not in shared]
        label = " ".join(own) or experiment or f"run {index}"
        base = arguments.run_id or f"{experiment or 'train'}-{stamp}"
        run_id = slug("-".join([base, *map(_short, own)]))
        if any(run_id == member.run_id for member in members):
            run_id = f"{run_id}-{index}"
        members.append(Member(label, run_id, _command(experiment, overrides, run_id, arguments)))
    return members


def _short(word: str) -> str:
    """`algorithm.discount=0.9` as discount0.9, for a run's id."""
    key, _, value = word.partition("=")
    return f"{key.rpartition('.')[2]}{value}"


def _command(experiment: str, overrides: list[str], run_id: str, arguments: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "rl_lab", "train", *([experiment] if experiment else []), *overrides]
    command += ["--run-id", run_id]
    for option, directory in (("--runs-dir", arguments.runs_dir), ("--config-dir", arguments.config_dir)):
        command += [option, str(directory)] if directory else []
    flags = {"--resume": arguments.resume, "--quiet": arguments.quiet, "--debug": arguments.debug}
    return command + [flag for flag, given in flags.items() if given]


def summary(members: Sequence[Member], runs_dir: Path) -> str:
    """The closing table: what became of each training."""
    from rl_lab.runs.run_directory import RunDirectory
    from rl_lab.utils.formatting import format_duration

    rows = []
    for member in members:
        status = RunDirectory(runs_dir / member.run_id).read_status()
        state = "not started" if member.process is None else status["state"]
        if state == "created":  # it ended before it could begin; its own message stands above
            state = f"failed (exit code {member.exit_code})"
        steps = status["counts"].get("agent_steps")
        label, time_s = short_label(member.label), format_duration(status["wall_s"])
        rows.append((label, state, steps, best_score(status), time_s, member.run_id))
    headers = ("TRAINING", "STATE", "AGENT STEPS", BEST_SCORE, "TIME", "RUN")
    return table(headers, rows, optional=("TRAINING", "TIME", "AGENT STEPS"), uncut="RUN")


def seeds_summary(members: Sequence[Member], runs_dir: Path) -> str:
    """Mean and standard deviation over the seeds of each setting; empty where no setting has two scores."""
    from rl_lab.runs.run_directory import RunDirectory

    scores: dict[str, list[tuple[float, float]]] = {}
    for member in members:
        status = RunDirectory(runs_dir / member.run_id).read_status()
        settings = " ".join(word for word in short_label(member.label).split() if not word.startswith("seed="))
        if (best := best_score(status)) is not None and (final := status.get("final_score")) is not None:
            scores.setdefault(settings or "all", []).append((final, best))
    rows = [
        (settings, len(pairs), *(_mean_and_std([pair[place] for pair in pairs]) for place in (0, 1)))
        for settings, pairs in scores.items()
    ]
    is_any_repeated = any(len(pairs) > 1 for pairs in scores.values())
    return table(("OVER SEEDS", "RUNS", "LAST EVAL", BEST_SCORE), rows) if is_any_repeated else ""


def _mean_and_std(values: Sequence[float]) -> str:
    spread = f" ± {format_value(stdev(values))}" if len(values) > 1 else ""
    return f"{format_value(fmean(values))}{spread}"


def _show(label: str, line: str) -> None:
    say(f"[{label}] {line}", end="")
