"""Films on disk: what lies where in a frame, how curves grow, and which files appear."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_lab.runs.film import (
    CURVE_HEIGHT,
    CURVE_WIDTH,
    GAP,
    HEADER,
    OBSERVED,
    OPEN_LOOP,
    Curves,
    curve_columns,
    frames_of,
    to_rgb,
    write_film,
)
from rl_lab.types import ConfigError, MissingExtraError

SHADES = {"real": 40, "reconstruction": 80, "open_loop": 120}


def views_of(observations: dict[str, Any], *, count: int = 2, length: int = 6) -> dict[str, dict[str, np.ndarray]]:
    """Every view of the same length; the second sequence is over from row 4 on."""
    numbers = {name: np.linspace(0, 1, length)[None].repeat(count, axis=0) for name in ("reward", "continue", "value")}
    views = {view: {**observations[view], **numbers} for view in SHADES}
    is_over = np.zeros((count, length), dtype=bool)
    is_over[1, 4:] = True
    del views["real"]["value"]
    views["real"]["is_over"] = is_over
    return views


def images(height: int = 64, width: int = 64, channels: int = 3) -> dict[str, Any]:
    return {view: {"image": np.full((2, 6, height, width, channels), grey, np.uint8)} for view, grey in SHADES.items()}


def vectors(size: int = 3) -> dict[str, Any]:
    base = np.random.default_rng(0).normal(size=(2, 6, size)) * np.arange(1, size + 1)
    return {view: {"vector": (base + shade / 100).astype(np.float32)} for view, shade in SHADES.items()}


def tile(frame: np.ndarray, line: int, column: int, size: int = 128) -> np.ndarray:
    """One tile with its edge."""
    top, left = HEADER + line * (size + 2 * GAP), column * (size + 2 * GAP)
    return frame[top : top + size + 2 * GAP, left : left + size + 2 * GAP]


def test_images_stand_side_by_side_enlarged_with_curves_to_their_right() -> None:
    views = views_of(images())
    frames = frames_of(views, Curves(views, 3), 3)
    assert len(frames) == 6
    assert {frame.shape for frame in frames} == {(HEADER + 2 * 136, 3 * 136 + 3 * CURVE_WIDTH, 3)}
    for column, shade in enumerate(SHADES.values()):
        inside = tile(frames[0], 1, column)[GAP:-GAP, GAP:-GAP]
        assert inside.shape == (128, 128, 3) and (inside == shade).all()


def test_an_edge_says_whether_the_model_looks_or_dreams() -> None:
    views = views_of(images())
    frames = frames_of(views, Curves(views, 3), 3)
    edges = [[tuple(tile(frame, 0, column)[GAP - 1, 20].tolist()) for column in range(3)] for frame in frames]
    white = (255, 255, 255)
    assert edges == [[white, OBSERVED, OBSERVED]] * 3 + [[white, OBSERVED, OPEN_LOOP]] * 3


def test_what_follows_the_end_of_an_episode_is_dimmed() -> None:
    views = views_of(images())
    frames = frames_of(views, Curves(views, 3), 3)
    assert [int(tile(frame, 1, 2)[GAP, GAP, 0]) for frame in frames] == [120] * 4 + [30] * 2
    assert {int(tile(frame, 0, 2)[GAP, GAP, 0]) for frame in frames} == {120}


@pytest.mark.parametrize(("channels", "taken"), [(1, [0, 0, 0]), (3, [0, 1, 2]), (4, [3, 3, 3]), (9, [6, 7, 8])])
def test_any_number_of_channels_can_be_seen(channels: int, taken: list[int]) -> None:
    image = np.arange(channels, dtype=np.uint8).reshape(1, 1, channels)
    assert to_rgb(image)[0, 0].tolist() == taken


def test_large_images_keep_their_size_and_two_keys_stand_side_by_side() -> None:
    both = {view: {"image": image["image"], "map": images(200, 100)[view]["image"]} for view, image in images().items()}
    views = views_of(both)
    frame = frames_of(views, Curves(views, 3), 3)[0]
    assert frame.shape == (HEADER + 2 * 208, 3 * 136 + 3 * 108 + 3 * CURVE_WIDTH, 3)


def test_without_images_the_elements_that_vary_most_are_drawn_in_their_order() -> None:
    views = views_of(vectors(6))
    assert list(curve_columns(views)) == [f"vector {index}" for index in (2, 3, 4, 5)] + ["reward", "continue", "value"]
    frames = frames_of(views, Curves(views, 3), 3)
    assert {frame.shape for frame in frames} == {(HEADER + 2 * CURVE_HEIGHT, 7 * CURVE_WIDTH, 3)}


def test_curves_are_those_of_the_views_and_stop_where_an_episode_is_over() -> None:
    columns = curve_columns(views_of(images()))
    assert list(columns) == ["reward", "continue", "value"]
    assert list(columns["value"]) == ["reconstruction", "open_loop"]
    np.testing.assert_array_equal(columns["reward"]["real"][0], np.linspace(0, 1, 6))
    assert np.isnan(columns["reward"]["open_loop"][1]).tolist() == [False] * 4 + [True] * 2


def test_a_model_that_predicts_no_end_has_no_such_column() -> None:
    views = views_of(images())
    for view in ("reconstruction", "open_loop"):
        del views[view]["continue"], views[view]["value"]
    assert list(curve_columns(views)) == ["reward"]


def test_curves_grow_from_left_to_right() -> None:
    views = views_of(vectors())
    curves = Curves(views, 3)
    last = curves.until(5)
    ink = [int((curves.until(row) < 200).any(axis=2).sum()) for row in range(6)]
    assert ink == sorted(ink) and ink[0] < ink[-1]
    first_axes = slice(0, CURVE_WIDTH // 2)
    assert np.array_equal(curves.until(4)[:, first_axes], last[:, first_axes]), "what was drawn stays"


def test_a_film_is_a_video_and_a_picture(tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio.v2")
    files = write_film(tmp_path / "videos" / "dream.mp4", views_of(images()), context=3)
    assert [files.video.name, files.curves.name] == ["dream.mp4", "dream.png"]
    with imageio.get_reader(files.video) as reader:
        back = list(reader.iter_data())
        assert reader.get_meta_data()["fps"] == 10.0
    assert len(back) == 6
    assert abs(float(tile(back[5], 0, 2)[30:100, 30:100].mean()) - 120) < 4
    assert imageio.imread(files.curves).shape[1] == 3 * CURVE_WIDTH * 1.5


def test_a_film_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only mp4 is written; name it 'dream\.mp4'"):
        write_film(tmp_path / "dream.gif", views_of(images()), context=3)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match="A film needs matplotlib: `pip install matplotlib`"):
        write_film(tmp_path / "dream.mp4", views_of(images()), context=3)
