"""`rl-lab verify checkpoint RUN`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.manifest import collect_manifest
from rl_lab.runs.run_directory import RunDirectory, first_files


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    facts = {"config_text": "seed: 7\n", "seed": 7, "algorithm": "PPO", "environment_id": "CartPole-v1"}
    files = first_files(config_text="seed: 7\n", overrides=[], manifest=collect_manifest(**facts), tags=[])
    return RunDirectory.create(tmp_path, run_id="mine", name="x", seed=7, files=files)


def save(run: RunDirectory, steps: int) -> Path:
    state: dict[str, Any] = {name: {"n": steps} for name in ("components", "controllers", "optimizers")}
    return CheckpointStore(run.checkpoints_dir).save(state, agent_steps=steps, counts={"agent_steps": steps})


def test_a_whole_run_says_where_it_goes_on(rl: Any, run: RunDirectory) -> None:
    answer = rl("verify", "checkpoint", "mine", "--runs-dir", run.path.parent)
    assert answer.code == 0
    assert answer.out == "whole, but nothing has been saved yet: `rl-lab resume mine` begins at the beginning\n"
    save(run, 1024)
    answer = rl("verify", "checkpoint", "mine", "--runs-dir", run.path.parent)
    lines = [line.split() for line in answer.out.splitlines()]
    assert answer.code == 0
    assert lines[1] == ["step_000000001024", "1,024", "exact,", "warm_start_optimizer,", "warm_start,", "evaluate"]
    assert answer.out.endswith("\nwhole: `rl-lab resume mine` goes on from step_000000001024\n")


def test_a_damaged_run_says_what_is_left(rl: Any, run: RunDirectory) -> None:
    words = ("verify", "checkpoint", run.path)
    first, second = save(run, 1), save(run, 2)
    (second / "optimizers.pt").write_bytes(b"")
    answer = rl(*words)
    assert answer.code == 1
    assert "error    checkpoints/step_000000000002: optimizers.pt has 0 bytes" in answer.out
    assert "damaged: `rl-lab resume mine` goes on from step_000000000001" in answer.out
    (first / "controllers.pt").unlink()
    assert "`rl-lab resume mine --mode warm_start` starts from step_000000000002" in rl(*words).out
    (second / "manifest.json").unlink()
    answer = rl(*words)
    assert answer.out.endswith("damaged: no checkpoint is usable; start again with `rl-lab train`\n")
    assert " nothing" in answer.out.splitlines()[1]


def test_json_says_the_same(rl: Any, run: RunDirectory) -> None:
    (save(run, 1) / "optimizers.pt").unlink()
    facts = json.loads(rl("verify", "checkpoint", run.path, "--json").out)
    assert facts["id"] == "mine" and facts["is_whole"] is False
    assert facts["checkpoints"][0]["usable_for"] == ["warm_start", "evaluate"]
    assert facts["findings"][0]["what"] == "optimizers.pt is missing."


def test_only_checkpoints_can_be_verified(rl: Any, run: RunDirectory) -> None:
    assert rl("verify", "weather", "mine").code == 2
