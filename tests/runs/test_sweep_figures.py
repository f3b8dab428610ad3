"""What the parameters of a sweep explain, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from rl_lab.runs.sweep_figures import importance


def test_the_share_of_variance_is_omega_squared() -> None:
    """Groups (1, 3) and (5, 7): sums of squares 20 in all and 4 within, noise 4/2 = 2, so (16 - 2) / (20 + 2)."""
    parameters = [{"kind": kind, "same": 1} for kind in ("a", "a", "b", "b")]
    shares = importance(parameters, [1.0, 3.0, 5.0, 7.0])
    assert shares["kind"] == pytest.approx(14 / 22) and shares["same"] == 0.0
    assert list(shares) == ["kind", "same"], "greatest first"


def test_numbers_fall_into_bins_of_equally_many_trials() -> None:
    parameters = [{"rate": 10.0**-n, "odd": n % 2 == 1} for n in range(8)]
    scores = [float(n // 2) for n in range(8)]
    assert importance(parameters, scores) == {"rate": 1.0, "odd": 0.0}


def test_equal_scores_and_single_trials_explain_nothing() -> None:
    assert importance([{"a": 1}, {"a": 2}, {"a": 1}], [2.0, 2.0, 2.0]) == {"a": 0.0}
    assert importance([{"a": 1}], [2.0]) == {}
