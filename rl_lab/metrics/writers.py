"""Where rows go: a JSON line each, run.log, or nowhere. Sinks that may fail are in sinks.py and beside it."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from rl_lab.metrics.media import Media
from rl_lab.types import RunError, StateTree
from rl_lab.utils.text import printable

Row = dict[str, float | int]
"""env_frames, agent_steps, episodes, updates, wall_s, then the metrics by name. NaN and infinities may occur."""

Level = Literal["detail", "info", "warning", "error"]  # a detail goes to run.log alone

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
NEWLINES = "\n\t"
Axis = Literal["agent_steps", "updates"]  # what charts are drawn over: updates where a run makes no steps


class Writer:
    """Takes rows and sentences; by itself it keeps nothing. `name` is the key of its state in a checkpoint."""

    name: ClassVar[str] = "null"
    is_direct: ClassVar[bool] = False  # as a sink: write rows without a thread (fast local files alone)

    def write(self, row: Row) -> None: ...
    def message(self, text: str, level: Level) -> None: ...
    def show(self, name: str, media: Media, agent_steps: int) -> None: ...
    def set_state(self, state: StateTree) -> None: ...
    def restart(self) -> None: ...  # the run begins anew in the same place
    def deliver(self) -> None: ...  # write the rows that were held back
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

    def last_rows(self, count: int) -> Iterator[Row]:
        """The newest rows of now, read when they are asked for, whatever is written by then."""
        return self._read_rows(self._open().size, count)

    def _read_rows(self, end: int, count: int) -> Iterator[Row]:
        with self.path.open("rb") as file:
            newest: deque[int] = deque(maxlen=count)  # where they begin
            while (start := file.tell()) < end and file.readline():
                newest.append(start)
            for start in newest:
                file.seek(start)
                yield decode_row(file.readline())


def encode_row(row: Row) -> str:
    """Valid JSON whatever the numbers: NaN and infinities become null; `non_finite` says which: nan, inf, -inf."""
    if all(map(math.isfinite, row.values())):
        return _template(tuple(row)) % tuple(row.values())  # what json.dumps gives, in less time
    non_finite = {name: str(float(value)) for name, value in row.items() if not math.isfinite(value)}
    safe: dict[str, Any] = {name: None if name in non_finite else value for name, value in row.items()}
    return json.dumps({**safe, "non_finite": non_finite}, allow_nan=False)


def decode_row(line: bytes) -> Row:
    """What `encode_row` was given."""
    row = json.loads(line)
    return row | {name: float(text) for name, text in row.pop("non_finite", {}).items()}


@cache
def _template(names: tuple[str, ...]) -> str:
    """An object with these keys, and places for their numbers."""
    keys = [json.dumps(name).replace("%", "%%") for name in names]
    return "{" + ", ".join(f"{key}: %r" for key in keys) + "}"


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
        try:
            written = os.write(self._descriptor, record)
            while written < len(record):  # a nearly full disk takes a part first
                written += os.write(self._descriptor, record[written:])
        except OSError as error:
            with suppress(OSError):  # a cut line is left out by its readers, and cut away at the next resume
                os.ftruncate(self._descriptor, self.size)
            raise self._explanation(error) from error
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
        try:
            yield
        except OSError as error:
            raise self._explanation(error) from error

    def _explanation(self, error: OSError) -> RunError:
        """A disk error as a sentence with its cure."""
        sentence = f"Cannot write {self.path}: {error.strerror}. Mend that, then resume the run."
        if error.errno == errno.ELOOP:
            sentence = f"{self.path} is a symbolic link, which is not followed: remove it."
        if error.errno in FULL_DISK_ERRORS:
            cure = "Free some space, then resume the run; its last checkpoint is intact."
            sentence = f"The disk is full: no space for the next record of {self.path}. {cure}"
        return RunError(sentence)


class TextLogWriter(_FileWriter):
    """run.log: every sentence the run said, with its time and level."""

    name = "text_log"

    def message(self, text: str, level: Level) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {level:<7} {printable(text, keep=NEWLINES)}\n"
        self._open().append(line.encode())
