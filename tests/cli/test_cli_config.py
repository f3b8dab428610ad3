"""`config explain | check | diff` and `experiments`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_fakes import Calls
from test_cli_runs import make_run

from rl_lab.cli.config import flatten
from rl_lab.types import ConfigError, MissingExtraError


@dataclass(frozen=True)
class Info:
    """Stands for config.experiments.ExperimentInfo."""

    name: str
    algorithm: str = "ppo"
    environment: str = "CartPole-v1"
    description: str = "about it"


@dataclass(frozen=True)
class Explanation:
    """Stands for config.explain.KeyExplanation."""

    key: str
    value: object
    documentation: str = "how far the ratio may move"
    type: str = "float"
    source: str = "algorithm/ppo.yaml"
    children: list[str] = field(default_factory=list)


CONFIGS = {
    "ppo_cartpole": {"seed": 0, "algorithm": {"discount": 0.98, "clip_range": 0.2}},
    "ppo_acrobot": {"seed": 0, "algorithm": {"discount": 0.99, "target_kl": None}},
}


@pytest.fixture
def composition(fake: Any) -> Any:
    parts = {
        "experiments": {
            "list_experiments": Calls([Info(name) for name in CONFIGS]),
            "experiment_names": Calls(list(CONFIGS)),
        },
        "compose": {"compose": Calls(lambda name, overrides=(), config_dir=None: CONFIGS[name or "ppo_cartpole"])},
        "explain": {"explain": Calls(lambda key, experiment, overrides, config_dir: Explanation(key, 0.2))},
    }
    for module, functions in parts.items():
        fake(f"config.{module}", **functions)
    return SimpleNamespace(**{name: function for functions in parts.values() for name, function in functions.items()})


def test_experiments_as_table_names_and_json(rl: Any, composition: Any) -> None:
    lines = rl("experiments").out.splitlines()
    assert lines[0].split() == ["EXPERIMENT", "ALGORITHM", "ENVIRONMENT", "ABOUT"]
    assert lines[1].split()[:3] == ["ppo_cartpole", "ppo", "CartPole-v1"]
    assert rl("experiments", "-q").out == "ppo_cartpole\nppo_acrobot\n"
    assert [row["name"] for row in json.loads(rl("experiments", "ACRO", "--json").out)] == ["ppo_acrobot"]
    assert "No experiment matches 'zelda'" in rl("experiments", "zelda").out


def test_explain_prints_meaning_value_type_and_source(rl: Any, composition: Any) -> None:
    out = rl("config", "explain", "algorithm.clip_range=", "ppo_cartpole", "seed=1").out  # as a shell completes it
    for expected in ("how far the ratio may move", "0.2", "float", "algorithm/ppo.yaml", "algorithm.clip_range=..."):
        assert expected in out
    ((arguments, _),) = composition.explain.seen
    assert arguments == ("algorithm.clip_range", "ppo_cartpole", ["seed=1"])


def test_explain_shows_null_and_children(rl: Any, composition: Any) -> None:
    composition.explain.answer = Explanation("algorithm.target_kl", None)
    assert "null" in rl("config", "explain", "algorithm.target_kl").out
    composition.explain.answer = Explanation("algorithm", {}, children=["algorithm.discount", "algorithm.epochs"])
    assert "algorithm.discount, algorithm.epochs" in rl("config", "explain", "algorithm").out


def test_explain_json(rl: Any, composition: Any) -> None:
    assert json.loads(rl("config", "explain", "seed", "--json").out)["value"] == 0.2


def test_config_without_an_action_shows_the_usage(rl: Any) -> None:
    answer = rl("config")
    assert answer.code == 2 and "explain | check | diff" in answer.err


def test_config_with_a_misspelt_action_names_the_nearest(rl: Any) -> None:
    assert "Did you mean 'diff'?" in rl("config", "dif").err


def test_check_all_reports_each_and_fails_if_one_does(rl: Any, fake: Any, composition: Any) -> None:
    def check(config: dict[str, Any]) -> None:
        if "target_kl" in config["algorithm"]:
            raise ConfigError("algorithm.target_kl: -1 is not allowed")

    fake("experiment.build", check=check)
    answer = rl("config", "check", "--all")
    assert answer.code == 2
    assert answer.out.splitlines() == [
        "ok  ppo_cartpole",
        "fail  ppo_acrobot  algorithm.target_kl: -1 is not allowed",
        "1 of 2 failed",
    ]
    states = [row["state"] for row in json.loads(rl("config", "check", "--all", "--json").out)]
    assert states == ["ok", "fail"]


def test_check_skips_what_needs_an_extra(rl: Any, fake: Any, composition: Any) -> None:
    fake("experiment.build", check=Calls(MissingExtraError("pip install rl-lab[box2d]")))
    answer = rl("config", "check", "ppo_acrobot")
    assert (answer.code, answer.out) == (0, "skip  ppo_acrobot  pip install rl-lab[box2d]\n")


def test_check_defaults_to_the_default_run(rl: Any, fake: Any, composition: Any) -> None:
    fake("experiment.build", check=Calls())
    assert rl("config", "check", "seed=2").out == "ok  (default run)\n"
    assert composition.compose.seen == [((None, ["seed=2"]), {"config_dir": None})]


def test_check_refuses_all_and_a_name(rl: Any, composition: Any) -> None:
    answer = rl("config", "check", "--all", "ppo_cartpole")
    assert answer.code == 2 and "leave out 'ppo_cartpole' or --all" in answer.err


def test_diff_of_two_experiments(rl: Any, composition: Any) -> None:
    lines = [line.split() for line in rl("config", "diff", "ppo_cartpole", "ppo_acrobot").out.splitlines()]
    assert lines == [
        ["KEY", "ppo_cartpole", "ppo_acrobot"],
        ["algorithm.discount", "0.98", "0.99"],
        ["algorithm.clip_range", "0.2", "-"],
        ["algorithm.target_kl", "-", "null"],
    ]
    assert rl("config", "diff", "ppo_cartpole", "ppo_cartpole").out == "no difference\n"


def test_diff_json_names_only_the_sides_that_have_the_key(rl: Any, composition: Any) -> None:
    assert json.loads(rl("config", "diff", "ppo_cartpole", "ppo_acrobot", "--json").out) == {
        "algorithm.discount": {"a": 0.98, "b": 0.99},
        "algorithm.clip_range": {"a": 0.2},
        "algorithm.target_kl": {"b": None},
    }


def test_diff_of_a_run(rl: Any, fake: Any, composition: Any, tmp_path: Path) -> None:
    make_run(tmp_path, "mine")
    fake(
        "experiment.load", load_config=lambda directory: {"seed": 7, "algorithm": {"discount": 0.98, "clip_range": 0.2}}
    )
    answer = rl("config", "diff", "mine", "ppo_cartpole", "--runs-dir", tmp_path)
    assert answer.out.splitlines()[1].split() == ["seed", "7", "0"]


def test_diff_of_nothing_known_names_the_nearest(rl: Any, composition: Any, tmp_path: Path) -> None:
    answer = rl("config", "diff", "ppo_cartpol", "ppo_acrobot", "--runs-dir", tmp_path)
    assert answer.code == 2
    assert "'ppo_cartpol' is neither an experiment nor a run. Did you mean 'ppo_cartpole'?" in answer.err


def test_flatten_numbers_blocks_and_keeps_plain_lists() -> None:
    config = {"a": {"b": [1, 2]}, "phases": [{"name": "x"}, {"name": "y"}], "empty": {}}
    assert flatten(config) == {"a.b": [1, 2], "phases.0.name": "x", "phases.1.name": "y", "empty": {}}
