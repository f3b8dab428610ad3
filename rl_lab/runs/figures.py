"""Drawings without a display."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.runs.files import write_atomic
from rl_lab.types import MissingExtraError


def make_figure(what: str, width_px: float, height_px: float, *, dpi: int) -> Any:
    """An empty figure; without pyplot there is no global state to disturb and no display to find."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(f"{what} needs matplotlib: `pip install matplotlib`.") from error
    figure = Figure(figsize=(width_px / dpi, height_px / dpi), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def pixels_of(figure: Any) -> np.ndarray:
    """The figure as it looks now: uint8 `[height, width, 3]`."""
    figure.canvas.draw()
    return np.array(figure.canvas.buffer_rgba())[..., :3]


def write_png(path: Path, figure: Any, *, dpi: int) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    write_atomic(path, picture.getvalue())
