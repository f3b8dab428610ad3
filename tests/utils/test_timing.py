"""The stopwatch."""

from __future__ import annotations

import pytest

from rl_lab.utils import timing
from rl_lab.utils.timing import Stopwatch


def test_sections_add_up_even_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    stopwatch = Stopwatch()
    with stopwatch.section("update"):
        pass
    with pytest.raises(ValueError, match="inside"), stopwatch.section("update"):
        raise ValueError("inside")
    stopwatch.add("policy", 0.5)
    assert stopwatch.seconds == {"update": 6.0, "policy": 0.5}
    assert stopwatch.elapsed() == 20.0
