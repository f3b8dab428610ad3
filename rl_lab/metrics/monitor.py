"""Looks at every row as it is written, and says once what is wrong and what to do: the rules of rules.yaml.

Only numbers that are in the row anyway are compared, so that watching costs microseconds and changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from rl_lab.metrics.names import PREFIXES
from rl_lab.metrics.series import pack_series, unpack_series
from rl_lab.types import ConfigError, StateTree

Bound = float | str | Sequence[float | str] | None
"""A number, the name of another metric, a dotted setting of the config, or a list of these."""
Numbers = Mapping[str, float | int]
LEAST_FALL = 0.25  # of its size, for a metric that `drops`: the range of a few evaluations may be nothing but noise
SIDES = ("above", "below")
CONDITIONS = (*SIDES, "grows", "shrinks", "drops", "flat", "not_finite")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When to say what. Every condition that is given must hold; see rules.yaml for each."""

    metric: str
    tip: str
    above: Bound = None
    below: Bound = None
    times: float = 1.0
    grows: float | None = None
    shrinks: float | None = None
    drops: float | None = None
    flat: float | None = None
    not_finite: bool = False
    over: int = 20
    rows: int = 1
    after_updates: int = 0
    begin: float = 0.0
    end: float = 1.0
    algorithms: Sequence[str] = ()
    actions: Literal["discrete", "multi_discrete", "continuous"] | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, name) is None or getattr(self, name) is False for name in CONDITIONS):
            raise ConfigError(f"A rule about {self.metric} says nothing: give it one of {', '.join(CONDITIONS)}.")
        if self.over < 1 or self.rows < 1:
            raise ConfigError(f"A rule about {self.metric} has over {self.over}, rows {self.rows}: write 1 or more.")
        for bound in self.bounds("above") + self.bounds("below"):
            if isinstance(bound, str) and "/" not in bound and "." not in bound:
                raise ConfigError(
                    f"A rule about {self.metric} has the bound '{bound}': write a number, a metric (loss/value), or a "
                    "setting (algorithm.free_nats)."
                )

    def bounds(self, side: str) -> list[float | str]:
        given = getattr(self, side)
        return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


@dataclass(frozen=True)
class Alert:
    """A rule that held, with the number that broke it."""

    rule: str
    metric: str
    value: float | None  # None: not finite
    condition: str  # above 0.1 in 3 rows in a row
    agent_steps: int
    updates: int
    tip: str

    @property
    def sentence(self) -> str:
        value = "not finite" if self.value is None else f"{self.value:.4g}"
        said = f", {self.condition}" if self.condition else ""
        return f"{self.metric} is {value} {self.when}{said}. {self.tip}"

    @property
    def when(self) -> str:
        """By updates in a run that takes no steps, as one that learns from a dataset alone."""
        if self.agent_steps:
            return f"at {self.agent_steps:,} agent steps"
        return f"after {self.updates:,} updates"


class Monitor:
    """The rules that apply to one run. Each speaks once; what was said is part of the run's checkpoints."""

    def __init__(
        self,
        rules: Mapping[str, Rule],
        *,
        algorithm: str = "",
        actions: str = "",
        settings: Callable[[str], Any] = lambda key: None,
        keep: Callable[[list[dict[str, Any]]], None] = lambda alerts: None,
    ) -> None:
        """`settings` finds the value of a dotted setting; `keep` takes all alerts so far when there is a new one."""
        applying = {
            name: _resolved(rule, settings)
            for name, rule in rules.items()
            if (not rule.algorithms or algorithm in rule.algorithms) and rule.actions in (None, actions)
        }
        self.rules: dict[str, Rule] = {name: rule for name, rule in applying.items() if rule is not None}
        self.alerts: list[Alert] = []
        self._keep = keep
        self._watches: dict[tuple[str, str], _Watch] = {}
        self._matches: dict[
            tuple[str, ...], tuple[list[_Watch], list[_Watch]]
        ] = {}  # keys of a row -> what looks at it
        self._agent_steps = -1  # of the newest row

    def check(self, row: Numbers) -> list[Alert]:
        """The alerts that this row raises."""
        keys = tuple(row)
        if keys not in self._matches:
            everyone = list(self._watches_of(keys))
            self._matches[keys] = (everyone, [watch for watch in everyone if not watch.rule.not_finite])
        everyone, of_finite_numbers = self._matches[keys]
        watches = of_finite_numbers if all(map(math.isfinite, row.values())) else everyone
        found: dict[str, Alert] = {}
        said = {alert.rule for alert in self.alerts}
        is_collecting = row["agent_steps"] > self._agent_steps
        self._agent_steps = int(row["agent_steps"])
        for watch in watches:
            if not is_collecting and watch.key.startswith("collect/"):
                continue  # an offline phase repeats what was collected before it
            if watch.name not in said and watch.holds(row) and watch.name not in found:
                found[watch.name] = watch.alert(row)
        if found:
            self.alerts += found.values()
            self._keep([asdict(alert) for alert in self.alerts])
        return list(found.values())

    def _watches_of(self, keys: Sequence[str]) -> Iterator[_Watch]:
        known = set(keys)
        for name, rule in self.rules.items():
            matching = [rule.metric] if rule.metric in known else []
            if set(rule.metric) & set("*?["):
                matching = [key for key in keys if fnmatchcase(key, rule.metric)]
            for key in matching:
                if (name, key) not in self._watches:
                    self._watches[name, key] = _Watch(name, key, rule)
                yield self._watches[name, key]

    def get_state(self) -> StateTree:
        numbers = {f"{name} {key}": watch.numbers() for (name, key), watch in self._watches.items()}
        alerts = [asdict(alert) for alert in self.alerts]
        return {"alerts": alerts, "watches": pack_series(numbers), "agent_steps": self._agent_steps}

    def set_state(self, state: StateTree) -> None:
        self.restart()
        self.alerts = [Alert(**alert) for alert in state["alerts"]]
        self._agent_steps = state.get("agent_steps", -1)  # checkpoints of earlier versions lack it
        for words, numbers in unpack_series(state["watches"]).items():
            name, _, key = words.partition(" ")
            if name in self.rules:  # rules may have changed since
                self._watches[name, key] = _Watch(name, key, self.rules[name], numbers)
        self._keep([asdict(alert) for alert in self.alerts])

    def restart(self) -> None:
        """The run begins anew."""
        self.alerts, self._watches, self._matches, self._agent_steps = [], {}, {}, -1
        self._keep([])


class _Watch:
    """One rule, one metric: what of its past the rule needs."""

    def __init__(self, name: str, key: str, rule: Rule, numbers: Sequence[float] = ()) -> None:
        self.name, self.key, self.rule = name, key, rule
        count, self.first, self.low, self.high, *recent = numbers or (0.0, math.nan, math.inf, -math.inf)
        self.count = int(count)
        self.recent: deque[float] = deque(recent, maxlen=rule.over + 1)
        self._remembers = any(each is not None for each in (rule.grows, rule.shrinks, rule.drops, rule.flat))
        self._sides = [side for side in SIDES if getattr(rule, side) is not None]
        self._bounds = {side: rule.bounds(side) for side in self._sides}

    def numbers(self) -> list[float]:
        return [float(self.count), self.first, self.low, self.high, *self.recent]

    def holds(self, row: Numbers) -> bool:
        """Take the row in; whether the rule has held for as many rows as it asks for."""
        value, rule = row[self.key], self.rule
        if rule.not_finite:
            return not math.isfinite(value)
        if not math.isfinite(value):
            return False
        if self._remembers:
            self._remember(value)
        fraction = row.get("train/phase_fraction", 0.0)
        is_time = row["updates"] >= rule.after_updates and rule.begin <= fraction <= rule.end
        is_beyond = is_time and self._is_beyond(value, row)
        self.count = self.count + 1 if is_beyond and (not self._remembers or self._has_moved(value)) else 0
        return self.count >= rule.rows

    def _remember(self, value: float) -> None:
        if self.first != self.first:
            self.first = value
        self.low, self.high = min(self.low, value), max(self.high, value)
        self.recent.append(value)

    def _is_beyond(self, value: float, row: Numbers) -> bool:
        for side in self._sides:
            limit = self._limit(side, row)
            if limit is None or not (value > limit if side == "above" else value < limit):
                return False
        return True

    def _limit(self, side: str, row: Numbers) -> float | None:
        """The farthest of the bounds; None where a row lacks a metric that is one."""
        known: list[float] = []
        for bound in self._bounds[side]:
            limit = row.get(bound) if isinstance(bound, str) else bound
            if limit is None or not math.isfinite(limit):
                return None
            known.append(limit)
        return float(max(known) if side == "above" else min(known)) * self.rule.times

    def _has_moved(self, value: float) -> bool:
        rule, is_full = self.rule, len(self.recent) == self.rule.over + 1
        before = self.recent[0] if is_full else math.nan
        if rule.grows is not None and not (is_full and abs(value) > rule.grows * abs(before) > 0.0):
            return False
        if rule.shrinks is not None and not value < rule.shrinks * self.first:
            return False
        fall, size = self.high - value, max(abs(self.high), abs(self.low))
        if rule.drops is not None and not fall > max(rule.drops * (self.high - self.low), LEAST_FALL * size):
            return False
        if rule.flat is None:
            return True
        return is_full and max(self.recent) - min(self.recent) <= rule.flat * max(map(abs, self.recent))

    def alert(self, row: Numbers) -> Alert:
        value, steps, updates = float(row[self.key]), int(row["agent_steps"]), int(row["updates"])
        shown = value if math.isfinite(value) else None
        return Alert(self.name, self.key, shown, self._condition(row), steps, updates, " ".join(self.rule.tip.split()))

    def _condition(self, row: Numbers) -> str:
        rule = self.rule
        sides = [(side, self._limit(side, row)) for side in self._sides]
        words = [f"{side} {limit:.4g}" for side, limit in sides if limit is not None]
        if rule.grows is not None:
            words.append(f"more than {rule.grows:g} times what it was {rule.over} rows before")
        if rule.shrinks is not None:
            words.append(f"less than {rule.shrinks:g} of the {self.first:.4g} it began with")
        if rule.drops is not None:
            words.append(f"down from {self.high:.4g}")
        if rule.flat is not None:
            words.append(f"level for {rule.over} rows")
        return " and ".join(words) + (f" in {rule.rows} rows in a row" if rule.rows > 1 else "")


def _resolved(rule: Rule, settings: Callable[[str], Any]) -> Rule | None:
    """The rule with the numbers of the settings that it names; None where a setting is not there or is no number."""
    numbers: dict[str, Any] = {}
    for side in SIDES:
        bounds = [
            settings(bound) if isinstance(bound, str) and not bound.startswith(PREFIXES) else bound
            for bound in rule.bounds(side)
        ]
        if any(isinstance(bound, bool) or not isinstance(bound, int | float | str) for bound in bounds):
            return None
        if any(isinstance(bound, str) and not bound.startswith(PREFIXES) for bound in bounds):
            return None  # a schedule, say
        numbers[side] = bounds or None
    return Rule(**{**vars(rule), **numbers})
