"""Sinks never slow or break a run, and a resumed run leaves no row twice in any of them."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rl_lab
from rl_lab.metrics import wandb_writer
from rl_lab.metrics.csv_writer import CsvWriter
from rl_lab.metrics.logger import MetricLogger
from rl_lab.metrics.media import Distribution, Frames
from rl_lab.metrics.series import pack_series
from rl_lab.metrics.sinks import Sink
from rl_lab.metrics.wandb_writer import WandbWriter, has_api_key
from rl_lab.metrics.writers import JsonlWriter, Level, Row, Writer
from rl_lab.orchestration.housekeeping import Housekeeping
from rl_lab.types import Counts, MissingExtraError, RunError, StateTree
from tests.fault_injection import forked


def row(agent_steps: int, **metrics: float) -> Row:
    return {"agent_steps": agent_steps, "wall_s": 0.5, **{name.replace("__", "/"): v for name, v in metrics.items()}}


class Notebook(Writer):
    """A user's own: keeps what it is given."""

    name = "notebook"

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.threads: set[str] = set()

    def write(self, row: Row) -> None:
        self.threads.add(threading.current_thread().name)
        self.seen.append(row["agent_steps"])

    def message(self, text: str, level: Level) -> None:
        self.seen.append(text)

    def set_state(self, state: StateTree) -> None:
        self.seen.append(state)

    def close(self) -> None:
        self.seen.append("closed")


def test_a_users_writer_gets_everything_in_order_in_a_thread_of_its_own() -> None:
    own = Notebook()
    logger = MetricLogger([Sink(own)])
    logger.set_state({"window": pack_series({}), "writers": {"notebook": {"rows": 7, "agent_steps": 40}}})
    logger.message("hello")
    logger.write(Counts(agent_steps=50), wall_s=1.0)
    logger.flush()
    assert logger.get_state()["writers"] == {"notebook": {"rows": 8, "agent_steps": 50, "updates": 0, "taken_rows": 8}}
    logger.close()
    assert own.seen == [{"rows": 7, "agent_steps": 40, "updates": -1}, "hello", 50, "closed"]
    assert own.threads == {"notebook-writer"}


def test_a_writer_that_raises_is_named_once_and_the_other_writers_go_on() -> None:
    class Broken(Writer):
        name = "broken"

        def write(self, row: Row) -> None:
            raise ValueError("no route to host")

    own, broken = Notebook(), Sink(Broken())
    logger = MetricLogger([broken, Sink(own)])
    broken.report = logger.message
    for steps in (1, 2, 3):
        logger.write(Counts(agent_steps=steps), wall_s=1.0)
        logger.flush()
    logger.close()
    sentence = "broken: nothing more is written there, training goes on. no route to host"
    assert own.seen == [1, sentence, 2, 3, "closed"]


def test_a_slow_writer_keeps_nobody_waiting_and_what_does_not_fit_is_left_out_with_a_sentence() -> None:
    class Slow(Writer):
        name = "slow"

        def write(self, row: Row) -> None:
            time.sleep(30)

    sink, said = Sink(Slow(), timeout_s=0.01, most_waiting=3), list[str]()
    sink.report = said.append
    began = time.monotonic()
    for steps in range(20):
        sink.write(row(steps))
    sink.flush()
    sink.close()
    assert time.monotonic() - began < 5.0
    assert said == ["slow: the writer is too slow, so that rows are left out there."]


def test_the_end_of_a_run_waits_for_a_slow_writer_once_and_says_what_is_missing_there() -> None:
    class Slow(Writer):
        name = "slow"

        def write(self, row: Row) -> None:
            hurry.wait(30.0)

    hurry = threading.Event()
    sink, said = Sink(Slow(), timeout_s=0.4), list[str]()
    sink.report = said.append
    for steps in range(3):
        sink.write(row(steps))
    began = time.monotonic()
    sink.flush()
    assert said == ["slow: 3 rows still wait for the writer; metrics.jsonl has every row."]
    between = time.monotonic()
    sink.close()
    assert between - began >= 0.4 and time.monotonic() - between < 0.4
    hurry.set()
    assert len(said) == 1


class Ledger(Notebook):
    """A user's own that takes nothing while it is closed for lunch, and forgets what a resumed run writes again."""

    name = "ledger"
    is_open = True

    def __init__(self) -> None:
        super().__init__()
        self.returns: list[float] = []
        self.lunch_is_over = threading.Event()

    def write(self, row: Row) -> None:
        assert self.is_open or self.lunch_is_over.wait(60.0)
        self.seen.append(row["agent_steps"])
        self.returns.append(row.get("eval/episode_return_mean", 0.0))

    def set_state(self, state: StateTree) -> None:
        assert len(self.seen) >= state["rows"], "rows are missing"
        del self.seen[state["rows"] :], self.returns[state["rows"] :]
        assert self.seen[-1:] == ([state["agent_steps"]] if state["rows"] else [])

    def message(self, text: str, level: Level) -> None: ...
    def close(self) -> None: ...


def logger_with_a(sink: Sink, folder: Path) -> MetricLogger:
    rows = JsonlWriter(folder / "metrics.jsonl")
    sink.earlier_rows = rows.last_rows
    return MetricLogger([rows, sink])


@pytest.mark.parametrize("taken", [0, 2])
def test_rows_that_waited_for_a_writer_when_the_process_was_killed_are_given_to_it_on_resume(
    taken: int, tmp_path: Path
) -> None:
    own = Ledger()
    logger = logger_with_a(Sink(own, timeout_s=0.01), tmp_path)
    for steps in range(1, 7):
        if steps == taken + 1:
            logger.flush()
            own.is_open = False
        logger.write(Counts(agent_steps=steps), wall_s=0.0, values={"eval/episode_return_mean": math.nan})
    state = logger.get_state()
    assert state["writers"]["ledger"] == {"rows": 6, "agent_steps": 6, "updates": 0, "taken_rows": taken}
    logger.write(Counts(agent_steps=7), wall_s=0.0)  # after the checkpoint; then the process is killed

    after = Ledger()
    after.seen, after.returns = own.seen.copy(), own.returns.copy()
    resumed = logger_with_a(Sink(after), tmp_path)
    resumed.set_state(state)
    assert resumed.get_state()["writers"]["ledger"]["rows"] == 6
    resumed.write(Counts(agent_steps=8), wall_s=0.0)
    resumed.close()
    own.lunch_is_over.set()
    logger.close()
    assert after.seen == [1, 2, 3, 4, 5, 6, 8]
    assert [number == number for number in after.returns] == [False] * 6 + [True], "NaN comes back as NaN"


def test_a_table_that_did_not_fit_on_the_disk_is_whole_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(writer: CsvWriter, row: Row) -> None:
        raise RunError("The disk is full")

    logger = logger_with_a(Sink(CsvWriter(tmp_path)), tmp_path)
    logger.write(Counts(agent_steps=1), wall_s=0.5)
    with monkeypatch.context() as while_full:
        while_full.setattr(CsvWriter, "write", full)
        for steps in (2, 3):
            logger.write(Counts(agent_steps=steps), wall_s=0.5)
        state = logger.get_state()
    logger.close()
    resumed = logger_with_a(Sink(CsvWriter(tmp_path)), tmp_path)
    resumed.set_state(state)
    resumed.write(Counts(agent_steps=4), wall_s=0.5)
    resumed.close()
    assert [line["agent_steps"] for line in table(tmp_path)] == ["1", "2", "3", "4"]


# --- CSV


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_table_is_exact_and_grows_a_column_for_a_new_metric(tmp_path: Path) -> None:
    sink = Sink(CsvWriter(tmp_path))
    sink.write(row(1, loss__value=0.1 + 0.2))
    sink.write(row(2, loss__value=1.0, eval__episode_return_mean=float("nan")))
    sink.write(row(3))
    sink.flush()
    first, second, third = table(tmp_path)
    assert float(first["loss/value"]) == 0.1 + 0.2 and first["eval/episode_return_mean"] == ""
    assert (second["eval/episode_return_mean"], third["loss/value"], third["agent_steps"]) == ("nan", "", "3")


def test_rows_after_the_checkpoint_leave_the_csv_table_on_resume(tmp_path: Path) -> None:
    sink = Sink(CsvWriter(tmp_path))
    sink.write(row(1))
    state = sink.get_state()
    sink.write(row(2, loss__value=1.0))
    sink.close()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("3,0.")  # killed in mid-line
    resumed = Sink(CsvWriter(tmp_path))
    resumed.set_state(state)
    resumed.write(row(20, loss__value=2.0))
    resumed.close()
    assert [line["agent_steps"] for line in table(tmp_path)] == ["1", "20"]
    again = Sink(CsvWriter(tmp_path))
    again.restart()
    again.write(row(5))
    again.close()
    assert [line["agent_steps"] for line in table(tmp_path)] == ["5"]


def test_a_csv_table_with_a_cut_last_line_is_continued_behind_the_whole_ones(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("agent_steps,wall_s\n1,0.5\n2,0.")
    writer = CsvWriter(tmp_path)
    writer.write(row(3))
    writer.close()
    assert [line["agent_steps"] for line in table(tmp_path)] == ["1", "3"]


# --- W&B, in its offline mode


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_SWEEP_ID", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def history(folder: Path, *, runs: int) -> list[dict[str, Any]]:
    """What W&B would be sent: the history of every offline run in a directory, in the order of the files, once each has
    its last record: they are written by another process."""
    for _ in range(200):
        found, ends = read_history(folder)
        if ends == runs:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{ends} of {runs} offline runs have their end")


def read_history(folder: Path) -> tuple[list[dict[str, Any]], int]:
    from wandb.proto.wandb_internal_pb2 import Record

    found, ends = [], 0
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            ends += record.WhichOneof("record_type") == "exit"
            if items := record.history.item:
                found.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return found, ends


def records(data: bytes, block: int = 32768, header: int = 7) -> Iterator[bytes]:
    """The format is LevelDB's log: blocks of records, each with checksum, length, kind."""
    position, parts = header, b""
    while position + header < len(data):
        if block - position % block < header:
            position += block - position % block
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + header : position + header + length]
        position += header + length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_wandb_keeps_rows_pictures_and_histograms_offline_and_a_resumed_run_sends_none_twice(offline: Path) -> None:
    pytest.importorskip("wandb")
    config = {"algorithm": {"discount": 0.9}}
    sink = Sink(WandbWriter(offline, "cart", config), timeout_s=60.0)
    sink.write(row(1, loss__value=0.5))
    state = sink.get_state()
    picture = np.zeros((8, 8, 3), dtype=np.uint8)
    sink.show("eval/episode_return", Distribution(np.array([1.0, 2.0])), 2)
    sink.show("eval/episode", Frames([picture, picture]), 2)
    sink.show("eval/picture", Frames([picture]), 2)
    sink.write(row(2, loss__value=0.25))
    sink.close()
    time.sleep(1.1)  # W&B names its directories by the second
    resumed = Sink(WandbWriter(offline, "cart", config), timeout_s=60.0)
    resumed.set_state(state)
    for steps in (2, 3):
        resumed.write(row(steps, loss__value=1.0 / steps))
    resumed.close()
    rows = history(offline, runs=2)
    assert [(each["_step"], each["agent_steps"]) for each in rows] == [(0, 1), (1, 2), (2, 3)]
    kinds = {name: rows[1][f"{name}/_type"] for name in ("eval/episode_return", "eval/episode", "eval/picture")}
    assert kinds == {"eval/episode_return": "histogram", "eval/episode": "video-file", "eval/picture": "image-file"}


def test_a_killed_run_with_all_sinks_leaves_no_row_twice_in_any_of_them(offline: Path) -> None:
    pytest.importorskip("wandb").teardown()  # a forked process must not share the service of this one
    words = [
        *("environment.num_envs=4", "training.phases.train.duration_steps=400", "training.checkpoint.every_updates=3"),
        *("evaluation.every_steps=null", "evaluation.final_episodes=2", "evaluation.video=false", "runtime.threads=1"),
        *("logging.every_updates=1", "logging.tensorboard=true", "logging.writers=[csv,{_target_:wandb,mode:offline}]"),
    ]
    settings: dict[str, Any] = {"overrides": words, "run_id": "cut", "runs_dir": offline, "quiet": True}

    def train_until_killed() -> None:
        write_row, rows = Housekeeping.write_row, 0

        def die_after(housekeeping: Housekeeping) -> dict[str, Any]:
            nonlocal rows
            row, rows = write_row(housekeeping), rows + 1
            if rows == 5:
                housekeeping.logger.flush()  # also the thread of W&B has had every row
                os.kill(os.getpid(), signal.SIGKILL)
            return row

        Housekeeping.write_row = die_after  # type: ignore[method-assign]
        rl_lab.train("q_learning_frozenlake", **settings)

    assert forked(train_until_killed) == -signal.SIGKILL
    folder = offline / "cut"
    assert [len(table(folder)), (folder / "wandb/rows_sent").read_text()] == [5, "5\n"], "two behind the checkpoint"
    time.sleep(1.1)  # W&B names its directories by the second
    assert rl_lab.resume(folder, quiet=True).status["state"] == "finished"
    steps = [json.loads(line)["agent_steps"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [int(line["agent_steps"]) for line in table(folder)] == steps and len(steps) > 7
    points = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [point.step for point in points.Scalars("counters/updates")] == steps
    sent = [(each["_step"], each["agent_steps"]) for each in history(folder, runs=1)]  # the killed one has no end
    assert sent[-len(steps[5:]) :] == [*enumerate(steps)][5:], "the resumed run sends what is new"
    assert {*sent[: -len(steps[5:])]} <= {*enumerate(steps[:5])}, "of the killed one W&B keeps what it had written"


def test_wandb_without_a_connection_keeps_the_rows_and_says_so(
    offline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(wandb_writer, "INIT_TIMEOUT_S", 2)
    writer = WandbWriter(offline, "cart", {})
    writer.write(row(1))
    writer.close()
    assert "W&B does not take this run" in caplog.text and "`wandb sync" in caplog.text
    assert [each["agent_steps"] for each in history(offline, runs=1)] == [1]


def test_an_api_key_is_looked_for_where_wandb_login_writes_it(offline: Path) -> None:
    assert not has_api_key()
    (offline / "netrc").write_text("machine api.wandb.ai login user password abc\n")
    assert has_api_key()


def test_a_missing_wandb_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wandb_writer, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rl-lab\[wandb\]'"):
        WandbWriter(tmp_path, "cart", {})
    assert "wandb" not in vars(sys.modules["rl_lab.metrics.wandb_writer"])
