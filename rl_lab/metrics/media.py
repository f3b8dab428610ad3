"""Pictures, videos and distributions as TensorBoard shows them: its image summaries play GIFs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_FRAMES, LARGEST_SIDE = 150, 256  # of a video in an event file; the mp4 beside it has them all
BUCKETS = 30


@dataclass(frozen=True)
class Frames:
    """uint8 `[height, width, 3]`; several are a video."""

    frames: Sequence[np.ndarray]
    fps: float = 10.0


@dataclass(frozen=True)
class Distribution:
    """Numbers whose histogram is shown."""

    values: np.ndarray


Media = Frames | Distribution


def summary_value(summary: Any, name: str, media: Media) -> Any:
    """The value of a TensorBoard summary; `summary` is the class of its messages."""
    if isinstance(media, Distribution):
        from tensorboard.compat.proto.histogram_pb2 import HistogramProto

        return summary.Value(tag=name, histo=HistogramProto(**histogram(media.values)))
    encoded, width, height = encode(media)
    image = summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
    return summary.Value(tag=name, image=image)


def histogram(values: np.ndarray) -> dict[str, Any]:
    """Finite values counted in equal buckets between the least and the greatest."""
    finite = values[np.isfinite(values)].astype(float)
    if not len(finite):
        finite = np.zeros(1)
    counts, edges = np.histogram(finite, bins=BUCKETS)
    return {
        "min": float(finite.min()),
        "max": float(finite.max()),
        "num": float(len(finite)),
        "sum": float(finite.sum()),
        "sum_squares": float((finite**2).sum()),
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.astype(float).tolist(),
    }


def encode(media: Frames) -> tuple[bytes, int, int]:
    """A PNG of one frame or a GIF of several, small enough for a browser, with its width and height."""
    from PIL import Image

    stride = -(-len(media.frames) // MOST_FRAMES)
    height, width = media.frames[0].shape[:2]
    shrink = max(1.0, max(height, width) / LARGEST_SIDE) if len(media.frames) > 1 else 1.0
    size = (max(1, round(width / shrink)), max(1, round(height / shrink)))
    pictures = [Image.fromarray(frame).resize(size) for frame in media.frames[::stride]]
    file = io.BytesIO()
    if len(pictures) == 1:
        pictures[0].save(file, format="PNG")
    else:
        duration_ms = max(20, round(1000 * stride / media.fps))  # browsers slow down what is faster
        pictures[0].save(file, format="GIF", save_all=True, append_images=pictures[1:], duration=duration_ms, loop=0)
    return file.getvalue(), *size
