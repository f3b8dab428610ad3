"""SIGKILL before and half-way through every file operation of a start: the run is there whole, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from rl_lab.runs.index import RunIndex
from rl_lab.runs.lock import RunLock
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import RunError
from tests.fault_injection import killed_at, operations_of

MakeRun = Callable[..., RunDirectory]


def test_a_kill_at_any_instant_of_a_start_blocks_no_id(runs_dir: Path, make_run: MakeRun) -> None:
    def start() -> None:
        run = make_run("mine")
        with RunLock(run):
            run.write_status("running")
            RunIndex(runs_dir).record(run)

    names = operations_of(runs_dir, start)
    assert len(names) > 40
    for at, name in enumerate(names):
        for half_way in (False, True) if name in ("write", "pwrite") else (False,):
            shutil.rmtree(runs_dir)
            assert killed_at(runs_dir, at, start, half_way=half_way)
            found = RunIndex(runs_dir).find()
            if not found:
                start()
                continue
            (row,) = found
            run = RunDirectory.open(runs_dir / "mine")
            assert (row["id"], row["seed"], row["status"]) == ("mine", 1, run.read_status()["state"])
            assert row["status"] in ("created", "killed")
            assert run.read_config_text() and run.read_manifest() and run.read_tags()
            try:
                start()
            except RunError as error:
                assert "continue it with `rl-lab resume mine`" in str(error)


def test_a_kill_at_any_instant_of_a_discard_blocks_no_id(runs_dir: Path, make_run: MakeRun) -> None:
    count = len(operations_of(runs_dir, make_run("mine").discard))
    for at in range(count):
        run = make_run("mine") if not (runs_dir / "mine").exists() else RunDirectory.open(runs_dir / "mine")
        assert killed_at(runs_dir, at, run.discard)
        assert [row["id"] for row in RunIndex(runs_dir).find()] in ([], ["mine"])
