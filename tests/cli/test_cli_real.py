"""Nothing faked: one short training, and every command that looks at it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rl_lab.cli.main import main
from rl_lab.runs.run_directory import RunDirectory


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run, `a`."""
    folder = tmp_path_factory.mktemp("runs")
    words = ["train", "ppo_cartpole", "preset=debug", "runtime.device=cpu", "--run-id", "a", "--runs-dir", str(folder)]
    assert main([*words, "-q"]) == 0
    return folder


def test_the_run_is_listed_shown_and_evaluated(rl: Any, runs_dir: Path) -> None:
    (row,) = json.loads(rl("list", "--json", "--runs-dir", runs_dir).out)
    assert (row["id"], row["status"], row["environment"]) == ("a", "finished", "CartPole-v1")
    facts = json.loads(rl("show", "@last", "--json", "--runs-dir", runs_dir).out)
    assert facts["status"]["counts"]["updates"] == 3 and facts["config"]["environment"]["id"] == "CartPole-v1"
    scores = json.loads(rl("evaluate", "a", "--episodes", "2", "--json", "--runs-dir", runs_dir).out)["scores"]
    assert scores["eval/episodes"] == 2 and scores["eval/episode_return_mean"] > 0


def test_play_writes_a_video(rl: Any, runs_dir: Path, tmp_path: Path) -> None:
    video = tmp_path / "play.mp4"
    assert rl("play", "a", "--output", video, "--runs-dir", runs_dir).out == f"video: {video}\n"
    assert video.stat().st_size > 1000


def test_the_same_run_id_is_refused(rl: Any, runs_dir: Path) -> None:
    answer = rl("train", "preset=debug", "--run-id", "a", "--runs-dir", runs_dir)
    assert answer.code == 1 and "exists already" in answer.err


def test_a_finished_run_is_not_resumed(rl: Any, runs_dir: Path) -> None:
    answer = rl("resume", "a", "--runs-dir", runs_dir)
    assert answer.code == 1 and "finished already" in answer.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sed=1"], "Did you mean 'seed'?"),
        (["ppo_cartpoel"], "Did you mean 'ppo_cartpole'?"),
        (["CartPole-v1:pppo"], "Did you mean 'ppo'?"),
        (["environment.id=CartPole-v0123"], "CartPole-v0123"),
        (["algorithm.epochs=many"], "many"),
        (["plugins=3"], "plugins is 3: write a list of packages, such as [my_package]."),
        (["training=3"], "training is 3: it is a block of settings"),
        (["training.phases=3"], "training.phases is 3. Allowed: a list"),
        (["seed=1,2"], "Add -m"),
        (["-m", "seed=range(0)"], "seed=range(0) names no value at all, so there is nothing to train."),
        (["--config-dir", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(rl: Any, tmp_path: Path, words: list[str], message: str) -> None:
    answer = rl("train", *words, "--runs-dir", tmp_path / "runs")
    assert answer.code == 2 and message in answer.err and "Traceback" not in answer.err
    assert not (tmp_path / "runs").exists()


def test_config_commands_speak_of_the_shipped_experiments(rl: Any, runs_dir: Path) -> None:
    assert "ppo_cartpole" in rl("experiments", "-q").out.splitlines()
    assert "environment:" in rl("train", "ppo_cartpole", "--cfg", "job").out
    assert rl("config", "check", "ppo_cartpole").out == "ok  ppo_cartpole\n"
    assert "set in" in rl("config", "explain", "algorithm.clip_range").out
    differing = json.loads(rl("config", "diff", "a", "ppo_cartpole", "--json", "--runs-dir", runs_dir).out)
    assert differing["training.limit_cycles"] == {"a": 3, "b": None}


def test_closing_the_terminal_saves_the_run(tmp_path: Path) -> None:
    words = ["-m", "rl_lab", "train", "ppo_cartpole", "--run-id", "t", "--runs-dir", str(tmp_path)]
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests started by nohup ignore it, and so would their children
        os.execv(sys.executable, [sys.executable, *words, "training.phases.train.duration_steps=100000000"])
    metrics = tmp_path / "t" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        os.read(terminal, 65536)  # a display that nobody reads would block
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert RunDirectory.open(tmp_path / "t").read_status()["state"] == "interrupted"
    assert (tmp_path / "t" / "checkpoints" / "latest").is_dir()


def test_killing_the_parent_of_a_sweep_ends_no_training(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rl_lab", "train", "-m", "seed=0", "--run-id", "s", "preset=debug"]
    command += ["--runs-dir", str(tmp_path), "training.limit_cycles=20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    run = tmp_path / "s"
    while not (run / "status.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.communicate()
    while (state := RunDirectory(run).read_status()["state"]) == "running":
        time.sleep(0.05)
    assert state == "finished"


@pytest.mark.slow
def test_ctrl_c_during_a_sweep_saves_every_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rl_lab", "train", "-m", "seed=0,1", "--jobs", "2", "--run-id", "s"]
    command += ["--runs-dir", str(tmp_path), "training.phases.train.duration_steps=100000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    logs = [tmp_path / f"s-seed{seed}" / "metrics.jsonl" for seed in (0, 1)]
    while not all(log.exists() and log.stat().st_size for log in logs):
        assert process.poll() is None
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert [line.split()[1] for line in out.splitlines() if line.startswith("seed=")] == ["interrupted", "interrupted"]
    assert all((tmp_path / f"s-seed{seed}" / "checkpoints" / "latest").exists() for seed in (0, 1))
