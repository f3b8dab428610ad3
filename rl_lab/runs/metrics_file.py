"""Reading metrics.jsonl, also while it is being written or after its writer was killed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

Series = list[tuple[dict[str, Any], float]]
"""Rows that carry one metric, each with its value."""

logger = logging.getLogger(__name__)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, oldest first; none where the file does not exist yet.

    A last line cut short by a kill is left out silently: it was never complete. A broken line elsewhere
    means that something else wrote into the file, so it is left out with a warning.
    """
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            logger.warning("%s: line %d is not a JSON object and is left out", path, number)
    return rows


def series(rows: list[dict[str, Any]], name: str) -> Series:
    """The rows that carry a number under `name`, with that number."""
    return [(row, float(row[name])) for row in rows if isinstance(row.get(name), int | float)]
