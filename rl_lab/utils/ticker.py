"""Something done a few times a second beside the main thread, at a cost that it knows."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from weakref import WeakSet

SLOWEST_S = 0.5  # between two ticks, however dear they are
COST_LIMIT = 0.01  # fraction of the time
PATIENCE_S = 2.0  # for a tick that is stuck, as on a terminal that Ctrl-S holds
_running: WeakSet[Ticker] = WeakSet()


class Ticker:
    """Calls `tick` every `interval_s` seconds from a thread of its own, at once when it starts, until it is stopped.

    A fork waits for the tick under way and leaves the child without a thread: there `on_fork` is called.
    """

    def __init__(
        self, tick: Callable[[], None], interval_s: float, *, on_fork: Callable[[], None] = lambda: None
    ) -> None:
        self._tick, self._interval_s, self._on_fork = tick, interval_s, on_fork
        self._stopping = threading.Event()
        self.lock = threading.Lock()  # held during a tick
        self.cpu_s = 0.0  # CPU time of the thread so far
        self.ticks = 0
        self._started = self._stopped = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="rl-lab display", daemon=True)

    def start(self) -> None:
        self._started = time.perf_counter()
        _running.add(self)
        self._thread.start()

    def stop(self) -> bool:
        """No tick begins after this. False: one is stuck, and is left behind."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(PATIENCE_S)
        self._stopped = time.perf_counter()
        _running.discard(self)
        return not self._thread.is_alive()

    @property
    def cost(self) -> float:
        """CPU time of the thread as a fraction of the time since it started."""
        end = self._stopped if self._stopping.is_set() else time.perf_counter()
        return self.cpu_s / max(end - self._started, 1e-9)

    def _run(self) -> None:
        rest_s = 0.0
        while not self._stopping.wait(rest_s):
            begin, cpu_before = time.perf_counter(), self.cpu_s
            with self.lock:
                self._tick()
            self.ticks += 1
            self.cpu_s = time.thread_time()
            dearness_s = (self.cpu_s - cpu_before) / COST_LIMIT
            interval_s = min(max(self._interval_s, dearness_s), max(SLOWEST_S, self._interval_s))
            rest_s = max(0.0, begin + interval_s - time.perf_counter())

    def _forked(self) -> None:
        self._stopping, self.lock = threading.Event(), threading.Lock()
        self._stopping.set()
        self._on_fork()


def _before_fork() -> None:
    for ticker in list(_running):
        ticker.lock.acquire(timeout=PATIENCE_S)


def _after_fork_in_parent() -> None:
    for ticker in list(_running):
        if ticker.lock.locked():
            ticker.lock.release()


def _after_fork_in_child() -> None:
    for ticker in list(_running):
        ticker._forked()
    _running.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
