"""Frames to an mp4 that every browser plays, with the ffmpeg that imageio brings along."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from rl_lab.runs.files import appearing, readable_disk_errors
from rl_lab.types import ConfigError, MissingExtraError, RunError


def write_video(path: str | Path, frames: Sequence[np.ndarray], fps: float) -> Path:
    """Write RGB frames (uint8 `[H, W, 3]`, all of one size) as H.264. The file appears when it is complete."""
    path = Path(path)
    _check(path, frames, fps)
    height, width = frames[0].shape[:2]
    # H.264 in yuv420p halves both colour axes, so odd sizes are padded by repeating the last row or column.
    padding = ((0, height % 2), (0, width % 2), (0, 0))
    size = f"{width + width % 2}x{height + height % 2}"
    command = [_ffmpeg(), "-y", "-v", "error", "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(fps)]
    command += ["-i", "-", "-an", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-movflags", "+faststart"]
    with readable_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with appearing(path) as temporary:
            command += ["-f", "mp4", str(temporary)]
            _encode(command, (np.pad(frame, padding, mode="edge") for frame in frames), path)
    return path


def check_name(path: Path) -> None:
    """For those who have long work to do before they write it."""
    if path.suffix != ".mp4":
        name = path.with_suffix(".mp4").name if path.name else "video.mp4"
        raise ConfigError(f"Video {path}: only mp4 is written; name it '{name}'.")


def _check(path: Path, frames: Sequence[np.ndarray], fps: float) -> None:
    check_name(path)
    if not fps > 0:
        raise ConfigError(f"Video {path}: fps is {fps}; it must be above 0.")
    if len(frames) == 0:
        raise ConfigError(f"Video {path}: there are no frames. Can the environment render (render_mode='rgb_array')?")
    for index, frame in enumerate(frames):
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or frame.shape != frames[0].shape:
            raise ConfigError(
                f"Video {path}: frame {index} is {frame.dtype} {list(frame.shape)}; every frame must be "
                f"uint8 [H, W, 3] and as large as the first, {list(frames[0].shape)}."
            )


def _ffmpeg() -> str:
    try:
        import imageio_ffmpeg  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError("Videos need imageio with ffmpeg: `pip install 'imageio[ffmpeg]'`.") from error
    return str(imageio_ffmpeg.get_ffmpeg_exe())


def _encode(command: list[str], frames: Iterable[np.ndarray], path: Path) -> None:
    """Feed ffmpeg; its error messages go to a file, so that no full pipe can block it."""
    with tempfile.TemporaryFile() as messages:
        # Its own session: Ctrl-C in the terminal reaches us, not the encoder in the middle of a frame.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=messages, start_new_session=True)
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # ffmpeg gave up; its exit status and words say why
                for frame in frames:
                    process.stdin.write(frame.tobytes())
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            status = process.wait()
        messages.seek(0)
        words = messages.read().decode(errors="replace").strip()
    if status != 0:
        raise RunError(f"Video {path} could not be written: ffmpeg says '{words or f'exit status {status}'}'.")
