"""Many processes write to one index at once: no lock error, no lost row."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_lab.runs.index import RunIndex
from rl_lab.runs.run_directory import RunDirectory

# What a run does at its begin and end, again and again: status, index. What goes wrong is printed.
WRITER = """
import logging, sys, time
from pathlib import Path
from rl_lab.runs.index import RunIndex
from rl_lab.runs.run_directory import RunDirectory

logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
run, end, writes = RunDirectory(Path(sys.argv[1])), float(sys.argv[2]), 0
while time.time() < end or not writes:
    writes += 1
    run.write_status("finished", counts={"agent_steps": writes})
    RunIndex(run.path.parent).record(run)
    if writes % 20 == 0:
        RunIndex(run.path.parent).find(where=["algorithm=ppo"], sort="agent_steps")
print(f"writes {writes}")
"""


def write_at_once(runs: list[RunDirectory], seconds: float) -> list[int]:
    """How often each of as many processes as there are runs has written."""
    end = str(time.time() + seconds)
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(run.path), end], env=environment, stdout=subprocess.PIPE, text=True
        )
        for run in runs
    ]
    answers = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert [answer for answer in answers if not answer.startswith("writes ")] == []
    return [int(answer.split()[1]) for answer in answers]


def check(runs_dir: Path, runs: list[RunDirectory], seconds: float) -> None:
    writes = write_at_once(runs, seconds)
    with sqlite3.connect(runs_dir / "index.sqlite") as database:
        stored = dict(database.execute("SELECT id, agent_steps FROM runs"))
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert stored == {run.id: count for run, count in zip(runs, writes, strict=True)}
    assert len(RunIndex(runs_dir).find(where=["status=finished"])) == len(runs)


def test_runs_that_write_at_once_lose_nothing(runs_dir: Path, make_run: Callable[..., RunDirectory]) -> None:
    check(runs_dir, [make_run(f"run-{number}") for number in range(6)], seconds=1.0)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_32_runs_write_for_a_minute(runs_dir: Path, make_run: Callable[..., RunDirectory]) -> None:
    check(runs_dir, [make_run(f"run-{number}") for number in range(32)], seconds=60.0)
