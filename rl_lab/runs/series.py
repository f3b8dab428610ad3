"""One metric of a run over one counter, read quickly, and several such curves on one grid."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl_lab.runs.files import read_bytes
from rl_lab.utils.text import printable

logger = logging.getLogger(__name__)

COUNTERS = ("env_frames", "agent_steps", "episodes", "updates", "wall_s")
WINDOW = 0.1  # of a curve's length, before its end: what its last values are averaged over
GRID = 200
_NUMBER = rb"(-?\d[\d.eE+-]*)"


@dataclass(frozen=True)
class Curve:
    """Values over a counter, in the order of the file; no value is missing."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    def until(self, end: float) -> float:
        """The mean of the values in the last tenth before `end`, the last one of each place; where none lies there, the
        last one before it."""
        curve = self.last_of_each()
        before = curve.x <= end
        inside = before & (curve.x > (1.0 - WINDOW) * end)
        if inside.any():
            return float(curve.y[inside].mean())
        return float(curve.y[before][-1] if before.any() else self.y[0])

    def last_of_each(self) -> Curve:
        """Of several values at one place the last: an evaluation on the way and the final one, say."""
        is_last = np.append(self.x[1:] != self.x[:-1], True)
        return Curve(self.x[is_last], self.y[is_last])


def read_curves(path: Path, x: str, names: Sequence[str]) -> dict[str, Curve]:
    """Some metrics of a metrics.jsonl over a counter, each in one pass that parses only what it needs. Rows without a
    finite number for both, and a line cut short, are left out."""
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        content = b""
    except OSError as error:
        logger.warning("%s cannot be read and is left out: %s", printable(str(path)), error.strerror)
        content = b""
    content = content[: content.rfind(b"}") + 1]  # of a line cut short by a kill, nothing can end so
    return {name: _curve(content, x, name) for name in names}


def _curve(content: bytes, x: str, name: str) -> Curve:
    counter, value = (re.compile(rb'"%s"\s*:\s*%s' % (re.escape(each.encode()), _NUMBER)) for each in (x, name))
    points = []
    for found in value.finditer(content):
        start = content.rfind(b"\n", 0, found.start()) + 1
        end = content.find(b"\n", found.end())
        at = counter.search(content, start, len(content) if end < 0 else end)
        if at is not None:
            points.append((float(at[1]), float(found[1])))
    array = np.asarray(points, dtype=float).reshape(-1, 2)
    array = array[np.isfinite(array).all(axis=1)]
    return Curve(array[:, 0], array[:, 1])


def metric_names(path: Path) -> list[str]:
    """The metrics that the rows of a file carry, for a message: those at its begin and end are looked at."""
    try:
        content = read_bytes(path)
    except OSError:
        return []
    ends = content[: 2**20] + content[-(2**20) :]
    return sorted({name.decode() for name in re.findall(rb'"([\w./-]+/[\w./-]+)"\s*:', ends)})


def common_grid(curves: Sequence[Curve]) -> np.ndarray:
    """From the first point of any curve to the end that all of them reach, give or take a tenth."""
    first = min(curve.x[0] for curve in curves)
    return np.linspace(first, shared_end([curve.x[-1] for curve in curves]), GRID)


def shared_end(ends: Sequence[float]) -> float:
    """Where curves end together: the farthest end, or a tenth beyond the nearest where others go on."""
    return float(min(max(ends), min(ends) * (1.0 + WINDOW)))


def on_grid(curve: Curve, grid: np.ndarray) -> np.ndarray:
    """The curve at the points of a grid: dense ones as means around each point, sparse ones interpolated."""
    x, y = curve.x, curve.y
    if len(x) > 2 * len(grid):
        edges = np.concatenate([[-np.inf], (grid[1:] + grid[:-1]) / 2, [np.inf]])
        inside = x <= grid[-1]
        counts, _ = np.histogram(x[inside], edges)
        sums, _ = np.histogram(x[inside], edges, weights=y[inside])
        filled = counts > 0
        x, y = grid[filled], sums[filled] / counts[filled]
    order = np.argsort(x, kind="stable")
    return np.interp(grid, x[order], y[order])
