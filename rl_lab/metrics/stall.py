"""Says so when a run makes no progress at all for minutes: an environment that hangs, a lock, a disk that waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from rl_lab.metrics.pace import Reading
from rl_lab.utils.formatting import format_duration
from rl_lab.utils.ticker import Ticker

LOOKS_PER_WAIT, LONGEST_REST_S = 4, 15.0


class StallWatch:
    """Looks at the run from a thread of its own, every few seconds; each stand-still is reported once."""

    def __init__(
        self,
        probe: Callable[[], Reading],
        report: Callable[[str], None],
        *,
        minutes: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._probe, self._report, self._clock = probe, report, clock
        self._wait_s = 60.0 * (minutes or 0.0)
        self._seen: object = None
        self._since = clock()
        self._is_told = False
        rest_s = min(self._wait_s / LOOKS_PER_WAIT, LONGEST_REST_S)
        self._ticker = Ticker(self.look, rest_s) if minutes else None

    def __enter__(self) -> StallWatch:
        if self._ticker is not None:
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ticker is not None:
            self._ticker.stop()

    def look(self) -> None:
        """Anything that was counted since the last look is progress, also in an evaluation."""
        reading, now = self._probe(), self._clock()
        seen = (reading.counts, reading.activity, reading.done)
        if seen != self._seen:
            self._seen, self._since, self._is_told = seen, now, False
        elif now - self._since >= self._wait_s and not self._is_told:
            self._is_told = True
            self._report(
                f"No progress for {format_duration(now - self._since)} ({reading.activity}). If it goes on: does an "
                "environment wait for something? `environment.worker_timeout_s` restarts one in a process of its own."
            )
