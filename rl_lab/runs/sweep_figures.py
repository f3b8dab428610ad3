"""What the parameters of a sweep explain, and pictures of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.runs.figures import make_figure, write_png

BINS = 4  # of a parameter's values, as many trials in each
DPI = 120
_BLUE, _GREY = "#2f6db5", "#5c6670"


def importance(parameters: Sequence[Mapping[str, Any]], scores: Sequence[float]) -> dict[str, float]:
    """Fraction of the scores' variance that each parameter explains by itself, greatest first, between 0 and 1.

    omega squared of a one-way analysis of variance: numbers fall into four bins of equally many trials, choices are
    their own groups. A parameter without influence gets 0 on average, however many groups it has.
    """
    if len(scores) < 2:
        return {}
    values = np.asarray(scores, dtype=float)
    fractions = {key: _omega_squared(_groups([each[key] for each in parameters]), values) for key in parameters[0]}
    return dict(sorted(fractions.items(), key=lambda item: -item[1]))


def _groups(column: Sequence[Any]) -> np.ndarray:
    """The group of each trial along one parameter."""
    is_numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in column)
    distinct = sorted(set(column)) if is_numeric else list(dict.fromkeys(map(repr, column)))
    if not is_numeric:
        return np.asarray([distinct.index(repr(value)) for value in column])
    if len(distinct) <= BINS:
        return np.asarray([distinct.index(value) for value in column])
    ranks = np.argsort(np.argsort(np.asarray(column, dtype=float), kind="stable"), kind="stable")
    return ranks * BINS // len(column)


def _omega_squared(groups: np.ndarray, scores: np.ndarray) -> float:
    names = np.unique(groups)
    total = float(((scores - scores.mean()) ** 2).sum())
    freedom = len(scores) - len(names)
    if len(names) < 2 or freedom < 1 or total == 0.0:
        return 0.0
    parts = [scores[groups == name] for name in names]
    within = float(sum(((part - part.mean()) ** 2).sum() for part in parts))
    noise = within / freedom
    return max(0.0, (total - within - (len(names) - 1) * noise) / (total + noise))


def draw_importance(path: Path, fractions: Mapping[str, float], *, title: str) -> None:
    figure = make_figure("The picture of a sweep", 960, 160 + 50 * len(fractions), dpi=DPI)
    axes = figure.add_subplot()
    names = list(fractions)[::-1]
    bars = axes.barh(names, [fractions[name] for name in names], color=_BLUE)
    axes.bar_label(bars, [f"{fractions[name]:.0%}" for name in names], padding=4)
    axes.set_xlim(0.0, 1.0)
    axes.set_title(title, loc="left", fontweight="bold")
    write_png(path, figure, dpi=DPI)


def draw_parallel_coordinates(
    path: Path,
    parameters: Sequence[Mapping[str, Any]],
    scores: Sequence[float],
    *,
    is_log: Mapping[str, bool],
    metric: str,
    title: str,
    is_maximized: bool,
) -> None:
    """One line per trial from parameter to parameter to its score; the better, the darker and the further in front."""
    keys = list(parameters[0])
    axes_values = [_axis([each[key] for each in parameters], is_log.get(key, False)) for key in keys]
    axes_values.append(_axis(list(scores), False))
    figure = make_figure("The picture of a sweep", 240 + 220 * len(axes_values), 640, dpi=DPI)
    axes = figure.add_subplot()
    goodness = axes_values[-1][0] if is_maximized else 1.0 - axes_values[-1][0]
    from matplotlib import colormaps

    for index in np.argsort(goodness, kind="stable"):
        color = colormaps["viridis_r"](float(goodness[index]))
        axes.plot([heights[index] for heights, _ in axes_values], color=color, alpha=0.8, linewidth=1.4)
    for place, (_, labels) in enumerate(axes_values):
        axes.axvline(place, color=_GREY, linewidth=0.8)
        for height, label in labels:
            axes.text(place, height, f" {label}", fontsize=8, va="center")
    axes.set_xticks(range(len(axes_values)), [*(key.rpartition(".")[2] for key in keys), metric], fontsize=8)
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(axes_values) - 0.6)
    axes.set_title(title, loc="left", fontweight="bold")
    write_png(path, figure, dpi=DPI)


def _axis(column: Sequence[Any], is_log: bool) -> tuple[np.ndarray, list[tuple[float, str]]]:
    """Heights between 0 and 1 of one column, and what is written beside the axis."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in column):
        numbers = np.log(np.asarray(column, dtype=float)) if is_log else np.asarray(column, dtype=float)
        low, high = float(numbers.min()), float(numbers.max())
        heights = (numbers - low) / (high - low) if high > low else np.full(len(numbers), 0.5)
        marks = [(0.0, min(column)), (1.0, max(column))] if high > low else [(0.5, column[0])]
        return heights, [(height, f"{value:.4g}") for height, value in marks]
    names = list(dict.fromkeys(map(str, column)))
    places = {name: index / max(len(names) - 1, 1) for index, name in enumerate(names)}
    return np.asarray([places[str(value)] for value in column]), [(place, name) for name, place in places.items()]
