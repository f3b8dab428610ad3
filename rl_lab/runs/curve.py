"""The learning curve as a picture."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.runs.figures import make_figure, write_png
from rl_lab.runs.metrics_file import Series, series

TRAINING_RETURN = "collect/episode_return_mean"
EVALUATION_RETURN = "eval/episode_return_mean"
EVALUATION_SPREAD = "eval/episode_return_std"

TITLE_LETTERS = 60  # of a line that fits into the figure
_BLUE, _ORANGE, _GREY = "#2f6db5", "#d9702c", "#5c6670"


def write_curve(path: Path, rows: list[dict[str, Any]], *, title: str) -> bool:
    """Draw training and evaluation return over agent steps, or over updates in a run that takes no steps; False, and
    no file, where there is nothing to draw."""
    figure = make_figure("The learning curve", 960, 540, dpi=120)
    if not draw_curve(figure.add_subplot(), rows, title=title):
        return False
    write_png(path, figure, dpi=120)
    return True


def draw_curve(axes: Any, rows: list[dict[str, Any]], *, title: str) -> bool:
    """The same in somebody's axes; False where there is nothing to draw."""
    rows = [row for row in rows if "agent_steps" in row]
    training, evaluation = series(rows, TRAINING_RETURN), series(rows, EVALUATION_RETURN)
    if not training and not evaluation:
        return False
    counter, last = _counter(rows), rows[-1]
    _draw(axes, training, evaluation, counter)
    frames = f"{last['agent_steps']:,} agent steps = {last.get('env_frames', 0):,} env frames"
    axes.set_xlabel(f"agent steps   ({frames})" if counter == "agent_steps" else "updates")
    axes.set_ylabel("episode return")
    axes.set_title(textwrap.fill(title, TITLE_LETTERS), loc="left", fontweight="bold")
    tidy(axes)
    return True


def draw_metric(axes: Any, rows: list[dict[str, Any]], name: str) -> bool:
    """One metric over agent steps, or updates where there are none; False where no row has it."""
    rows = [row for row in rows if "agent_steps" in row]
    found = series(rows, name)
    if found:
        counter = _counter(rows)
        axes.plot(*_points(found, counter), linewidth=1.8, label=name)
        axes.set_xlabel(counter.replace("_", " "))
        tidy(axes)
    return bool(found)


def _counter(rows: list[dict[str, Any]]) -> str:
    """What a curve is drawn over: a run that learns from a dataset alone has updates only."""
    has_steps = any(row["agent_steps"] for row in rows)
    return "agent_steps" if has_steps or not rows[-1].get("updates") else "updates"


def _draw(axes: Any, training: Series, evaluation: Series, counter: str) -> None:
    if training:
        steps, returns = _points(training, counter)
        axes.plot(steps, returns, color=_BLUE, linewidth=1.8, label="training (mean of recent episodes)")
    if evaluation:
        steps, returns = _points(evaluation, counter)
        spread = np.asarray([row.get(EVALUATION_SPREAD) or 0.0 for row, _ in evaluation], dtype=float)
        axes.fill_between(steps, returns - spread, returns + spread, color=_ORANGE, alpha=0.15, linewidth=0)
        axes.plot(steps, returns, color=_ORANGE, linewidth=1.4, marker="o", markersize=5, label="evaluation (± std)")
        if np.isfinite(returns).any():
            best = int(np.nanargmax(returns))
            axes.annotate(
                f"best {returns[best]:,.1f}",
                (steps[best], returns[best]),
                xytext=(0, 8),
                textcoords="offset points",
                ha="right" if steps[best] > steps.mean() else "left",
                color=_ORANGE,
                fontweight="bold",
            )


def _points(values: Series, counter: str) -> np.ndarray:
    """The counter and the values, `[2, rows]`."""
    return np.asarray([(row.get(counter, 0), value) for row, value in values], dtype=float).T


def tidy(axes: Any) -> None:
    """Light grid, no box, thousands as k and millions as M; a legend where lines have labels."""
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(True, color="#e3e6e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02, y=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_GREY)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")
