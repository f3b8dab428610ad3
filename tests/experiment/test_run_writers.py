"""`logging.writers` in whole runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import rl_lab
from rl_lab.config.compose import compose
from rl_lab.experiment.build import check
from rl_lab.metrics.writers import Row, Writer
from rl_lab.types import ConfigError

SHORT = ["preset=debug", "evaluation.video=false", "logging.tensorboard=false", "evaluation.num_envs=2"]


class Faulty(Writer):
    """Found by its `_target_`; fails at the second row."""

    name = "faulty"
    rows: list[Row] = []

    def write(self, row: Row) -> None:
        self.rows.append(row)
        if len(self.rows) == 2:
            raise OSError("the postman is ill")


class NotAWriter:
    pass


def read_rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("writers", "sentence"),
    [
        ("[cvs]", r"logging\.writers\.0 is 'cvs'\. Did you mean 'csv'\? Write csv, tensorboard, wandb, or a block"),
        ("[csv,csv]", "two writers with the name 'csv': leave one out"),
        ("[{_target_:csv,fiel:x}]", r"fiel is not a setting of CsvWriter\. Did you mean 'file'\?"),
        ("[{_target_:test_run_writers.NotAWriter}]", "names NotAWriter, which is no Writer: derive it from"),
    ],
)
def test_a_wrong_writer_is_refused_at_the_door(writers: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(compose("ppo_cartpole", [*SHORT, "plugins=[test_run_writers]", f"logging.writers={writers}"]))


def test_a_run_goes_on_without_a_writer_that_fails_and_its_numbers_are_those_of_a_run_without_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(Faulty, "rows", [])
    many = [*SHORT, "training.limit_cycles=5"]
    faulty = "{_target_:test_run_writers.Faulty}"
    settings: dict[str, Any] = {"runs_dir": tmp_path / "runs", "quiet": True}
    run = rl_lab.train(
        "ppo_cartpole", overrides=[*many, "plugins=[test_run_writers]", f"logging.writers=[csv,{faulty}]"], **settings
    )
    plain = rl_lab.train("ppo_cartpole", overrides=many, **settings)
    assert run.status["state"] == "finished"
    log = (run.path / "run.log").read_text()
    assert log.count("faulty: nothing more is written there, training goes on. the postman is ill") == 1
    with (run.path / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    rows = read_rows(run.path)
    assert [{key: float(value) for key, value in line.items() if value} for line in table] == rows
    apart = ("wall_s", "time/", "system/")
    for ours, theirs in zip(rows, read_rows(plain.path), strict=True):
        assert {k: v for k, v in ours.items() if not k.startswith(apart)} == {
            k: v for k, v in theirs.items() if not k.startswith(apart)
        }


def test_a_wandb_sweep_turns_its_writer_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rl_lab.config.schema import read_settings
    from rl_lab.experiment.sinks import build_sinks

    config = compose("ppo_cartpole", SHORT)
    assert build_sinks(config, read_settings(config), None) == []
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    assert [sink.name for sink in build_sinks(config, read_settings(config), None)] == ["wandb"]
    config = compose("ppo_cartpole", [*SHORT, "logging.writers=[{_target_:wandb,project:x}]"])
    assert [sink.name for sink in build_sinks(config, read_settings(config), None)] == ["wandb"]
