"""Where rows go: a JSON line each, TensorBoard events, or nowhere."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, Literal

from rl_lab.metrics.media import Media, summary_value
from rl_lab.types import MissingExtraError, RLLabError, RunError, StateTree
from rl_lab.utils.text import printable

Row = dict[str, float | int]
"""env_frames, agent_steps, episodes, updates, wall_s, then the metrics by name. NaN and infinities may occur."""

Level = Literal["detail", "info", "warning", "error"]  # a detail goes to run.log alone

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
NEWLINES = "\n\t"
LARGEST_FLOAT32 = 3.4028234663852886e38


class Writer:
    """Takes rows and sentences; by itself it keeps nothing. `name` is the key of its state in a checkpoint."""

    name = "null"

    def write(self, row: Row) -> None: ...
    def message(self, text: str, level: Level) -> None: ...
    def show(self, name: str, media: Media, agent_steps: int) -> None: ...
    def set_state(self, state: StateTree) -> None: ...
    def restart(self) -> None: ...  # the run begins anew in the same place
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def get_state(self) -> StateTree:
        return {}


class _FileWriter(Writer):
    """Opens its file when it first writes; a file that exists is continued."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file: AppendFile | None = None

    def _open(self) -> AppendFile:
        if self._file is None:
            self._file = AppendFile(self.path)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class JsonlWriter(_FileWriter):
    """One JSON object per line, floats exact, each line with the operating system before `write` returns.

    `set_state` cuts the file back to where a checkpoint stood.
    """

    name = "jsonl"

    def write(self, row: Row) -> None:
        self._open().append(encode_row(row).encode() + b"\n")

    def get_state(self) -> StateTree:
        """Rows up to here are on the disk itself once this returns."""
        file = self._open()
        file.sync()
        return {"bytes": file.size}

    def set_state(self, state: StateTree) -> None:
        """Rows written after the checkpoint vanish; the resumed run writes them again."""
        file = self._open()
        if file.size < state["bytes"]:
            raise RunError(
                f"{self.path} holds {file.size} bytes, but the checkpoint was saved when it held {state['bytes']}: "
                "rows are missing. Put the file back from a copy, or begin a new run from this checkpoint with "
                "mode=warm_start."
            )
        file.truncate(state["bytes"])

    def restart(self) -> None:
        self.set_state({"bytes": 0})


def encode_row(row: Row) -> str:
    """Valid JSON whatever the numbers: NaN and infinities become null, and `non_finite` lists their names."""
    non_finite = [name for name, value in row.items() if not math.isfinite(value)]
    if not non_finite:
        return json.dumps(row, allow_nan=False)
    safe: dict[str, Any] = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps({**safe, "non_finite": non_finite}, allow_nan=False)


class AppendFile:
    """A file that only grows by whole records: a record that does not fit on the disk leaves no trace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
            self._descriptor = os.open(path, flags, 0o644)
            facts = os.fstat(self._descriptor)
        if not stat.S_ISREG(facts.st_mode):
            os.close(self._descriptor)
            raise RunError(f"{path} is not an ordinary file, so nothing is written to it: remove it.")
        self.size = facts.st_size

    def append(self, record: bytes) -> None:
        """Write one record with no buffer in between."""
        written = 0
        with self._explained():
            try:
                while written < len(record):  # a nearly full disk takes a part first
                    written += os.write(self._descriptor, record[written:])
            except OSError:
                with suppress(OSError):  # a cut line is left out by its readers, and cut away at the next resume
                    os.ftruncate(self._descriptor, self.size)
                raise
        self.size += written

    def sync(self) -> None:
        with self._explained():
            os.fsync(self._descriptor)

    def truncate(self, size: int) -> None:
        with self._explained():
            os.ftruncate(self._descriptor, size)
        self.size = size

    def close(self) -> None:
        os.close(self._descriptor)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a disk error into a sentence with its cure."""
        try:
            yield
        except OSError as error:
            sentence = f"Cannot write {self.path}: {error.strerror}. Mend that, then resume the run."
            if error.errno == errno.ELOOP:
                sentence = f"{self.path} is a symbolic link, which is not followed: remove it."
            if error.errno in FULL_DISK_ERRORS:
                cure = "Free some space, then resume the run; its last checkpoint is intact."
                sentence = f"The disk is full: no space for the next record of {self.path}. {cure}"
            raise RunError(sentence) from error


class TextLogWriter(_FileWriter):
    """run.log: every sentence the run said, with its time and level."""

    name = "text_log"

    def message(self, text: str, level: Level) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {level:<7} {printable(text, keep=NEWLINES)}\n"
        self._open().append(line.encode())


class TensorBoardWriter(Writer):
    """Scalars, videos and histograms over agent steps, written by a thread: neither the import nor the encoding delays
    the run.

    Each process writes one event file; after `set_state` the points behind the checkpoint are marked as dropped.
    Rows wait in a queue: one still in it when the process is killed is missing here and nowhere else.
    """

    name = "tensorboard"

    def __init__(self, directory: Path, *, timeout_s: float = 10.0) -> None:
        """timeout_s bounds how long `flush` and `close` wait for the thread."""
        if find_spec("tensorboard") is None:
            raise MissingExtraError(
                "TensorBoard events need the package 'tensorboard', which is not installed: "
                "run `pip install tensorboard`, or leave the TensorBoard writer out of the config."
            )
        self.directory = Path(directory)
        self.timeout_s = timeout_s
        self._last_agent_steps = -1
        self._queue: SimpleQueue[Callable[[_EventFile], None] | Event | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._error: RLLabError | None = None  # found by the thread, raised once by the next call
        self._has_failed = False

    def write(self, row: Row) -> None:
        self._raise_error()
        self._last_agent_steps = int(row["agent_steps"])
        self._hand_over(partial(_EventFile.add, wall_time=time.time(), row=dict(row)))

    def show(self, name: str, media: Media, agent_steps: int) -> None:
        """A video, a picture or a histogram; encoded in the thread."""
        self._raise_error()
        self._hand_over(partial(_EventFile.show, wall_time=time.time(), name=name, media=media, step=agent_steps))

    def _hand_over(self, work: Callable[[_EventFile], None]) -> None:
        if self._has_failed:
            return
        self._queue.put(work)
        if self._thread is None:
            self._thread = Thread(target=self._work, name="tensorboard-writer", daemon=True)
            self._thread.start()

    def get_state(self) -> StateTree:
        return {"agent_steps": self._last_agent_steps}

    def set_state(self, state: StateTree) -> None:
        """Points after the checkpoint vanish; the resumed run writes them again."""
        self._last_agent_steps = state["agent_steps"]
        self._queue.put(partial(_EventFile.purge, from_agent_steps=state["agent_steps"] + 1))

    def restart(self) -> None:
        self.set_state({"agent_steps": -1})

    def flush(self) -> None:
        """Wait, within bounds, until every row so far is in the file."""
        if self._thread is not None:
            reached = Event()
            self._queue.put(reached)
            reached.wait(self.timeout_s)
        self._raise_error()

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(self.timeout_s)
            self._thread = None
        self._raise_error()

    def _work(self) -> None:
        try:
            events = _EventFile(self.directory)
            while (item := self._queue.get()) is not None:
                if isinstance(item, Event):
                    item.set()
                else:
                    item(events)
            events.close()
            return
        except RLLabError as error:
            self._error = error
        except OSError as error:
            self._error = RunError(f"Cannot write {self.directory}: {error.strerror}.")
        self._has_failed = True
        while (item := self._queue.get()) is not None:  # nobody may wait for a thread that gave up
            if isinstance(item, Event):
                item.set()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


class _EventFile:
    """One TensorBoard event file. Lives in the writer's thread, where importing tensorboard keeps nobody waiting."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as EventMessage
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session_log, self._summary = EventMessage, SessionLog, Summary
        self._file = AppendFile(next_event_path(directory))
        self._records = RecordWriter(SimpleNamespace(write=self._file.append))
        self._append(self._event(wall_time=time.time(), file_version="brain.Event:2"))  # what readers know how to purge

    def add(self, wall_time: float, row: Row) -> None:
        values = [
            self._summary.Value(tag=name if "/" in name else f"counters/{name}", simple_value=_as_float32(value))
            for name, value in row.items()
            if name != "agent_steps"  # the x axis
        ]
        step = int(row["agent_steps"])
        self._append(self._event(wall_time=wall_time, step=step, summary=self._summary(value=values)))

    def show(self, wall_time: float, name: str, media: Media, step: int) -> None:
        summary = self._summary(value=[summary_value(self._summary, name, media)])
        self._append(self._event(wall_time=wall_time, step=step, summary=summary))

    def purge(self, from_agent_steps: int) -> None:
        """Make TensorBoard drop earlier points from these agent steps on."""
        start = self._session_log(status=self._session_log.START)
        self._append(self._event(wall_time=time.time(), step=from_agent_steps, session_log=start))

    def close(self) -> None:
        self._file.close()

    def _append(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def next_event_path(directory: Path) -> Path:
    """A name that sorts after every event file there is: TensorBoard reads files in that order, clock or no clock."""
    begun = [path.name.split(".")[3] for path in directory.glob("events.out.tfevents.*")]
    seconds = max([int(time.time()), *(int(text) + 1 for text in begun if text.isdecimal())])
    return directory / f"events.out.tfevents.{seconds:010d}.rl_lab"


def _as_float32(value: float | int) -> float:
    """TensorBoard keeps float32; what does not fit is shown as infinite."""
    return math.copysign(math.inf, value) if abs(value) > LARGEST_FLOAT32 else float(value)
