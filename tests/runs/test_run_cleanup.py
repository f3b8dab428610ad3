"""Freeing space: what goes, what stays, and that neither a running run nor a kill in the middle is harmed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rl_lab.runs import cleanup
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.cleanup import Plan, clean, parse_age, plan_cleanup, remove_run
from rl_lab.runs.index import RunIndex
from rl_lab.runs.lock import RunLock
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.tags import change_tags
from rl_lab.types import ConfigError, RunError

MakeRun = Callable[..., RunDirectory]
FOLDERS = ("checkpoints/step_000000000001", "replay/main", "videos", "tensorboard", "episodes")


@pytest.fixture
def finished(make_run: MakeRun) -> MakeRun:
    """A run with 1000 bytes in each of its folders."""

    def make(run_id: str, score: float | None = None, state: str = "finished", **more: Any) -> RunDirectory:
        run = make_run(run_id, **more)
        run.write_status(state, final_score=score)
        for name in FOLDERS:
            (run.path / name).mkdir(parents=True)
            (run.path / name / "data").write_bytes(b"x" * 1000)
        return run

    return make


def plan(runs_dir: Path, *, keep_best: int = 0, days: int = 0, **more: Any) -> Plan:
    later = datetime.now(UTC) + timedelta(days=2)
    return plan_cleanup(runs_dir, keep_best=keep_best, keep_recent=timedelta(days=days), now=later, **more)


def going(made: Plan) -> set[str]:
    return {each.run.id for each in made.removals}


def test_the_best_of_each_environment_the_recent_and_the_tagged_stay(runs_dir: Path, finished: MakeRun) -> None:
    finished("good", 9.0)
    finished("bad", 1.0)
    finished("other", 0.5, environment_id="Pendulum-v1")
    finished("unscored")
    change_tags(finished("dear", 0.0), add=["keep"])
    assert going(plan(runs_dir)) == {"good", "bad", "other", "unscored"}
    made = plan(runs_dir, keep_best=1)
    assert going(made) == {"bad", "unscored"}
    assert made.kept["other"] == "it is among the best in Pendulum-v1" and made.kept["dear"] == "it is tagged keep"
    assert going(plan(runs_dir, days=3)) == set()
    assert plan(runs_dir, days=3).kept["good"] == "it is recent"


def test_runs_under_way_and_unfinished_ones_stay(runs_dir: Path, finished: MakeRun) -> None:
    running, killed = finished("running", state="running"), finished("killed", state="running")
    finished("failed", state="failed")
    with RunLock(running):
        made = plan(runs_dir)
        assert going(made) == set() and made.kept["running"] == "it is running"
        assert "`rl-lab resume` needs its checkpoints" in made.kept["killed"]
        made = plan(runs_dir, with_unfinished=True)
        assert going(made) == {"killed", "failed"}
        for removal in made.removals:
            clean(removal)
    assert running.checkpoints_dir.is_dir() and not killed.checkpoints_dir.exists()


def test_what_an_unfinished_run_reads_stays(runs_dir: Path, finished: MakeRun) -> None:
    finished("teacher")
    finished("student", state="interrupted").config_path.write_text("load: {from: runs/teacher}\n")
    assert plan(runs_dir).kept["teacher"] == "run student, which is not done, reads it"


def test_checkpoints_and_replay_go_and_the_results_stay(runs_dir: Path, finished: MakeRun) -> None:
    run = finished("a")
    before = {path.name for path in run.path.iterdir()}
    (removal,) = plan(runs_dir).removals
    assert removal.folders == {"checkpoints": 1000, "replay": 1000}
    assert clean(removal) == 2000
    assert {path.name for path in run.path.iterdir()} == (before - {"checkpoints", "replay"}) | {
        "cleanup.json",
        ".lock",
    }
    assert run.read_cleaned()["removed"] == ["checkpoints", "replay"]
    assert plan(runs_dir).kept == {"a": "nothing to remove"}
    with pytest.raises(RunError, match=r"no 'latest' checkpoint: `rl-lab cleanup` has removed it; train it again"):
        CheckpointStore(run.checkpoints_dir).load()
    also = plan(runs_dir, also=("videos", "episodes"))
    assert also.size == 2000 and list(also.removals[0].folders) == ["videos", "episodes"]


def test_a_run_that_began_to_work_after_the_plan_is_left_alone(runs_dir: Path, finished: MakeRun) -> None:
    run = finished("a")
    (removal,) = plan(runs_dir).removals
    with RunLock(run), pytest.raises(RunError, match="Run 'a' is in use by process"):
        clean(removal)
    run.write_status("interrupted")
    with pytest.raises(RunError, match="Run 'a' has been continued since: it is left alone"):
        clean(removal)
    assert run.checkpoints_dir.is_dir()


KILLED = """
import os, shutil, signal, sys
from datetime import timedelta
from pathlib import Path
from rl_lab.runs import files
from rl_lab.runs.cleanup import clean, plan_cleanup

rename, calls = os.rename, [int(sys.argv[2])]
def dying(*arguments, **keywords):
    calls[0] -= 1
    if calls[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(*arguments, **keywords)
if sys.argv[3] == "rename":
    os.rename = dying
else:
    shutil.rmtree, rename = dying, shutil.rmtree
(removal,) = plan_cleanup(Path(sys.argv[1]), keep_best=0, keep_recent=timedelta(0)).removals
clean(removal)
"""


@pytest.mark.parametrize(("what", "calls"), [("rename", 0), ("rename", 1), ("rmtree", 0), ("rmtree", 1)])
def test_a_kill_in_the_middle_leaves_whole_folders_and_is_finished_later(
    runs_dir: Path, finished: MakeRun, what: str, calls: int
) -> None:
    run = finished("a")
    command = [sys.executable, "-c", KILLED, str(runs_dir), str(calls), what]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    for name in FOLDERS[:2]:  # there with all that was in it, or not there
        assert (run.path / name / "data").exists() == (run.path / name.partition("/")[0]).exists()
    assert not (run.path / "checkpoints").exists() or (run.path / "replay").exists()
    (removal,) = plan(runs_dir).removals
    clean(removal)
    assert [name for name in os.listdir(run.path) if "checkpoints" in name or "replay" in name] == []
    assert plan(runs_dir).kept == {"a": "nothing to remove"} and run.read_status()["state"] == "finished"


def test_a_whole_run_is_removed_at_one_instant_but_not_while_it_runs(runs_dir: Path, finished: MakeRun) -> None:
    run = finished("a")
    with RunLock(run), pytest.raises(RunError, match="Run 'a' is in use by process"):
        remove_run(run)
    assert remove_run(run) > 5000
    assert RunIndex(runs_dir).find() == [] and os.listdir(runs_dir) == ["index.sqlite"]


@pytest.mark.parametrize(("text", "hours"), [("30d", 720), ("12h", 12), ("2w", 336)])
def test_an_age_is_a_number_and_a_unit(text: str, hours: int) -> None:
    assert parse_age(text) == timedelta(hours=hours)


def test_an_age_without_a_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="'30' is no age: write a number and h, d or w, such as 30d"):
        parse_age("30")


def test_a_time_that_cannot_be_read_keeps_a_run(runs_dir: Path, finished: MakeRun) -> None:
    run = finished("a")
    run.status_path.write_text('{"state": "finished", "time": "yesterday"}')
    assert plan(runs_dir).kept == {"a": "its time 'yesterday' cannot be read"}


def test_every_folder_that_may_go_is_one_of_a_run() -> None:
    known = {name for name in vars(RunDirectory) if name.endswith("_dir")}
    assert {f"{name}_dir" for name in (*cleanup.ALWAYS, *cleanup.ON_REQUEST)} - known == {"replay_dir"}


# --- tags and notes ------------------------------------------------------------------------------


def test_tags_are_added_once_and_removed(make_run: MakeRun) -> None:
    run = make_run("a")
    assert change_tags(run, add=["x", "y", "x"]) == ["x", "y"]
    assert change_tags(run, add=["z"], remove=["x"]) == ["y", "z"]
    assert run.read_tags() == {"tags": ["y", "z"], "notes": ""}
    with pytest.raises(ConfigError, match="Run 'a' has no tag 'zz'. Did you mean 'z'"):
        change_tags(run, remove=["zz"])
    with pytest.raises(ConfigError, match="The tag 'a b' is empty or holds a blank: write one word"):
        change_tags(run, add=["a b"])


def test_tags_written_at_once_are_all_kept(make_run: MakeRun) -> None:
    run = make_run("a")
    program = "import sys; from pathlib import Path; from rl_lab.runs.run_directory import RunDirectory; "
    program += "from rl_lab.runs.tags import change_tags; run = RunDirectory(Path(sys.argv[1])); "
    program += "[change_tags(run, add=[f'{sys.argv[2]}-{number}']) for number in range(20)]"
    processes = [subprocess.Popen([sys.executable, "-c", program, str(run.path), str(each)]) for each in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(run.read_tags()["tags"]) == 60
