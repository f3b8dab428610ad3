"""TensorBoard events: scalars, pictures, videos and histograms over agent steps, or over updates."""

from __future__ import annotations

import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

from rl_lab.metrics.event_file import EventFile
from rl_lab.metrics.media import Media, summary_value
from rl_lab.metrics.writers import Axis, Row, Writer
from rl_lab.types import MissingExtraError, StateTree


class TensorBoardWriter(Writer):
    """Rows are written without a thread, which takes less than to wake one; as a sink it encodes videos in a thread.

    Each process writes one event file; after `set_state` the points behind the checkpoint are marked as dropped.
    """

    name = "tensorboard"
    is_direct = True

    def __init__(self, directory: Path, axis: Axis = "agent_steps") -> None:
        if find_spec("tensorboard") is None:
            raise MissingExtraError(
                "TensorBoard events need the package 'tensorboard', which is not installed: "
                "run `pip install tensorboard`, or leave the TensorBoard writer out of the config."
            )
        self.directory = Path(directory) / "tensorboard"
        self._file: EventFile | None = None
        self._lock = Lock()  # rows and videos come from two threads
        self.axis = axis
        self._newest = 0  # where the newest row lies
        self._purge_from: int | None = None  # where a resumed run goes on, until there is a file to say it in

    def write(self, row: Row) -> None:
        numbers = [number for name, number in row.items() if name != self.axis]
        self._newest = int(row[self.axis])
        with self._lock:
            self._open().add_scalars(time.time(), self._newest, _tags(tuple(row), self.axis), numbers)

    def show(self, name: str, media: Media, agent_steps: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # here, in the sink's thread: it takes a while

        summary = Summary(value=[summary_value(Summary, name, media)])
        encoded = summary.SerializeToString()
        with self._lock:
            where = agent_steps if self.axis == "agent_steps" else self._newest
            self._open().add_summary(time.time(), where, encoded)

    def set_state(self, state: StateTree) -> None:
        """Points after the checkpoint vanish; the resumed run writes them again."""
        self._newest = state[self.axis]
        self._purge_from = self._newest + 1

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _open(self) -> EventFile:
        if self._file is None:
            self._file = EventFile(self.directory)
        if self._purge_from is not None:
            self._file.purge(time.time(), self._purge_from)
            self._purge_from = None
        return self._file


@cache
def _tags(names: tuple[str, ...], axis: Axis) -> tuple[str, ...]:
    return tuple(name if "/" in name else f"counters/{name}" for name in names if name != axis)
