"""When something is due."""

from __future__ import annotations

import pytest

from rl_lab.orchestration.cadence import Cadence, DueMarks
from rl_lab.types import ConfigError, Counts


def test_due_once_for_each_multiple_that_was_passed() -> None:
    marks = DueMarks(Cadence(every_steps=100))
    answers = [marks.due(Counts(agent_steps=steps), 0.0) for steps in (0, 99, 100, 100, 199, 450, 499, 500)]
    assert answers == [False, False, True, False, False, True, False, True]


def test_updates_count_apart_from_steps() -> None:
    marks = DueMarks(Cadence(every_updates=2))
    answers = [marks.due(Counts(agent_steps=10_000, updates=updates), 0.0) for updates in (1, 2, 3, 4)]
    assert answers == [False, True, False, True]


def test_any_of_several_units_suffices() -> None:
    marks = DueMarks(Cadence(every_steps=100, every_updates=3))
    assert marks.due(Counts(agent_steps=100, updates=1), 0.0)
    assert not marks.due(Counts(agent_steps=150, updates=2), 0.0)
    assert marks.due(Counts(agent_steps=160, updates=3), 0.0)


def test_minutes_run_from_the_last_time_it_was_due() -> None:
    marks = DueMarks(Cadence(every_minutes=2.0))
    answers = [marks.due(Counts(), seconds) for seconds in (119.0, 121.0, 239.0, 240.9, 241.0)]
    assert answers == [False, True, False, False, True]


def test_never_due_without_a_unit() -> None:
    assert not DueMarks(Cadence()).due(Counts(agent_steps=10**9, updates=10**9), 1e9)


def test_marks_survive_a_round_trip() -> None:
    marks = DueMarks(Cadence(every_steps=100, every_updates=10))
    marks.due(Counts(agent_steps=250, updates=25), 0.0)
    fresh = DueMarks(marks.cadence)
    fresh.set_state(marks.get_state())
    assert not fresh.due(Counts(agent_steps=299, updates=29), 0.0)
    assert fresh.due(Counts(agent_steps=300, updates=29), 0.0)


@pytest.mark.parametrize("name", ["every_steps", "every_updates", "every_minutes"])
def test_a_cadence_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"evaluation\.{name} is 0: write a number above 0, or null for never"):
        Cadence(**{name: 0}, place="evaluation")


def test_a_longer_run_with_a_coarser_cadence_is_due_at_its_next_multiple() -> None:
    """A finished run that goes on has other marks: nine of 100 steps are two of 400."""
    before = DueMarks(Cadence(every_steps=100))
    assert before.due(Counts(agent_steps=900), 0.0)
    after = DueMarks(Cadence(every_steps=400))
    after.set_state(before.get_state())
    assert not after.due(Counts(agent_steps=1100), 0.0)
    assert after.due(Counts(agent_steps=1200), 0.0)
