"""Try every experiment: a few cycles of each whose environment is installed, in processes of their own.

Exit code 1 when one failed, 2 when none matches. Nothing is kept, unless --runs-dir says where.

examples:
  rl-lab smoke
  rl-lab smoke dreamer
  rl-lab smoke cartpole --jobs 4
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rl_lab.cli.parsing import CONFIG_DIR, JSON, UsageError, argument, positive, quiet
from rl_lab.cli.printing import only_json_on_stdout, print_json, say, table
from rl_lab.launch.local import Member, Supervisor
from rl_lab.utils.processes import available_cores

DEFAULT_TIMEOUT_S = 300
COLLECT = "rl-lab collect"  # what the error of a missing dataset tells to write

ARGUMENTS = (
    argument("filter", nargs="?", default="", metavar="FILTER", help="text in the experiment's name or environment"),
    argument("--jobs", type=positive, metavar="N", help="how many at a time (default: one per core)"),
    argument("--timeout", type=positive, default=DEFAULT_TIMEOUT_S, metavar="SECONDS", help="of each (default: 300)"),
    argument("--runs-dir", type=Path, metavar="DIR", help="where runs are kept (default: nowhere)"),
    CONFIG_DIR,
    JSON,
    quiet("print only those that failed"),
)


@dataclass
class Trial:
    """One experiment and what became of it."""

    experiment: str
    environment: str
    result: str = "not started"  # ok, failed, timed out, skipped
    seconds: float | None = None
    why: str = ""
    lines: list[str] = field(default_factory=list, repr=False)


def run(arguments: argparse.Namespace) -> int:
    with only_json_on_stdout(arguments.json), ExitStack() as opened:
        trials = _plan(arguments)
        runs_dir = arguments.runs_dir or Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="rl-lab-smoke-")))
        wanted = [trial for trial in trials if trial.result != "skipped"]
        signal_number = _try(wanted, runs_dir, arguments)
    if arguments.json:
        print_json([{name: value for name, value in asdict(trial).items() if name != "lines"} for trial in trials])
    else:
        _print(trials, arguments)
    if signal_number is not None:
        return 128 + signal_number
    return 1 if any(trial.result not in ("ok", "skipped") for trial in trials) else 0


def _plan(arguments: argparse.Namespace) -> list[Trial]:
    from rl_lab import api
    from rl_lab.config.experiments import list_experiments

    wanted = arguments.filter.lower()
    trials = [
        Trial(each.name, each.environment)
        for each in list_experiments(config_dir=arguments.config_dir)
        if wanted in each.name.lower() or wanted in each.environment.lower()
    ]
    if not trials:
        raise UsageError(f"No experiment matches '{arguments.filter}'. All of them: rl-lab experiments")
    for trial in trials:
        if install := api.how_to_install(trial.environment):
            trial.result, trial.why = "skipped", f"not installed: {install}"
    return trials


def _try(trials: Sequence[Trial], runs_dir: Path, arguments: argparse.Namespace) -> int | None:
    """The number of the signal that cut it short, if one did."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as cores
    options = ["--config-dir", str(arguments.config_dir)] if arguments.config_dir else []
    members = [
        Member(trial.experiment, f"smoke-{index}", _command(trial, f"smoke-{index}", runs_dir, options))
        for index, trial in enumerate(trials)
    ]
    by_name = {trial.experiment: trial for trial in trials}
    timed_out: set[str] = set()

    def end_slow_ones() -> None:
        for member in members:
            is_running = member.process is not None and member.exit_code is None
            if is_running and time.monotonic() - member.started > arguments.timeout:
                timed_out.add(member.label)
                assert member.process is not None
                os.killpg(member.process.pid, signal.SIGKILL)  # with the processes of its environments

    supervisor = Supervisor(
        members,
        min(arguments.jobs or available_cores(), max(len(members), 1)),
        show=lambda name, line: by_name[name].lines.append(line.rstrip()),
        on_signal=lambda: say("\nstopping", file=sys.stderr),
        tick=end_slow_ones,
    )
    signal_number = supervisor.run()
    for member in members:
        _judge(by_name[member.label], member, is_too_slow=member.label in timed_out, limit_s=arguments.timeout)
    return signal_number


def _command(trial: Trial, run_id: str, runs_dir: Path, options: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "rl_lab", "train", trial.experiment, "preset=debug", "--quiet"]
    return [*command, "--run-id", run_id, "--runs-dir", str(runs_dir), *options]


def _judge(trial: Trial, member: Member, *, is_too_slow: bool, limit_s: int) -> None:
    if member.exit_code is None:
        return
    trial.seconds = round(member.seconds, 1)
    said = [line for line in trial.lines if line.strip()]
    error = next((line for line in said if line.startswith("error:")), said[-1] if said else "")
    if member.exit_code == 0:
        trial.result = "ok"
    elif is_too_slow:
        trial.result, trial.why = "timed out", f"more than {limit_s} s"
    elif COLLECT in " ".join(said):
        trial.result, trial.why = "skipped", error.removeprefix("error: ")
    else:
        trial.result, trial.why = "failed", error.removeprefix("error: ") or f"exit code {member.exit_code}"


def _print(trials: Sequence[Trial], arguments: argparse.Namespace) -> None:
    failed = [trial for trial in trials if trial.result not in ("ok", "skipped")]
    shown = failed if arguments.quiet else trials
    if shown:
        rows = [(trial.experiment, trial.environment, trial.result, trial.seconds, trial.why) for trial in shown]
        say(table(("EXPERIMENT", "ENVIRONMENT", "RESULT", "SECONDS", "WHY"), rows))
    for trial in failed:
        say(f"\n{trial.experiment}: rl-lab train {trial.experiment} preset=debug", *trial.lines[-12:], sep="\n  ")
    if not arguments.quiet:
        counts = {name: sum(trial.result == name for trial in trials) for name in ("ok", "skipped")}
        say(f"\n{counts['ok']} ok, {len(failed)} failed, {counts['skipped']} skipped")
