"""Sweeps of trials that take a tenth of a second, and what is on record of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from rl_lab.experiment.trial import work
from rl_lab.launch.pool import Event

WORDS = [
    *("environment.num_envs=4", "+environment.kwargs.is_slippery=false", "training.phases.train.duration_steps=400"),
    *("evaluation.final_episodes=4", "evaluation.num_envs=4", "evaluation.video=false", "logging.tensorboard=false"),
]
CHEAP = {
    "experiment": "q_learning_frozenlake",
    "overrides": WORDS,
    "metric": "collect/episode_return_mean",
    "parameters": {"algorithm.epsilon": {"low": 0.01, "high": 0.9}, "algorithm.discount": [0.9, 0.99]},
}


def write(name: str = "s.yaml", **content: Any) -> Path:
    path = Path(name)
    path.write_text(yaml.safe_dump({**CHEAP, **content}, sort_keys=False))
    return path


def journal(name: str) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in Path(f"runs/sweeps/{name}/trials.jsonl").read_text().splitlines()]
    return {row["number"]: row for row in rows if "number" in row}


def facts(name: str) -> list[tuple[Any, ...]]:
    rows = journal(name)
    return [(n, rows[n]["parameters"], rows[n]["state"], rows[n]["score"], rows[n]["values"]) for n in sorted(rows)]


class PoolOfOne:
    """A pool whose only worker is this process."""

    def __init__(self, work: str, jobs: int, *, log_path: Path) -> None:
        self._tasks: list[Any] = []

    idle = property(lambda self: 1 - len(self._tasks))

    def tasks(self) -> list[Any]:
        return self._tasks

    def submit(self, task: Any) -> None:
        self._tasks.append(task)

    def events(self, timeout_s: float) -> list[Event]:
        task = self._tasks.pop()
        return [Event("done", task, work(task, lambda value: False))]

    def close(self) -> None: ...
