"""Runs as the tests need them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_lab.runs.index import RunIndex
from rl_lab.runs.lock import RunLock
from rl_lab.runs.manifest import collect_manifest
from rl_lab.runs.run_directory import RunDirectory, first_files
from tests.fault_injection import tried

CONFIG = "algorithm:\n  discount: 0.99\nseed: 1\n"


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def make_run(runs_dir: Path) -> Callable[..., RunDirectory]:
    """A run with config and manifest, as `rl-lab train` leaves it before the first row."""

    def make(run_id: str | None = None, *, algorithm: str = "ppo", environment_id: str = "CartPole-v1") -> RunDirectory:
        manifest = collect_manifest(config_text=CONFIG, seed=1, algorithm=algorithm, environment_id=environment_id)
        files = first_files(config_text=CONFIG, overrides=["seed=1"], manifest=manifest, tags=[])
        return RunDirectory.create(runs_dir, run_id=run_id, name="ppo_cartpole", seed=1, files=files)

    return make


@pytest.fixture
def start(runs_dir: Path, make_run: Callable[..., RunDirectory]) -> Callable[[], None]:
    """All that is written when a run called `mine` starts."""
    run = make_run("mine")
    files = {name: (run.path / name).read_text() for name in ("config.yaml", "manifest.json", "tags.json", "run.log")}
    shutil.rmtree(runs_dir)

    def start() -> None:
        run = RunDirectory.create(runs_dir, run_id="mine", name="n", seed=1, files=files)
        with RunLock(run):
            run.write_status("running")
            RunIndex(runs_dir).record(run)

    return start


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if any(tried.values()):
        terminalreporter.write_line(f"{tried['kills']} kills and {tried['faults']} injected faults were tried")
