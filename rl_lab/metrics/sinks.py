"""Writers that can neither slow nor break a run: TensorBoard, CSV, W&B and users' own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread

from rl_lab.metrics.media import Media
from rl_lab.metrics.writers import Level, Row, Writer
from rl_lab.types import StateTree

MOST_WAITING = 10_000  # rows and pictures between the run and a sink that is slower
BEFORE_FIRST = {"agent_steps": -1, "updates": -1}
Work = Callable[[], None]


class Sink(Writer):
    """Hands everything to another writer, in a thread of its own; where that writer `is_direct`, only what it shows.

    Rows of a direct writer wait for the next `deliver`, `flush`, checkpoint or message.

    Whatever the writer raises is reported once, and it gets nothing more. When too much waits for it, what comes is
    left out and that is reported once. A checkpoint knows how many rows the writer has taken, so its `set_state` gets
    `{"rows": ..., "agent_steps": ..., "updates": ...}`, the last two of their newest: rows after these come again,
    first those of `earlier_rows` that waited or did not fit when the checkpoint was saved, then what the resumed run
    writes.
    """

    def __init__(self, writer: Writer, *, timeout_s: float = 10.0, most_waiting: int = MOST_WAITING) -> None:
        """timeout_s bounds how long `flush` and `close` together wait for the thread."""
        self.writer = writer
        self.name = writer.name  # type: ignore[misc]  # each sink has the name of its writer
        self.timeout_s = timeout_s
        self.report: Callable[[str], None] = lambda sentence: None
        self.earlier_rows: Callable[[int], Iterator[Row]] | None = None  # so many, the newest of metrics.jsonl
        self._rows, self._last = 0, BEFORE_FIRST  # handed over, left out ones too
        self._taken_rows = 0  # that the writer has without a gap
        self.most_waiting = most_waiting
        self._queue: SimpleQueue[Work | Event | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._held_back: list[Work] = []  # rows of a direct writer
        self._before_first: list[Work] = []  # a thread is worth starting only when there is something to write
        self._problem = ""  # to be reported by the next call, which comes from the run's own thread
        self._has_failed = False
        self._is_behind = False
        self._waited_s = 0.0  # for the thread, so far
        self._is_left = False  # it did not come to its end in time
        self._takes_messages = type(writer).message is not Writer.message
        self._takes_media = type(writer).show is not Writer.show

    def write(self, row: Row) -> None:
        number = self._rows
        self._rows, self._last = number + 1, _place(row)
        work = partial(self._write, number, dict(row))
        if self.writer.is_direct:
            self._held_back.append(work)
        else:
            self._hand_over(work)

    def deliver(self) -> None:
        held_back, self._held_back = self._held_back, []
        for work in held_back:
            self._hand_over(work)

    def message(self, text: str, level: Level) -> None:
        if self._takes_messages:
            self.deliver()
            self._hand_over(partial(self.writer.message, text, level))

    def show(self, name: str, media: Media, agent_steps: int) -> None:
        if self._takes_media:
            self._hand_over(partial(self.writer.show, name, media, agent_steps), is_direct=False)

    def get_state(self) -> StateTree:
        self.deliver()
        return {"rows": self._rows, **self._last, "taken_rows": self._taken_rows}

    def set_state(self, state: StateTree) -> None:
        self.deliver()
        self._rows, self._last = state.get("rows", 0), _place(state)
        taken, again = self._rows, None
        if self.earlier_rows is not None and state.get("taken_rows", taken) < taken:
            taken = state["taken_rows"]
            again = self.earlier_rows(self._rows - taken + min(taken, 1))  # with the row before, for its place
        self._taken_rows = taken
        work = partial(self._go_back, taken, self._last, again)
        if self._thread is None and not self.writer.is_direct and again is None:
            self._before_first.append(work)
        else:
            self._hand_over(work)

    def restart(self) -> None:
        self.set_state({"rows": 0, **BEFORE_FIRST})

    def flush(self) -> None:
        """Wait, within bounds, until the writer has everything so far."""
        self.deliver()
        if self._thread is not None and not self._is_behind:
            reached = Event()
            self._queue.put(reached)
            if not self._wait(reached.wait):
                self._leave()
        self._tell()

    def close(self) -> None:
        self.deliver()
        if self._thread is not None:
            self._queue.put(None)
            self._wait(self._thread.join)
            if self._thread.is_alive():
                self._leave()  # it is a daemon, and ends with the process
            self._thread = None
        elif self.writer.is_direct and not self._has_failed:
            self._attempt(self.writer.close)
        self._tell()

    def _wait(self, wait: Callable[[float], bool | None]) -> bool | None:
        """All waiting together takes no longer than `timeout_s`."""
        began = time.monotonic()
        try:
            return wait(max(0.0, self.timeout_s - self._waited_s))
        finally:
            self._waited_s += time.monotonic() - began

    def _leave(self) -> None:
        if not self._is_left and not self._is_behind:  # else it has been said
            rows = self._rows - self._taken_rows
            what = f"{rows:,} rows still wait" if rows else "a picture still waits"
            self._problem = f"{self.name}: {what} for the writer; metrics.jsonl has every row."
        self._is_left = True

    def _hand_over(self, work: Work, *, is_direct: bool | None = None) -> None:
        self._tell()
        if self._has_failed:
            return
        if self.writer.is_direct if is_direct is None else is_direct:
            self._attempt(work)
            self._tell()
            return
        if self._thread is None:
            self._thread = Thread(target=self._serve, name=f"{self.name}-writer", daemon=True)
            self._thread.start()
        if self._queue.qsize() < self.most_waiting:
            self._queue.put(work)
        elif not self._is_behind:
            self._is_behind = True
            self._problem = f"{self.name}: the writer is too slow, so that rows are left out there."
            self._tell()

    def _serve(self) -> None:
        for work in self._before_first:
            self._attempt(work)
        while (item := self._queue.get()) is not None:
            if isinstance(item, Event):
                item.set()
            elif not self._has_failed:
                self._attempt(item)
        if not self._has_failed:
            self._attempt(self.writer.close)

    def _write(self, number: int, row: Row) -> None:
        self.writer.write(row)
        if number == self._taken_rows:
            self._taken_rows += 1

    def _go_back(self, taken: int, last: dict[str, int], again: Iterator[Row] | None) -> None:
        if again is not None:
            last = _place(next(again)) if taken else BEFORE_FIRST
        self._taken_rows = taken  # rows that still waited when the run went back do not count
        self.writer.set_state({"rows": taken, **last})
        for number, row in enumerate(again or (), start=taken):
            self._write(number, row)

    def _attempt(self, work: Work) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 (a user's class, a network, a disk: training goes on without it)
            self._has_failed = True
            text = str(error).strip() or type(error).__name__
            self._problem = f"{self.name}: nothing more is written there, training goes on. {text}"

    def _tell(self) -> None:
        problem, self._problem = self._problem, ""
        if problem:
            self.report(problem)


def _place(row: Row | StateTree) -> dict[str, int]:
    """Where a row lies on the axes of charts; checkpoints of earlier versions know no updates."""
    return {"agent_steps": int(row["agent_steps"]), "updates": int(row.get("updates", -1))}
