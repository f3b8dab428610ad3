"""Aggregates, intervals and probabilities of improvement against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rl_lab.runs.statistics import (
    band,
    estimate,
    estimate_improvement,
    improvement,
    interquartile_mean,
    mean,
    median,
)


def arrays(*tasks: list[float]) -> list[np.ndarray]:
    return [np.asarray(task, dtype=float) for task in tasks]


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ([[8.0, 1, 2, 7, 3, 6, 4, 5]], (3 + 4 + 5 + 6) / 4),  # two of eight are left out on each side
        ([[1.0, 2, 3, 100]], 2.5),
        ([[1.0, 2, 9]], 4.0),  # floor(3 / 4) = 0: of three runs none is left out
        ([[1.0, 2], [3, 100]], 2.5),  # runs of all tasks together
        ([[5.0]], 5.0),
    ],
)
def test_the_interquartile_mean_is_that_of_the_middle_half(tasks: list[list[float]], expected: float) -> None:
    assert interquartile_mean(arrays(*tasks)) == pytest.approx(expected)


def test_mean_and_median_are_taken_over_tasks() -> None:
    tasks = arrays([0.0, 2.0], [10.0, 20.0, 30.0], [5.0])
    assert mean(tasks) == pytest.approx((1 + 20 + 5) / 3)
    assert median(tasks) == pytest.approx(5.0)  # of the tasks' means 1, 20 and 5
    assert median(arrays([1.0, 2.0, 30.0])) == 2.0  # of one task: over its runs


def test_the_probability_of_improvement_counts_pairs_and_halves_ties() -> None:
    # 1 < 2, 1 < 3, 3 > 2, 3 = 3: (0 + 0 + 1 + 0.5) of four pairs
    assert improvement(arrays([1.0, 3.0]), arrays([2.0, 3.0])) == pytest.approx(0.375)
    assert improvement(arrays([1.0, 3.0], [9.0]), arrays([2.0, 3.0], [8.0])) == pytest.approx((0.375 + 1.0) / 2)
    assert improvement(arrays([2.0]), arrays([2.0])) == 0.5


def test_an_interval_is_the_percentile_bootstrap() -> None:
    # The mean of two draws from 0 and 1 is 0, 0.5 or 1 with chances 1/4, 1/2, 1/4: both ends lie beyond 2.5 %.
    found = estimate(mean, arrays([0.0, 1.0]))
    assert (found.value, found.low, found.high) == (0.5, 0.0, 1.0)
    # Of 100 draws from a fair coin: 0.5 -+ 1.96 * sqrt(0.25 / 100)
    found = estimate(mean, arrays([0.0] * 50 + [1.0] * 50))
    assert found.low == pytest.approx(0.402, abs=0.015) and found.high == pytest.approx(0.598, abs=0.015)
    assert estimate(interquartile_mean, arrays([3.0, 3.0, 3.0])).low == 3.0


def test_resampling_stays_within_each_task() -> None:
    found = estimate(mean, arrays([1.0, 1.0], [100.0, 100.0]))
    assert (found.low, found.value, found.high) == (50.5, 50.5, 50.5)


def test_one_run_has_no_interval() -> None:
    found = estimate(median, arrays([7.0]))
    assert found.value == 7.0 and math.isnan(found.low) and math.isnan(found.high)
    assert math.isnan(estimate_improvement(arrays([7.0]), arrays([6.0])).low)
    assert math.isnan(estimate_improvement(arrays([7.0, 8.0]), arrays([6.0])).low), "one run has no spread"


def test_the_same_seed_gives_the_same_interval() -> None:
    runs = [np.arange(20.0) ** 2]
    assert estimate(mean, runs) == estimate(mean, runs)
    assert estimate(mean, runs, seed=1) != estimate(mean, runs)
    assert estimate_improvement(runs, arrays([2.0, 3.0])) == estimate_improvement(runs, arrays([2.0, 3.0]))


def test_an_improvement_that_is_certain_has_a_certain_interval() -> None:
    found = estimate_improvement(arrays([5.0, 6.0]), arrays([1.0, 2.0]))
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)


def test_a_band_is_the_interval_of_the_mean_at_each_point() -> None:
    low, high = band(np.asarray([[0.0, 5.0], [1.0, 5.0]]))
    assert low == pytest.approx([0.0, 5.0]) and high == pytest.approx([1.0, 5.0])
