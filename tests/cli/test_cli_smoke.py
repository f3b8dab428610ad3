"""`smoke`: every experiment is tried in a process of its own; what failed, was skipped or took too long is said."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Calls

from rl_lab.cli import smoke

PROGRAMS = {
    "good": "print('learnt')",
    "bad": "import sys; print('error: the reward is nan'); sys.exit(1)",
    "silent": "import os; os._exit(3)",
    "offline": "import sys; print('error: no dataset: write `rl-lab collect random`'); sys.exit(2)",
    "slow": "import time; time.sleep(60)",
}


@dataclass(frozen=True)
class Experiment:
    """Stands for a line of `rl-lab experiments`."""

    name: str
    environment: str


@pytest.fixture
def experiments(monkeypatch: pytest.MonkeyPatch, fake: Any) -> Any:
    def install(*names: str) -> None:
        fake("api", how_to_install=lambda env_id: "pip install 'rl-lab[atari]'" if env_id.startswith("ALE") else "")
        listed = [Experiment(name, "ALE/Pong-v5" if name == "atari" else "CartPole-v1") for name in names]
        fake("config.experiments", list_experiments=Calls(listed))
        monkeypatch.setattr(
            smoke, "_command", lambda trial, *_: [sys.executable, "-S", "-c", PROGRAMS[trial.experiment]]
        )

    return install


def test_each_result_is_a_row_and_a_failure_the_exit_code(rl: Any, experiments: Any) -> None:
    experiments("good", "bad", "silent", "offline", "atari")
    answer = rl("smoke", "--jobs", "4")
    rows = {line.split()[0]: " ".join(line.split()) for line in answer.out.splitlines() if line.strip()}
    assert answer.code == 1
    assert rows["good"].startswith("good CartPole-v1 ok")
    assert "failed" in rows["bad"] and rows["bad"].endswith("the reward is nan")
    assert "failed" in rows["silent"] and rows["silent"].endswith("exit code 3")
    assert "skipped" in rows["offline"] and "rl-lab collect random" in rows["offline"]
    assert rows["atari"] == "atari ALE/Pong-v5 skipped - not installed: pip install 'rl-lab[atari]'"
    assert "1 ok, 2 failed, 2 skipped" in answer.out and "rl-lab train bad preset=debug" in answer.out


def test_a_filter_and_json(rl: Any, experiments: Any) -> None:
    experiments("good", "bad")
    answer = rl("smoke", "goo", "--json")
    (row,) = json.loads(answer.out)
    assert answer.code == 0 and row["experiment"] == "good" and row["result"] == "ok" and row["seconds"] >= 0


def test_a_filter_that_matches_nothing_has_not_passed(rl: Any, experiments: Any) -> None:
    experiments("good")
    answer = rl("smoke", "zelda", "--json")
    assert (answer.code, answer.out) == (2, "")
    assert "error: No experiment matches 'zelda'. All of them: rl-lab experiments" in answer.err


def test_the_help_says_that_nothing_is_kept(rl: Any) -> None:
    text = " ".join(rl("smoke", "--help").out.split())
    assert "where runs are kept (default: nowhere)" in text and "./runs)" not in text


def test_one_that_takes_too_long_is_ended(rl: Any, experiments: Any) -> None:
    experiments("slow")
    answer = rl("smoke", "--timeout", "1", "-q")
    assert answer.code == 1 and "timed out" in answer.out and "more than 1 s" in answer.out


def test_the_command_of_a_trial_is_a_short_training() -> None:
    command = smoke._command(
        smoke.Trial("ppo_cartpole", "CartPole-v1"), "smoke-0", Path("/tmp/x"), ["--config-dir", "y"]
    )
    assert command[1:6] == ["-m", "rl_lab", "train", "ppo_cartpole", "preset=debug"]
    assert command[-4:] == ["--runs-dir", "/tmp/x", "--config-dir", "y"]
