"""Few runs, honest numbers: interquartile mean, bootstrap intervals, probability of improvement.

The definitions are those of Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical
Precipice", and of their library rliable: scores are runs by tasks, resampling is stratified by task. Runs of one task
are one array, so that tasks may have different numbers of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Scores = Sequence[np.ndarray]  # one array of runs for each task, or [repetitions, runs] of resampled ones
CONFIDENCE = 0.95
REPETITIONS = 10_000
IMPROVEMENT_REPETITIONS = 2_000  # rliable's own number: each is a comparison of all pairs
_TRIMMED = 0.25  # on each side


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval; NaN where one run is all there is."""

    value: float
    low: float
    high: float

    def turned(self) -> Estimate:
        """Of a probability: that of the contrary."""
        return Estimate(1.0 - self.value, 1.0 - self.high, 1.0 - self.low)


def interquartile_mean(scores: Scores) -> np.ndarray:
    """The mean of the middle half of all runs of all tasks; of n runs, floor(n / 4) are left out on each side."""
    pooled = np.sort(np.concatenate(scores, axis=-1), axis=-1)
    count = pooled.shape[-1]
    cut = int(_TRIMMED * count)
    middle: np.ndarray = pooled[..., cut : count - cut].mean(axis=-1)
    return middle


def mean(scores: Scores) -> np.ndarray:
    """The mean over tasks of the mean over runs."""
    return np.mean([runs.mean(axis=-1) for runs in scores], axis=0)


def median(scores: Scores) -> np.ndarray:
    """The median over tasks of the mean over runs. Of a single task that would be the mean, so there it is the median
    over runs."""
    if len(scores) == 1:
        return np.asarray(np.median(scores[0], axis=-1))
    return np.asarray(np.median([runs.mean(axis=-1) for runs in scores], axis=0))


def improvement(ours: Scores, theirs: Scores) -> np.ndarray:
    """The mean over tasks of P(X > Y), a run of ours against one of theirs; a tie counts half (Mann-Whitney U)."""
    chances = []
    for x, y in zip(ours, theirs, strict=True):
        difference = x[..., :, None] - y[..., None, :]
        chances.append(((difference > 0) + 0.5 * (difference == 0)).mean(axis=(-2, -1)))
    return np.mean(chances, axis=0)


AGGREGATES: Mapping[str, Callable[[Scores], np.ndarray]] = {
    "IQM": interquartile_mean,
    "mean": mean,
    "median": median,
}


def estimate(aggregate: Callable[[Scores], np.ndarray], scores: Scores, *, seed: int = 0) -> Estimate:
    """An aggregate of all runs, with its percentile bootstrap interval; the same seed gives the same interval."""
    samples = None if _is_single(scores) else aggregate(_resampled(scores, REPETITIONS, np.random.default_rng(seed)))
    return _estimate(float(aggregate(scores)), samples)


def estimate_improvement(ours: Scores, theirs: Scores, *, seed: int = 0) -> Estimate:
    """Probability of improvement over another method in the same tasks, with its interval where both have several
    runs: of one run nobody knows how far another would lie from it."""
    generator = np.random.default_rng(seed)
    samples = None
    if not (_is_single(ours) or _is_single(theirs)):
        resampled = (_resampled(each, IMPROVEMENT_REPETITIONS, generator) for each in (ours, theirs))
        samples = improvement(*resampled)
    return _estimate(float(improvement(ours, theirs)), samples)


def band(values: np.ndarray, *, seed: int = 0, repetitions: int = 1_000) -> tuple[np.ndarray, np.ndarray]:
    """The 95 % interval of the mean over runs, `[runs, points]`, at every point."""
    picks = np.random.default_rng(seed).integers(len(values), size=(repetitions, len(values)))
    weights = np.zeros((repetitions, len(values)))
    np.add.at(weights, (np.arange(repetitions)[:, None], picks), 1.0 / len(values))
    low, high = np.quantile(weights @ values, _TAILS, axis=0)
    return low, high


_TAILS = ((1.0 - CONFIDENCE) / 2.0, 1.0 - (1.0 - CONFIDENCE) / 2.0)


def _estimate(value: float, samples: np.ndarray | None) -> Estimate:
    low, high = (np.nan, np.nan) if samples is None else np.quantile(samples, _TAILS)
    return Estimate(value, float(low), float(high))


def _is_single(scores: Scores) -> bool:
    return all(len(runs) < 2 for runs in scores)


def _resampled(scores: Scores, repetitions: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Runs drawn with replacement within each task: `[repetitions, runs]` each."""
    return [runs[generator.integers(len(runs), size=(repetitions, len(runs)))] for runs in scores]
