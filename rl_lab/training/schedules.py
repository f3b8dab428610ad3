"""Any number may change over a run: `3e-4`, `linear(3e-4, 0)`, or the same spelt out as a mapping.

     value
start |   ______                      warmup: from 0 up to start, linearly
      |  /      \\                     then from start to end: linear, cosine or exponential
      | /        \\_____  end          after `over`: end
      +-----------------------------> unit: fraction of the phase, agent_steps, env_frames, updates, episodes
        warmup   over                 with `from`, all of it begins so much later, and waits with its first value
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_lab.types import ConfigError, Progress, did_you_mean

KINDS = ("constant", "linear", "cosine", "exponential")
UNITS = ("fraction", "agent_steps", "env_frames", "updates", "episodes")
EXAMPLE = "Write for example linear(1e-3, 0) or linear(1e-3, 0, over=50000 agent_steps)."
_CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*")


@dataclass(frozen=True)
class Schedule:
    """A number as a function of progress. `fraction` is of the current phase; the other units count the whole run."""

    kind: str
    start: float
    end: float | None = None  # needed by all but constant
    unit: str = "fraction"
    over: float = 1.0  # where `end` is reached, in the unit
    warmup: float = 0.0  # in the unit
    begin: float = 0.0  # `from` in a config: `over` and `warmup` count from here, in the unit
    place: str = field(default="schedule", compare=False)  # for messages: the setting this is

    def __post_init__(self) -> None:
        _known("schedule", self.kind, KINDS, self.place)
        _known("unit", self.unit, UNITS, self.place)
        if self.kind != "constant" and self.end is None:
            raise ConfigError(f"{self.place}: a {self.kind} schedule needs an end. {EXAMPLE}")
        if self.over <= 0 or not 0 <= self.warmup < self.over:
            raise ConfigError(
                f"{self.place}: warmup is {self.warmup:g} and over is {self.over:g} {self.unit}; allowed is "
                f"0 <= warmup < over. {EXAMPLE}"
            )
        if not 0 <= self.begin < math.inf or (self.unit == "fraction" and self.begin >= 1):
            most = ", less than the whole phase (1)" if self.unit == "fraction" else ""
            raise ConfigError(f"{self.place}: from is {self.begin:g} {self.unit}; allowed is a number from 0 on{most}.")
        if self.kind == "exponential" and not (self.start > 0 and (self.end or 0) > 0):
            raise ConfigError(
                f"{self.place}: an exponential schedule goes between numbers above 0, not from {self.start:g} to "
                f"{self.end:g}. Write linear, or an end such as {abs(self.start) / 100:g}."
            )

    @staticmethod
    def from_config(value: Any, place: str) -> Number:
        """What a config may write for a number: see `parse_number`."""
        return parse_number(value, place)

    def __call__(self, progress: Progress) -> float:
        """The number at this point of the run."""
        amount = progress.fraction if self.unit == "fraction" else getattr(progress.run, self.unit)
        amount = max(amount - self.begin, 0)
        if amount < self.warmup:
            return self.start * amount / self.warmup
        if self.end is None or self.kind == "constant":
            return self.start
        fraction = min((amount - self.warmup) / (self.over - self.warmup), 1.0)
        if self.kind == "linear":
            return self.start + (self.end - self.start) * fraction
        if self.kind == "cosine":
            return self.end + (self.start - self.end) * 0.5 * (1.0 + math.cos(math.pi * fraction))
        return self.start * (self.end / self.start) ** fraction


Number = float | Schedule


def value_at(number: Number, progress: Progress) -> float:
    """A plain number is itself; a schedule is asked."""
    return number(progress) if isinstance(number, Schedule) else number


def never_negative(number: Number, place: str) -> Number:
    """The very number or schedule; one that is or becomes less than 0 is refused."""
    lowest = min(number.start, number.end or 0.0) if isinstance(number, Schedule) else number
    if not lowest >= 0.0:
        raise ConfigError(f"{place}: {lowest:g}; allowed is a number from 0 on, or a schedule that stays there.")
    return number


def parse_number(value: Any, place: str) -> Number:
    """A number, a schedule, its short spelling or its mapping; anything else is refused with `place`."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Mapping):
        return _from_mapping(value, place)
    if isinstance(value, str):
        return _from_text(value, place)
    raise ConfigError(f"{place}: {value!r} is neither a number nor a schedule. {EXAMPLE}")


def _from_mapping(mapping: Mapping[str, Any], place: str) -> Schedule:
    allowed = ["schedule", "start", "end", "unit", "over", "warmup", "from"]
    for key in mapping:
        if key not in allowed:
            nearest = did_you_mean(str(key), allowed)
            raise ConfigError(f"{place}: a schedule has no key '{key}'; allowed: {', '.join(allowed)}.{nearest}")
    kind, unit = mapping.get("schedule", "linear"), mapping.get("unit", "fraction")
    numbers = ("start", "end", "over", "warmup", "from")
    settings = {key: _number(mapping[key], f"{place}.{key}") for key in numbers if mapping.get(key) is not None}
    if "start" not in settings:
        raise ConfigError(f"{place}: a schedule needs a start. {EXAMPLE}")
    if "over" not in settings and unit != "fraction":
        if kind != "constant":
            raise ConfigError(f"{place}: over how many {unit}? Write over: 50000, say.")
        settings["over"] = math.inf  # a constant with a warm-up has no end to reach
    settings["begin"] = settings.pop("from", 0.0)  # a word of Python's own
    if "over" not in settings and 0 < settings["begin"] < 1:
        settings["over"] = 1.0 - settings["begin"]  # to the end of the phase
    return Schedule(kind=kind, unit=unit, place=place, **settings)


def _from_text(text: str, place: str) -> Number:
    call = _CALL.fullmatch(text)
    if call is None:
        return _number(text, place)
    mapping: dict[str, Any] = {"schedule": call[1]}
    positions = iter(("start", "end"))
    for argument in filter(None, (part.strip() for part in call[2].split(","))):
        key, equals, amount = (part.strip() for part in argument.partition("="))
        if not equals:
            key, amount = next(positions, "a third number"), argument
        if key in ("over", "warmup", "from") and len(words := amount.split()) == 2:
            amount, mapping["unit"] = words[0], _one_unit(mapping.get("unit"), words[1], place)
        mapping[key] = amount
    return _from_mapping(mapping, place)


def _one_unit(before: str | None, unit: str, place: str) -> str:
    if before not in (None, unit):
        raise ConfigError(f"{place}: one schedule counts in one unit, not in {before} and {unit}.")
    return unit


def _number(value: Any, place: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{place}: {value!r} is neither a number nor a schedule. {EXAMPLE}") from None


def _known(what: str, word: str, allowed: tuple[str, ...], place: str) -> None:
    if word not in allowed:
        raise ConfigError(
            f"{place}: {what} '{word}' is not known; allowed: {', '.join(allowed)}.{did_you_mean(str(word), allowed)}"
        )
