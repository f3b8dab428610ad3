"""Processes of one machine: signals reach each of them as often as a person means it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rl_lab.launch.local import Member, Supervisor, default_jobs

COUNT_SIGNALS = """
import pathlib, signal, sys, time
marks = pathlib.Path(sys.argv[1])
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
    signal.signal(getattr(signal, name), lambda number, frame: print(signal.Signals(number).name, flush=True))
marks.touch()
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    time.sleep(0.02)
"""


def supervise(tmp_path: Path, numbers: list[signal.Signals], *, seconds: float = 0.8) -> tuple[list[str], Member]:
    """What one process printed while its supervisor got signals, and how it ended."""
    mark, shown = tmp_path / "started", []
    member = Member("m", "r", [sys.executable, "-c", COUNT_SIGNALS, str(mark), str(seconds)])

    def send() -> None:
        while not mark.exists():
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    sender = threading.Thread(target=send)
    sender.start()
    announced: list[str] = []
    supervisor = Supervisor(
        [member], 1, show=lambda label, line: shown.append(line.strip()), on_signal=lambda: announced.append("!")
    )
    assert supervisor.run() == numbers[0]
    sender.join()
    assert announced == ["!"]
    return shown, member


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_what_a_job_queue_sends_twice_is_passed_on_once(tmp_path: Path, name: str) -> None:
    shown, member = supervise(tmp_path, [signal.Signals[name], signal.SIGTERM])
    assert (shown, member.exit_code) == ([name], 0)


def test_the_third_ctrl_c_kills(tmp_path: Path) -> None:
    shown, member = supervise(tmp_path, [signal.SIGINT] * 3, seconds=60.0)
    assert (shown, member.exit_code) == (["SIGINT", "SIGINT"], -signal.SIGKILL)


def test_a_line_that_cannot_be_shown_does_not_stop_the_process(tmp_path: Path) -> None:
    """A full pipe would block it for ever."""
    broken = (
        'import rl_lab.cli.multirun as m, os; os.close(1); m._show("m", "x" * 100)\nfor _ in range(9): m._show("", "x")'
    )
    answer = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_default_jobs_leaves_half_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert default_jobs() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert default_jobs() == 1
