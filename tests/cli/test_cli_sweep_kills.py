"""kill -9 of a sweep at exact instants: what is done is not done again, what is cut goes on, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from small_sweeps import WORDS, PoolOfOne, facts, write

from rl_lab.cli import sweep_run
from rl_lab.cli.main import main
from rl_lab.experiment import trial
from rl_lab.orchestration.housekeeping import Housekeeping
from rl_lab.runs.metrics_file import read_metrics
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.sweeps import SweepDirectory
from tests.fault_injection import forked

TRIALS, CUT = 3, 1  # the trial that is cut has one before it and one behind it
CUT_RUN = f"s-{CUT:04d}-s0"
OTHERS = [f"s-{number:04d}-s0" for number in range(TRIALS) if number != CUT]
SETTINGS = {
    "overrides": [*WORDS, "training.checkpoint.every_updates=3", "runtime.threads=1"],
    "sampler": "tpe",
    "trials": TRIALS,
    "jobs": 1,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the same sweep, which nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patched:
        patched.setattr(sweep_run, "Pool", PoolOfOne)
        assert main(["sweep", str(write(**SETTINGS)), "--quiet"]) == 0
    return folder


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at_save(number: int) -> None:
    """From here on, the cut trial's process dies when it is about to save for the `number`-th time."""
    start_run, save, saves = trial.start_run, Housekeeping.save, 0

    def count_and_save(housekeeping: Housekeeping) -> None:
        nonlocal saves
        saves += 1
        if saves == number:
            die()
        save(housekeeping)

    def start(config: dict[str, Any], *, run_id: str, **more: Any) -> RunDirectory:
        if run_id == CUT_RUN:
            Housekeeping.save = count_and_save  # type: ignore[method-assign]
        return start_run(config, run_id=run_id, **more)

    trial.start_run = start  # type: ignore[assignment]


def killed_before_it_is_on_record() -> None:
    append = SweepDirectory.append

    def die_or_append(directory: SweepDirectory, row: Mapping[str, Any]) -> None:
        if row.get("number") == CUT and row["state"] == "finished":
            die()
        append(directory, row)

    SweepDirectory.append = die_or_append  # type: ignore[method-assign]


def sweep_until(cut: Callable[[], None]) -> None:
    def work() -> None:
        cut()
        main(["sweep", "s.yaml", "--quiet"])

    assert forked(work) == -signal.SIGKILL, "the sweep ended before it could be killed"


def files_of(run_id: str) -> dict[str, tuple[int, int, int]]:
    """A file that was written again has another inode or another time."""
    facts = {str(path): path.lstat() for path in Path("runs", run_id).rglob("*") if path.is_file()}
    return {name: (fact.st_ino, fact.st_mtime_ns, fact.st_size) for name, fact in facts.items()}


def rows_of(folder: Path, run_id: str) -> list[dict[str, Any]]:
    clocks = ("wall_s", "time/", "system/")
    rows = read_metrics(folder / "runs" / run_id / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(clocks)} for row in rows]


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every training that begins or goes on in this process."""
    seen: list[tuple[str, str]] = []
    start_run, continue_run = trial.start_run, trial.continue_run

    def start(config: dict[str, Any], *, run_id: str, **more: Any) -> RunDirectory:
        seen.append(("started", run_id))
        return start_run(config, run_id=run_id, **more)

    def go_on(run: RunDirectory, **more: Any) -> None:
        seen.append(("continued", run.id))
        continue_run(run, **more)

    monkeypatch.setattr(trial, "start_run", start)
    monkeypatch.setattr(trial, "continue_run", go_on)
    return seen


@pytest.mark.parametrize(
    ("cut", "checkpoints", "is_finished"),
    [
        pytest.param(lambda: killed_at_save(1), 0, False, id="before its first checkpoint"),
        pytest.param(lambda: killed_at_save(2), 1, False, id="in mid-training"),
        pytest.param(killed_before_it_is_on_record, None, True, id="finished and not yet on record"),
    ],
)
def test_a_sweep_killed_at_an_exact_instant_repeats_and_loses_nothing(
    cut: Callable[[], None],
    checkpoints: int | None,
    is_finished: bool,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainings: list[tuple[str, str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_run, "Pool", PoolOfOne)
    write(**SETTINGS)
    sweep_until(cut)
    cut_run = RunDirectory(Path("runs", CUT_RUN))
    assert (cut_run.read_status()["state"] == "finished") is is_finished
    states = [state for _, _, state, *_ in facts("s")]
    assert states[0] == "finished" and "finished" not in states[CUT:], "the cut trial's result is not on record"
    if checkpoints is not None:
        assert len(list(cut_run.checkpoints_dir.glob("step_*"))) == checkpoints
    identity, done = cut_run.identity(), [OTHERS[0], *([CUT_RUN] if is_finished else [])]
    before = {run_id: files_of(run_id) for run_id in done}

    assert main(["sweep", "s.yaml", "--quiet"]) == 0
    assert trainings == [*([] if is_finished else [("continued", CUT_RUN)]), ("started", OTHERS[1])]
    assert {run_id: files_of(run_id) for run_id in done} == before, "a finished run is only read"
    assert cut_run.identity() == identity, "a cut run goes on in its place"
    with contextlib.chdir(whole):
        expected, best = facts("s"), Path("configs/experiment/s_best.yaml").read_text()
    assert facts("s") == expected
    assert Path("configs/experiment/s_best.yaml").read_text() == best
    for run_id in (*OTHERS, CUT_RUN):
        assert rows_of(tmp_path, run_id) == rows_of(whole, run_id)
