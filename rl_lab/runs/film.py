"""A world model's dream as a video and a picture.

    real | reconstruction | open loop      reward   continue   value        one line per sequence; the curves grow
    [  ]       [  ]            [  ]        ~~~~~     ~~~~~~    ~~~~~        with the video, the picture has them whole

Observations without an image are drawn as curves too, those elements that vary most. A green frame: the model sees
the observation; a red one: it gets the actions alone. Rows after the end of an episode are dark, and not in curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.runs.figures import make_figure, pixels_of, write_png
from rl_lab.runs.video import write_video

Views = Mapping[str, Mapping[str, np.ndarray]]
"""`real`, `reconstruction`, `open_loop`: observation keys `[B, T, ...]`, numbers `[B, T]`; `real` has `is_over`."""

FPS = 10.0  # slow enough to compare by eye
TILE, GAP, HEADER = 128, 4, 24  # pixels: least height of an image, space around it, its title
CURVE_WIDTH, CURVE_HEIGHT = 220, 136  # pixels
MOST_ELEMENTS = 4  # curves of an observation without an image
NUMBERS = ("reward", "continue", "value", "planned reward", "planned return")
COLOURS = {"real": "#30363c", "reconstruction": "#2f6db5", "open_loop": "#d9702c"}
OBSERVED, OPEN_LOOP = (70, 160, 80), (200, 60, 50)


@dataclass(frozen=True)
class FilmFiles:
    """Where a film lies."""

    video: Path
    curves: Path
    frames: Sequence[np.ndarray] = field(default=(), repr=False, compare=False)  # of the video


def write_film(path: str | Path, views: Views, *, context: int, fps: float = FPS) -> FilmFiles:
    """Write the video, and beside it a png of whole curves. Open loops begin after `context` rows."""
    path = Path(path)
    curves = Curves(views, context)
    frames = frames_of(views, curves, context)
    video = write_video(path, frames, fps)
    picture = path.with_suffix(".png")
    write_png(picture, curves.figure, dpi=150)
    return FilmFiles(video, picture, frames)


def frames_of(views: Views, curves: Curves, context: int) -> list[np.ndarray]:
    """One frame `[height, width, 3]` per row: tiles, where there are images, and the curves so far."""
    keys, length = image_keys(views), views["real"]["reward"].shape[1]
    if not keys:
        return [curves.until(row) for row in range(length)]
    header = _header(views, keys)
    frames = []
    for row in range(length):
        left = np.concatenate((header, _tiles(views, keys, row, is_context=row < context)))
        right = curves.until(row)
        canvas = np.full((max(len(left), len(right)), left.shape[1] + right.shape[1], 3), 255, dtype=np.uint8)
        canvas[: len(left), : left.shape[1]] = left
        canvas[: len(right), left.shape[1] :] = right
        frames.append(canvas)
    return frames


# --- images ------------------------------------------------------------------------------------


def image_keys(views: Views) -> list[str]:
    """Observations to be shown as they are: uint8 `[B, T, height, width, C]`."""
    return [key for key, values in views["real"].items() if values.dtype == np.uint8 and values.ndim == 5]


def to_rgb(images: np.ndarray) -> np.ndarray:
    """Images `[..., C]` with any number of channels as `[..., 3]`: of stacked frames the newest."""
    if images.shape[-1] % 3 == 0:
        return images[..., -3:]
    return np.repeat(images[..., -1:], 3, axis=-1)


def _scale(views: Views, key: str) -> int:
    """How many times an image is enlarged; whole numbers keep its pixels square."""
    return max(1, -(-TILE // views["real"][key].shape[2]))


def _header(views: Views, keys: list[str]) -> np.ndarray:
    """Titles over the tiles."""
    widths = [int(views["real"][key].shape[3]) * _scale(views, key) + 2 * GAP for key in keys for _ in COLOURS]
    figure = make_figure("A film", sum(widths), HEADER, dpi=100)
    titles = [view.replace("_", " ") for _ in keys for view in COLOURS]
    middle = np.cumsum([0, *widths])[:-1] + np.array(widths) / 2
    for title, place in zip(titles, middle, strict=True):
        figure.text(place / sum(widths), 0.5, title, ha="center", va="center", fontsize=8)
    return pixels_of(figure)


def _tiles(views: Views, keys: list[str], row: int, *, is_context: bool) -> np.ndarray:
    """The images of one row: a line per sequence, real, reconstruction and open loop of each key side by side."""
    lines = []
    for sequence in range(len(views["real"]["reward"])):
        is_over = bool(views["real"]["is_over"][sequence, row])
        tiles = []
        for key in keys:
            scale = _scale(views, key)
            for view in COLOURS:
                image = to_rgb(views[view][key][sequence, row])
                image = (image // 4 if is_over else image).repeat(scale, axis=0).repeat(scale, axis=1)
                is_seen = is_context or view == "reconstruction"
                border = (255, 255, 255) if view == "real" or is_over else OBSERVED if is_seen else OPEN_LOOP
                tiles.append(_framed(image, border))
        height = max(len(tile) for tile in tiles)
        padded = [np.pad(tile, ((0, height - len(tile)), (0, 0), (0, 0)), constant_values=255) for tile in tiles]
        lines.append(np.concatenate(padded, axis=1))
    return np.concatenate(lines)


def _framed(image: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """The image with a coloured edge, half of the gap around it, on white."""
    height, width = image.shape[:2]
    tile = np.full((height + 2 * GAP, width + 2 * GAP, 3), 255, dtype=np.uint8)
    edge = GAP // 2
    tile[edge:-edge, edge:-edge] = colour
    tile[GAP:-GAP, GAP:-GAP] = image
    return tile


# --- curves ------------------------------------------------------------------------------------


class Curves:
    """A grid of curves, a line per sequence. It is drawn twice, with curves and without: a frame joins the two."""

    def __init__(self, views: Views, context: int) -> None:
        columns = curve_columns(views)
        images = image_keys(views)
        count, self.length = views["real"]["reward"].shape
        line_height = CURVE_HEIGHT
        if images:  # a line of curves is as high as its tiles
            line_height = max(views["real"][key].shape[2] * _scale(views, key) for key in images) + 2 * GAP
        height = HEADER + count * line_height
        self.figure = make_figure("A film", CURVE_WIDTH * len(columns), height, dpi=100)
        self.figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02)
        grid = self.figure.subplots(count, len(columns), squeeze=False, sharex=True)
        drawn = []
        for sequence, line_of_axes in enumerate(grid):
            for (title, values), axes in zip(columns.items(), line_of_axes, strict=True):
                drawn += _draw(axes, {view: numbers[sequence] for view, numbers in values.items()}, context)
                if sequence == 0:
                    axes.set_title(title, fontsize=8)
                if title == "continue":  # a probability: small differences are none
                    axes.set_ylim(-0.05, 1.05)
        handles, labels = grid[0][0].get_legend_handles_labels()
        self.figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
        self._whole = pixels_of(self.figure)
        for line in drawn:
            line.set_visible(False)
        self._empty = pixels_of(self.figure)
        for line in drawn:
            line.set_visible(True)
        self._boxes = [_box(axes, len(self._whole)) for axes in grid.flat]
        self._places = [
            [int(axes.transData.transform((row, 0.0))[0]) for row in range(self.length)] for axes in grid.flat
        ]

    def until(self, row: int) -> np.ndarray:
        """The drawing with the curves up to a row, which a thin line marks."""
        frame = self._whole.copy()
        for (top, bottom, right), places in zip(self._boxes, self._places, strict=True):
            now = places[row]
            frame[top:bottom, now + 1 : right] = self._empty[top:bottom, now + 1 : right]
            frame[top:bottom, now] = 170
        return frame


def curve_columns(views: Views) -> dict[str, dict[str, np.ndarray]]:
    """Title to view to values `[B, T]`, NaN where an episode is over."""
    is_over = views["real"]["is_over"]
    columns: dict[str, dict[str, np.ndarray]] = {}
    if not image_keys(views):
        columns |= _elements(views)
    for name in NUMBERS:
        there = {view: views[view][name] for view in COLOURS if name in views[view]}
        if len(there) > ("real" in there):  # the model says something of it
            columns[name] = there
    return {
        title: {view: np.where(is_over, np.nan, values.astype(np.float64)) for view, values in column.items()}
        for title, column in columns.items()
    }


def _elements(views: Views) -> dict[str, dict[str, np.ndarray]]:
    """Those elements of the observations that vary most, in their own order."""
    real, is_over = views["real"], views["real"]["is_over"]
    every = {
        f"{key} {index}": {view: views[view][key].reshape(*is_over.shape, -1)[..., index] for view in COLOURS}
        for key in real
        if key not in (*NUMBERS, "is_over")
        for index in range(math.prod(real[key].shape[2:]))
    }
    spread = {title: float(column["real"][~is_over].std()) for title, column in every.items()}
    chosen = sorted(spread, key=lambda title: -spread[title])[:MOST_ELEMENTS]
    return {title: column for title, column in every.items() if title in chosen}


def _draw(axes: Any, values: Mapping[str, np.ndarray], context: int) -> list[Any]:
    """One curve per view; the real one lies below, wide enough to be seen under the others."""
    lines = [
        axes.plot(numbers, color=COLOURS[view], linewidth=2.4 if view == "real" else 1.1, label=view.replace("_", " "))
        for view, numbers in values.items()
    ]
    axes.axvline(context - 0.5, color="#9aa2a9", linewidth=0.8, linestyle=":")
    axes.tick_params(labelsize=6, length=2)
    axes.margins(y=0.1)
    axes.set_xlim(0, max(1, len(next(iter(values.values()))) - 1))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return [line for each in lines for line in each]


def _box(axes: Any, height: int) -> tuple[int, int, int]:
    """Top, bottom and right edge of a drawing's inside in pixels, its frame left alone."""
    extent = axes.get_window_extent()
    return height - int(extent.y1), height - int(extent.y0) - 1, int(extent.x1) + 1
