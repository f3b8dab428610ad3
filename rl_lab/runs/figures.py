"""Drawings without a display."""

from __future__ import annotations

from typing import Any

import numpy as np

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
