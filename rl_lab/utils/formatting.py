"""Numbers as a person reads them: short, aligned, and as tiny curves. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
MISSING = "–"


def sparkline(values: Sequence[float], *, width: int = 24) -> str:
    """The values from left to right as blocks between their minimum and maximum.

    More values than `width` are averaged in equal stretches. A flat curve lies in the middle; a value that is
    not finite leaves a gap.
    """
    points = [_finite_mean(stretch) for stretch in _stretches(values, width)]
    known = [point for point in points if point is not None]
    if not known:
        return " " * len(points)
    low, high = min(known), max(known)
    return "".join(" " if point is None else _block(point, low, high) for point in points)


def _stretches(values: Sequence[float], width: int) -> list[Sequence[float]]:
    count = min(len(values), width)
    edges = [index * len(values) // count for index in range(count + 1)] if count else [0]
    return [values[start:end] for start, end in pairwise(edges)]


def _finite_mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(value / len(finite) for value in finite) if finite else None


def _block(value: float, low: float, high: float) -> str:
    if high == low:
        return BLOCKS[3]
    height = value / 2 - low / 2, high / 2 - low / 2  # halves, so that the span of two huge numbers stays finite
    return BLOCKS[min(int(height[0] / height[1] * len(BLOCKS)), len(BLOCKS) - 1)]


def arrow_of(curve: str) -> str:
    """Where a sparkline goes: its newest block against the mean of those before it in its last third. At most half a
    block is level; a space where there is nothing to compare."""
    end = curve[-max(2, math.ceil(len(curve) / 3)) :] or " "
    before, newest = end[:-1], end[-1]
    heights = [BLOCKS.index(block) for block in before if block != " "]
    if newest == " " or not heights:
        return " "
    rise = BLOCKS.index(newest) - sum(heights) / len(heights)
    return "→" if abs(rise) <= 0.5 else "↑" if rise > 0.0 else "↓"


def format_number(value: float | int | None, digits: int = 4) -> str:
    """About so many digits, here four: 12,345 · 123.4 · 1.234 · 0.0123 · 1.23e-05."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if value == int(value) and size < 1e9:
        return f"{int(value):,}"
    if size >= 1e7 or size < 1e-3:
        return f"{value:.{max(0, digits - 2)}e}"
    if size >= 10.0**digits:
        return f"{value:,.0f}"
    return f"{value:,.{max(0, digits - (3 if size >= 100 else 1 if size >= 1 else 0))}f}"


def format_duration(seconds: float | None) -> str:
    """`0:07`, `12:34`, `1:02:03`, `2 d 03:04`."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def proportional_widths(fractions: Sequence[float], width: int) -> list[int]:
    """Whole widths that follow the fractions and sum to `width` times their sum, rounded once in all."""
    edges, total = [0], 0.0
    for fraction in fractions:
        total += max(0.0, fraction)
        edges.append(round(min(total, 1.0) * width))
    return [end - start for start, end in pairwise(edges)]
