"""Whole runs of TD-MPC2: filmed, finetuned from another run's weights, and learnt from a dataset alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import rl_lab
from rl_lab.config.compose import compose
from rl_lab.experiment.build import build
from rl_lab.experiment.curriculum import pin_sources
from rl_lab.runs import film as film_module
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.state import gather_state
from rl_lab.types import ConfigError
from rl_lab.utils.tree import equal
from tests.tiny_tdmpc2 import TINY_TDMPC2

SMALL = [
    *TINY_TDMPC2,
    "environment.num_envs=2",
    "buffers.replay.batch_size=8",
    "training.phases.prefill.duration_steps=40",
    "training.phases.pretrain.duration_updates=2",
    "training.phases.train.duration_steps=8",
    "evaluation.final_episodes=0",
    "evaluation.video=false",
    "logging.tensorboard=false",
    "runtime.device=cpu",
]
EVERYTHING = ["world_model", "actor", "critic", "slow_critic", "value_scale"]


def train(runs_dir: Path, run_id: str, *words: str, experiment: str = "rl_lab/PointMass-v0:tdmpc2") -> Any:
    return rl_lab.train(experiment, overrides=[*SMALL, *words], run_id=run_id, runs_dir=runs_dir, quiet=True)


def weights(runs_dir: Path, run_id: str) -> Any:
    state = CheckpointStore(runs_dir / run_id / "checkpoints").load("latest").state
    return {part: state[part] for part in ("components", "controllers")}


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(folder, "first")
    return folder


def test_its_film_shows_what_plans_promised_and_what_came(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    write = film_module.write_film

    def remember(path: Path, views: Any, *, context: int) -> Any:
        seen.append(views)
        return write(path, views, context=context)

    monkeypatch.setattr("rl_lab.experiment.film.write_film", remember)
    files = rl_lab.dream("first", horizon=6, context=2, sequences=2, runs_dir=runs_dir)
    assert files.video.exists() and files.curves.exists()
    (views,) = seen
    told = {"reward", "continue", "value", "planned reward", "planned return"}
    assert views["reconstruction"].keys() == told and views["real"].keys() == told | {"is_over"}
    assert views["open_loop"].keys() == {"reward", "continue", "value"}
    assert list(film_module.curve_columns(views)) == ["reward", "continue", "value", "planned reward", "planned return"]


LOOK = {"buffer": "replay", "workflow_hooks": [], "collect_steps": 1}
TUNE = LOOK | {"workflow_hooks": ["update"], "updates_per_step": 1.0, "freeze": ["encoder"]}


def finetune(runs_dir: Path, *words: str, phase: dict[str, Any], parts: list[str] = EVERYTHING) -> Any:
    """What is left of a prefill and a phase that begins with weights of the first run."""
    prefill, *_ = (config := compose("rl_lab/PointMass-v0:tdmpc2", [*SMALL, *words, "seed=5"]))["training"]["phases"]
    load = {"name": "tune", "load": {"from": str(runs_dir / "first"), "parts": parts}, "duration_steps": 4}
    config["training"]["phases"] = [prefill, {**phase, **load}]
    experiment = build(pin_sources(config, runs_dir), run=None, quiet=True)
    try:
        experiment.orchestrator.run()
        return gather_state(experiment.targets)
    finally:
        experiment.close()


def test_a_phase_begins_with_the_weights_of_another_run(runs_dir: Path) -> None:
    """Nothing learns in the phase, so that the weights of the first run are found again at its end."""
    after, before = finetune(runs_dir, phase=LOOK), weights(runs_dir, "first")
    assert equal({part: after[part] for part in before}, before)


def test_finetuning_changes_what_it_began_with_but_not_what_is_frozen(runs_dir: Path) -> None:
    before, after = weights(runs_dir, "first"), finetune(runs_dir, phase=TUNE)
    assert equal(after["components"]["encoder"], before["components"]["encoder"])
    assert not equal(after["components"]["dynamics"], before["components"]["dynamics"])


def test_weights_of_another_size_are_refused_with_the_difference(runs_dir: Path) -> None:
    with pytest.raises(ConfigError, match="dynamics"):
        finetune(runs_dir, "components.dynamics.units=16", phase=LOOK, parts=["dynamics"])


def test_it_learns_from_a_dataset_without_a_step(runs_dir: Path, tmp_path: Path) -> None:
    rl_lab.collect("random", environment="rl_lab/PointMass-v0", steps=60, output=tmp_path / "data")
    words = [word for word in TINY_TDMPC2 if not word.startswith(("training", "buffers", "components.continue"))]
    words += [f"buffers.replay.dataset={tmp_path / 'data'}", "environment.id=rl_lab/PointMass-v0"]
    words += ["buffers.replay.batch_size=8", "training.phases.train.duration_updates=3", "evaluation.final_episodes=2"]
    words += ["evaluation.num_envs=2", "evaluation.video=false", "logging.every_updates=1", "logging.tensorboard=false"]
    run = rl_lab.train("tdmpc2_pendulum_offline", overrides=words, run_id="offline", runs_dir=tmp_path, quiet=True)
    assert run.status["counts"] == {"env_frames": 0, "agent_steps": 0, "episodes": 0, "updates": 3}
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert all(
        math.isfinite(row[f"loss/{name}"]) for row in rows if "loss/value" in row for name in ("value", "reward")
    )
    assert any("eval/episode_return_mean" in row for row in rows)
