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
