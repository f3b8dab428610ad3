"""Where the wall-clock goes: named sections, measured with two clock reads each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Accumulates seconds per named section, and knows which one is under way, for whoever looks from another thread.
    Wall-clock never influences what a run computes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = self.since = time.perf_counter()
        self.current = ""  # the section under way since `since`; none while rows are collected

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        outer, start = self.current, time.perf_counter()
        self.current, self.since = name, start
        try:
            yield
        finally:
            end = time.perf_counter()
            self.add(name, end - start)
            self.current, self.since = outer, end

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def elapsed(self) -> float:
        return time.perf_counter() - self.started
