"""Sweeps: names, one process each, signals passed on, a closing table, an honest exit code."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rl_lab.cli import multirun
from rl_lab.cli.multirun import plan
from rl_lab.launch.local import Member
from rl_lab.runs.run_directory import RunDirectory

WRITE_STATUS = """
import sys
print("hello from " + sys.argv[1])
sys.exit(int(sys.argv[2]))
"""
SAVE_ON_SIGNAL = """
import pathlib, signal, sys, time
def save(number, frame):
    print(f"saved on {signal.Signals(number).name}")
    sys.exit(130)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, save)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def arguments_of(**given: Any) -> argparse.Namespace:
    defaults = {"run_id": None, "runs_dir": None, "config_dir": None, "jobs": None}
    flags = {"resume": False, "quiet": False, "debug": False}
    return argparse.Namespace(**{**defaults, **flags, **given})


def test_members_are_named_by_what_they_do_not_share() -> None:
    sweep = [("ppo_cartpole", ["algorithm.lr=0.1", f"seed={seed}"]) for seed in (0, 1)]
    members = plan(sweep, arguments_of(run_id="sweep"))
    assert [(member.label, member.run_id) for member in members] == [
        ("seed=0", "sweep-seed0"),
        ("seed=1", "sweep-seed1"),
    ]
    assert members[1].command[1:] == [
        *("-m", "rl_lab", "train", "ppo_cartpole", "algorithm.lr=0.1", "seed=1", "--run-id", "sweep-seed1")
    ]


def test_a_run_is_named_by_whole_values() -> None:
    members = plan([("a", [f"algorithm.discount={value}"]) for value in ("0.9", "0.99")], arguments_of(run_id="x"))
    assert [member.run_id for member in members] == ["x-discount0.9", "x-discount0.99"]


def test_members_of_several_experiments_carry_their_names() -> None:
    members = plan([("a", []), ("b", [])], arguments_of())
    assert [member.label for member in members] == ["a", "b"]
    assert members[0].run_id.startswith("a-2") and members[0].run_id.endswith("-a")


def test_equal_members_get_different_run_ids() -> None:
    members = plan([("a", ["seed=1"]), ("a", ["seed=1"])], arguments_of(run_id="x"))
    assert len({member.run_id for member in members}) == 2


def test_options_reach_every_process() -> None:
    given = arguments_of(runs_dir=Path("r"), config_dir=Path("c"), resume=True, quiet=True, debug=True)
    (member,) = plan([("", [])], given)
    assert member.command[4:] == [
        *("--run-id", member.run_id, "--runs-dir", "r", "--config-dir", "c", "--resume", "--quiet", "--debug")
    ]


def run_members(monkeypatch: pytest.MonkeyPatch, members: list[Member], runs_dir: Path, **given: Any) -> int:
    monkeypatch.setattr(multirun, "plan", lambda sweep, arguments: members)
    return multirun.train_all([("", [])] * len(members), arguments_of(runs_dir=runs_dir, **given))


def test_one_failure_fails_the_sweep_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WRITE_STATUS]
    members = [Member(f"seed={seed}", f"r{seed}", [*command, str(seed), str(int(seed == 1))]) for seed in range(3)]
    for seed in (0, 2):
        finished = RunDirectory.create(tmp_path, run_id=f"r{seed}", name="x", seed=seed)
        finished.write_status("finished", counts={"agent_steps": 1000}, best_score=500.0)
    assert run_members(monkeypatch, members, tmp_path, jobs=2) == 1
    out = capsys.readouterr().out
    assert "3 trainings, 2 at a time" in out
    assert "[seed=0] hello from 0" in out and "[seed=2] hello from 2" in out
    table = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("seed=")}
    assert table["seed=0"][1:4] == ["finished", "1,000", "500.0"]
    assert table["seed=1"][1:5] == ["failed", "(exit", "code", "1)"]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_closing_table_never_cuts_the_name_of_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: int
) -> None:
    run_id = "ppo_cartpole-20261118-052130-seed0-gae_lambda0.9"
    member = Member("seed=0 algorithm.gae_lambda=0.9", run_id, [], exit_code=0)
    member.process = object()  # type: ignore[assignment]  # started
    status = {"counts": {"agent_steps": 100_000}, "best_score": 500.0, "wall_s": 75.0}
    RunDirectory.create(tmp_path, run_id=run_id, name="x", seed=0).write_status("finished", **status)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = multirun.summary([member], tmp_path).splitlines()
    assert lines[1].endswith(run_id) and "BEST EVAL" in lines[0]
    assert all(len(line) <= max(columns, 70) for line in lines[:2])
    assert columns < 200 or "1:15" in lines[1]  # the time of the training, as `list` and `show` have it


def test_scores_are_averaged_over_the_seeds_of_each_setting(tmp_path: Path) -> None:
    scores = {"seed=0 a.rate=1": 400.0, "seed=1 a.rate=1": 500.0, "seed=0 a.rate=2": 100.0, "seed=1 a.rate=2": None}
    members = [Member(label, f"r{index}", []) for index, label in enumerate(scores)]
    for run, score in zip(members, scores.values(), strict=True):
        directory = RunDirectory.create(tmp_path, run_id=run.run_id, name="x", seed=0)
        directory.write_status("finished", best_score=score and score + 10, final_score=score)
    lines = [line.split() for line in multirun.seeds_summary(members, tmp_path).splitlines()]
    assert lines[1] == ["rate=1", "2", "450.0", "±", "70.71", "460.0", "±", "70.71"]
    assert lines[2] == ["rate=2", "1", "100.0", "110.0"]
    assert multirun.seeds_summary(members[2:], tmp_path) == ""


def test_all_well_is_zero_and_quiet_says_only_what_the_children_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    members = [Member("seed=0", "r0", [sys.executable, "-c", WRITE_STATUS, "0", "0"])]
    assert run_members(monkeypatch, members, tmp_path, quiet=True) == 0
    assert capsys.readouterr().out == "[seed=0] hello from 0\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_child_and_starts_no_further_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, number: signal.Signals
) -> None:
    marks = [tmp_path / "started0", tmp_path / "started1", tmp_path / "started2"]
    command = [sys.executable, "-c", SAVE_ON_SIGNAL]
    members = [Member(f"m{index}", f"r{index}", [*command, str(mark)]) for index, mark in enumerate(marks)]

    def interrupt_when_started() -> None:
        while not (marks[0].exists() and marks[1].exists()):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt_when_started, daemon=True).start()
    handler = signal.getsignal(number)
    assert run_members(monkeypatch, members, tmp_path, jobs=2) == 128 + number
    assert signal.getsignal(number) is handler
    captured = capsys.readouterr()
    assert f"[m0] saved on {number.name}" in captured.out and f"[m1] saved on {number.name}" in captured.out
    assert "not started" in captured.out and not marks[2].exists()
    assert "each training saves first" in captured.err and "interrupted" in captured.err
