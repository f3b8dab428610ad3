"""What a sweep file says, checked: what to train, what to search over, and how."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from rl_lab.types import ConfigError, did_you_mean

RANGE_KEYS = ("low", "high", "log", "step", "count")
LEAST_PARALLEL = 4
LARGEST_GRID = 100_000
Reader = Callable[[Any, str], Any]
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
    parameters: tuple[Parameter, ...]
    experiment: str | None = None
    overrides: tuple[str, ...] = ()  # of every trial and of the best config
    trial_overrides: tuple[str, ...] = ()  # of every trial alone: shorter runs, no videos
    sampler: str = "tpe"
    pruner: str = "none"
    trials: int = 20
    seeds: tuple[int, ...] = (0,)
    seed: int = 0
    metric: str = "eval/episode_return_mean"
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


def read_plan(
    content: Mapping[str, Any], *, place: str, default_name: str, default_jobs: int, overrides: Sequence[str] = ()
) -> SweepPlan:
    """The plan that a file's content and more overrides describe; whatever is wrong with it is refused here."""
    for key in content:
        if key not in READERS:
            raise ConfigError(
                f"{place}: {key} is not a key of a sweep.{did_you_mean(str(key), READERS)} Keys: {', '.join(READERS)}."
            )
    given = {"parameters": {}, **{key: value for key, value in content.items() if value is not None}}
    read: dict[str, Any] = {"name": default_name, "jobs": default_jobs}
    read |= {key: READERS[key](value, f"{place}: {key}") for key, value in given.items()}
    plan = SweepPlan(**{"parallel": max(LEAST_PARALLEL, read["jobs"]), **read})
    plan = replace(plan, overrides=(*plan.overrides, *overrides))
    _check_name(plan.name, place)
    _check_keys(plan, place)
    _check_parameters(plan, place)
    return _with_grid(plan, "trials" in given, place) if plan.sampler == "grid" else plan


def stored_plan(stored: Mapping[str, Any]) -> SweepPlan:
    """The plan as it stands on record."""
    lists = {name: tuple(stored[name]) for name in ("overrides", "trial_overrides", "seeds")}
    parameters = tuple(Parameter(**{**each, "choices": tuple(each["choices"])}) for each in stored["parameters"])
    return SweepPlan(**{**stored, **lists, "parameters": parameters})


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


def _check_parameters(plan: SweepPlan, place: str) -> None:
    """What the sampler can search over."""
    for parameter in plan.parameters:
        where = f"{place}: parameters.{parameter.key}"
        if plan.sampler == "cmaes" and parameter.is_choice:
            raise ConfigError(
                f"{where} is a list of choices, and CMA-ES searches over numbers: write a range, or `sampler: tpe`."
            )
        if plan.sampler == "grid" and not parameter.is_choice and parameter.step is None and parameter.count is None:
            raise ConfigError(f"{where} has no points for a grid: write a list, or add `step` or `count`.")
        if plan.sampler != "grid" and parameter.count is not None:
            raise ConfigError(f"{where}.count is for `sampler: grid`: leave it out with {plan.sampler}.")
    if plan.sampler == "cmaes" and len(plan.parameters) < 2:
        raise ConfigError(f"{place}: CMA-ES needs at least two parameters: write `sampler: tpe` for one.")


# --- one key of the file each; `place` names it ---


def _read_parameters(blocks: Any, place: str) -> tuple[Parameter, ...]:
    if not isinstance(blocks, Mapping) or not blocks:
        raise ConfigError(
            f"{place} is {blocks!r}: write what to search over, such as "
            "`parameters: {algorithm.discount: {low: 0.9, high: 0.999}}`."
        )
    return tuple(_read_parameter(str(key), block, f"{place}.{key}") for key, block in blocks.items())


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
    if _is_whole(value, 1):
        return tuple(range(value))
    if (
        isinstance(value, list)
        and value
        and all(_is_whole(seed, 0) for seed in value)
        and len(set(value)) == len(value)
    ):
        return tuple(value)
    raise ConfigError(f"{place} is {value!r}: write how many (3 means 0, 1, 2), or a list of different seeds.")


def _read_words(words: Any, place: str) -> tuple[str, ...]:
    if not isinstance(words, list) or not all(isinstance(word, str) and "=" in word for word in words):
        raise ConfigError(f"{place} is {words!r}: write a list of words, such as [evaluation.episodes=5].")
    return tuple(words)


def _read_minutes(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{place} is {value!r}: write a number above 0.")
    return float(value)


def _read_text(value: Any, place: str) -> str:
    return str(value)


def _one_of(*allowed: str) -> Reader:
    def read(value: Any, place: str) -> str:
        if value not in allowed:
            raise ConfigError(
                f"{place} is '{value}'.{did_you_mean(str(value), allowed)} Allowed: {', '.join(allowed)}."
            )
        return str(value)

    return read


def _at_least(lowest: int) -> Reader:
    def read(value: Any, place: str) -> int:
        if not _is_whole(value, lowest):
            raise ConfigError(f"{place} is {value!r}: write a whole number of at least {lowest}.")
        return int(value)

    return read


def _is_whole(value: Any, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


READERS: dict[str, Reader] = {
    "name": _read_text,
    "experiment": _read_text,
    "overrides": _read_words,
    "trial_overrides": _read_words,
    "parameters": _read_parameters,
    "sampler": _one_of("grid", "random", "tpe", "cmaes"),
    "pruner": _one_of("none", "median", "hyperband"),
    "trials": _at_least(1),
    "seeds": _read_seeds,
    "seed": _at_least(0),
    "metric": _read_text,
    "score": _one_of("last", "best"),
    "direction": _one_of("maximize", "minimize"),
    "parallel": _at_least(1),
    "jobs": _at_least(1),
    "minutes": _read_minutes,
    "best_config": _read_text,
}
