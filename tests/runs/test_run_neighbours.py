"""One run that cannot be read stops nobody: it is named in one line, and every other run is listed and found."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_lab.runs.index import RunIndex, resolve_run
from rl_lab.runs.lock import RunLock
from rl_lab.runs.report import write_report
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import RunError

MakeRun = Callable[..., RunDirectory]


@contextmanager
def without_privileges() -> Iterator[None]:
    """Permissions mean nothing to root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_runs_dir() -> Iterator[Path]:
    """A folder that another user can reach, which pytest's own are not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def status_of(**entries: Any) -> Callable[[RunDirectory], None]:
    return lambda run: run.status_path.write_text(json.dumps({"state": "finished", **entries})) and None


def manifest_of(**entries: Any) -> Callable[[RunDirectory], None]:
    return lambda run: run.manifest_path.write_text(json.dumps(run.read_manifest() | entries)) and None


def replaced(file: str, make: Callable[[Path], Any]) -> Callable[[RunDirectory], None]:
    def damage(run: RunDirectory) -> None:
        path = run.path / file
        path.unlink(missing_ok=True)
        make(path)

    return damage


DAMAGES: dict[str, tuple[Callable[[RunDirectory], None], str]] = {
    "counts null": (status_of(counts=None), "'counts' is null"),
    "counts of text": (status_of(counts={"agent_steps": "many"}), "counts is damaged: 'agent_steps' is \"many\""),
    "a count beyond 64 bits": (status_of(counts={"agent_steps": 2**70}), "'agent_steps' is 11805"),
    "wall_s of text": (status_of(wall_s="long"), "'wall_s' is \"long\""),
    "score of truth": (status_of(best_score=True), "'best_score' is true"),
    "status of a list": (replaced("status.json", lambda path: path.write_text("[]")), "holds a list"),
    "status a pipe": (replaced("status.json", os.mkfifo), "status.json cannot be read: not an ordinary file"),
    "status a directory": (replaced("status.json", Path.mkdir), "status.json cannot be read: Is a directory"),
    "seed of a dict": (manifest_of(seed={}), "'seed' is {}"),
    "git of text": (manifest_of(git="abc"), "'git' is \"abc\""),
    "commit of a number": (manifest_of(git={"commit": 7}), "git is damaged: 'commit' is 7"),
    "name of a list": (manifest_of(name=["a"]), "'name' is [\"a\"]"),
    "half a character": (
        lambda run: run.manifest_path.write_text('{"config_schema_version": 1, "name": "\\ud800"}') and None,
        "surrogates not allowed",
    ),
    "no manifest": (lambda run: run.manifest_path.unlink(), "manifest.json is missing"),
    "manifest a pipe": (replaced("manifest.json", os.mkfifo), "manifest.json cannot be read: not an ordinary file"),
    "a newer manifest": (manifest_of(config_schema_version=99), "was written by a newer RL Lab"),
    "tags null": (replaced("tags.json", lambda path: path.write_text('{"tags": null}')), "'tags' is null"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_neighbour_stops_neither_list_nor_a_name(
    runs_dir: Path, make_run: MakeRun, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    make_run("good").write_status("finished", best_score=1.0)
    bad = make_run("2-bad")
    spoil, words = DAMAGES[damage]
    spoil(bad)
    index = RunIndex(runs_dir)
    assert {row["id"] for row in index.find()} == {"good", "2-bad"}
    assert resolve_run("goo", runs_dir).id == resolve_run("@best", runs_dir).id == "good"
    said = caplog.text + bad.read_status()["message"]
    assert words in said
    index.path.unlink()
    assert len(index.find()) == 2, "also when the index is made anew"


def test_a_pipe_as_a_lock_neither_blocks_nor_counts(runs_dir: Path, make_run: MakeRun) -> None:
    make_run("good")
    bad = make_run("bad")
    bad.write_status("running")
    os.mkfifo(bad.lock_path)
    assert {row["id"]: row["status"] for row in RunIndex(runs_dir).find()} == {"good": "created", "bad": "killed"}
    with pytest.raises(RunError, match=r"\.lock is not an ordinary file, so it cannot serve as a lock: remove it"):
        RunLock(bad).acquire()


def test_directories_of_others_are_named_and_left_out(open_runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("lost+found", "private"):
        RunDirectory.create(open_runs_dir, run_id=name.replace("+", "_"), name="n", seed=0, files={"config.yaml": ""})
    os.rename(open_runs_dir / "lost_found", open_runs_dir / "lost+found")
    mine = RunDirectory.create(open_runs_dir, run_id="mine", name="n", seed=0, files={"config.yaml": ""})
    mine.path.chmod(0o777)
    for name in ("lost+found", "private"):
        (open_runs_dir / name).chmod(0o000 if os.geteuid() else 0o700)
    try:
        with without_privileges():
            assert [row["id"] for row in RunIndex(open_runs_dir).find()] == ["mine"]
            assert resolve_run("mine", open_runs_dir).id == resolve_run("@last", open_runs_dir).id == "mine"
            with pytest.raises(RunError, match=r"private cannot be read: Permission denied"):
                resolve_run(open_runs_dir / "private", open_runs_dir)
    finally:
        for name in ("lost+found", "private"):
            (open_runs_dir / name).chmod(0o700)
    lines = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert f"left out: {open_runs_dir / 'private'} cannot be read: Permission denied." in lines
    assert f"left out: {open_runs_dir / 'lost+found'} cannot be read: Permission denied." in lines


def test_a_runs_folder_that_cannot_be_read_is_a_sentence(open_runs_dir: Path) -> None:
    locked = open_runs_dir / "runs"
    locked.mkdir(mode=0o700 if os.geteuid() == 0 else 0o000)
    try:
        with without_privileges(), pytest.raises(RunError, match=r"runs cannot be read: Permission denied"):
            RunIndex(locked).find()
    finally:
        locked.chmod(0o700)


def test_a_name_that_is_no_text_is_left_out(
    runs_dir: Path, make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    make_run("good")
    shutil.copytree(runs_dir / "good", runs_dir / os.fsdecode(b"bad\xff"))
    assert [row["id"] for row in RunIndex(runs_dir).find()] == ["good"]
    assert "left out: " in caplog.text


def test_an_index_that_is_a_link_is_not_written_through(
    tmp_path: Path, runs_dir: Path, make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    make_run("good")
    RunIndex(runs_dir).find()
    victim = tmp_path / "victim.sqlite"
    os.rename(runs_dir / "index.sqlite", victim)
    before = victim.read_bytes()
    (runs_dir / "index.sqlite").symlink_to(victim)
    make_run("new")
    assert {row["id"] for row in RunIndex(runs_dir).find()} == {"good", "new"}
    assert victim.read_bytes() == before
    assert "index.sqlite is a symbolic link and is not used" in caplog.text


def test_a_run_that_cannot_be_recorded_says_so_and_goes_on(
    runs_dir: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run("mine")

    def fail(directory: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("rl_lab.runs.index.os.scandir", fail)
    RunIndex(runs_dir).record(run)
    assert "run 'mine' is not in the index:" in caplog.text


@pytest.mark.parametrize("damage", ["counts null", "status a pipe", "wall_s of text"])
def test_a_report_is_written_whatever_the_status_says(make_run: MakeRun, damage: str) -> None:
    run = make_run("mine")
    DAMAGES[damage][0](run)
    assert "unknown" in write_report(run).read_text()
