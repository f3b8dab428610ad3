"""Questions about many runs: `algorithm=ppo`, `env~Cart`, `eval/return>200`, `algorithm.discount<0.99`.

A field is a column of the index, a metric (its last value), or a setting by its dotted key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_lab.runs.index_rows import SCORE, VISIBLE
from rl_lab.types import ConfigError

Kind = Literal["column", "metric", "setting"]
OPERATORS = ("!=", "<=", ">=", "=", "~", "<", ">")
ALIASES = {
    "env": "environment",
    "algo": "algorithm",
    "state": "status",
    "run": "id",
    "tag": "tags",
    "note": "notes",
    "commit": "git",
    "parent": "parents",
    "steps": "agent_steps",
    "frames": "env_frames",
    "time": "wall_s",
}
FIELDS = (*VISIBLE, SCORE)
_SHORT = re.compile(r"(\w+)/(return|length)")
_LONG = re.compile(r"(\w+)/episode_(return|length)_mean")
_CONDITION = re.compile(r"\s*([^=~<>!\s]+)\s*(!=|<=|>=|==|=|~|<|>)(.*)", re.DOTALL)
_MISSING = ("null", "none", "-")


def metric_name(name: str) -> str:
    """`eval/return` is short for eval/episode_return_mean, `collect/length` for collect/episode_length_mean."""
    found = _SHORT.fullmatch(name)
    return f"{found[1]}/episode_{found[2]}_mean" if found else name


def with_short_names(names: Iterable[str]) -> list[str]:
    """These metrics, and how they may be written for short."""
    known = list(names)
    return known + [f"{found[1]}/{found[2]}" for name in known if (found := _LONG.fullmatch(name))]


@dataclass(frozen=True)
class Field:
    """What a condition looks at or a list is sorted by."""

    name: str
    kind: Kind

    @classmethod
    def parse(cls, word: str) -> Field:
        word = ALIASES.get(word, word)
        if word in FIELDS:
            return cls(word, "column")
        return cls(metric_name(word), "metric") if "/" in word else cls(word, "setting")


@dataclass(frozen=True)
class Condition:
    """`field operator value`, as a user writes it."""

    field: Field
    operator: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"--where '{text}' is no condition: write FIELD OPERATOR VALUE with one of {' '.join(OPERATORS)}, such "
                "as algorithm=ppo, env~Cart, 'eval/return>200' or 'algorithm.discount<0.99' (quoted: < and > are the "
                "shell's)."
            )
        operator = "=" if found[2] == "==" else found[2]
        return cls(Field.parse(found[1]), operator, found[3].strip())

    def predicate(self) -> Callable[[Any], bool]:
        """Whether a value fits. What a run does not have fits only `!=` and `=null`."""
        wanted, number = as_text(self.value), as_number(self.value)
        is_missing_wanted = wanted in _MISSING
        compare = _COMPARE[self.operator]

        def fits(value: Any) -> bool:
            if value is None:
                return (self.operator == "=") == is_missing_wanted and self.operator in ("=", "!=")
            if is_missing_wanted and self.operator in ("=", "!="):
                return self.operator == "!="
            if isinstance(value, list):
                texts = [str(each).lower() for each in value]
                inside = any(wanted in text if self.operator == "~" else text == wanted for text in texts)
                return inside != (self.operator == "!=")
            own = None if self.operator == "~" or number is None else as_number(value)
            return compare(own, number) if own is not None else compare(as_text(value), wanted)

        return fits


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda own, wanted: own == wanted,
    "!=": lambda own, wanted: own != wanted,
    "~": lambda own, wanted: wanted in own,
    "<": lambda own, wanted: own < wanted,
    "<=": lambda own, wanted: own <= wanted,
    ">": lambda own, wanted: own > wanted,
    ">=": lambda own, wanted: own >= wanted,
}


def as_number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(str(value).replace("_", ""))
    except ValueError:
        return None
    return None if math.isnan(number) else number


def as_text(value: Any) -> str:
    """As a user would write it: true, adam, [64,64]."""
    text = str(value).lower()
    return text.replace(" ", "") if text.startswith("[") else text


def in_order(
    rows: Sequence[dict[str, Any]], values: Sequence[Any], *, is_reversed: bool, is_descending: bool = False
) -> list[dict[str, Any]]:
    """Greatest numbers first, newest times first, other texts from A to Z unless `is_descending`; `is_reversed` the
    other way round. Runs without the value come last either way, and equals stay as they were."""
    pairs = [(value, row) for value, row in zip(values, rows, strict=True) if value is not None]
    without = [row for value, row in zip(values, rows, strict=True) if value is None]
    is_numeric = all(isinstance(value, int | float) for value, _ in pairs)
    is_time = all(isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d", value) for value, _ in pairs)
    key: Callable[[Any], Any] = (lambda pair: pair[0]) if is_numeric else (lambda pair: as_text(pair[0]))
    pairs.sort(key=key, reverse=(is_numeric or is_time or is_descending) != is_reversed)
    return [row for _, row in pairs] + without
