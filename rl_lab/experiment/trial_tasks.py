"""What a sweep and its workers say to each other. It imports nothing large: a sweep starts its workers, which import
torch, and does not wait for an import of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrialRun:
    """What a worker needs to know."""

    run_id: str
    experiment: str | None
    overrides: tuple[str, ...]
    runs_dir: Path
    config_dir: Path | None
    tag: str
    metric: str
    score: str
    direction: str
    is_reporting: bool  # ask the parent about every value of the metric: it may prune the run


@dataclass(frozen=True)
class TrialResult:
    """`finished`, `pruned`, `failed`, `interrupted` or, for another run in its place, `refused`."""

    state: str
    score: float | None = None
    values: tuple[float, ...] = ()
    logged: tuple[str, ...] = ()  # metrics there were, where the sweep's own never came
    message: str = ""
    seconds: float = 0.0  # of training, as the run's own status counts them
    task_seconds: float = 0.0  # that the worker took in all


@dataclass(frozen=True)
class TrialCheck:
    """A config to build and throw away before the first trial starts."""

    label: str  # `parameters.algorithm.discount=2`
    experiment: str | None
    overrides: tuple[str, ...]
    config_dir: Path | None
    metric: str
    has_pruner: bool
