"""A sweep on disk: `<runs_dir>/sweeps/<name>/trials.jsonl`, one line for the plan, then one per news of a trial.

A line is appended and waited for before the next thing happens; of a line that a kill cut short nothing is read. The
file is never the only truth: a trial's runs are ordinary runs, and what they hold decides.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_lab.runs.files import MissingFile, read_text, readable_disk_errors, remove, sync_directory
from rl_lab.runs.lock import RunLock, is_held
from rl_lab.runs.metrics_file import series
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import RunError, did_you_mean

SWEEPS = "sweeps"  # the folder of sweeps beside the runs
JOURNAL = "trials.jsonl"


@dataclass(frozen=True)
class SweepDirectory:
    """Where a sweep keeps its plan, its trials and its pictures."""

    runs_dir: Path
    name: str

    @property
    def path(self) -> Path:
        return Path(os.path.abspath(self.runs_dir)) / SWEEPS / self.name

    @property
    def journal_path(self) -> Path:
        return self.path / JOURNAL

    @property
    def log_path(self) -> Path:
        return self.path / "workers.log"

    def exists(self) -> bool:
        return self.journal_path.is_file()

    def run(self, number: int, seed: int) -> RunDirectory:
        return RunDirectory(Path(os.path.abspath(self.runs_dir)) / self.run_id(number, seed))

    def run_id(self, number: int, seed: int) -> str:
        return f"{self.name}-{number:04d}-s{seed}"

    def tag(self) -> str:
        return f"sweep:{self.name}"

    def is_worked_on(self) -> bool:
        return is_held(RunDirectory(self.path).lock_path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time works on a sweep."""
        with readable_disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if self.is_worked_on():
            raise RunError(f"Sweep {self.name} is being worked on by another process: wait for it, or stop it.")
        with RunLock(RunDirectory(self.path)):
            yield

    @contextmanager
    def discarded_if_empty(self) -> Iterator[None]:
        """A sweep that was refused before its first trial leaves nothing behind."""
        try:
            yield
        finally:
            if not self.exists():
                remove(self.path)
                with suppress(OSError):  # other sweeps, or runs, lie there
                    self.path.parent.rmdir()
                    self.path.parents[1].rmdir()

    def read(self) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        """The plan and the newest news of each trial; both empty where there is no sweep yet."""
        try:
            lines = read_text(self.journal_path).split("\n")
        except MissingFile:
            return {}, {}
        plan: dict[str, Any] = {}
        trials: dict[int, dict[str, Any]] = {}
        for line in lines:
            row = _parse(line)
            if "plan" in row:
                plan = row["plan"]
            elif isinstance(row.get("number"), int):
                trials[row["number"]] = row
        return plan, trials

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line and wait until the disk has it; what a kill left half-written before it is cut off."""
        with readable_disk_errors(self.journal_path):
            with open(self.journal_path, "a+b") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - 1))
                if end and file.read(1) != b"\n":
                    file.truncate(self.journal_path.read_bytes().rfind(b"\n") + 1)
                file.write(json.dumps(row).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            if not end:
                sync_directory(self.path)


def _parse(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:  # the last line, cut short by a kill
        return {}
    return row if isinstance(row, dict) else {}


def open_sweep(name: str, runs_dir: Path) -> SweepDirectory:
    """An existing sweep; the nearest names where there is none."""
    sweep = SweepDirectory(runs_dir, name)
    if not sweep.exists():
        near = did_you_mean(name, sweep_names(runs_dir))
        raise RunError(f"There is no sweep '{name}' in {runs_dir / SWEEPS}.{near} {listed_sweeps(runs_dir)}")
    return sweep


def sweep_names(runs_dir: Path) -> list[str]:
    folder = runs_dir / SWEEPS
    return sorted(path.parent.name for path in folder.glob(f"*/{JOURNAL}")) if folder.is_dir() else []


def listed_sweeps(runs_dir: Path) -> str:
    """A sentence with the names of all sweeps."""
    known = sweep_names(runs_dir)
    return f"There are: {', '.join(known)}." if known else "There are no sweeps there yet."


def finite_values(rows: list[dict[str, Any]], metric: str) -> list[float]:
    """The values of a metric in a run's rows, oldest first."""
    return [value for _, value in series(rows, metric) if math.isfinite(value)]
