"""Runs with a replay: killed inside a save, moved, damaged, warm-started; on the disk as in memory."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_lab import api
from rl_lab.config.compose import compose
from rl_lab.experiment.build import build
from rl_lab.experiment.identical import rows_in_full
from rl_lab.runs.checkpoint import CheckpointStore, DamagedExternalFile
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.verify import verify_run
from rl_lab.types import RunError
from rl_lab.utils.tree import equal
from tests.test_resume import COMMON, SMALL_DQN, assert_same_run, reproducible_rows, run_to_the_end

UPDATES = 14
SMALL_SAC = [
    "environment.num_envs=4",
    "buffers.replay.capacity_rows=160",
    "buffers.replay.minimum_rows=8",
    "buffers.replay.batch_size=16",
    "training.phases.prefill.duration_steps=48",
    "training.phases.train.collect_steps=4",
    "training.phases.train.updates_per_step=0.07",
    "logging.every_updates=1",
]
ON_DISK = ["buffers.replay.storage=disk"]
CASES = {
    "dqn, prioritised": ["dqn_cartpole_rainbow", *SMALL_DQN],
    "dqn, on the disk": ["dqn_cartpole_rainbow", *SMALL_DQN, *ON_DISK],
    "sac": ["sac_pendulum", *SMALL_SAC],
    "sac, on the disk": ["sac_pendulum", *SMALL_SAC, *ON_DISK],
}


def overrides_of(case: str) -> tuple[str, list[str]]:
    experiment, *own = CASES[case]
    length = ["training.phases.train.duration_steps=null", f"training.phases.train.duration_updates={UPDATES}"]
    return experiment, [*COMMON, *own, *length]


def train(case: str, runs_dir: Path, run_id: str = "whole") -> Path:
    experiment, overrides = overrides_of(case)
    return api.train(experiment, overrides=overrides, run_id=run_id, runs_dir=runs_dir, quiet=True).directory.path


# Every file reaches the disk by os.fsync: dying before one of these calls is dying inside a save, mostly half-way.
KILLED_TRAINING = """
import os, signal, sys
from rl_lab import api

fatal, run_id, runs_dir, experiment, *overrides = sys.argv[1:]
calls, sync = 0, os.fsync

def fsync(descriptor):
    global calls
    calls += 1
    if calls == int(fatal):
        os.kill(os.getpid(), signal.SIGKILL)
    sync(descriptor)

os.fsync = fsync
api.train(experiment, overrides=overrides, run_id=run_id, runs_dir=runs_dir, quiet=True)
"""


def kill_inside_a_save(case: str, runs_dir: Path, run_id: str, fatal_call: int) -> None:
    experiment, overrides = overrides_of(case)
    command = [sys.executable, "-c", KILLED_TRAINING, str(fatal_call), run_id, str(runs_dir), experiment, *overrides]
    environment = os.environ | {"PYTHONPATH": str(Path(api.__file__).parents[1])}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode in (0, -signal.SIGKILL), answer.stderr
    if RunDirectory.open(runs_dir / run_id).read_status()["state"] != "finished":
        api.resume(run_id, runs_dir=runs_dir, quiet=True)


@pytest.mark.parametrize(("case", "fatal_call"), [("dqn, prioritised", 70), ("sac, on the disk", 53)])
def test_a_run_killed_inside_a_save_resumes_bit_for_bit(case: str, fatal_call: int, tmp_path: Path) -> None:
    whole = train(case, tmp_path)
    kill_inside_a_save(case, tmp_path, "cut", fatal_call)
    assert verify_run(RunDirectory.open(tmp_path / "cut")).is_whole
    assert_same_run(tmp_path / "cut", whole)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # as many kills as RL_LAB_KILLS says
@pytest.mark.parametrize("case", CASES)
def test_many_kills_inside_saves_resume_bit_for_bit(case: str, tmp_path: Path) -> None:
    whole = train(case, tmp_path)
    chance = random.Random(case)
    for number in range(int(os.environ.get("RL_LAB_KILLS", "10"))):
        kill_inside_a_save(case, tmp_path, f"cut_{number}", chance.randrange(10, 160))
        assert_same_run(tmp_path / f"cut_{number}", whole)


@pytest.mark.parametrize("case", ["sac", "dqn, on the disk"])
def test_a_run_cut_at_several_cycles_equals_the_uninterrupted_run(case: str, tmp_path: Path) -> None:
    experiment, overrides = overrides_of(case)
    config = compose(experiment, overrides)
    run_to_the_end(config, tmp_path / "whole", cuts=[])
    run_to_the_end(config, tmp_path / "cut", cuts=[3, 9, 10])
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_disk_and_memory_learn_the_same(tmp_path: Path) -> None:
    memory = train("dqn, prioritised", tmp_path, "memory")
    disk = train("dqn, on the disk", tmp_path, "disk")
    assert reproducible_rows(disk) == reproducible_rows(memory)


# --- what lies on the disk ---


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was cut after nine cycles; each test takes a copy."""
    path = tmp_path_factory.mktemp("runs") / "run"
    experiment, overrides = overrides_of("dqn, prioritised")
    config = compose(experiment, overrides)
    run = RunDirectory.create(path.parent, run_id="run", name="test", seed=0)
    running: list[Any] = []
    running.append(
        build(config, run=run, quiet=True, interrupted=lambda: running[0].orchestrator.scheduler.cycles >= 9)
    )
    assert running[0].orchestrator.run() == "interrupted"
    running[0].close()
    return path


@pytest.fixture
def run_path(interrupted: Path, tmp_path: Path) -> Path:
    shutil.copytree(interrupted, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def restore(run_path: Path, reports: list[str]) -> Any:
    experiment, overrides = overrides_of("dqn, prioritised")
    built = build(compose(experiment, overrides), run=RunDirectory(run_path), quiet=True)
    found = CheckpointStore(run_path / "checkpoints").load_newest_valid(reports.append)
    assert found is not None
    built.restore(found)
    return built


def test_the_manifest_names_what_lies_in_the_replay_folder(run_path: Path) -> None:
    store = CheckpointStore(run_path / "checkpoints")
    there = {path.relative_to(run_path).as_posix() for path in (run_path / "replay").rglob("*.bin")}
    assert there == store.external_paths(), "no file that nobody needs"
    assert all(path.startswith("replay/replay/rows_") for path in there)


def test_a_copied_run_goes_on_with_its_own_files(run_path: Path, interrupted: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (interrupted / "replay").rglob("*")}
    built = restore(run_path, [])
    assert built.orchestrator.run() == "finished"
    built.close()
    assert before == {path: path.stat().st_mtime_ns for path in (interrupted / "replay").rglob("*")}


def newest_only(run_path: Path) -> Path:
    """A file of rows that the newest checkpoint needs and the one before does not."""
    store = CheckpointStore(run_path / "checkpoints")
    _, *earlier = store.paths()
    for path in earlier[1:]:
        shutil.rmtree(path)
    named = [
        {entry["path"]: entry["blocks"]["rows"] for entry in store.load(path).manifest["external"]}
        for path in store.paths()
    ]
    return run_path / next(path for path, size in named[0].items() if size > named[1].get(path, 0))


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_a_damaged_file_of_rows_is_named_and_the_checkpoint_before_is_used(run_path: Path, damage: str) -> None:
    file = newest_only(run_path)
    content = file.read_bytes()
    file.write_bytes(content[:-1] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
    reports: list[str] = []
    built = restore(run_path, reports)
    assert file.relative_to(run_path).as_posix() in reports[0] and "Going on from" in reports[1]
    assert built.orchestrator.run() == "finished"
    built.close()


@pytest.mark.parametrize("case", ["dqn, prioritised", "sac, on the disk"])
def test_a_flipped_bit_concerns_only_the_checkpoints_that_hold_its_row(case: str, tmp_path: Path) -> None:
    """Every checkpoint without the row loads exactly; every other is refused with the file, the block and a way out."""
    path = train(case, tmp_path)
    store = CheckpointStore(path / "checkpoints")
    whole = {each: rows_of(path, store.load(each).state["buffers"]["replay"]) for each in store.paths()}
    chance, outcomes = random.Random(case), set()
    for _ in range(60):
        file = chance.choice(sorted((path / "replay" / "replay").iterdir()))
        content = bytearray(file.read_bytes())
        position = chance.randrange(len(content))
        content[position] ^= 1 << chance.randrange(8)
        with flipped(file, bytes(content)):
            for each, (state, rows) in whole.items():
                held = [named for named in state["log"]["segments"] if named["file"] == file.name]
                is_held = held and holds(state, held[0]["blocks"], position)
                outcomes.add(bool(is_held))
                if not is_held:
                    assert equal(rows_of(path, store.load(each).state["buffers"]["replay"]), (state, rows))
                    continue
                with pytest.raises(
                    DamagedExternalFile, match=rf"{file.name}: block \d+ \(rows \d+ to \d+\) has changed"
                ):
                    store.load(each)
                with pytest.raises(RunError, match=rf"{file.name}: block \d+"):
                    rows_of(path, state)
    assert outcomes == {True, False}, "both kinds were tried"


def rows_of(run_path: Path, state: Any) -> tuple[Any, Any]:
    return state, rows_in_full(run_path / "replay" / "replay", state)["rows"]


def holds(state: Any, blocks: Any, position: int) -> bool:
    """Whether a byte of a file lies in a row that the checkpoint's replay holds."""
    assert blocks["block_rows"] == 1, "small enough that a block is a row"
    time, end = blocks["first_row"] + position // blocks["row_bytes"], state["answered"]
    begin = max(state["forgotten"], end + bool(state["pending_keys"]) - state["slots_per_env"])
    return begin <= time < end and position < blocks["rows"] * blocks["row_bytes"]


@contextmanager
def flipped(file: Path, content: bytes) -> Iterator[None]:
    before = file.read_bytes()
    file.write_bytes(content)
    yield
    file.write_bytes(before)


def test_when_every_checkpoint_needs_a_deleted_file_the_error_names_it(run_path: Path) -> None:
    shutil.rmtree(run_path / "replay")
    with pytest.raises(
        RunError, match=r"Every checkpoint in .* is damaged:(.|\n)*replay/replay/rows_\d+.bin: it is missing"
    ):
        CheckpointStore(run_path / "checkpoints").load_newest_valid(lambda sentence: None)


def test_policies_and_warm_starts_do_not_need_the_replay(tmp_path: Path) -> None:
    path = train("dqn, prioritised", tmp_path)
    shutil.rmtree(path / "replay")
    assert api.load("whole", runs_dir=tmp_path) is not None
    short = ["training.phases.train.duration_updates=1"]
    warm = api.resume("whole", runs_dir=tmp_path, mode="warm_start_optimizer", overrides=short, quiet=True)
    assert warm.directory.path != path
