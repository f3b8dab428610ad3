"""Reading metrics.jsonl, also while it is being written or after its writer was killed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_lab.runs.files import read_bytes
from rl_lab.utils.text import printable

if TYPE_CHECKING:  # the index reads rows too, and starts without numpy
    import numpy as np

Series = list[tuple[dict[str, Any], float]]
"""Rows that carry one metric, each with its value."""

logger = logging.getLogger(__name__)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, oldest first; none where the file does not exist yet.

    A last line cut short by a kill is left out silently: it was never complete. A broken line elsewhere
    means that something else wrote into the file, so it is left out with a warning.
    """
    try:
        lines = read_bytes(path).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("%s cannot be read and is left out: %s", printable(str(path)), error.strerror)
        return []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is not None:
            rows.append(row)
        elif line.strip() and number < len(lines):
            logger.warning("%s: line %d is no row of metrics and is left out", printable(str(path)), number)
    return rows


def parse_row(line: bytes) -> dict[str, Any] | None:
    """One line of a metrics file: numbers by name, null where one was not finite. None where it holds no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    numbers = (value for name, value in row.items() if name != "non_finite")
    return row if all(value is None or isinstance(value, int | float) for value in numbers) else None


def series(rows: list[dict[str, Any]], name: str) -> Series:
    """The rows that carry a number under `name`, with that number."""
    return [(row, float(row[name])) for row in rows if isinstance(row.get(name), int | float)]


def columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Rows as one array per name, equally long: whole numbers where every row has one, else floats, NaN for gaps."""
    names = dict.fromkeys(name for row in rows for name in row if name != "non_finite")
    return {name: _column([row.get(name) for row in rows]) for name in names}


def _column(values: list[Any]) -> np.ndarray:
    import numpy as np

    if all(isinstance(value, int) for value in values):
        return np.asarray(values, dtype=np.int64)
    return np.asarray([np.nan if value is None else value for value in values], dtype=np.float64)
