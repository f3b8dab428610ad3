"""Curves of several groups of runs as one picture: a panel for each environment and metric, bands over seeds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rl_lab.runs.compare import Comparison, Group
from rl_lab.runs.curve import tidy
from rl_lab.runs.figures import make_figure
from rl_lab.runs.published import Published
from rl_lab.runs.series import Curve, common_grid, on_grid
from rl_lab.runs.statistics import band
from rl_lab.types import ConfigError

Band = Literal["ci", "std", "range"]
BANDS: dict[str, str] = {
    "ci": "mean, 95 % interval over runs",
    "std": "mean ± std over runs",
    "range": "mean, lowest to highest run",
}
DPI = 120
# Okabe and Ito's colours, which people with any colour vision tell apart; then the same with other dashes.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6d31")
DASHES = ("-", "--", "-.", ":")
_PUBLISHED = ("#1b1b1b", "#6b6b6b", "#9a9a9a")
_PANEL_PX, _MOST_COLUMNS = (600, 420), 3
_LABEL_LETTERS = 70


def comparison_figure(comparison: Comparison, *, spread: Band = "ci") -> Any:
    """The picture as a matplotlib figure: rows of panels, and one legend below them all."""
    if spread not in BANDS:
        raise ConfigError(f"band is '{spread}': write {', '.join(BANDS)}.")
    published = comparison.published
    panels = [(task, metric) for task in comparison.tasks for metric in comparison.metrics]
    columns = min(_MOST_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    lines = len(comparison.groups) + len({each.label for found in published.values() for each in found})
    width, height = _PANEL_PX
    legend_columns = 2 if columns > 1 and lines > 4 else 1
    size = (max(width * columns, 800), height * rows + 50 + 26 * math.ceil(lines / legend_columns))
    figure = make_figure("A comparison", *size, dpi=DPI)
    grid = figure.subplots(rows, columns, squeeze=False)
    handles: dict[str, Any] = {}
    for axes, (task, metric) in zip(grid.flat, panels, strict=False):
        handles |= _draw_panel(axes, comparison, task, metric, spread, published.get(task, ()))
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    letters = _LABEL_LETTERS * columns // legend_columns
    figure.legend(
        list(handles.values()),
        [textwrap.shorten(label, letters, placeholder=" …") for label in handles],
        loc="outside lower left",
        frameon=False,
        ncols=legend_columns,
        alignment="left",
        title=_legend_title(comparison, spread),
    )
    return figure


def _legend_title(comparison: Comparison, spread: Band) -> str:
    most = max(len(group.of(task)) for group in comparison.groups for task in comparison.tasks)
    title = BANDS[spread] if most > 1 else "one run each"
    return f"{title}; published: mean and std over seeds" if comparison.published else title


def _draw_panel(
    axes: Any, comparison: Comparison, task: str, metric: str, spread: Band, published: Sequence[Published]
) -> dict[str, Any]:
    handles = {}
    for index, group in enumerate(comparison.groups):
        color, dash = COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]
        curves = [member.curves[metric].last_of_each() for member in group.of(task) if len(member.curves[metric])]
        if curves:
            handles[_label(group, comparison)] = _draw_group(axes, curves, color, dash, spread)
    is_return = metric.endswith("return_mean")
    for index, each in enumerate(published if is_return else ()):
        handles[each.label] = _draw_published(axes, each, _PUBLISHED[index % len(_PUBLISHED)], comparison)
    axes.set_title(task, loc="left", fontweight="bold", fontsize=11)
    axes.set_xlim(left=0.0)
    axes.set_xlabel(comparison.x.replace("_", " ") if comparison.x != "wall_s" else "seconds")
    axes.set_ylabel(metric)
    tidy(axes)
    return handles


def _label(group: Group, comparison: Comparison) -> str:
    counts = sorted({len(group.of(task)) for task in comparison.tasks} - {0})
    many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    return f"{comparison.full_name(group.label)} ({many} {'run' if many == '1' else 'runs'})"


def _draw_group(axes: Any, curves: Sequence[Curve], color: str, dash: str, spread: Band) -> Any:
    """The mean over runs as far as all of them reach, its band, and each run as a faint line."""
    if len(curves) == 1:
        grid = np.linspace(curves[0].x[0], curves[0].x[-1], 4 * len(common_grid(curves)))
        x, y = (curves[0].x, curves[0].y) if len(curves[0]) < len(grid) else (grid, on_grid(curves[0], grid))
        return axes.plot(x, y, color=color, linestyle=dash, linewidth=1.9, marker=_marker(x))[0]
    grid = common_grid(curves)
    values = np.stack([on_grid(curve, grid) for curve in curves])
    for curve in curves:
        end = np.linspace(curve.x[0], curve.x[-1], len(grid))
        axes.plot(end, on_grid(curve, end), color=color, linewidth=0.6, alpha=0.35)
    mean = values.mean(axis=0)
    if spread == "ci":
        low, high = band(values)
    elif spread == "std":
        std = values.std(axis=0, ddof=1)
        low, high = mean - std, mean + std
    else:
        low, high = values.min(axis=0), values.max(axis=0)
    axes.fill_between(grid, low, high, color=color, alpha=0.2, linewidth=0)
    return axes.plot(grid, mean, color=color, linestyle=dash, linewidth=2.2, marker=_marker(grid))[0]


def _marker(x: np.ndarray) -> str | None:
    """A line through one place cannot be seen."""
    return "o" if x[0] == x[-1] else None


def _draw_published(axes: Any, found: Published, color: str, comparison: Comparison) -> Any:
    """As far as the runs beside it go: a curve of millions of frames would hide those of thousands."""
    farthest = max(
        member.curves[comparison.metrics[0]].x[-1]
        for group in comparison.groups
        for member in group.members
        if len(member.curves[comparison.metrics[0]])
    )
    shown = found.curve.x <= max(farthest, found.curve.x[0])
    x, y, std = found.curve.x[shown], found.curve.y[shown], found.std[shown]
    axes.fill_between(x, y - std, y + std, color=color, alpha=0.1, linewidth=0)
    return axes.plot(x, y, color=color, linestyle=(0, (4, 2)), linewidth=1.6, marker="s", markersize=4)[0]
