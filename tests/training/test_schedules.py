"""Numbers that change over a run, in every spelling."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rl_lab.training.schedules import Schedule, parse_number, value_at
from rl_lab.types import ConfigError, Counts, Progress


def at(fraction: float = 0.0, **counts: int) -> Progress:
    return Progress(fraction=fraction, run=Counts(**counts))


def test_a_plain_number_is_itself() -> None:
    assert value_at(0.2, at(0.7)) == 0.2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [4.0, 4.0, 4.0, 4.0]),
        ("linear", [4.0, 3.25, 2.5, 1.0]),
        ("cosine", [4.0, 1.0 + 3.0 * 0.5 * (1.0 + math.sqrt(0.5)), 2.5, 1.0]),
        ("exponential", [4.0, 4.0 * 0.25**0.25, 2.0, 1.0]),
    ],
)
def test_each_kind_by_hand(kind: str, expected: list[float]) -> None:
    schedule = Schedule(kind, 4.0, 1.0)
    assert [schedule(at(fraction)) for fraction in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(expected)


@pytest.mark.parametrize("unit", ["agent_steps", "env_frames", "updates", "episodes"])
def test_named_units_count_the_run_and_stay_at_the_end(unit: str) -> None:
    schedule = Schedule("linear", 1.0, 0.0, unit=unit, over=200)
    assert [schedule(at(**{unit: amount})) for amount in (0, 50, 200, 999)] == [1.0, 0.75, 0.0, 0.0]


def test_warmup_climbs_from_zero_then_the_rest_is_shared_out() -> None:
    schedule = Schedule("linear", 1.0, 0.0, unit="updates", over=30, warmup=10)
    assert [schedule(at(updates=n)) for n in (0, 5, 10, 20, 30)] == [0.0, 0.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, 0.5),
        (3, 3.0),
        ("1e-3", 1e-3),
        ("linear(1e-3, 0)", Schedule("linear", 1e-3, 0.0)),
        (" cosine( 1 , 0.1 , warmup=0.1 )", Schedule("cosine", 1.0, 0.1, warmup=0.1)),
        (
            "linear(1e-3, 0, over=50000 agent_steps)",
            Schedule("linear", 1e-3, 0.0, unit="agent_steps", over=50000.0),
        ),
        (
            "linear(start=1, end=0, warmup=5 updates, over=50 updates)",
            Schedule("linear", 1.0, 0.0, unit="updates", over=50.0, warmup=5.0),
        ),
        ("constant(3, warmup=100 updates)", Schedule("constant", 3.0, unit="updates", over=math.inf, warmup=100.0)),
        (
            {"schedule": "exponential", "start": "1e-3", "end": 1e-4, "unit": "episodes", "over": 10},
            Schedule("exponential", 1e-3, 1e-4, unit="episodes", over=10.0),
        ),
        ({"start": 1, "end": 0}, Schedule("linear", 1.0, 0.0)),
        (Schedule("linear", 1.0, 0.0), Schedule("linear", 1.0, 0.0)),
    ],
)
def test_every_spelling(value: Any, expected: Any) -> None:
    assert parse_number(value, "algorithm.clip") == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("liner(1, 0)", "algorithm.clip: schedule 'liner' is not known.*Did you mean 'linear'"),
        ("linear(1)", "algorithm.clip: a linear schedule needs an end. Write for example"),
        ("linear(one, 0)", "algorithm.clip.start: 'one' is neither a number nor a schedule"),
        ("linear(1, 0, 3)", "algorithm.clip: a schedule has no key 'a third number'"),
        ("linear(1, 0, over=5 update)", "unit 'update' is not known.*Did you mean 'updates'"),
        ("linear(1, 0, warmup=5 updates)", "over how many updates"),
        ("linear(1, 0, warmup=5 updates, over=9 episodes)", "one schedule counts in one unit, not in updates and epis"),
        ("soon", "algorithm.clip: 'soon' is neither a number nor a schedule"),
        (True, "algorithm.clip: True is neither a number nor a schedule"),
        ([1], "is neither a number nor a schedule"),
        ({"start": 1, "ende": 0}, "a schedule has no key 'ende'.*Did you mean 'end'"),
        ({"end": 0}, "a schedule needs a start"),
        ({"start": 1, "end": 0, "over": 0}, "over is 0 fraction; allowed is 0 <= warmup < over"),
        ({"start": 1, "end": 0, "warmup": 1}, "warmup is 1 and over is 1 fraction"),
        ("exponential(1, 0)", "between numbers above 0, not from 1 to 0. Write linear, or an end such as 0.01"),
    ],
)
def test_mistakes_are_refused_with_their_place(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_number(value, "algorithm.clip")


@pytest.mark.parametrize(
    "value",
    [
        "linear(1.0, 0, over=50000 agent_steps, from=20000)",
        "linear(1.0, 0, from=20000 agent_steps, over=50000)",
        {"start": 1.0, "end": 0, "unit": "agent_steps", "over": 50000, "from": 20000},
    ],
)
def test_a_late_schedule_waits_with_its_first_value_and_then_takes_as_long(value: Any) -> None:
    schedule = parse_number(value, "optimizers.controller.learning_rate")
    values = [value_at(schedule, at(agent_steps=steps)) for steps in (0, 20000, 45000, 70000, 99999)]
    assert values == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_a_schedule_that_begins_late_in_its_phase_ends_with_the_phase() -> None:
    schedule = parse_number("linear(1.0, 0, from=0.5)", "x")
    assert [value_at(schedule, at(fraction)) for fraction in (0.0, 0.5, 0.75, 1.0)] == [1.0, 1.0, 0.5, 0.0]


def test_the_warmup_of_a_late_schedule_is_late_too() -> None:
    schedule = parse_number("linear(1.0, 0, warmup=10 updates, over=30, from=100)", "x")
    assert [value_at(schedule, at(updates=n)) for n in (0, 100, 105, 110, 120, 130)] == [0.0, 0.0, 0.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("linear(1, 0, from=1.5)", "x: from is 1.5 fraction; allowed is a number from 0 on, less than the whole phase"),
        ("linear(1, 0, over=9 updates, from=-1)", "x: from is -1 updates; allowed is a number from 0 on."),
        ("linear(1, 0, over=9 updates, from=3 episodes)", "one schedule counts in one unit"),
        ("linear(1, 0, form=0.5)", "Did you mean 'from'?"),
    ],
)
def test_a_wrong_beginning_is_refused(value: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_number(value, "x")
    assert sentence in str(refused.value)
