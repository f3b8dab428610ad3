"""Every metric name, how people read it, its unit, its meaning and its healthy value: the tables of names.md, shown in
docs/metrics.md."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rl_lab.types import ConfigError, did_you_mean


class Meaning(NamedTuple):
    """What one metric says: its friendly name, its unit, its definition, and how to read it."""

    label: str
    unit: str
    description: str
    advice: str


def _read_tables() -> dict[str, Meaning]:
    """A row of a table: | `name` | shown as | unit | meaning | healthy, and what to do otherwise |."""
    lines = Path(__file__).with_name("names.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    return {name.strip("`"): Meaning(*meaning) for name, *meaning in rows}


_TABLES = _read_tables()
COUNTERS = {name: meaning for name, meaning in _TABLES.items() if "/" not in name}
"""The five counters that open every row. "Step" never stands alone."""
NAMES = {name: meaning for name, meaning in _TABLES.items() if "/" in name}
"""Metric name -> meaning. A `*` stands for any text; an exact name is found before a pattern."""

PREFIXES = ("collect/", "train/", "controller/", "loss/", "eval/", "time/", "system/")


def meaning_of(name: str) -> Meaning | None:
    """What the table says about a name, or None."""
    return NAMES.get(_key_of(name) or "")


def _key_of(name: str) -> str | None:
    """The name itself or the pattern that the table lists it under."""
    patterns = (pattern for pattern in NAMES if "*" in pattern and fnmatchcase(name, pattern))
    return name if name in NAMES else next(patterns, None)


@cache
def label_of(name: str) -> str:
    """How a person reads a metric's name: `controller/approx_kl` is KL, `train/actor_grad_norm` actor gradient norm."""
    key = _key_of(name)
    if key is None:  # of a user's own workflow
        return name.rpartition("/")[2].replace("_", " ")
    before, _, after = key.partition("*")
    filled = name.removeprefix(before).removesuffix(after).replace("_", " ")
    return NAMES[key].label.replace("*", filled)


@cache
def rank_of(name: str) -> tuple[int, str]:
    """Sorts names as the table lists them; those it does not list come last."""
    key = _key_of(name)
    return (len(NAMES) if key is None else list(NAMES).index(key), name)


def check_name(name: str, *, strict: bool) -> None:
    """Refuse a name outside the known prefixes and, when strict, a name that the table does not list."""
    if not name.startswith(PREFIXES):
        raise ConfigError(
            f"Metric '{name}' has no known prefix: a name begins with one of {', '.join(PREFIXES)}."
            f"{did_you_mean(name, NAMES)}"
        )
    if not name.isprintable():
        raise ConfigError(f"Metric {name!r} holds characters that cannot be printed.")
    if strict and meaning_of(name) is None:
        raise ConfigError(
            f"Metric '{name}' is not documented: add it with its unit and meaning to rl_lab/metrics/names.md "
            f"and to docs/metrics.md, or build the MetricLogger with strict_names=False.{did_you_mean(name, NAMES)}"
        )


def is_wall_clock(name: str) -> bool:
    """Whether a row's key may differ between two otherwise identical runs."""
    return name == "wall_s" or name.startswith(("time/", "system/"))
