"""Where the wall-clock went since the last log row, as fractions that sum to one."""

from __future__ import annotations

from time import perf_counter

from rl_lab.types import Metrics
from rl_lab.utils.timing import Stopwatch

SECTIONS = ("environment", "policy", "device", "update", "evaluation", "checkpoint", "logging")
AFTERWARDS = ("video", "report")  # when training is over, which they are no part of


class TimeSplit:
    """Reads a stopwatch in windows. What no section measured is overhead."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._first = self._last = self._reading()

    def window(self) -> Metrics:
        """`time/*_fraction` since the previous call; empty when no time has passed."""
        previous, self._last = self._last, self._reading()
        return _fractions(previous, self._last)

    def whole(self) -> Metrics:
        """`time/*_fraction` since the beginning, for the panel and the end-of-run report."""
        now, section = self._reading(), self._stopwatch.current
        under_way_s = perf_counter() - self._stopwatch.since
        if section in SECTIONS:  # the one under way included: one update may take a minute
            now[section] += under_way_s
        elif section in AFTERWARDS:
            now["elapsed"] -= under_way_s
        return _fractions(self._first, now)

    def _reading(self) -> dict[str, float]:
        measured, elapsed = self._stopwatch.seconds, self._stopwatch.elapsed()
        seconds = {section: measured.get(section, 0.0) for section in SECTIONS}
        return {**seconds, "elapsed": elapsed - sum(measured.get(section, 0.0) for section in AFTERWARDS)}


def _fractions(before: dict[str, float], after: dict[str, float]) -> Metrics:
    elapsed = after["elapsed"] - before["elapsed"]
    if elapsed <= 0.0:
        return {}
    fractions = {section: (after[section] - before[section]) / elapsed for section in SECTIONS}
    fractions["overhead"] = max(0.0, 1.0 - sum(fractions.values()))
    return {f"time/{section}_fraction": fraction for section, fraction in fractions.items()}
