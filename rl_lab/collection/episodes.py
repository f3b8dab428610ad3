"""Running returns and lengths of N environments, and the statistics of the latest finished episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rl_lab.types import EnvRows, Episode, Metrics, StateTree


def episode_quota(episodes: int, num_envs: int) -> np.ndarray:
    """How many episodes each environment plays: as many as any other, or one more."""
    return episodes // num_envs + (np.arange(num_envs) < episodes % num_envs)


def outcome_metrics(outcomes: Iterable[Mapping[str, float]], *, prefix: str) -> Metrics:
    """The mean of every outcome over the episodes that have it, and Crafter's score where there are achievements."""
    values: dict[str, list[float]] = {}
    for outcome in filter(None, outcomes):
        for name, value in outcome.items():
            if not np.isnan(value):
                values.setdefault(name, []).append(value)
    means = {name: float(np.mean(each)) for name, each in values.items()}
    metrics: Metrics = {f"{prefix}/outcome/{name}": mean for name, mean in means.items()}
    rates = [mean for name, mean in means.items() if name.startswith("achievement/")]
    if rates:  # Hafner 2021: the geometric mean of success rates in percent, so that rare achievements count
        metrics[f"{prefix}/achievement_score"] = float(np.expm1(np.mean(np.log1p(100.0 * np.array(rates)))))
    return metrics


class EpisodeTracker:
    """Adds up rewards per environment; a time step that says is_last finishes an episode."""

    def __init__(self, num_envs: int, *, window: int = 100) -> None:
        self._returns = np.zeros(num_envs, dtype=np.float64)
        self.lengths = np.zeros(num_envs, dtype=np.int64)
        self._recent: deque[tuple[float, int]] = deque(maxlen=window)
        self._outcomes: deque[dict[str, float]] = deque(maxlen=window)  # of the same episodes
        self._metrics: Metrics | None = {}  # None: episodes have finished since

    def track(self, rows: EnvRows) -> list[Episode]:
        """Count what arrived: an is_first row starts at zero, every other row is one agent step."""
        self._returns += rows.reward
        self.lengths += 1
        if np.count_nonzero(rows.is_first):  # of booleans, a tenth of what any() takes
            self._returns[rows.is_first] = 0.0
            self.lengths[rows.is_first] = 0
        if not np.count_nonzero(rows.is_last):
            return []
        finished = [
            self._episode(
                i,
                is_terminal=bool(rows.is_terminal[i]),
                outcome={name: float(values[i]) for name, values in rows.outcome.items()},
            )
            for i in np.flatnonzero(rows.is_last).tolist()
        ]
        self._recent.extend((episode.episode_return, episode.length) for episode in finished)
        self._outcomes.extend(episode.outcome for episode in finished)
        self._metrics = None
        return finished

    def cut(self, env_indices: np.ndarray) -> list[Episode]:
        """Episodes under way, as they stand."""
        return [self._episode(i, is_terminal=False, is_cut=True) for i in env_indices.tolist()]

    def _episode(self, i: int, **how: Any) -> Episode:
        return Episode(i, float(self._returns[i]), int(self.lengths[i]), **how)

    def metrics(self) -> Metrics:
        """Statistics of the last episodes, empty before the first one ends."""
        if self._metrics is None:
            returns, lengths = zip(*self._recent, strict=True)
            self._metrics = {
                "collect/episode_return_mean": float(np.add.reduce(returns) / len(returns)),
                "collect/episode_return_min": min(returns),
                "collect/episode_return_max": max(returns),
                "collect/episode_length_mean": sum(lengths) / len(lengths),
                **outcome_metrics(self._outcomes, prefix="collect"),
            }
        return dict(self._metrics)

    def get_state(self) -> StateTree:
        return {
            "returns": self._returns.copy(),
            "lengths": self.lengths.copy(),
            "recent": [list(episode) for episode in self._recent],
            "outcomes": list(self._outcomes),
        }

    def set_state(self, state: StateTree) -> None:
        self._returns = np.asarray(state["returns"]).copy()
        self.lengths = np.asarray(state["lengths"]).copy()
        self._recent.clear()
        self._metrics = None if state["recent"] else {}
        self._recent.extend((float(episode_return), int(length)) for episode_return, length in state["recent"])
        self._outcomes.clear()
        self._outcomes.extend(
            {name: float(value) for name, value in each.items()} for each in state.get("outcomes", ())
        )
