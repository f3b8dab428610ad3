"""A pseudo-terminal with a screen behind it: what a person would see, and when it was painted."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pyte


class PtyScreen:
    """A terminal of `columns` x `lines`; `stream` is what a program writes to. Every painted frame is remembered."""

    def __init__(self, columns: int, lines: int = 40) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=1000)
        self._bytes = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        self.stream = open(slave, "w", encoding="utf-8", buffering=8192)  # noqa: SIM115
        self._lock = threading.Lock()
        self.resize(columns)
        self.frames: list[tuple[float, str]] = []  # when, and what the whole screen showed
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other side is closed
                return
            if not data:
                return
            with self._lock:
                self._bytes.feed(data)
                self.frames.append((time.perf_counter(), "\n".join(self.screen.display)))

    def resize(self, columns: int) -> None:
        with self._lock:
            self.screen.resize(self.screen.lines, columns)
        fcntl.ioctl(self.stream, termios.TIOCSWINSZ, struct.pack("HHHH", self.screen.lines, columns, 0, 0))

    @property
    def text(self) -> str:
        with self._lock:
            return "\n".join(line.rstrip() for line in self.screen.display)

    def wait_for(self, is_there: Callable[[str], bool], *, seconds: float = 5.0) -> str:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            if is_there(self.text):
                return self.text
            time.sleep(0.01)
        raise AssertionError(f"not shown within {seconds} s:\n{self.text}")

    def between(self, begin: float, end: float) -> list[tuple[float, str]]:
        with self._lock:
            return [(when, shown) for when, shown in self.frames if begin <= when <= end]

    def close(self) -> None:
        self.stream.flush()
        time.sleep(0.05)
        self.stream.close()
        self._reader.join(2.0)
        os.close(self._master)


class BusyMachine:
    """How long other programs kept this process from running, seen by a thread that only sleeps.

    A pause counts where it is longer than the sleep and the process used no processor time in it: on an idle machine
    nothing counts, nor does a thread of ours that keeps the others waiting by computing.
    """

    def __init__(self, interval_s: float = 0.02) -> None:
        self._interval_s = interval_s
        self._looks = [(time.perf_counter(), time.process_time())]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> BusyMachine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._looks.append((time.perf_counter(), time.process_time()))

    def lost_s(self, begin: float, end: float) -> float:
        """Seconds between two instants in which nothing of this process could run."""
        lost = 0.0
        for (before, cpu_before), (after, cpu_after) in pairwise(self._looks.copy()):
            if after > begin and before < end:
                lost += max(0.0, after - before - 1.5 * self._interval_s - (cpu_after - cpu_before))
        return lost
