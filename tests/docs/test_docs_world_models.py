"""docs/world_models.md: its curricula run and learn, its three lines of Python dream."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from docs_pages import ROOT, blocks

import rl_lab
from tests.tiny_dreamer import TINY_PARTS

PAGE = ROOT / "docs" / "world_models.md"
EXPERIMENTS = {
    match[1]: block
    for block in blocks(PAGE, "yaml")
    if (match := re.search(r"^# configs/experiment/(\w+)\.yaml$", block, re.MULTILINE))
}
SMALL = [*TINY_PARTS, "preset=debug", "runtime.device=cpu", "logging.every_updates=1"]
REPLAY = ["buffers.replay.batch_size=2", "buffers.replay.sequence_length=9"]
LEARNT = {  # what the rows of each learning phase tell of
    "model_first": [{"loss/dynamics"}, {"loss/dynamics", "loss/policy"}],
    "controller_only": [{"loss/dynamics", "loss/policy"}, {"loss/policy"}],
    "dream_offline": [{"loss/dynamics", "loss/policy"}],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "configs" / "experiment"
    folder.mkdir(parents=True)
    for name, text in EXPERIMENTS.items():
        (folder / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_of(run: rl_lab.Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def test_the_page_shows_every_kind_of_phase() -> None:
    assert EXPERIMENTS.keys() == LEARNT.keys()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_curriculum_learns_what_its_phases_say(name: str, here: Path) -> None:
    overrides = SMALL + REPLAY
    if name == "dream_offline":
        rl_lab.collect("random", environment="CartPole-v1", steps=200, output="data/cartpole")
        overrides = [*SMALL, "buffers.dataset.batch_size=2", "buffers.dataset.sequence_length=9"]
    elif name == "controller_only":
        overrides = [*overrides, "training.phases.joint.updates_per_step=0.01"]
    run = rl_lab.train(name, overrides=overrides, quiet=True)
    assert run.status["state"] == "finished"
    told = [{"loss/dynamics", "loss/policy"} & row.keys() for row in rows_of(run)]
    assert [losses for losses, _ in groupby(losses for losses in told if losses)] == LEARNT[name]


def test_three_lines_of_python_dream(here: Path) -> None:
    run = rl_lab.train("model_first", overrides=SMALL + REPLAY, quiet=True)
    (code,) = blocks(PAGE, "python")
    assert len(code.splitlines()) == 3
    names: dict[str, Any] = {"rl_lab": rl_lab, "observation": [0.0, 0.0, 0.0, 0.0]}
    exec(compile(code, "world_models.md", "exec"), names)
    dream = names["dream"]
    assert run.status["state"] == "finished"
    assert {
        name: tuple(dream[name].shape[:2]) for name in ("vector", "reward", "continue", "value", "deter", "action")
    } == {
        **dict.fromkeys(("vector", "reward", "continue", "value", "deter"), (1, 16)),
        "action": (1, 15),
    }
