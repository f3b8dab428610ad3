"""Runs as the tests need them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rl_lab.runs.manifest import collect_manifest
from rl_lab.runs.run_directory import RunDirectory

CONFIG = "algorithm:\n  discount: 0.99\nseed: 1\n"


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def make_run(runs_dir: Path) -> Callable[..., RunDirectory]:
    """A run with config and manifest, as `rl-lab train` leaves it before the first row."""

    def make(run_id: str | None = None, *, algorithm: str = "ppo", environment_id: str = "CartPole-v1") -> RunDirectory:
        run = RunDirectory.create(runs_dir, run_id=run_id, name="ppo_cartpole", seed=1)
        run.write_config(CONFIG)
        run.write_overrides(["seed=1"])
        run.write_manifest(
            collect_manifest(config_text=CONFIG, seed=1, algorithm=algorithm, environment_id=environment_id)
        )
        return run

    return make
