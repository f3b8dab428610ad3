"""The dispatcher: help that answers at once, exit codes, and messages instead of tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Calls

from rl_lab.cli import main as dispatcher
from rl_lab.cli.main import SUMMARIES, command_module, parser_of
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import ConfigError, MissingExtraError, RunError

HEAVY = ("torch", "numpy", "hydra", "omegaconf", "gymnasium", "rich", "matplotlib", "yaml")
HELP_OF_EVERYTHING = f"""
import io, json, sys, time
from contextlib import redirect_stdout
from rl_lab.cli.main import SUMMARIES, main
with redirect_stdout(io.StringIO()):
    codes = [main([*words, "--help"]) for words in [[], *([name] for name in SUMMARIES)]]
    codes.append(main(["completion", "bash"]))
print(json.dumps({{"codes": codes, "heavy": [name for name in {HEAVY!r} if name in sys.modules]}}))
"""


def test_help_of_every_command_imports_nothing_heavy() -> None:
    answer = subprocess.run([sys.executable, "-c", HELP_OF_EVERYTHING], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) == {"codes": [0] * (len(SUMMARIES) + 2), "heavy": []}


def test_python_dash_m_rl_lab_answers_help_at_once() -> None:
    start = time.perf_counter()
    answer = subprocess.run([sys.executable, "-m", "rl_lab", "--help"], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 3.0  # 0.1 s here; the bound only catches an import gone astray
    assert all(f"\n  {name} " in answer.stdout for name in SUMMARIES)


@pytest.mark.parametrize("name", SUMMARIES)
def test_help_of_each_command_shows_examples(rl: Any, name: str) -> None:
    answer = rl("help", name)
    assert answer.code == 0
    assert f"usage: rl-lab {name}" in answer.out and f"\n  rl-lab {name}" in answer.out.replace('eval "$(', "")


def test_no_command_prints_the_help(rl: Any) -> None:
    assert rl().out == rl("--help").out
    assert rl().code == 0


def test_version(rl: Any) -> None:
    assert rl("--version").out.startswith("rl-lab ")


def test_help_of_help_is_the_help(rl: Any) -> None:
    assert rl("help", "help") == rl("--help", "-h") == rl("help")


def test_unknown_command_names_the_nearest(rl: Any) -> None:
    answer = rl("trian")
    assert answer.code == 2
    assert "error: unknown command 'trian'. Did you mean 'train'?" in answer.err
    assert "Commands: train resume" in answer.err


def test_unknown_option_names_the_nearest(rl: Any) -> None:
    answer = rl("train", "--rnu-id", "a")
    assert answer.code == 2
    assert "unknown option '--rnu-id'. Did you mean '--run-id'?" in answer.err
    assert "rl-lab train --help" in answer.err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("--sed", "--seed"), ("--total-timestep", "--total-timesteps"), ("--lerning-rate", "--learning-rate")],
)
def test_a_misspelt_setting_that_may_be_an_option_is_suggested_as_one(rl: Any, typed: str, meant: str) -> None:
    answer = rl("train", typed, "3")
    assert answer.code == 2 and f"unknown option '{typed}'. Did you mean '{meant}'?" in answer.err


def test_wrong_choice_names_the_nearest(rl: Any) -> None:
    answer = rl("resume", "@last", "--mode", "exatc")
    assert answer.code == 2
    assert "Did you mean 'exact'?" in answer.err


def test_missing_argument_shows_the_usage(rl: Any) -> None:
    answer = rl("evaluate")
    assert answer.code == 2
    assert "required: RUN" in answer.err and "usage: rl-lab evaluate" in answer.err


@pytest.mark.parametrize("number", ["0", "-3", "many"])
def test_a_count_must_be_positive(rl: Any, number: str) -> None:
    answer = rl("evaluate", "@last", f"--episodes={number}")
    assert answer.code == 2
    assert f"'{number}' is not a whole number of at least 1" in answer.err


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("bad key"), 2), (RunError("no run"), 1), (MissingExtraError("pip install x"), 1)]
)
def test_user_errors_are_one_line_and_an_exit_code(rl: Any, fake: Any, error: Exception, code: int) -> None:
    fake("api", play=Calls(error))
    answer = rl("play", "@last")
    assert answer == type(answer)(code, "", f"error: {error}\n")


@pytest.mark.parametrize("how", ["option", "leading option", "environment"])
def test_debug_shows_the_traceback(rl: Any, fake: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    fake("api", play=Calls(RunError("no run")))
    words = {"option": ["play", "x", "--debug"], "leading option": ["--debug", "play", "x"]}.get(how, ["play", "x"])
    if how == "environment":
        monkeypatch.setenv("RL_LAB_DEBUG", "1")
    with pytest.raises(RunError, match="no run"):
        dispatcher.main(words)


def test_a_bug_is_not_hidden(fake: Any) -> None:
    fake("api", play=Calls(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError, match="ours"):
        dispatcher.main(["play", "x"])


def test_ctrl_c_is_130(rl: Any, fake: Any) -> None:
    fake("api", play=Calls(KeyboardInterrupt()))
    answer = rl("play", "x")
    assert answer.code == 130 and "interrupted" in answer.err


@pytest.mark.parametrize(("leaving", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_a_signal_is_the_exit_code_and_says_how_to_go_on(rl: Any, fake: Any, leaving: BaseException, code: int) -> None:
    leaving.add_note("Continue with `rl-lab resume a1`.")
    fake("experiment.session", train=Calls(leaving))
    answer = rl("train")
    assert answer.code == code and answer.err.splitlines()[-2:] == ["interrupted", "Continue with `rl-lab resume a1`."]


@pytest.mark.parametrize(("asked", "code"), [(3, 3), ("no more", 1), (None, 0)])
def test_code_of_the_user_that_exits_is_no_interruption(rl: Any, fake: Any, asked: Any, code: int) -> None:
    leaving = SystemExit(asked)
    leaving.add_note("error: somebody called sys.exit()")
    fake("experiment.session", train=Calls(leaving))
    answer = rl("train")
    assert answer.code == code and answer.err.splitlines()[-1:] == ["error: somebody called sys.exit()"]
    assert "interrupted" not in answer.err


def rl_lab_with_stdout(kind: str, *words: str) -> tuple[int, str]:
    """Exit code and stderr of a process whose stdout nobody reads, is full, or was closed before it began."""
    reader, writer = os.pipe()
    os.close(reader)
    if kind == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), writer)
    command = [sys.executable, "-m", "rl_lab", *words]
    if kind == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    answer = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    return answer.returncode, answer.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("unread", (1, "")),
        ("full", (1, "error: the output could not be written: No space left on device.\n")),
        ("closed", (0, "")),
    ],
)
def test_an_output_that_cannot_be_written_is_no_traceback(
    kind: str, expected: tuple[int, str], unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    assert rl_lab_with_stdout(kind, "--help") == expected


@pytest.mark.parametrize("kind", ["unread", "full", "closed"])
def test_a_broken_stdout_never_ends_a_training(kind: str, tmp_path: Path) -> None:
    words = ["train", "ppo_cartpole", "preset=debug", "logging.terminal=plain", "--run-id", "a"]
    assert rl_lab_with_stdout(kind, *words, "--runs-dir", str(tmp_path)) == (0, "")
    assert RunDirectory.open(tmp_path / "a").read_status()["state"] == "finished"


def test_an_error_that_is_not_of_stdout_is_seen(fake: Any) -> None:
    fake("api", play=Calls(BrokenPipeError("a worker died")))
    with pytest.raises(BrokenPipeError, match="a worker died"):
        dispatcher.main(["play", "x"])


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_command_has_a_parser_and_a_run(name: str) -> None:
    assert parser_of(name).prog == f"rl-lab {name}" and callable(command_module(name).run)
