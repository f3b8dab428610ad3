"""What the terminal knows of a run: the newest values, their recent past, progress and messages."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rl_lab.metrics.names import COUNTERS, is_wall_clock
from rl_lab.metrics.series import pack_series, unpack_series
from rl_lab.metrics.writers import Level, Row
from rl_lab.types import StateTree

HISTORY_ROWS = 240  # rows a sparkline looks back
EVALUATION_RETURN = "eval/episode_return_mean"

HEADLINES = {
    "collect/episode_return_mean": "episode return",
    EVALUATION_RETURN: "evaluation return",
    "collect/episode_length_mean": "episode length",
    "controller/entropy": "entropy",
    "controller/approx_kl": "KL",
    "train/model_kl": "model KL",
    "controller/clip_fraction": "clip fraction",
    "train/explained_variance": "explained variance",
    "loss/policy": "policy loss",
    "loss/value": "value loss",
    "train/grad_norm": "gradient norm",
    "train/learning_rate": "learning rate",
}
"""Shown first, in this order, by these words; other metrics follow by name."""

QUIET_NAMES = ("train/phase_fraction", "train/phase_index")  # the progress bar says it already


@dataclass
class RunView:
    """Plain data; the renderers read it and nothing else."""

    title: str
    total: int | None = None  # agent steps of the whole run, where known
    phase_fraction: float = 0.0
    phase_name: str = ""
    phase_index: int = 0
    phase_count: int = 1
    latest: Row = field(default_factory=dict)  # newest value of every name seen
    history: dict[str, deque[float]] = field(default_factory=dict)
    best_evaluation: float | None = None
    messages: deque[tuple[Level, str]] = field(default_factory=lambda: deque(maxlen=4))

    def take(self, row: Row) -> None:
        """Remember a row. A metric that a row lacks keeps its last value."""
        self.latest.update(row)
        for name, value in row.items():
            if name not in COUNTERS and not is_wall_clock(name):
                self.history.setdefault(name, deque(maxlen=HISTORY_ROWS)).append(float(value))
        score = row.get(EVALUATION_RETURN, math.nan)
        if score == score and (self.best_evaluation is None or score > self.best_evaluation):
            self.best_evaluation = score

    @property
    def run_fraction(self) -> float:
        """By agent steps where the total is known, otherwise phases count alike."""
        if self.total:
            fraction = self.latest.get("agent_steps", 0) / self.total
        else:
            fraction = (self.phase_index + self.phase_fraction) / max(1, self.phase_count)
        return min(1.0, max(0.0, fraction))

    @property
    def eta_s(self) -> float | None:
        """The run's own estimate, otherwise by rule of three."""
        if "time/eta_s" in self.latest:
            return self.latest["time/eta_s"]
        fraction = self.run_fraction
        return self.latest.get("wall_s", 0.0) * (1.0 - fraction) / fraction if fraction > 0.0 else None

    @property
    def agent_steps_per_second(self) -> int | None:
        """The run's own measure, otherwise the mean since its beginning; rounded."""
        wall_s = self.latest.get("wall_s", 0.0)
        mean = self.latest.get("agent_steps", 0) / wall_s if wall_s > 0.0 else None
        rate = self.latest.get("time/agent_steps_per_second", mean)
        return None if rate is None else round(rate)

    def table_names(self, limit: int) -> list[str]:
        """Which metrics the table shows: headlines first, then the rest by name."""
        headlines = [name for name in HEADLINES if name in self.history]
        others = sorted(name for name in self.history if name not in HEADLINES and name not in QUIET_NAMES)
        return [*headlines, *others][:limit]

    def get_state(self) -> StateTree:
        return {"history": pack_series(self.history), "best_evaluation": self.best_evaluation}

    def set_state(self, state: StateTree) -> None:
        histories = unpack_series(state["history"])
        self.history = {name: deque(values, maxlen=HISTORY_ROWS) for name, values in histories.items()}
        self.latest = {name: values[-1] for name, values in histories.items() if values}
        self.best_evaluation = state["best_evaluation"]
