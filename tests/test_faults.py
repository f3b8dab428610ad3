"""What goes wrong in real life: damaged files, full disks, broken environments, two processes on one run."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rl_lab import api
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.lock import RunLock
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.verify import verify_run
from rl_lab.types import ConfigError, EnvironmentFault, RunError
from tests.test_resume import assert_same_run, overrides_of, reproducible_rows

EXPERIMENT, OVERRIDES = overrides_of("ppo discrete, native", updates=8)


def train(runs_dir: Path, run_id: str, *more: str) -> api.Run:
    return api.train(EXPERIMENT, overrides=[*OVERRIDES, *more], run_id=run_id, runs_dir=runs_dir, quiet=True)


def cut_short(runs_dir: Path, run_id: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that died in its seventh update, after checkpoints at 2, 4 and 6."""
    from rl_lab.workflows.ppo import PPO

    original = PPO.update_controller
    calls = 0

    def dies(self: PPO, *arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise MemoryError("no memory left")
        return original(self, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(PPO, "update_controller", dies)
        with pytest.raises(MemoryError):
            train(runs_dir, run_id)
    status = RunDirectory.open(runs_dir / run_id).read_status()
    assert status["state"] == "failed"
    assert "no memory left" in status["message"]
    return runs_dir / run_id


def test_a_crash_leaves_its_traceback_in_the_log_also_while_the_run_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_lab.experiment import session

    def dies(*arguments: Any, **options: Any) -> Any:
        raise MemoryError("no memory left")

    assert "in dies" in (cut_short(tmp_path, "cut", monkeypatch) / "run.log").read_text()
    monkeypatch.setattr(session, "build", dies)
    with pytest.raises(MemoryError):
        train(tmp_path, "early")
    run = RunDirectory.open(tmp_path / "early")
    assert run.read_status()["state"] == "failed" and "no memory left" in run.read_status()["message"]
    assert "Traceback" in run.log_path.read_text() and "in dies" in run.log_path.read_text()


def test_a_run_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        train(tmp_path / "runs", "refused", "evaluation.dream_every_steps=10")
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run and one that was cut short, to be copied and not changed."""
    runs_dir = tmp_path_factory.mktemp("runs")
    train(runs_dir, "whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        cut_short(runs_dir, "cut", monkeypatch)
    return runs_dir


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink])
@pytest.mark.parametrize("file", ["controllers.pt", "manifest.json"])
def test_a_damaged_checkpoint_is_left_for_the_previous_one_loudly(
    damage: Any, file: str, trained_once: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(trained_once / "cut", tmp_path / "cut", symlinks=True)
    damage((path / "checkpoints" / "latest").resolve() / file)
    api.resume("cut", runs_dir=tmp_path, quiet=True)
    assert_same_run(path, trained_once / "whole")
    assert file in (path / "run.log").read_text()
    assert "warning" in (path / "run.log").read_text()


def test_a_run_whose_checkpoints_are_all_damaged_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cut_short(tmp_path, "cut", monkeypatch)
    for checkpoint in CheckpointStore(path / "checkpoints").paths():
        truncate(checkpoint / "controllers.pt")
    with pytest.raises(RunError, match=r"controllers\.pt"):
        api.resume("cut", runs_dir=tmp_path, quiet=True)


def test_an_exact_resume_refuses_a_changed_config_and_names_changed_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.open(cut_short(tmp_path, "cut", monkeypatch))
    text = run.read_config_text()
    run.config_path.write_text(text.replace("seed: ", "seed: 1"))
    with pytest.raises(RunError, match="has been changed since run 'cut' began"):
        api.resume("cut", runs_dir=tmp_path, quiet=True)
    run.config_path.write_text(text)
    manifest = run.read_manifest()
    run.write_manifest({**manifest, "packages": {**manifest["packages"], "torch": "1.0.0"}, "cpu": "Abacus"})
    api.resume("cut", runs_dir=tmp_path, quiet=True)
    log = run.log_path.read_text()
    assert "This run began with CPU Abacus, now" in log and "torch 1.0.0, now" in log


def test_an_environment_that_changes_the_working_directory_moves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_lab.workflows.ppo import PPO

    original = PPO.update_controller
    (tmp_path / "elsewhere").mkdir()

    def moves(self: PPO, *arguments: Any, **keywords: Any) -> Any:
        os.chdir(tmp_path / "elsewhere")
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(PPO, "update_controller", moves)
    monkeypatch.chdir(tmp_path)
    run = train(Path("runs"), "mine")
    assert run.status["state"] == "finished"
    assert run.path == tmp_path / "runs" / "mine"
    assert verify_run(run.directory).findings == []
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_checkpoint_of_another_network_is_refused_with_the_paths_that_differ(tmp_path: Path) -> None:
    run = train(tmp_path, "small")
    with pytest.raises(RunError, match=r"controllers\.actor\.\S+: checkpoint \[2, 64\], this run \[2, 32\]"):
        api.resume(run, mode="warm_start", overrides=["controllers.actor.hidden_sizes=[64,32]"], quiet=True)


def mounted_tmpfs(path: Path, size: str) -> bool:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_full_disk_stops_the_run_clearly_and_leaves_the_last_checkpoint_intact(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    if not mounted_tmpfs(disk, "600k"):
        pytest.skip("mounting a small tmpfs needs privileges that this machine does not give")
    try:
        with pytest.raises(RunError, match="(?i)disk (is )?full"):
            train(disk, "cut", "training.phases.train.duration_updates=500", "training.checkpoint.keep_recent=1000")
        found = CheckpointStore(disk / "cut" / "checkpoints").load_newest_valid(lambda sentence: None)
        assert found is not None
        assert found.counts["updates"] >= 2
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunError, match="file"):
        train(tmp_path / "file" / "runs", "cut")


FAULTY = ["environment.id=rl_lab/Faulty-v0", "environment.num_envs=2", "training.phases.train.duration_updates=4"]


def test_a_reward_that_is_not_finite_stops_the_run_and_names_the_environment(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"Environment \d of 'rl_lab/Faulty-v0' sent a \w+ that is not finite"):
        train(tmp_path, "cut", *FAULTY, "+environment.kwargs.nan_at=20")
    assert RunDirectory.open(tmp_path / "cut").read_status()["state"] == "failed"


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_environment_that_raises_is_restarted_and_reported_and_the_run_goes_on(
    vectorization: str, tmp_path: Path
) -> None:
    kind = f"environment.vectorization={vectorization}"
    run = train(tmp_path, "cut", *FAULTY, kind, "+environment.kwargs.raise_at=20", "environment.max_restarts=100")
    assert run.status["state"] == "finished"
    assert reproducible_rows(run.path)[-1]["collect/environment_restarts"] > 0
    assert "restart" in (run.path / "run.log").read_text()


def test_a_worker_process_that_dies_is_restarted_and_the_run_goes_on(tmp_path: Path) -> None:
    options = ["environment.vectorization=async", "+environment.kwargs.exit_at=30", "environment.max_restarts=100"]
    quick = ["evaluation.every_updates=null", "evaluation.final_episodes=0"]
    run = train(tmp_path, "cut", *FAULTY, *options, *quick)
    assert run.status["state"] == "finished"
    assert reproducible_rows(run.path)[-1]["collect/environment_restarts"] > 0


def hold(path: Path, seconds: float, ready: Any) -> None:
    with RunLock(RunDirectory.open(path)):
        ready.set()
        time.sleep(seconds)


def test_a_second_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cut_short(tmp_path, "cut", monkeypatch)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold, args=(path, 60.0, ready))
    holder.start()
    try:
        assert ready.wait(60)
        with pytest.raises(RunError, match=str(holder.pid)):
            api.resume("cut", runs_dir=tmp_path, quiet=True)
    finally:
        holder.kill()
        holder.join()
    api.resume("cut", runs_dir=tmp_path, quiet=True)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint_from_before(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not finite at"):
        train(tmp_path, "cut", "optimizers.controller.learning_rate=1e30", "optimizers.controller.name=sgd")


def test_an_environment_that_exits_fails_its_run_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_lab.workflows.ppo import PPO

    def leaves(self: PPO, *arguments: Any, **keywords: Any) -> Any:
        sys.exit("no more")

    monkeypatch.setattr(PPO, "update_controller", leaves)
    with pytest.raises(SystemExit) as caught:
        train(tmp_path, "exits")
    assert "called sys.exit(): see" in caught.value.__notes__[0]
    status = RunDirectory.open(tmp_path / "exits").read_status()
    assert status["state"] == "failed" and status["message"] == "SystemExit: no more"
