"""Several trainings at once: one process each, so that one crash or one leak cannot reach its neighbours."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import IO

from rl_lab.cli.parsing import runs_dir_of
from rl_lab.cli.printing import table

POLL_SECONDS = 0.1
PATIENCE = 3  # this many Ctrl-C mean: do not wait for checkpoints any longer


@dataclass
class Member:
    """One training of a sweep and, once started, its process."""

    label: str  # what sets it apart: `seed=1`
    run_id: str
    command: list[str]
    process: subprocess.Popen[str] | None = None
    exit_code: int | None = None
    started: float = 0.0
    seconds: float = 0.0
    relay: Thread | None = field(default=None, repr=False)


def train_all(sweep: Sequence[tuple[str, list[str]]], arguments: argparse.Namespace) -> int:
    """Train every (experiment, overrides) of `sweep`; 0 only if all of them finished."""
    members = plan(sweep, arguments)
    jobs = min(arguments.jobs or default_jobs(), len(members))
    if not arguments.quiet:
        print(f"{len(members)} trainings, {jobs} at a time")
    signal_number = _Supervisor(members, jobs).run()
    if not arguments.quiet:
        print(summary(members, runs_dir_of(arguments)))
    if signal_number is not None:
        print("interrupted: the same command with --run-id and --resume goes on", file=sys.stderr)
        return 128 + signal_number
    return 0 if all(member.exit_code == 0 for member in members) else 1


def default_jobs() -> int:
    """Half the cores we may use: a training is one busy thread plus environments and writers."""
    return max(1, len(os.sched_getaffinity(0)) // 2 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 2) // 2)


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
        run_id = slug("-".join([base, *(word.rpartition(".")[2].replace("=", "") for word in own)]))
        if any(run_id == member.run_id for member in members):
            run_id = f"{run_id}-{index}"
        members.append(Member(label, run_id, _command(experiment, overrides, run_id, arguments)))
    return members


def _command(experiment: str, overrides: list[str], run_id: str, arguments: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "rl_lab", "train", *([experiment] if experiment else []), *overrides]
    command += ["--run-id", run_id]
    for option, directory in (("--runs-dir", arguments.runs_dir), ("--config-dir", arguments.config_dir)):
        command += [option, str(directory)] if directory else []
    flags = {"--resume": arguments.resume, "--quiet": arguments.quiet, "--debug": arguments.debug}
    return command + [flag for flag, given in flags.items() if given]


def summary(members: Sequence[Member], runs_dir: Path) -> str:
    """The closing table: what became of each training."""
    from rl_lab.cli.outcome import best_score
    from rl_lab.runs.report import duration
    from rl_lab.runs.run_directory import RunDirectory

    rows = []
    for member in members:
        status = RunDirectory(runs_dir / member.run_id).read_status()
        state = "not started" if member.process is None else status["state"]
        if state == "created":  # it ended before it could begin; its own message stands above
            state = f"failed (exit code {member.exit_code})"
        steps = status["counts"].get("agent_steps")
        rows.append((member.label, state, steps, best_score(status), duration(member.seconds), member.run_id))
    return table(("TRAINING", "STATE", "AGENT STEPS", "SCORE", "TIME", "RUN"), rows)


class _Supervisor:
    """Starts processes as places become free and passes signals on, so that each training can save."""

    def __init__(self, members: list[Member], jobs: int) -> None:
        self.members = members
        self.jobs = jobs
        self.signals_seen: list[int] = []

    def run(self) -> int | None:
        """Until every process has ended; the number of the signal that cut the sweep short, if one did."""
        handlers = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            waiting = list(self.members)
            while (waiting and not self.signals_seen) or self._running():
                while waiting and not self.signals_seen and len(self._running()) < self.jobs:
                    self._start(waiting.pop(0))
                self._collect_ended()
                time.sleep(POLL_SECONDS)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self.signals_seen[0] if self.signals_seen else None

    def _running(self) -> list[Member]:
        return [member for member in self.members if member.process is not None and member.exit_code is None]

    def _start(self, member: Member) -> None:
        # A session of its own: the terminal's Ctrl-C reaches only us, and we pass it on exactly once.
        member.started = time.monotonic()
        member.process = subprocess.Popen(
            member.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert member.process.stdout is not None
        member.relay = Thread(target=_relay, args=(member.process.stdout, member.label), daemon=True)
        member.relay.start()

    def _collect_ended(self) -> None:
        for member in self._running():
            assert member.process is not None and member.relay is not None
            exit_code = member.process.poll()
            if exit_code is not None:
                member.relay.join(timeout=5)  # a grandchild may hold the pipe open; do not wait for it forever
                member.seconds = time.monotonic() - member.started
                member.exit_code = exit_code

    def _forward(self, number: int, frame: object) -> None:
        self.signals_seen.append(number)
        if len(self.signals_seen) == 1:
            print("\nstopping: each training saves first; again to hurry, three times to kill", file=sys.stderr)
        for member in self._running():
            assert member.process is not None
            member.process.send_signal(signal.SIGKILL if len(self.signals_seen) >= PATIENCE else number)


def _relay(lines: IO[str], label: str) -> None:
    """Print a child's lines under its label."""
    for line in lines:
        sys.stdout.write(f"[{label}] {line}")
        sys.stdout.flush()
