"""What a sweep file says, checked: what to train, what to search over, and how."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from rl_lab.types import ConfigError, did_you_mean

SAMPLERS = ("grid", "random", "tpe", "cmaes")
PRUNERS = ("none", "median", "hyperband")
SCORES = ("last", "best")
DIRECTIONS = ("maximize", "minimize")
RANGE_KEYS = ("low", "high", "log", "step", "count")
DEFAULT_METRIC = "eval/episode_return_mean"
DEFAULT_TRIALS = 20
LEAST_PARALLEL = 4
LARGEST_GRID = 100_000
CHANGEABLE = ("trials", "jobs", "minutes", "best_config")  # what a resumed sweep may change


@dataclass(frozen=True)
class Parameter:
    """One setting that is searched over: `choices`, or a range of numbers."""

    key: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    count: int | None = None  # points of a grid
    is_whole: bool = False

    @property
    def is_choice(self) -> bool:
        return bool(self.choices)

    def short(self) -> Any:
        """As a sweep file writes it."""
        given = {"low": self.low, "high": self.high, "log": self.log or None, "step": self.step, "count": self.count}
        return list(self.choices) or {name: value for name, value in given.items() if value is not None}

    def extremes(self) -> list[Any]:
        """The values to try out before anything starts: every choice, or both ends of the range."""
        return list(self.choices) if self.is_choice else [self.at(0.0), self.at(1.0)]

    def at(self, fraction: float) -> Any:
        """The value at a fraction in [0, 1] of the range, or among the choices."""
        if self.is_choice:
            return self.choices[min(int(fraction * len(self.choices)), len(self.choices) - 1)]
        if self.step is not None or (self.is_whole and not self.log):  # each point as often as the others
            steps = self._steps()
            value = self.low + (self.step or 1) * min(int(fraction * (steps + 1)), steps)
        elif self.log:
            value = self.low * (self.high / self.low) ** fraction
        else:
            value = self.low + fraction * (self.high - self.low)
        value = min(max(value, self.low), self.high)
        return round(value) if self.is_whole else value

    def grid(self) -> list[Any]:
        """The points of a grid along this parameter, each once."""
        if self.is_choice:
            return list(self.choices)
        if self.count is not None:
            even = replace(self, step=None, is_whole=False)
            points = [even.at(index / (self.count - 1)) for index in range(self.count)]
        else:
            points = [self.low + (self.step or 1) * index for index in range(self._steps() + 1)]
        return list(dict.fromkeys(round(point) if self.is_whole else point for point in points))

    def _steps(self) -> int:
        return math.floor((self.high - self.low) / (self.step or 1) + 1e-9)


@dataclass(frozen=True)
class SweepPlan:
    """A checked sweep."""

    name: str
    experiment: str | None
    overrides: tuple[str, ...]  # of every trial and of the best config
    trial_overrides: tuple[str, ...]  # of every trial alone: shorter runs, no videos
    parameters: tuple[Parameter, ...]
    sampler: str = "tpe"
    pruner: str = "none"
    trials: int = DEFAULT_TRIALS
    seeds: tuple[int, ...] = (0,)
    seed: int = 0
    metric: str = DEFAULT_METRIC
    score: str = "last"
    direction: str = "maximize"
    parallel: int = LEAST_PARALLEL
    jobs: int = 1
    minutes: float | None = None
    best_config: str | None = None

    @property
    def is_dependent(self) -> bool:
        """Whether a trial needs the results of earlier ones."""
        return self.sampler in ("tpe", "cmaes") or self.pruner != "none"

    def known_before(self, number: int) -> int:
        """How many trials, counted from the first, trial `number` may know the results of: the rule that makes a
        sweep repeatable, however fast its trials are and whenever it is interrupted."""
        return max(0, number - self.parallel + 1) if self.is_dependent else 0

    def identity(self) -> dict[str, Any]:
        """What must stay as it is when the sweep is resumed."""
        return {name: value for name, value in self.as_dict().items() if name not in CHANGEABLE}

    def as_dict(self) -> dict[str, Any]:
        """The plan as it is stored: lists instead of tuples."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def grid_points(self) -> list[dict[str, Any]]:
        axes = [parameter.grid() for parameter in self.parameters]
        keys = [parameter.key for parameter in self.parameters]
        return [dict(zip(keys, point, strict=True)) for point in product(*axes)]


FILE_KEYS = tuple(SweepPlan.__dataclass_fields__)


def read_plan(content: Mapping[str, Any], *, place: str, default_name: str, default_jobs: int) -> SweepPlan:
    """The plan that a file's content describes; whatever is wrong with it is refused here."""
    for key in content:
        if key not in FILE_KEYS:
            raise ConfigError(
                f"{place}: {key} is not a key of a sweep.{did_you_mean(str(key), FILE_KEYS)} "
                f"Keys: {', '.join(FILE_KEYS)}."
            )
    given = {key: value for key, value in content.items() if value is not None}
    sampler = _one_of(given, "sampler", SAMPLERS, "tpe", place)
    parameters = _read_parameters(given.get("parameters"), sampler, place)
    jobs = _whole(given, "jobs", default_jobs, 1, place)
    plan = SweepPlan(
        name=str(given.get("name", default_name)),
        experiment=str(given["experiment"]) if "experiment" in given else None,
        overrides=_words(given, "overrides", place),
        trial_overrides=_words(given, "trial_overrides", place),
        parameters=parameters,
        sampler=sampler,
        pruner=_one_of(given, "pruner", PRUNERS, "none", place),
        trials=_whole(given, "trials", DEFAULT_TRIALS, 1, place),
        seeds=_read_seeds(given.get("seeds", 1), place),
        seed=_whole(given, "seed", 0, 0, place),
        metric=str(given.get("metric", DEFAULT_METRIC)),
        score=_one_of(given, "score", SCORES, "last", place),
        direction=_one_of(given, "direction", DIRECTIONS, "maximize", place),
        parallel=_whole(given, "parallel", max(LEAST_PARALLEL, jobs), 1, place),
        jobs=jobs,
        minutes=_positive(given, "minutes", place),
        best_config=str(given["best_config"]) if "best_config" in given else None,
    )
    _check_name(plan.name, place)
    _check_keys(plan, place)
    return _with_grid(plan, "trials" in given, place) if sampler == "grid" else plan


def stored_plan(stored: Mapping[str, Any]) -> SweepPlan:
    """The plan as it stands on record."""
    lists = {name: tuple(stored[name]) for name in ("overrides", "trial_overrides", "seeds")}
    parameters = tuple(Parameter(**{**each, "choices": tuple(each["choices"])}) for each in stored["parameters"])
    return SweepPlan(**{**stored, **lists, "parameters": parameters})


def _words(given: Mapping[str, Any], key: str, place: str) -> tuple[str, ...]:
    words = given.get(key, [])
    if not isinstance(words, list) or not all(isinstance(word, str) and "=" in word for word in words):
        raise ConfigError(f"{place}: {key} is {words!r}: write a list of words, such as [evaluation.episodes=5].")
    return tuple(words)


def _check_name(name: str, place: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name):
        raise ConfigError(
            f"{place}: the name '{name}' begins the ids of its runs: begin with a letter or digit and use only "
            "letters, digits, '.', '_' and '-' (at most 80)."
        )


def _check_keys(plan: SweepPlan, place: str) -> None:
    """A setting has one source; seeds have their own key."""
    words = [word.lstrip("+").partition("=")[0] for word in (*plan.overrides, *plan.trial_overrides)]
    searched = [parameter.key for parameter in plan.parameters]
    for key in [*words, *searched]:
        if key == "seed":
            raise ConfigError(f"{place}: seed is set by the sweep itself: write `seeds: 3`, or a list of seeds.")
    for key in words:
        if key in searched:
            raise ConfigError(f"{place}: {key} stands among the parameters and the overrides: leave one out.")


def _with_grid(plan: SweepPlan, is_given: bool, place: str) -> SweepPlan:
    size = math.prod(len(parameter.grid()) for parameter in plan.parameters)
    if size > LARGEST_GRID:
        raise ConfigError(f"{place}: the grid has {size:,} points: make it smaller, or write `sampler: random`.")
    if is_given and plan.trials != size:
        raise ConfigError(
            f"{place}: trials is {plan.trials}, but the grid has {size} points and all of them are tried: leave trials "
            "out, or write `sampler: random`."
        )
    return replace(plan, trials=size)


def _read_parameters(blocks: Any, sampler: str, place: str) -> tuple[Parameter, ...]:
    if not isinstance(blocks, Mapping) or not blocks:
        raise ConfigError(
            f"{place}: parameters is {blocks!r}: write what to search over, such as "
            "`parameters: {algorithm.discount: {low: 0.9, high: 0.999}}`."
        )
    parameters = tuple(_read_parameter(str(key), block, f"{place}: parameters.{key}") for key, block in blocks.items())
    for parameter in parameters:
        where = f"{place}: parameters.{parameter.key}"
        if sampler == "cmaes" and parameter.is_choice:
            raise ConfigError(
                f"{where} is a list of choices, and CMA-ES searches over numbers: write a range, or `sampler: tpe`."
            )
        if sampler == "grid" and not parameter.is_choice and parameter.step is None and parameter.count is None:
            raise ConfigError(f"{where} has no points for a grid: write a list, or add `step` or `count`.")
        if sampler != "grid" and parameter.count is not None:
            raise ConfigError(f"{where}.count is for `sampler: grid`: leave it out with {sampler}.")
    if sampler == "cmaes" and len(parameters) < 2:
        raise ConfigError(f"{place}: CMA-ES needs at least two parameters: write `sampler: tpe` for one.")
    return parameters


def _read_parameter(key: str, block: Any, place: str) -> Parameter:
    if isinstance(block, list):
        if not block:
            raise ConfigError(f"{place} is an empty list: write at least one value.")
        choices = [_number(value) for value in block]
        if len({repr(value) for value in choices}) < len(choices):
            raise ConfigError(f"{place} is {block}: the same value stands there twice.")
        return Parameter(key, choices=tuple(choices))
    if not isinstance(block, Mapping):
        raise ConfigError(f"{place} is {block!r}: write a list of values, or a range {{low: ..., high: ...}}.")
    for name in block:
        if name not in RANGE_KEYS:
            raise ConfigError(
                f"{place}.{name} is unknown.{did_you_mean(str(name), RANGE_KEYS)} Allowed: {', '.join(RANGE_KEYS)}."
            )
    ends = {name: _number(block.get(name)) for name in ("low", "high", "step", "count")}
    for name, value in ends.items():
        is_needed = name in ("low", "high") or value is not None
        if is_needed and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
            raise ConfigError(f"{place}.{name} is {value!r}: write a number.")
    low, high, log = ends["low"], ends["high"], block.get("log", False)
    if low >= high:
        raise ConfigError(f"{place}: the range from {low} to {high} is empty: low must be below high.")
    if not isinstance(log, bool):
        raise ConfigError(f"{place}.log is {log!r}: write true or false.")
    if log and low <= 0:
        raise ConfigError(f"{place}: a logarithmic range cannot begin at {low}: write a low above 0, or leave log out.")
    if log and ends["step"] is not None:
        raise ConfigError(f"{place}: log and step exclude each other: leave one out.")
    if ends["step"] is not None and not 0 < ends["step"] <= high - low:
        raise ConfigError(f"{place}.step is {ends['step']}: write a number above 0 that fits into {low} to {high}.")
    if ends["count"] is not None and (not isinstance(ends["count"], int) or ends["count"] < 2):
        raise ConfigError(f"{place}.count is {ends['count']}: write a whole number of at least 2.")
    is_whole = all(isinstance(value, int) for value in (low, high, ends["step"] or 1))
    return Parameter(key, (), low, high, log, ends["step"], ends["count"], is_whole)


def _number(value: Any) -> Any:
    """`1e-4`, which YAML reads as text, as the number it means; everything else as it is."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value.strip()):
        return float(value)
    return value


def _read_seeds(value: Any, place: str) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return tuple(range(value))
    is_list = isinstance(value, list) and value
    if is_list and all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in value):
        if len(set(value)) == len(value):
            return tuple(value)
    raise ConfigError(f"{place}: seeds is {value!r}: write how many (3 means 0, 1, 2), or a list of different seeds.")


def _one_of(given: Mapping[str, Any], key: str, allowed: Sequence[str], default: str, place: str) -> str:
    value = str(given.get(key, default))
    if value not in allowed:
        raise ConfigError(f"{place}: {key} is '{value}'.{did_you_mean(value, allowed)} Allowed: {', '.join(allowed)}.")
    return value


def _whole(given: Mapping[str, Any], key: str, default: int, lowest: int, place: str) -> int:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(f"{place}: {key} is {value!r}: write a whole number of at least {lowest}.")
    return value


def _positive(given: Mapping[str, Any], key: str, place: str) -> float | None:
    value = given.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise ConfigError(f"{place}: {key} is {value!r}: write a number above 0.")
    return None if value is None else float(value)
