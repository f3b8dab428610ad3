"""EIO, ENOSPC and EACCES at every file operation of what a run writes and reads: a sentence, and nothing is lost.

`lasting` lets every later operation fail too, as on a disk that is gone.
"""

from __future__ import annotations

import errno
import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.metrics.csv_writer import CsvWriter
from rl_lab.metrics.sinks import Sink
from rl_lab.metrics.tensorboard_writer import TensorBoardWriter
from rl_lab.metrics.writers import JsonlWriter, TextLogWriter, Writer
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.index import RunIndex, resolve_run
from rl_lab.runs.report import write_report
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.verify import verify_run
from rl_lab.types import RLLabError, RunError
from tests.fault_injection import failing, killed_at, operations_of

MakeRun = Callable[..., RunDirectory]


WRITING = ("write", "pwrite")
everywhere = pytest.mark.parametrize(
    "code",
    [
        pytest.param(errno.EIO, id="EIO"),
        pytest.param(errno.ENOSPC, id="ENOSPC", marks=pytest.mark.slow),
        pytest.param(errno.EACCES, id="EACCES", marks=pytest.mark.slow),
    ],
)


def fails_in_words(root: Path, at: int, code: int, work: Callable[[], Any], *, lasting: bool) -> bool:
    """Whether `work` failed; in any other way than with a sentence of ours, the test fails."""
    try:
        with failing(root, at=at, code=code, lasting=lasting):
            work()
    except RLLabError as error:
        assert str(error).strip()
        return True
    return False


def save(store: CheckpointStore, steps: int) -> Path:
    state = {"components": {"weight": torch.full((100,), float(steps))}, "progress": {"n": steps}, "rng": [steps]}
    return store.save(state, agent_steps=steps, counts={"agent_steps": steps}, is_best=steps == 1)


def newest(store: CheckpointStore) -> int:
    """The agent steps of the checkpoint a resume would take; it must be whole, and nothing may be damaged."""
    damages: list[str] = []
    found = store.load_newest_valid(damages.append)
    assert damages == [] and found is not None
    steps = found.counts["agent_steps"]
    assert found.state["components"]["weight"].unique().tolist() == [float(steps)]
    assert found.state["rng"] == [found.state["progress"]["n"]] == [steps]
    return steps


@everywhere
@pytest.mark.parametrize("lasting", [False, True])
def test_a_save_that_fails_anywhere_keeps_the_checkpoint_before_it(tmp_path: Path, code: int, lasting: bool) -> None:
    store = CheckpointStore(tmp_path / "mine" / "checkpoints", keep_recent=2)
    for steps in (1, 2, 3):
        save(store, steps)
    names = operations_of(store.directory, lambda: save(store, 4))
    assert {"write", "fsync", "rename", "replace", "symlink", "unlink"} <= set(names)
    steps = 5
    for at in range(len(names)):
        failed = fails_in_words(store.directory, at, code, lambda: save(store, steps), lasting=lasting)  # noqa: B023
        assert newest(store) in ([steps - 1, steps] if failed else [steps])
        assert store.load("best").counts["agent_steps"] == 1
        save(store, steps)  # the disk is back
        assert newest(store) == steps
        steps += 1
    CheckpointStore(store.directory).save({}, agent_steps=steps, counts={})  # a new process also clears what was left
    assert not list(store.directory.glob("*.tmp-*"))


@everywhere
@pytest.mark.parametrize("lasting", [False, True])
def test_a_load_that_fails_anywhere_takes_another_checkpoint_or_says_why(
    tmp_path: Path, code: int, lasting: bool
) -> None:
    store = CheckpointStore(tmp_path / "mine" / "checkpoints")
    for steps in (1, 2, 3):
        save(store, steps)

    def load() -> None:
        found = store.load_newest_valid(lambda sentence: None)
        assert found is not None and found.counts["agent_steps"] in (1, 2, 3)

    for at in range(len(operations_of(store.directory, load))):
        failed = fails_in_words(store.directory, at, code, load, lasting=lasting)
        assert lasting or not failed
    assert newest(store) == 3


def test_a_kill_before_or_half_way_through_any_operation_of_a_save_loses_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "mine" / "checkpoints", keep_recent=1)
    save(store, 1)
    save(store, 2)
    names = operations_of(store.directory, lambda: save(store, 3))
    steps, before = 4, 3
    for at, name in enumerate(names):
        for half_way in (False, True) if name in WRITING else (False,):

            def work() -> None:
                save(CheckpointStore(store.directory, keep_recent=1), steps)  # noqa: B023

            killed_at(store.directory, at, work, half_way=half_way)
            before = newest(store)
            assert store.load("best").counts["agent_steps"] == 1
            assert before in (steps - 1, steps)
            if before == steps - 1:
                save(CheckpointStore(store.directory, keep_recent=1), steps)
            assert not [path for path in store.directory.glob("*.tmp-*") if before == steps - 1]
            steps += 1


@everywhere
@pytest.mark.parametrize("lasting", [False, True])
def test_a_start_that_fails_anywhere_blocks_no_id(
    runs_dir: Path, start: Callable[[], None], code: int, lasting: bool
) -> None:
    for at in range(len(operations_of(runs_dir, start))):
        shutil.rmtree(runs_dir)
        fails_in_words(runs_dir, at, code, start, lasting=lasting)
        if (runs_dir / "mine").exists():
            run = RunDirectory.open(runs_dir / "mine")
            assert run.read_manifest() and run.read_config_text()
            assert verify_run(run).is_whole
        else:
            start()


@everywhere
@pytest.mark.parametrize("lasting", [False, True])
def test_a_status_that_cannot_be_written_leaves_the_one_before(make_run: MakeRun, code: int, lasting: bool) -> None:
    run = make_run("mine")
    run.write_status("finished", best_score=1.0)
    for at in range(len(operations_of(run.path, lambda: run.write_status("failed")))):
        run.write_status("finished", best_score=1.0)
        failed = fails_in_words(run.path, at, code, lambda: run.write_status("failed"), lasting=lasting)
        assert run.read_status()["state"] in (["finished", "failed"] if failed else ["failed"])


@everywhere
def test_a_discard_that_fails_hides_no_other_error(make_run: MakeRun, code: int) -> None:
    for at in range(len(operations_of(make_run("mine").path, make_run("other").discard)) + 20):
        run = make_run(f"run{at}")
        assert not fails_in_words(run.path.parent, at, code, run.discard, lasting=False)


def rows_of(path: Path) -> list[int]:
    return [json.loads(line)["agent_steps"] for line in path.read_text().splitlines()]


@everywhere
@pytest.mark.parametrize("lasting", [False, True])
def test_metrics_that_cannot_be_written_keep_every_row_before(tmp_path: Path, code: int, lasting: bool) -> None:
    path = tmp_path / "run" / "metrics.jsonl"

    def work() -> None:
        writer = JsonlWriter(path)
        try:
            writer.set_state({"bytes": 0})
            for step in range(4):
                writer.write({"agent_steps": step, "wall_s": 0.1})
            state = writer.get_state()
            writer.write({"agent_steps": 4})
            writer.set_state(state)
        finally:
            writer.close()

    for at in range(len(operations_of(tmp_path, work))):
        path.unlink(missing_ok=True)
        failed = fails_in_words(tmp_path, at, code, work, lasting=lasting)
        kept = rows_of(path) if path.exists() and not lasting else []
        assert kept == list(range(len(kept)))
        assert failed or kept == [0, 1, 2, 3] or lasting
        work()
        assert rows_of(path) == [0, 1, 2, 3]


@everywhere
def test_a_log_or_event_file_that_cannot_be_written_is_a_sentence(tmp_path: Path, code: int) -> None:
    def work() -> None:
        log = TextLogWriter(tmp_path / "run.log")
        log.message("hello", "info")
        log.close()

    def refuse(sentence: str) -> None:
        raise RunError(sentence)

    def rows(writer: Writer) -> None:
        sink = Sink(writer)
        sink.report = refuse
        sink.write({"agent_steps": 1, "wall_s": 0.1})
        sink.flush()
        sink.close()

    def events() -> None:
        rows(TensorBoardWriter(tmp_path))

    def table() -> None:
        rows(CsvWriter(tmp_path))

    for each in (work, events, table):
        for at in range(len(operations_of(tmp_path, each))):
            fails_in_words(tmp_path, at, code, each, lasting=False)
            each()


@everywhere
@pytest.mark.parametrize("lasting", [False, True])
def test_questions_are_answered_or_refused_in_words_whatever_cannot_be_read(
    runs_dir: Path, make_run: MakeRun, code: int, lasting: bool
) -> None:
    run = make_run("mine")
    run.write_status("finished", best_score=1.0)
    run.metrics_path.write_text('{"agent_steps": 1, "wall_s": 1.0}\n')
    save(CheckpointStore(run.checkpoints_dir, identity=run.identity()), 1)
    make_run("other")

    def find_without_an_index() -> list[dict[str, Any]]:
        index = RunIndex(runs_dir)
        index.path = runs_dir / f".{secrets.token_hex(4)}.sqlite"  # nothing is there yet: every run is read
        return index.find()

    questions: list[Callable[[], Any]] = [
        lambda: RunIndex(runs_dir).find(),
        find_without_an_index,
        lambda: RunIndex(runs_dir).record(run),
        lambda: resolve_run("min", runs_dir),
        lambda: resolve_run("@best", runs_dir),
        lambda: run.read_tags(),
        lambda: run.check_config(),
        lambda: verify_run(run),
        lambda: write_report(run),
    ]
    for question in questions:
        for at in range(len(operations_of(runs_dir, question))):
            fails_in_words(runs_dir, at, code, question, lasting=lasting)
    assert {row["id"] for row in RunIndex(runs_dir).find()} == {"mine", "other"}
    assert verify_run(run).is_whole
