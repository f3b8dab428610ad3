"""A sweep is checked whole before its first training starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_lab.config.translate import _say_once
from rl_lab.experiment import sweep_check
from rl_lab.experiment.sweep_check import check_sweep, find_problems
from rl_lab.types import ConfigError

SMALL = ["preset=debug", "runtime.device=cpu"]


def test_every_refused_member_is_named_with_its_reason() -> None:
    values = [
        "algorithm.clip_range=0.1",
        "algorithm.clip_range=high",
        "algorithm.discout=1",
        "algorithm.epochs=0",
        "seed=-1",
    ]
    problems = find_problems([("ppo_cartpole", [*SMALL, value]) for value in values], None)
    assert [line.split(": ")[0].split()[-1] for line in problems] == values[1:]
    assert problems[0].startswith(
        "ppo_cartpole preset=debug runtime.device=cpu algorithm.clip_range=high: algorithm.clip_range: "
    )
    assert "Did you mean 'algorithm.discount'?" in problems[1]


def test_members_that_differ_by_their_seed_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(sweep_check, "check", lambda config: built.append(config["seed"]))
    sweep = [("", [f"seed={seed}", f"algorithm.epochs={epochs}"]) for epochs in (1, 2) for seed in (0, 1)]
    assert find_problems(sweep, None) == []
    assert built == [0, 0]


def test_a_sweep_with_a_wrong_value_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_sweep([("ppo_cartpole", [*SMALL, f"algorithm.epochs={value}"]) for value in ("2", "many")], None)
    lines = str(refusal.value).splitlines()
    assert lines[0] == "1 of 2 trainings cannot run, so none was started:"
    assert lines[1].endswith("algorithm.epochs=many: algorithm.epochs is 'many'. Allowed: a whole number.")


@pytest.mark.parametrize("is_quiet", [True, False])
def test_quiet_says_nothing_of_what_a_word_sets(
    is_quiet: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sweep_check, "check", lambda config: None)
    _say_once.cache_clear()
    find_problems([("ppo_cartpole", ["gamma=0.91"])], None, quiet=is_quiet)
    assert ("gamma=0.91 sets algorithm.discount=0.91" in caplog.text) is not is_quiet
