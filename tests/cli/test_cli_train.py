"""`train` and `resume`: what a command line asks of the layers below, and how it ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_fakes import Calls

from rl_lab.cli.parsing import split_words
from rl_lab.types import ConfigError

RUN = SimpleNamespace(id="r1", path=Path("runs/r1"), status={"state": "finished", "message": ""})


def split_sweep(overrides: list[str]) -> list[list[str]]:
    """Stands for composition.split_sweep."""
    lists: list[list[str]] = [[]]
    for word in overrides:
        key, _, values = word.partition("=")
        options = [f"{key}={value}" for value in values.split(",")] if not values.startswith("[") else [word]
        lists = [[*done, option] for done in lists for option in options]
    return lists


@pytest.fixture
def below(fake: Any) -> SimpleNamespace:
    """The layers below the two commands, remembering what they were asked."""
    composition = fake(
        "config.compose",
        split_sweep=split_sweep,
        compose=Calls(lambda name, overrides, config_dir: {"name": name, "overrides": list(overrides)}),
        to_yaml=lambda config: f"name: {config['name']}\noverrides: {config['overrides']}\n",
    )
    session, api = fake("experiment.session", train=Calls(RUN)), fake("api", resume=Calls(RUN))
    return SimpleNamespace(composition=composition, session=session, api=api)


def trained(below: SimpleNamespace) -> tuple[str | None, list[str]]:
    ((config, overrides), _), *_ = below.session.train.seen
    assert config == {"name": config["name"], "overrides": overrides}, "what is recorded is what was composed"
    return config["name"], overrides


@pytest.mark.parametrize(
    ("words", "experiment", "overrides"),
    [
        ([], None, []),
        (["ppo_cartpole", "seed=3"], "ppo_cartpole", ["seed=3"]),
        (["seed=3", "ppo_cartpole"], "ppo_cartpole", ["seed=3"]),
        (["+experiment=ppo_cartpole", "+new.key=1", "~old"], "ppo_cartpole", ["+new.key=1", "~old"]),
        (["CartPole-v1:ppo"], "CartPole-v1:ppo", []),
        (["--env", "my_package:MyEnv-v0", "--algorithm", "ppo"], "my_package:MyEnv-v0:ppo", []),
        (["--env", "Acrobot-v1"], "Acrobot-v1:ppo", []),
        (["--algorithm", "reinforce"], "CartPole-v1:reinforce", []),
        (["ppo_cartpole", "-q", "sizes=[1,2]", "--run-id", "a", "lr=1e-3"], "ppo_cartpole", ["sizes=[1,2]", "lr=1e-3"]),
    ],
)
def test_words_become_an_experiment_and_overrides(
    rl: Any, below: SimpleNamespace, words: list[str], experiment: str | None, overrides: list[str]
) -> None:
    assert rl("train", *words).code == 0
    assert trained(below) == (experiment, overrides)


def test_options_are_passed_on(rl: Any, below: SimpleNamespace) -> None:
    rl("train", "--run-id", "a", "--runs-dir", "here", "--config-dir", "mine", "--resume", "-q")
    ((_, keywords),) = below.session.train.seen
    assert keywords == {"run_id": "a", "runs_dir": Path("here"), "resume_existing": True, "quiet": True}
    assert below.composition.compose.seen == [((None, []), {"config_dir": Path("mine")})]


def test_quiet_prints_the_id_alone(rl: Any, below: SimpleNamespace) -> None:
    assert rl("train", "-q").out == "r1\n"
    assert rl("train").out == ""


def test_cfg_job_prints_the_config_and_trains_nothing(rl: Any, below: SimpleNamespace) -> None:
    answer = rl("train", "ppo_cartpole", "seed=1", "--cfg", "job")
    assert answer.out == "name: ppo_cartpole\noverrides: ['seed=1']\n"
    assert below.session.train.seen == []


def test_cfg_job_of_a_sweep_is_one_document_per_training(rl: Any, below: SimpleNamespace) -> None:
    answer = rl("train", "-m", "seed=1,2", "--cfg", "job")
    assert answer.out == "name: None\noverrides: ['seed=1']\n---\nname: None\noverrides: ['seed=2']\n"


@pytest.mark.parametrize("word", ["seed=0,1,2", "ppo_a,ppo_b,ppo_c"])
def test_a_sweep_without_m_says_add_m(rl: Any, below: SimpleNamespace, word: str) -> None:
    answer = rl("train", word)
    assert answer.code == 2
    assert f"'{word}' asks for 3 trainings. Add -m" in answer.err
    assert below.session.train.seen == []


def test_a_range_of_values_without_m_says_add_m(rl: Any) -> None:
    answer = rl("train", "seed=range(3)")
    assert answer.code == 2
    assert "'seed=range(3)' asks for 3 trainings. Add -m" in answer.err


def test_a_sweep_is_checked_before_it_is_trained(
    rl: Any, fake: Any, below: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = fake("experiment.sweep_check", check_sweep=Calls())
    trained = Calls(0)
    monkeypatch.setattr("rl_lab.cli.multirun.train_all", trained)
    assert rl("train", "-m", "ppo_a", "seed=0,1", "--config-dir", "mine").code == 0
    assert checked.check_sweep.seen == [
        (([("ppo_a", ["seed=0"]), ("ppo_a", ["seed=1"])], Path("mine")), {"quiet": False})
    ]
    checked.check_sweep.answer = ConfigError("1 of 2 trainings cannot run")
    assert rl("train", "-m", "seed=0,x").code == 2
    assert len(trained.seen) == 1


def test_two_experiments_are_refused(rl: Any, below: SimpleNamespace) -> None:
    answer = rl("train", "ppo_cartpole", "sed", "seed=1")
    assert answer.code == 2
    assert "'sed' is a second experiment after 'ppo_cartpole'" in answer.err and "key=value" in answer.err


def test_an_experiment_and_env_are_refused(rl: Any, below: SimpleNamespace) -> None:
    answer = rl("train", "ppo_cartpole", "--env", "Acrobot-v1")
    assert answer.code == 2
    assert "'ppo_cartpole' and --env both say what to train" in answer.err
    assert "rl-lab train Acrobot-v1:ppo" in answer.err


def test_jobs_without_m_is_refused(rl: Any, below: SimpleNamespace) -> None:
    answer = rl("train", "--jobs", "2")
    assert answer.code == 2 and "--jobs" in answer.err and "needs -m" in answer.err


def test_a_config_error_of_the_layers_below_is_exit_2(rl: Any, below: SimpleNamespace) -> None:
    below.session.train.answer = ConfigError("algorithm.clip: unknown key. Did you mean 'clip_range'?")
    answer = rl("train", "algorithm.clip=1")
    assert (answer.code, answer.err) == (2, "error: algorithm.clip: unknown key. Did you mean 'clip_range'?\n")


def test_split_words_keeps_values_with_equals_signs() -> None:
    assert split_words(["a", "b=c=d", "+experiment=x"]) == (["a", "x"], ["b=c=d"])


# --- resume ------------------------------------------------------------------------------------


def test_resume_passes_everything_on(rl: Any, below: SimpleNamespace) -> None:
    words = ("resume", "@last", "seed=4", "--mode", "warm_start", "--runs-dir", "here", "--trust", "mine", "-q")
    assert rl(*words).out == "r1\n"
    settings = {"mode": "warm_start", "overrides": ["seed=4"], "runs_dir": Path("here"), "trust": ["mine"]}
    assert below.api.resume.seen == [(("@last",), {**settings, "quiet": True})]


def test_resume_refuses_a_word_that_is_no_override(rl: Any, below: SimpleNamespace) -> None:
    answer = rl("resume", "@last", "seed")
    assert answer.code == 2
    assert "'seed' is not an override" in answer.err and "key=value" in answer.err
