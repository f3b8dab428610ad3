"""Sweep files: what they may say, and the sentence for everything else."""

from __future__ import annotations

from typing import Any

import pytest

from rl_lab.launch.sweep_plan import Parameter, SweepPlan, read_plan
from rl_lab.types import ConfigError

RATE = {"optimizers.controller.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}
TWO = {**RATE, "algorithm.discount": {"low": 0.9, "high": 0.99}}


def read(**content: Any) -> SweepPlan:
    content = {"experiment": "ppo_cartpole", "parameters": RATE, **content}
    return read_plan(content, place="s.yaml", default_name="s", default_jobs=2)


def test_a_short_file_is_a_bayesian_search_for_the_return() -> None:
    plan = read()
    assert (plan.name, plan.sampler, plan.pruner, plan.trials, plan.seeds) == ("s", "tpe", "none", 20, (0,))
    assert (plan.metric, plan.score, plan.direction) == ("eval/episode_return_mean", "last", "maximize")
    assert (plan.jobs, plan.parallel) == (2, 4)
    assert read(jobs=9).parallel == 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"sampler": "tpa"}, "sampler is 'tpa'. Did you mean 'tpe'?"),
        ({"metrics": "x"}, "metrics is not a key of a sweep. Did you mean 'metric'?"),
        ({"pruner": "medain"}, "Did you mean 'median'?"),
        ({"direction": "up"}, "Allowed: maximize, minimize"),
        ({"score": "mean"}, "Allowed: last, best"),
        ({"trials": 0}, "trials is 0: write a whole number of at least 1"),
        ({"minutes": -1}, "minutes is -1: write a number above 0"),
        ({"seeds": []}, "seeds is []: write how many"),
        ({"seeds": [1, 1]}, "a list of different seeds"),
        ({"name": "a b"}, "the name 'a b' begins the ids of its runs"),
        ({"overrides": "x=1"}, "overrides is 'x=1': write a list of words"),
        ({"overrides": ["seed=1"]}, "seed is set by the sweep itself"),
        ({"parameters": {"seed": [1, 2]}}, "seed is set by the sweep itself"),
        ({"overrides": ["a.b=1"], "parameters": {"a.b": [1, 2]}}, "a.b stands among the parameters and the overrides"),
        ({"parameters": {}}, "write what to search over"),
        ({"parameters": {"a": []}}, "parameters.a is an empty list"),
        ({"parameters": {"a": [1, 1]}}, "the same value stands there twice"),
        ({"parameters": {"a": 3}}, "write a list of values, or a range"),
        ({"parameters": {"a": {"low": 1}}}, "parameters.a.high is None: write a number"),
        ({"parameters": {"a": {"low": 1, "hihg": 2}}}, "parameters.a.hihg is unknown. Did you mean 'high'?"),
        ({"parameters": {"a": {"low": 2, "high": 2}}}, "the range from 2 to 2 is empty"),
        ({"parameters": {"a": {"low": 3, "high": 2}}}, "the range from 3 to 2 is empty"),
        ({"parameters": {"a": {"low": 0, "high": 2, "log": True}}}, "a logarithmic range cannot begin at 0"),
        ({"parameters": {"a": {"low": 1, "high": 2, "log": 1}}}, "log is 1: write true or false"),
        ({"parameters": {"a": {"low": 1, "high": 2, "log": True, "step": 1}}}, "log and step exclude each other"),
        ({"parameters": {"a": {"low": 1, "high": 2, "step": 3}}}, "step is 3: write a number above 0 that fits"),
        ({"parameters": {"a": {"low": 1, "high": 2, "count": 3}}}, "count is for `sampler: grid`"),
        ({"sampler": "grid"}, "has no points for a grid: write a list, or add `step` or `count`"),
        ({"sampler": "grid", "parameters": {"a": {"low": 1, "high": 2, "count": 1}}}, "count is 1"),
        ({"sampler": "grid", "parameters": {"a": [1, 2]}, "trials": 3}, "trials is 3, but the grid has 2 points"),
        ({"sampler": "grid", "parameters": {c: list(range(20)) for c in "abcd"}}, "the grid has 160,000 points"),
        ({"sampler": "cmaes", "parameters": {**TWO, "memory": ["none", "gru"]}}, "CMA-ES searches over numbers"),
        ({"sampler": "cmaes"}, "CMA-ES needs at least two parameters"),
    ],
)
def test_a_mistake_is_refused_with_its_cure(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**content)
    assert message in str(caught.value) and str(caught.value).startswith("s.yaml")


def test_overrides_of_the_command_line_are_checked_like_those_of_the_file() -> None:
    content = {"parameters": RATE, "overrides": ["a.b=1"]}
    options = {"place": "s.yaml", "default_name": "s", "default_jobs": 1}
    assert read_plan(content, **options, overrides=["c.d=2"]).overrides == ("a.b=1", "c.d=2")
    for word, message in (("seed=3", "seed is set by the sweep"), (f"{next(iter(RATE))}=1", "stands among")):
        with pytest.raises(ConfigError, match=message):
            read_plan(content, **options, overrides=[word])


def test_a_grid_tries_every_combination_once() -> None:
    parameters = {"a": [1, 2], "b": {"low": 0.0, "high": 1.0, "count": 3}, "c": {"low": 1, "high": 5, "step": 2}}
    plan = read(sampler="grid", parameters=parameters)
    points = plan.grid_points()
    assert plan.trials == len(points) == 2 * 3 * 3
    assert points[0] == {"a": 1, "b": 0.0, "c": 1} and points[-1] == {"a": 2, "b": 1.0, "c": 5}
    logarithmic = {"a": {"low": 1, "high": 100, "log": True, "count": 3}}
    assert [point["a"] for point in read(sampler="grid", parameters=logarithmic).grid_points()] == [1, 10, 100]


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    rate = read(parameters={"a": {"low": "1e-4", "high": "1e-2", "log": True}}).parameters[0]
    assert (rate.low, rate.high) == (1e-4, 1e-2)
    assert read(parameters={"a": ["1e-4", "none"]}).parameters[0].choices == (1e-4, "none")


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        (Parameter("a", choices=("x", "y")), ["x", "x", "y", "y"]),
        (Parameter("a", low=1, high=3, is_whole=True), [1, 1, 2, 3]),
        (Parameter("a", low=0.0, high=1.0, step=0.5), [0.0, 0.0, 0.5, 1.0]),
        (Parameter("a", low=0.0, high=8.0), [0.0, 2.0, 4.0, 8.0]),
        (Parameter("a", low=1.0, high=16.0, log=True), [1.0, 2.0, 4.0, 16.0]),
    ],
)
def test_a_fraction_of_a_range_is_a_value(parameter: Parameter, expected: list[Any]) -> None:
    assert [parameter.at(fraction) for fraction in (0.0, 0.25, 0.5, 1.0)] == expected


def test_a_trial_knows_only_trials_that_lie_far_enough_back() -> None:
    assert [read(parallel=3).known_before(number) for number in range(6)] == [0, 0, 0, 1, 2, 3]
    assert read(sampler="random", parallel=1).known_before(5) == 0
    assert read(sampler="random", pruner="median", parallel=1).known_before(5) == 5
