"""`rl-lab collect`: what it passes on, what it prints, and a dataset made for real."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Calls

from rl_lab.experiment.collect import Dataset

WRITTEN = Dataset("data/a", Path("data/a"), "CartPole-v1", "random", 105, 100, 4, 1, 20.5, 9.0, 31.0, 4321)


def test_every_option_is_passed_on(rl: Any, fake: Any) -> None:
    collect = Calls(WRITTEN)
    fake("api", collect=collect)
    words = ["--env", "CartPole-v1", "--steps", "100", "--output", "data/a", "--format", "minari", "--mode", "eval"]
    words += ["--seed", "3", "--num-envs", "4", "--checkpoint", "best", "--overwrite", "--runs-dir", "elsewhere"]
    words += ["--trust", "my_package"]
    assert rl("collect", "random", "environment.time_limit=9", *words).code == 0
    ((source,), keywords) = collect.seen[0]
    assert source == "random" and keywords.pop("progress")(1, 2) is None
    assert keywords == {
        "output": "data/a",
        "environment": "CartPole-v1",
        "steps": 100,
        "episodes": None,
        "format": "minari",
        "mode": "eval",
        "seed": 3,
        "num_envs": 4,
        "checkpoint": "best",
        "overwrite": True,
        "overrides": ["environment.time_limit=9"],
        "runs_dir": Path("elsewhere"),
        "trust": ["my_package"],
    }


def test_it_says_what_was_written(rl: Any, fake: Any) -> None:
    fake("api", collect=Calls(WRITTEN))
    out = rl("collect", "@last", "--episodes", "4").out
    assert out.splitlines()[0] == "data/a: CartPole-v1, played by random"
    lines = {tuple(line.split()) for line in out.splitlines()[1:]}
    assert {("rows", "105"), ("episodes", "4"), ("episode_return_mean", "20.5"), ("size_bytes", "4,321")} <= lines
    assert rl("collect", "@last", "--episodes", "4", "-q").out == "data/a\n"
    assert json.loads(rl("collect", "@last", "--episodes", "4", "--json").out) == {**asdict(WRITTEN), "path": "data/a"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required"),
        (["seed=1", "--steps", "5"], "say whose policy acts: rl-lab collect random --env CartPole-v1"),
        (["random", "@last", "--steps", "5"], "'@last' is a second run after 'random'"),
        (["random"], "say how much to collect: --steps 10000 or --episodes 100, one of the two"),
        (["random", "--steps", "5", "--episodes", "5"], "say how much to collect"),
        (["random", "--episodes", "0"], "'0' is not a whole number of at least 1"),
        (["random", "--steps", "5", "--format", "nzp"], "Did you mean 'npz'?"),
        (["random", "--steps", "5", "--env", "CartPole-v1"], "Say where the dataset goes: --output data/cartpole"),
        (
            ["random", "--steps", "5", "--output", "d"],
            "The random policy needs an environment: write --env CartPole-v1",
        ),
    ],
)
def test_mistakes_are_refused(rl: Any, words: list[str], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    answer = rl("collect", *words)
    assert answer.code == 2 and message in answer.err and "Traceback" not in answer.err
    assert not list(tmp_path.iterdir())


def test_a_dataset_is_written_and_not_written_twice(rl: Any, tmp_path: Path) -> None:
    words = ["collect", "random", "--env", "CartPole-v1", "--episodes", "3", "--output", tmp_path / "data"]
    facts = json.loads(rl(*words, "--json").out)
    assert facts["episodes"] == 3 and facts["rows"] == facts["agent_steps"] + 3
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["chunk_00000.npz", "dataset.json"]
    again = rl(*words)
    assert again.code == 1 and "exists already: write to another --output, or replace it with --overwrite" in again.err
    assert rl(*words, "--overwrite", "-q").out == f"{tmp_path / 'data'}\n"


def test_an_experiment_without_its_dataset_is_passed_over_by_the_check(
    rl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = rl("config", "check", "dqn_cartpole_offline")
    assert answer.code == 0 and answer.out.startswith(
        "skip  dqn_cartpole_offline  There is no dataset at data/cartpole"
    )
