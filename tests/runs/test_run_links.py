"""A run directory from somebody else: nothing is written through a link that leaves it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl_lab.metrics.writers import JsonlWriter, TextLogWriter
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.files import write_atomic
from rl_lab.runs.lock import RunLock
from rl_lab.runs.report import write_report
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import RunError

MakeRun = Callable[..., RunDirectory]

FILES = (".lock", "metrics.jsonl", "run.log", "status.json", "report.md", "learning_curve.png", "config.yaml")
FOLDERS = (
    "checkpoints",
    "replay",
    "replay/replay",
    "tensorboard",
    "videos",
    "episodes",
    "checkpoints/step_000000000001",
)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "thesis.tex").write_text("three years of work")
    return folder


@pytest.mark.parametrize("name", [*FILES, *FOLDERS, "checkpoints/latest", "videos/a.mp4", "wandb/rows_sent"])
def test_a_link_out_of_the_run_is_refused_before_anything_is_written(
    make_run: MakeRun, victim: Path, name: str
) -> None:
    run = make_run("mine")
    link = run.path / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(victim if name in FOLDERS else victim / "thesis.tex")
    for attempt in (RunLock(run).acquire, lambda: run.output("videos", "play.mp4")):
        with pytest.raises(RunError, match=rf"{link} is a symbolic link to {victim}.*outside the run.*remove it"):
            attempt()
    assert (victim / "thesis.tex").read_text() == "three years of work"
    assert [path.name for path in victim.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("target", ["../../victim/thesis.tex", "../mine-too/thesis.tex", "dangling/../../../x"])
def test_relative_and_dangling_links_are_seen_through(make_run: MakeRun, target: str) -> None:
    run = make_run("mine")
    run.log_path.unlink()
    run.log_path.symlink_to(target)
    with pytest.raises(RunError, match="outside the run"):
        RunLock(run).acquire()


def test_a_link_that_wandb_made_to_its_cache_does_not_stop_a_run(make_run: MakeRun, victim: Path) -> None:
    run = make_run("mine")
    link = run.path / "wandb" / "offline-run-1" / "logs" / "debug-core.log"
    link.parent.mkdir(parents=True)
    link.symlink_to(victim / "thesis.tex")
    with RunLock(run):
        assert (victim / "thesis.tex").read_text() == "three years of work"


def test_links_within_the_run_are_no_matter(make_run: MakeRun, runs_dir: Path, tmp_path: Path) -> None:
    run = make_run("mine")
    store = CheckpointStore(run.checkpoints_dir)
    store.save({"progress": {"n": 1}}, agent_steps=1, counts={"agent_steps": 1}, is_best=True)
    with RunLock(run):
        assert store.load("best").counts == {"agent_steps": 1}
    os.rename(run.path, tmp_path / "large_disk")
    run.path.symlink_to(tmp_path / "large_disk")  # a run as a whole may lie elsewhere
    with RunLock(RunDirectory.open(run.path)):
        assert run.output("videos") == runs_dir / "mine" / "videos"


def test_each_writer_refuses_a_link_by_itself(make_run: MakeRun, victim: Path) -> None:
    run = make_run("mine")
    for path in (run.metrics_path, run.log_path, run.status_path):
        path.unlink(missing_ok=True)
        path.symlink_to(victim / "thesis.tex")
    with pytest.raises(RunError, match=r"metrics.jsonl is a symbolic link, which is not followed: remove it"):
        JsonlWriter(run.metrics_path).write({"agent_steps": 1})
    with pytest.raises(RunError, match=r"run.log is a symbolic link, which is not followed: remove it"):
        TextLogWriter(run.log_path).message("hello", "info")
    run.write_status("running")  # replaces the link itself
    assert not run.status_path.is_symlink()
    write_atomic(run.log_path, "new")
    assert (victim / "thesis.tex").read_text() == "three years of work"


def test_a_pipe_in_the_place_of_a_log_neither_blocks_nor_is_written(make_run: MakeRun) -> None:
    run = make_run("mine")
    os.mkfifo(run.metrics_path)
    reader = os.open(run.metrics_path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(
        RunError, match=r"metrics.jsonl is not an ordinary file, so nothing is written to it: remove it"
    ):
        JsonlWriter(run.metrics_path).write({"agent_steps": 1})
    os.close(reader)
    with pytest.raises(RunError, match=r"Cannot write .*metrics.jsonl: No such device"):  # nobody reads it
        JsonlWriter(run.metrics_path).write({"agent_steps": 1})


def test_an_old_checkpoint_that_is_a_link_is_removed_without_its_target(make_run: MakeRun, victim: Path) -> None:
    store = CheckpointStore(make_run("mine").checkpoints_dir, keep_recent=1)
    store.directory.mkdir()
    (store.directory / "step_000000000001").symlink_to(victim)
    (store.directory / "step_000000000002.tmp-7").symlink_to(victim)
    for steps in (2, 3):
        store.save({"components": {"w": torch.ones(1)}}, agent_steps=steps, counts={"agent_steps": steps})
    assert [path.name for path in store.paths()] == ["step_000000000003"]
    assert (victim / "thesis.tex").read_text() == "three years of work"


def test_stored_texts_cannot_steer_the_terminal_that_shows_a_report(make_run: MakeRun) -> None:
    run = make_run("mine")
    evil = "\x1b]0;owned\x07\x9b2J\u202e"
    run.write_manifest(run.read_manifest() | {"algorithm": evil, "command_line": f"rl-lab train\n```\n# {evil}"})
    run.write_status("failed", message=evil)
    run.config_path.write_text(f"a: 1 # {evil}\n")
    report = write_report(run).read_text()
    assert all(each.isprintable() or each == "\n" for each in report)
    assert "\\u001b]0;owned\\u0007" in report and "a: 1" in report
    assert "rl-lab train\\n```\\n#" in report
