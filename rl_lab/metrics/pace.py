"""How fast a run goes and when it will be over, from a few looks at its counters a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_lab.types import Counts

TRAINING_WINDOW_S, RUN_WINDOW_S = 15.0, 60.0  # how far back speed and time left look


@dataclass(frozen=True)
class Reading:
    """What a run is doing right now, read from the counters that its loop keeps."""

    counts: Counts  # those of a collection under way included
    wall_s: float
    run_fraction: float
    phase_name: str = ""
    phase_index: int = 0
    phase_count: int = 1
    phase_fraction: float = 0.0
    activity: str = "training"
    activity_s: float = 0.0  # for so long
    done: int = 0  # of `total` parts of the activity, where it counts them
    total: int = 0
    is_ending: bool = False  # the training itself is over, maybe before its last step
    newest: Mapping[str, float] = field(default_factory=dict)  # metrics that are known before the next row is due
    is_training: bool = True  # else it evaluates, saves, compiles, ...: its speed is that of the training before


class Pace:
    """Speeds are those of the last seconds of training, so that an evaluation does not make them fall to 0."""

    def __init__(self) -> None:
        self._training: deque[tuple[float, float, float]] = deque()  # seconds of training, agent steps, updates
        self._run: deque[tuple[float, float]] = deque()  # seconds, fraction of the run
        self._phase = -1
        self._clock = 0.0  # seconds of training seen so far
        self._last_wall_s: float | None = None

    def take(self, reading: Reading) -> None:
        """Look at the run once more."""
        passed = 0.0 if self._last_wall_s is None else max(0.0, reading.wall_s - self._last_wall_s)
        self._last_wall_s = reading.wall_s
        if reading.phase_index != self._phase:  # a phase that learns says nothing of one that only collects
            self._phase = reading.phase_index
            self._training.clear()
            self._run.clear()
        if reading.is_training or not self._training:
            self._clock += passed
            self._training.append((self._clock, reading.counts.agent_steps, reading.counts.updates))
            _forget(self._training, TRAINING_WINDOW_S)
        self._run.append((reading.wall_s, reading.run_fraction))
        _forget(self._run, RUN_WINDOW_S)

    @property
    def agent_steps_per_second(self) -> float | None:
        return self._speed(1)

    @property
    def updates_per_second(self) -> float | None:
        return self._speed(2)

    def _speed(self, place: int) -> float | None:
        if not self._training:
            return None
        first, last = self._training[0], self._training[-1]
        return (last[place] - first[place]) / (last[0] - first[0]) if last[0] > first[0] else None

    def eta_s(self, reading: Reading) -> float | None:
        """Seconds until the run, or what comes after its last step, is over; None where nothing tells."""
        if reading.run_fraction >= 1.0 or reading.is_ending:
            fraction = reading.done / reading.total if reading.total else 0.0
            return reading.activity_s * (1.0 - fraction) / fraction if fraction > 0.0 else None
        first, last = self._run[0], self._run[-1]
        gained = last[1] - first[1]
        return (last[0] - first[0]) * (1.0 - last[1]) / gained if gained > 0.0 else None


def _forget(window: deque[Any], seconds: float) -> None:
    """Drop what is older than `seconds`, as long as what moves is still seen to move: a slow run has a speed, too."""
    while len(window) > 2 and window[-1][0] - window[1][0] >= seconds:
        newest = window[-1]
        if _moved(window[1], newest) != _moved(window[0], newest):
            return
        window.popleft()


def _moved(old: tuple[float, ...], new: tuple[float, ...]) -> list[bool]:
    return [after > before for before, after in zip(old[1:], new[1:], strict=True)]
