"""A run repeated and compared with itself, and an experiment that is cut and resumed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab import api
from rl_lab.config.compose import compose
from rl_lab.environments.handed import NAMESPACE
from rl_lab.experiment import verify_resume as verify_resume_module
from rl_lab.experiment.identical import row_differences, state_differences
from rl_lab.experiment.saver import RandomState
from rl_lab.experiment.verify_resume import verify_resume
from rl_lab.experiment.verify_run import RunVerdict, verify_run
from rl_lab.runs.manifest import git_changes_since, machine
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import ConfigError, RunError

SMALL = [
    "environment.num_envs=4",
    "algorithm.epochs=1",
    "training.phases.train.collect_steps=8",
    "training.phases.train.duration_steps=null",
    "training.phases.train.duration_updates=4",
    "evaluation.final_episodes=2",
    "evaluation.num_envs=2",
    "evaluation.timeout_steps=20",
    "evaluation.video=false",
    "logging.tensorboard=false",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("trained")
    return api.train("ppo_cartpole", overrides=SMALL, run_id="mine", runs_dir=folder, quiet=True).directory


@pytest.fixture
def run(trained: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy that a test may spoil."""
    return RunDirectory.open(shutil.copytree(trained.path, tmp_path / "mine", symlinks=True))


def change_row(run: RunDirectory, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    rows = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    change(rows[number - 1])
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_repeats_itself_to_the_bit(trained: RunDirectory) -> None:
    seen: list[tuple[int, int]] = []
    verdict = verify_run(trained, progress=lambda done, total: seen.append((done, total)))
    assert verdict.outcome == "identical" and verdict.rows_compared == verdict.rows_recorded == 5
    assert {"progress", "controllers", "optimizers", "buffers", "collector", "rng"} <= set(verdict.sections)
    assert seen[-1][0] == seen[-1][1] == trained.read_status()["counts"]["agent_steps"]


def test_the_beginning_alone_can_be_repeated(trained: RunDirectory) -> None:
    verdict = verify_run(trained, steps=40)
    assert (verdict.outcome, verdict.rows_compared, verdict.rows_recorded) == ("identical", 2, 5)
    assert verdict.checkpoint is None


def test_a_config_that_was_changed_is_named_first(run: RunDirectory) -> None:
    text = run.read_config_text()
    run.config_path.write_text(text.replace("discount: 0.98", "discount: 0.9"))
    assert run.read_config_text() != text
    verdict = verify_run(run)
    assert verdict.outcome == "different"
    assert verdict.reasons[0].endswith(
        "config.yaml, which has been changed since the run began (its hash in manifest.json differs)"
    )


def test_the_first_row_that_differs_ends_the_repetition_and_is_named(run: RunDirectory) -> None:
    change_row(run, 2, lambda row: row.update({"controller/entropy": row["controller/entropy"] * 1.5}))
    manifest = run.read_manifest()
    run.write_manifest({**manifest, "packages": {**manifest["packages"], "torch": "0.1"}, "threads": 64, "cpu": "Z80"})
    verdict = verify_run(run)
    first = verdict.differences[0]
    assert verdict.outcome == "different" and verdict.rows_compared == 2
    assert (first.row, first.key) == (2, "controller/entropy") and first.relative == pytest.approx(1 / 3)
    assert f"torch 0.1, now {torch.__version__}" in verdict.reasons
    assert "threads of torch 64, now 1" in verdict.reasons
    assert any(reason.startswith("CPU Z80, now ") for reason in verdict.reasons)


def test_rows_that_are_nearly_the_same_are_within_tolerance(run: RunDirectory) -> None:
    change_row(run, 3, lambda row: row.update({"controller/entropy": row["controller/entropy"] * (1 + 1e-8)}))
    verdict = verify_run(run)
    assert verdict.outcome == "within_tolerance" and verdict.rows_identical == 4
    assert verdict.largest is not None and verdict.largest.key == "controller/entropy"
    assert verify_run(run, tolerance=0.0).outcome == "different"


def test_other_weights_in_the_checkpoint_are_found(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_lab.experiment import verify_run as module

    plain = module.reproducible

    def changed(checkpoint: Any) -> Any:
        state = plain(checkpoint)
        next(iter(state["controllers"]["actor"].values())).view(-1)[3] += 1.0
        return state

    monkeypatch.setattr(module, "reproducible", changed)
    verdict = verify_run(run)
    assert verdict.outcome == "different" and verdict.differences[0].row is None
    assert verdict.differences[0].key.startswith("controllers.actor.") and verdict.differences[0].key.endswith("[3]")


def test_an_unfinished_run_is_repeated_as_far_as_it_came(run: RunDirectory) -> None:
    lines = run.metrics_path.read_text().splitlines(keepends=True)
    run.metrics_path.write_text("".join(lines[:3]))  # killed; its checkpoints are of later
    run.write_status("interrupted")
    verdict = verify_run(run)
    assert (verdict.outcome, verdict.rows_compared) == ("identical", 3)


def test_a_run_with_more_rows_than_its_repetition_differs(run: RunDirectory) -> None:
    line = run.metrics_path.read_text().splitlines()[-1]
    with run.metrics_path.open("a") as file:
        file.write(line + "\n")
    verdict = verify_run(run)
    assert verdict.differences[0].key == "the whole row" and verdict.differences[0].row == 6


def test_a_run_without_rows_cannot_be_repeated(run: RunDirectory) -> None:
    run.metrics_path.write_text("")
    with pytest.raises(RunError, match="has no row in metrics.jsonl, so there is nothing to compare"):
        verify_run(run)


def test_a_warm_started_run_is_repeated_from_the_same_weights(run: RunDirectory) -> None:
    warm = api.resume("mine", mode="warm_start", runs_dir=run.path.parent, quiet=True).directory
    assert verify_run(warm).outcome == "identical"
    shutil.rmtree(run.path)
    with pytest.raises(RunError, match="began with the weights in .*, which is not there any more"):
        verify_run(warm)


# --- what is compared ---


def test_what_follows_the_clock_is_not_compared() -> None:
    left = {"agent_steps": 1, "wall_s": 1.0, "time/eta_s": 3.0, "loss/value": None, "non_finite": ["loss/value"]}
    assert not list(row_differences(left, {**left, "wall_s": 2.0, "time/eta_s": 4.0}, number=1))
    found = list(row_differences(left, {**left, "loss/value": 1.0}, number=7))
    assert [(each.key, each.row, each.relative) for each in found] == [("loss/value", 7, math.inf)]


def test_one_unit_in_the_last_place_and_a_metric_that_is_not_there_are_differences() -> None:
    left = {"agent_steps": 9, "loss/value": 0.1, "loss/policy": None, "non_finite": ["loss/policy"]}
    (found,) = row_differences(left, {**left, "loss/value": math.nextafter(0.1, 1.0)}, number=9)
    assert found.key == "loss/value" and 0.0 < found.relative < 1e-15
    exact, usual = RunVerdict(0.0), RunVerdict(1e-5)
    assert not exact.take([found]) and exact.outcome == "different"
    assert usual.take([found]) and usual.outcome == "within_tolerance" and usual.largest == found
    (missing,) = row_differences(left, {"agent_steps": 9, "loss/value": 0.1}, number=9)
    assert (missing.key, missing.relative) == ("loss/policy", math.inf)


def test_kinds_of_numbers_that_are_not_finite_are_told_apart() -> None:
    left = {"agent_steps": 9, "loss/value": None, "non_finite": {"loss/value": "inf"}}
    assert not list(row_differences(left, left, number=1))
    (found,) = row_differences(left, {**left, "non_finite": {"loss/value": "-inf"}}, number=1)
    assert (found.key, found.recorded, found.found, found.relative) == ("loss/value", "inf", "-inf", math.inf)
    assert not list(row_differences({**left, "non_finite": ["loss/value"]}, left, number=1)), "of an earlier version"


def test_the_largest_difference_of_a_tensor_is_named() -> None:
    left = {"a": {"weight": torch.tensor([1.0, 2.0, math.nan])}, "count": 3, "name": "x"}
    right = {"a": {"weight": torch.tensor([1.0, 2.5, math.nan])}, "count": 3, "name": "y"}
    weight, name = state_differences(left, right)
    assert (weight.key, weight.recorded, weight.found) == ("a.weight[1]", 2.0, 2.5)
    assert weight.relative == pytest.approx(0.2) and name.relative == math.inf
    shape, missing = state_differences({"w": torch.zeros(2), "v": 1}, {"w": torch.zeros(3)})
    assert (shape.recorded, shape.found) == ("float32 [2]", "float32 [3]") and missing.found is None


def test_the_code_of_a_run_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_lab.runs.manifest.git_state", lambda place: {"commit": "b" * 40, "dirty": True})
    assert git_changes_since({"git": {"commit": "a" * 40, "dirty": True}}, Path()) == [
        f"commit {'a' * 12}, now {'b' * 12}",
        "the run began with changes that were not committed",
        "there are changes now that are not committed",
    ]
    assert machine(threads=3)["threads"] == 3 and machine()["cpu_instructions"]


# --- an experiment that is cut and resumed ---


def test_an_experiment_is_proven_to_resume_exactly() -> None:
    cuts = verify_resume(compose("ppo_cartpole", SMALL), updates=4, cuts=2, kills=1)
    assert [cut.kind for cut in cuts] == ["stop", "stop", "kill -9"]
    assert all(cut.is_exact and cut.rows >= 4 for cut in cuts)
    assert [cut.updates for cut in cuts[:2]] == [1, 3] and cuts[0].resumed_at == cuts[0].agent_steps


def test_an_experiment_with_a_package_of_ones_own_is_proven_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that is killed imports it as well."""
    (tmp_path / "lab_of_mine.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('OwnPole-v0', CartPoleEnv, max_episode_steps=50)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    config = compose("ppo_cartpole", [*SMALL, "environment.id=lab_of_mine:OwnPole-v0", "plugins=[lab_of_mine]"])
    (cut,) = verify_resume(config, updates=3, cuts=0, kills=1)
    assert cut.kind == "kill -9" and cut.is_exact


def test_state_that_is_not_restored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RandomState, "set_state", lambda self, state: None)
    (cut,) = verify_resume(compose("ppo_cartpole", SMALL), updates=4, cuts=1, kills=0)
    assert not cut.is_exact and cut.differences[0].row is not None


def test_what_never_learns_is_cut_too() -> None:
    config = compose("random_cartpole", ["environment.num_envs=2", "training.phases.play.collect_steps=4"])
    (cut,) = verify_resume(config, updates=4, cuts=1, kills=0)
    assert cut.is_exact and cut.updates == 0


def test_a_run_too_short_to_cut_is_refused() -> None:
    with pytest.raises(RunError, match="The shortened run has 1 cycles and 2 rows, too few to cut it"):
        verify_resume(compose("ppo_cartpole", SMALL), updates=1, cuts=1, kills=0)


def test_an_object_cannot_be_made_in_another_process() -> None:
    config = compose("ppo_cartpole", SMALL)
    config["environment"]["id"] = f"{NAMESPACE}Line-v0"
    with pytest.raises(ConfigError, match="cannot be made in another process: write kills=0"):
        verify_resume(config, kills=1)


def test_a_process_that_writes_no_row_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_resume_module.sys, "executable", "/bin/false")
    with pytest.raises(RunError, match="The process that was to be killed wrote no row:"):
        verify_resume_module._kill(compose("ppo_cartpole", SMALL), tmp_path, "mine", rows=1)
