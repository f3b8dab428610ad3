"""Plans of actions on disk: a video, and a png of its last frame.

    a line per sequence, a column per number of an action; per frame
        what was done so far, in black
        the plan under way: its executed part thick, the rest thin
        the same plan on its way out of noise, fainter the noisier

The first sequences' episodes end at different times; an ended one stands still.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.runs.figures import make_figure, pixels_of, write_png
from rl_lab.runs.film import CURVE_HEIGHT, CURVE_WIDTH, FPS, HEADER, FilmFiles
from rl_lab.runs.video import write_video

MOST_NUMBERS = 4  # of an action
MOST_ITERATIONS = 6  # of a plan on its way out of noise
DONE, EXECUTED, PLANNED, NOISY = "#30363c", "#d9702c", "#e8b48a", "#2f6db5"


def write_plan_film(
    path: str | Path, film: Mapping[str, np.ndarray], *, first_executed: int, after_executed: int, fps: float = FPS
) -> FilmFiles:
    """`film`: `iterations [B, T, K, steps, A]`, `place [B, T]`, `action [B, T, A]`, `is_over [B, T]`."""
    path = Path(path)
    figure = None
    frames = []
    for row in range(film["action"].shape[1]):
        figure = draw_row(film, row, first_executed, after_executed)
        frames.append(pixels_of(figure))
    video = write_video(path, frames, fps)
    picture = path.with_suffix(".png")
    write_png(picture, figure, dpi=150)
    return FilmFiles(video, picture, frames)


def draw_row(film: Mapping[str, np.ndarray], row: int, first_executed: int, after_executed: int) -> Any:
    """One frame as a figure."""
    actions, is_over = film["action"], film["is_over"]
    count, length, numbers = actions.shape[0], actions.shape[1], min(actions.shape[2], MOST_NUMBERS)
    figure = make_figure("Plans", CURVE_WIDTH * numbers, HEADER + count * CURVE_HEIGHT, dpi=100)
    grid = figure.subplots(count, numbers, squeeze=False, sharex=True)
    for sequence, line in enumerate(grid):
        shown = row if not is_over[sequence, row] else max(int(is_over[sequence].argmax()) - 1, 0)
        for number, axes in enumerate(line):
            done = actions[sequence, : shown + 1, number]
            plans = film["iterations"][sequence, shown, :, :, number]
            begin = shown - int(film["place"][sequence, shown])  # the agent step that the plan's first action is of
            _draw_plan(axes, plans, begin, first_executed, after_executed)
            axes.plot(np.arange(len(done)), done, color=DONE, linewidth=1.6, label="done")
            axes.axvline(shown, color="#9aa2a9", linewidth=0.8, linestyle=":")
            axes.set_xlim(-1, length + plans.shape[1])
            axes.set_ylim(-1.3, 1.3)
            axes.tick_params(labelsize=6, length=2)
            if sequence == 0:
                axes.set_title(f"action {number}", fontsize=8)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    return figure


def _draw_plan(axes: Any, plans: np.ndarray, begin: int, first_executed: int, after_executed: int) -> None:
    """Plans `[K, steps]` from noise to the last, from the agent step `begin` on."""
    steps = begin + np.arange(plans.shape[1])
    chosen = np.unique(np.linspace(0, len(plans) - 2, min(MOST_ITERATIONS, len(plans) - 1)).astype(int))
    for order, iteration in enumerate(chosen):
        label = "out of noise" if order == len(chosen) - 1 else None
        faintness = 0.1 + 0.4 * (order + 1) / len(chosen)
        axes.plot(steps, plans[iteration], color=NOISY, linewidth=0.7, alpha=faintness, label=label)
    axes.plot(steps, plans[-1], color=PLANNED, linewidth=1.2, label="planned")
    executed = slice(first_executed, after_executed)
    axes.plot(steps[executed], plans[-1][executed], color=EXECUTED, linewidth=2.2, label="executed")
