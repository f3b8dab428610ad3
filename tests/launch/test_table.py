"""The table of a sweep: every training with its progress, at any width and however many there are."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from typing import Any

import pytest

from rl_lab.launch.local import Member, Supervisor
from rl_lab.launch.table import LiveTable, render_table

REPORTS = """
import os, time
print("a warning", flush=True)
for step in range(3):
    print('\\x1e{"fraction": %f, "agent_steps": %d, "activity": "updating"}' % (step / 2, step * 50), flush=True)
    time.sleep(0.05)
print('\\x1e{"cut', end="")
"""


def member(label: str, exit_code: int | None = None, *, is_started: bool = True, **report: Any) -> Member:
    process: Any = object() if is_started else None
    return Member(label, label, [], process=process, exit_code=exit_code, seconds=30.0, report=report)


MEMBERS = [
    member("seed=0 algorithm.rate=0.1", 0, fraction=1.0, agent_steps=100_000, score=500.0, **{"return": 480.0}),
    member("seed=1 algorithm.rate=0.1", fraction=0.5, agent_steps=50_000, activity="evaluating 3 of 10", eta_s=30.0),
    member("seed=2 algorithm.rate=0.1", 1, fraction=0.2, agent_steps=20_000),
    member("seed=3 algorithm.rate=0.1", 130, fraction=0.2, agent_steps=20_000),
    member("seed=4 algorithm.rate=0.1", is_started=False),
]


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_every_training_has_a_line_of_the_same_width(columns: int) -> None:
    lines = render_table(MEMBERS, 2, 65.0, columns=columns, height=30, colours=False)
    assert {len(line) for line in lines} == {min(columns, 120)} and len(lines) == 7
    assert lines[0].startswith("5 trainings · 1 running · 3 ended · 1:05 · ETA ")
    words = ("finished", "evaluating", "failed", "interru", "waiting")
    for line, seed, word in zip(lines[2:], range(5), words, strict=True):
        assert line.startswith(f"seed={seed}") and word in line
    assert "500" in lines[2] and "0:30" in lines[3] and "50%" in lines[3]


def test_more_trainings_than_lines_shows_those_under_way() -> None:
    many = [member(f"seed={seed}", 0) for seed in range(50)]
    many[30] = member("seed=30", fraction=0.5, activity="updating")
    lines = render_table(many, 2, 1.0, columns=80, height=12, colours=False)
    assert len(lines) <= 11 and any(line.startswith("seed=30") for line in lines) and "more" in lines[-1]


def test_reports_reach_the_table_and_texts_stay_above(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StringIO()
    one = Member("seed=0", "r", [sys.executable, "-c", REPORTS])
    live = LiveTable([one], 1, stream)
    assert Supervisor([one], 1, show=live.say, on_signal=lambda: None, tick=live.tick).run() is None
    live.close()
    assert one.report["agent_steps"] == 100 and one.report["fraction"] == 1.0
    assert "[seed=0] a warning\n" in stream.getvalue() and "fraction" not in stream.getvalue()


def test_a_terminal_that_is_gone_ends_no_training() -> None:
    stream = StringIO()
    stream.close()
    one = Member("seed=0", "r", [sys.executable, "-c", "print('hello')"])
    live = LiveTable([one], 1, stream)
    Supervisor([one], 1, show=live.say, on_signal=lambda: None, tick=live.tick).run()
    live.close()
    assert one.exit_code == 0


def test_without_a_table_nobody_is_asked_for_reports() -> None:
    shown: list[str] = []
    asks = "import os; print(repr(os.environ['RL_LAB_REPORTS']))"
    one = Member("seed=0", "r", [sys.executable, "-c", asks])
    Supervisor([one], 1, show=lambda label, line: shown.append(line.strip()), on_signal=lambda: None).run()
    assert shown == ["''"] and isinstance(one.process, subprocess.Popen)
