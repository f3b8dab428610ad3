"""What a display knows of a run: the newest values, their recent past, and what the run is doing right now."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rl_lab.metrics.names import COUNTERS, is_wall_clock, label_of, rank_of
from rl_lab.metrics.pace import Pace, Reading
from rl_lab.metrics.series import pack_series, unpack_series
from rl_lab.metrics.writers import Row
from rl_lab.types import Counts, StateTree
from rl_lab.utils.formatting import arrow_of, format_number, sparkline
from rl_lab.utils.text import printable

HISTORY_ROWS = 240  # rows a sparkline looks back
TRAINING_RETURN, EVALUATION_RETURN = "collect/episode_return_mean", "eval/episode_return_mean"
EPISODE_LENGTH = "collect/episode_length_mean"
HEADLINES = (TRAINING_RETURN, EVALUATION_RETURN, EPISODE_LENGTH)  # shown first, then the highlights, then the rest
QUIET_NAMES = ("train/phase_fraction", "train/phase_index")  # the progress bar says it already
FAULTS = ("collect/environment_restarts",)  # worth a line once there are any


@dataclass(frozen=True)
class Curve:
    """One line of the table of metrics."""

    label: str
    value: str
    arrow: str  # agrees with the end of the sparkline
    sparkline: str
    is_highlight: bool
    note: str = ""


@dataclass
class RunView:
    """Plain data; the renderers read it and nothing else. Rows fill it; between them `look` keeps it up to date."""

    title: str
    total: int | None = None  # agent steps of the whole run, where known
    highlight: Sequence[str] = ()  # metrics to show next after return and length, in this order
    digits: int = 4
    phase_fraction: float = 0.0
    phase_name: str = ""
    phase_index: int = 0
    phase_count: int = 1
    latest: Row = field(default_factory=dict)  # newest value of every name seen
    history: dict[str, deque[float]] = field(default_factory=dict)
    best_evaluation: float | None = None
    reading: Reading | None = None  # newer than the newest row, where somebody looks
    pace: Pace = field(default_factory=Pace)
    display_fraction: float | None = None  # of the time that showing all this takes

    def __post_init__(self) -> None:
        self._rows = 0
        self._moving: set[str] = set()  # metrics that have changed
        self._row_speed: float | None = None  # agent steps per second of the newest row in which there were any
        self._drawn: dict[tuple[str, int], tuple[int, str, str]] = {}  # after how many rows drawn: sparkline, arrow

    def take(self, row: Row) -> None:
        """Remember a row. A metric that a row lacks keeps its last value."""
        if row.get("agent_steps", 0) > self.latest.get("agent_steps", 0) and "time/agent_steps_per_second" in row:
            self._row_speed = row["time/agent_steps_per_second"]
        self.latest.update(row)
        self._rows += 1
        for name, value in row.items():
            if name not in COUNTERS and not is_wall_clock(name):
                values = self.history.setdefault(name, deque(maxlen=HISTORY_ROWS))
                if values and values[-1] != value:
                    self._moving.add(name)
                values.append(float(value))
        score = row.get(EVALUATION_RETURN, math.nan)
        if score == score and (self.best_evaluation is None or score > self.best_evaluation):
            self.best_evaluation = score

    def look(self, reading: Reading) -> None:
        """Take a look at the counters between two rows. Counters never fall, even where one is added in two places."""
        before = self.counts
        counts = {name: max(value, getattr(before, name)) for name, value in reading.counts.as_dict().items()}
        self.reading = replace(reading, counts=Counts(**counts))
        self.phase_fraction, self.phase_name = reading.phase_fraction, printable(reading.phase_name)
        self.phase_index, self.phase_count = reading.phase_index, reading.phase_count
        self.reading = replace(self.reading, run_fraction=self.run_fraction)
        self.pace.take(self.reading)

    @property
    def counts(self) -> Counts:
        if self.reading is not None:
            return self.reading.counts
        return Counts(**{name: int(self.latest.get(name, 0)) for name in Counts().as_dict()})

    @property
    def wall_s(self) -> float:
        return self.reading.wall_s if self.reading is not None else float(self.latest.get("wall_s", 0.0))

    @property
    def run_fraction(self) -> float:
        """By agent steps where the total is known, otherwise phases count alike."""
        if self.total:
            fraction = self.counts.agent_steps / self.total
        else:
            fraction = (self.phase_index + self.phase_fraction) / max(1, self.phase_count)
        return min(1.0, max(0.0, fraction))

    @property
    def eta_s(self) -> float | None:
        """From the last looks, else the run's own estimate, else by rule of three."""
        if self.reading is not None:
            return self.pace.eta_s(self.reading)
        fraction = self.run_fraction
        if "time/eta_s" in self.latest and fraction < 1.0:  # the last row has none of its own
            return self.latest["time/eta_s"]
        return self.latest.get("wall_s", 0.0) * (1.0 - fraction) / fraction if fraction > 0.0 else None

    @property
    def agent_steps_per_second(self) -> int | None:
        """From the last looks, else the newest row's that collected anything, else the mean; rounded, and never 0."""
        live = self.pace.agent_steps_per_second if self.reading is not None else None
        mean = self.counts.agent_steps / self.wall_s if self.wall_s > 0.0 else None
        speed = live or self._row_speed or mean
        return round(speed) or None if speed else None

    def table_names(self, limit: int) -> list[str]:
        """Which metrics are shown: return and length first, then the highlights, then the rest as names.md lists them;
        what never changes comes last."""
        first = [*HEADLINES, *(name for name in self.highlight if name not in HEADLINES)]
        others = [name for name in self.history if name not in first and name not in QUIET_NAMES]
        others = [name for name in others if name not in FAULTS or self.latest.get(name)]
        others.sort(key=lambda name: (name not in self._moving, rank_of(name)))
        return [*(name for name in first if name in self.history), *others][:limit]

    def curve(self, name: str, width: int) -> Curve:
        """A metric with its recent past in `width` blocks."""
        values = self.history[name]
        rows, drawn, arrow = self._drawn.get((name, width), (-1, "", ""))
        if rows != self._rows:
            drawn = sparkline(list(values), width=width)
            arrow = arrow_of(drawn)
            self._drawn[name, width] = (self._rows, drawn, arrow)
        best = self.best_evaluation if name == EVALUATION_RETURN else None
        return Curve(
            label=label_of(name),
            value=self.number(self.newest(name)),
            arrow=arrow,
            sparkline=drawn,
            is_highlight=name in HEADLINES[:2] or name in self.highlight,
            note="" if best is None else f"best {self.number(best)}",
        )

    def newest(self, name: str) -> float | None:
        """As the last look saw it, else as the newest row says."""
        seen = {} if self.reading is None else self.reading.newest
        return seen[name] if name in seen else self.latest.get(name)

    def number(self, value: float | None) -> str:
        return format_number(value, self.digits)

    def get_state(self) -> StateTree:
        return {"history": pack_series(self.history), "best_evaluation": self.best_evaluation}

    def set_state(self, state: StateTree) -> None:
        histories = unpack_series(state["history"])
        self.history = {name: deque(values, maxlen=HISTORY_ROWS) for name, values in histories.items()}
        self.latest = {name: values[-1] for name, values in histories.items() if values}
        self._moving = {name for name, values in histories.items() if len(set(values)) > 1}
        self.best_evaluation = state["best_evaluation"]
