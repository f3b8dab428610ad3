from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_lab.runs import index as index_module
from rl_lab.runs.index import RunIndex, resolve_run
from rl_lab.runs.lock import RunLock
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import RunError

MakeRun = Callable[..., RunDirectory]


def ids(index: RunIndex, *arguments: str, **filters: str) -> list[str]:
    return [row["id"] for row in index.find(*arguments, **filters)]


def test_a_row_tells_what_manifest_status_and_tags_say(runs_dir: Path, make_run: MakeRun) -> None:
    run = make_run("mine")
    run.write_manifest(
        run.read_manifest() | {"git": {"commit": "a" * 40, "dirty": True, "branch": "main"}, "created": "2026-01-01"}
    )
    counts = {"agent_steps": 10, "env_frames": 40, "episodes": 2, "updates": 5}
    run.write_status("finished", counts=counts, wall_s=1.5, best_score=9.0, final_score=8.0)
    run.write_tags(["paper"], "long one")
    index = RunIndex(runs_dir)
    index.record(run)
    (row,) = index.find()
    assert row == {
        "id": "mine",
        "name": "mine",
        "algorithm": "ppo",
        "environment": "CartPole-v1",
        "seed": 1,
        "git": "aaaaaaaaaaaa+changes",
        "branch": "main",
        "config_hash": run.read_manifest()["config_hash"],
        "host": socket.gethostname(),
        "tags": ["paper"],
        "notes": "long one",
        "status": "finished",
        "created": "2026-01-01",
        "progress": 1.0,
        "lineage": "",
        "parents": [],
        "updated": run.read_status()["time"],
        "wall_s": 1.5,
        "best_score": 9.0,
        "final_score": 8.0,
        "score": 9.0,
        **counts,
    }


def test_the_name_of_a_run_is_read_from_its_generated_id(runs_dir: Path, make_run: MakeRun) -> None:
    make_run()
    assert RunIndex(runs_dir).find()[0]["name"] == "ppo_cartpole"


def test_runs_are_found_newest_first_by_text_and_by_field(runs_dir: Path, make_run: MakeRun) -> None:
    make_run("a-first").write_status("finished")
    make_run("b-second", environment_id="Pendulum-v1").write_status("failed")
    make_run("c-third", algorithm="reinforce").write_tags([], "the good one")
    index = RunIndex(runs_dir)
    assert ids(index) == ["c-third", "b-second", "a-first"]
    assert ids(index, "pendulum") == ["b-second"]
    assert ids(index, "GOOD one") == ["c-third"]
    assert ids(index, "100%_") == []
    assert ids(index, status="finished") == ["a-first"]
    assert ids(index, algorithm="ppo") == ["b-second", "a-first"]
    assert ids(index, environment="CartPole-v1", algorithm="reinforce") == ["c-third"]
    assert ids(index, "first", status="failed") == []


def test_changes_in_the_directories_are_seen_without_being_recorded(runs_dir: Path, make_run: MakeRun) -> None:
    index, run = RunIndex(runs_dir), make_run("a")
    assert index.find()[0]["status"] == "created"
    run.write_status("finished", best_score=1.0)
    assert index.find()[0]["best_score"] == 1.0
    shutil.copytree(run.path, runs_dir / "copied")
    assert set(ids(index)) == {"a", "copied"}
    shutil.rmtree(run.path)
    (runs_dir / "not a run").mkdir()
    assert ids(index) == ["copied"]


def test_a_killed_run_is_listed_as_killed(runs_dir: Path, make_run: MakeRun) -> None:
    index, run = RunIndex(runs_dir), make_run("a")
    with RunLock(run):
        run.write_status("running")
        index.record(run)
        assert index.find()[0]["status"] == "running"
    assert index.find()[0]["status"] == "killed"
    assert ids(index, status="killed") == ["a"]
    with RunLock(run):
        assert ids(index, status="running") == ["a"]


def test_a_missing_index_is_rebuilt(runs_dir: Path, make_run: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    make_run("a")
    make_run("b")
    index = RunIndex(runs_dir)
    assert set(ids(index)) == {"a", "b"}
    index.path.unlink()
    with caplog.at_level(logging.INFO):
        assert set(ids(index)) == {"a", "b"}
    assert "is new or of another version; filling it from the run directories" in caplog.text


@pytest.mark.parametrize("where", ["everything", "pages"])
def test_a_corrupt_index_is_rebuilt_loudly(
    runs_dir: Path, make_run: MakeRun, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    make_run("a")
    index = RunIndex(runs_dir)
    index.find()
    data = index.path.read_bytes()
    index.path.write_bytes(
        b"no database at all, only text" * 100 if where == "everything" else data[:100] + b"\xff" * 9000
    )
    assert ids(index) == ["a"]
    assert "is damaged" in caplog.text and "rebuilding it from the run directories" in caplog.text
    caplog.clear()
    assert ids(index) == ["a"]
    assert caplog.text == ""


def test_an_index_of_another_version_is_replaced(runs_dir: Path, make_run: MakeRun) -> None:
    make_run("a")
    with sqlite3.connect(runs_dir / "index.sqlite") as database:
        database.execute("CREATE TABLE runs (something INTEGER)")
        database.execute("PRAGMA user_version = 77")
    assert ids(RunIndex(runs_dir)) == ["a"]


def test_a_locked_index_stops_neither_a_run_nor_a_question(
    runs_dir: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, index = make_run("a"), RunIndex(runs_dir)
    index.find()
    monkeypatch.setattr(index_module, "_BUSY_TIMEOUT_S", 0.05)
    other = sqlite3.connect(index.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    index.record(run)
    assert ids(index) == ["a"]
    other.close()
    assert "cannot be used (database is locked); reading the run directories instead" in caplog.text


def test_many_writers_at_once_lose_nothing(runs_dir: Path, make_run: MakeRun) -> None:
    runs = [make_run(f"run-{number}") for number in range(6)]
    threads = [threading.Thread(target=lambda run=run: RunIndex(runs_dir).record(run)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with sqlite3.connect(runs_dir / "index.sqlite") as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (6,)


def test_a_run_with_a_damaged_manifest_is_listed_with_a_warning(
    runs_dir: Path, make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    make_run("a").manifest_path.write_text("{")
    (row,) = RunIndex(runs_dir).find()
    assert (row["id"], row["algorithm"], row["status"]) == ("a", None, "created")
    assert "run 'a' is listed without details" in caplog.text


def test_no_runs_directory_means_no_runs_and_makes_none(runs_dir: Path) -> None:
    assert RunIndex(runs_dir).find() == []
    assert not runs_dir.exists()


# --- naming a run ----------------------------------------------------------------------------------


def test_a_run_is_named_by_id_prefix_path_or_mark(
    runs_dir: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("2026-a").write_status("finished", best_score=5.0, final_score=1.0)
    make_run("2026-ab").write_status("finished", final_score=3.0)
    make_run("2027-x").write_status("failed")
    assert resolve_run("2026-a", runs_dir).id == "2026-a"  # an exact id wins over being a prefix
    assert resolve_run("2026-ab", runs_dir).id == "2026-ab"
    assert resolve_run("2027", runs_dir).id == "2027-x"
    assert resolve_run("@last", runs_dir).id == "2027-x"
    assert resolve_run("@best", runs_dir).id == "2026-a"
    assert resolve_run(runs_dir / "2026-a", runs_dir / "elsewhere").id == "2026-a"
    assert resolve_run(f"{runs_dir}/2026-a/", runs_dir / "elsewhere").id == "2026-a"
    monkeypatch.chdir(runs_dir)
    assert resolve_run("2026-a", "elsewhere").id == "2026-a"


def test_the_best_run_is_the_best_of_one_environment(runs_dir: Path, make_run: MakeRun) -> None:
    make_run("1", environment_id="CartPole-v1").write_status("finished", final_score=500.0)
    make_run("2", environment_id="dmc/walker_walk").write_status("finished", final_score=900.0)
    make_run("3", environment_id="Pendulum-v1").write_status("finished", final_score=-150.0)
    make_run("4", environment_id="Pendulum-v1").write_status("finished", final_score=-400.0)
    make_run("5", environment_id="CartPole-v1").write_status("failed")  # the newest, but it has no score
    assert resolve_run("@best", runs_dir).id == "3"
    assert resolve_run("@best:CartPole-v1", runs_dir).id == "1"
    assert resolve_run("@best:dmc/walker_walk", runs_dir).id == "2"
    with pytest.raises(RunError) as refusal:
        resolve_run("@best:CartPol-v1", runs_dir)
    assert str(refusal.value) == (
        f"@best:CartPol-v1: no run in {runs_dir} has been evaluated in CartPol-v1. Did you mean 'CartPole-v1'? There "
        "are scores in CartPole-v1, Pendulum-v1, dmc/walker_walk."
    )


def test_an_ambiguous_prefix_lists_the_candidates(runs_dir: Path, make_run: MakeRun) -> None:
    make_run("2026-a")
    make_run("2026-b")
    with pytest.raises(RunError, match=r"'2026' fits 2 runs; write more of the id:\n  2026-a\n  2026-b"):
        resolve_run("2026", runs_dir)


@pytest.mark.parametrize("reference", ["pole", "2026-ppo_cartpol-s1"])
def test_an_unknown_run_gets_the_nearest_ids(runs_dir: Path, make_run: MakeRun, reference: str) -> None:
    make_run("2026-ppo_cartpole-s1")
    with pytest.raises(RunError, match=rf"no run '{reference}' in .*Nearest: 2026-ppo_cartpole-s1\. `rl-lab list`"):
        resolve_run(reference, runs_dir)


@pytest.mark.parametrize("word", ["last", "best"])
def test_a_forgotten_at_is_the_nearest(runs_dir: Path, make_run: MakeRun, word: str) -> None:
    make_run("2026-a")
    with pytest.raises(RunError, match=rf"no run '{word}' in .*Nearest: @{word}\. `rl-lab list`"):
        resolve_run(word, runs_dir)


def test_with_no_runs_at_all_the_way_to_the_first_is_shown(runs_dir: Path) -> None:
    with pytest.raises(RunError, match=r"no runs there yet: `rl-lab train` makes one"):
        resolve_run("x", runs_dir)
    with pytest.raises(RunError, match=r"@last: there are no runs in .* yet; `rl-lab train` makes one"):
        resolve_run("@last", runs_dir)


def test_a_mark_that_cannot_be_followed_is_explained(runs_dir: Path, make_run: MakeRun) -> None:
    make_run("a")
    with pytest.raises(RunError, match=r"@best: no run in .* has been evaluated yet; use @last or an id"):
        resolve_run("@best", runs_dir)
    with pytest.raises(RunError, match=r"'@first' names no run: write @last, @best, @best:ENVIRONMENT, an id"):
        resolve_run("@first", runs_dir)


def test_a_path_that_is_no_run_is_refused(tmp_path: Path, runs_dir: Path) -> None:
    with pytest.raises(RunError, match="is not a run directory"):
        resolve_run(tmp_path / "nowhere", runs_dir)


def test_an_unwritable_runs_directory_can_still_be_listed(
    runs_dir: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_run("a")
    connect = sqlite3.connect

    def read_only(path: str, **options: object) -> sqlite3.Connection:
        if path != ":memory:":
            raise sqlite3.OperationalError(os.strerror(errno.EROFS))
        return connect(path, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(sqlite3, "connect", read_only)
    assert ids(RunIndex(runs_dir)) == ["a"]
    assert "cannot be used (Read-only file system)" in caplog.text
