from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl_lab.runs import video as video_module
from rl_lab.runs.video import write_video
from rl_lab.types import ConfigError, MissingExtraError, RunError


def frames(count: int = 10, height: int = 64, width: int = 96) -> list[np.ndarray]:
    """A grey picture that brightens."""
    return [np.full((height, width, 3), 20 * (number % 10), dtype=np.uint8) for number in range(count)]


def test_a_video_holds_every_frame_in_a_format_that_browsers_play(tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio.v2")
    path = write_video(tmp_path / "videos" / "final.mp4", frames(), fps=25)
    with imageio.get_reader(path) as reader:
        data = reader.get_meta_data()
        back = list(reader.iter_data())
    assert (data["codec"], data["fps"], tuple(data["size"])) == ("h264", 25.0, (96, 64))
    assert data["pix_fmt"].startswith("yuv420p")
    assert len(back) == 10
    for number, frame in enumerate(back):
        assert abs(float(frame.mean()) - 20 * number) < 4
    assert [file.name for file in path.parent.iterdir()] == ["final.mp4"]


def test_odd_sizes_are_padded(tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio.v2")
    path = write_video(tmp_path / "odd.mp4", frames(3, height=63, width=95), fps=30)
    with imageio.get_reader(path) as reader:
        assert tuple(reader.get_meta_data()["size"]) == (96, 64)


def test_a_video_without_a_name_gets_one_proposed() -> None:
    with pytest.raises(ConfigError, match=r"only mp4 is written; name it 'video\.mp4'"):
        write_video("", frames(), 30)


@pytest.mark.parametrize(
    ("name", "pictures", "fps", "words"),
    [
        ("a.gif", frames(), 30, r"only mp4 is written; name it 'a\.mp4'"),
        ("a.mp4", frames(), 0, "fps is 0; it must be above 0"),
        ("a.mp4", [], 30, r"there are no frames. Can the environment render"),
        ("a.mp4", [np.zeros((4, 4, 3), np.float32)], 30, r"frame 0 is float32 \[4, 4, 3\]; every frame must be uint8"),
        ("a.mp4", [np.zeros((4, 4), np.uint8)], 30, r"frame 0 is uint8 \[4, 4\]"),
        ("a.mp4", frames(1) + frames(1, height=32), 30, r"frame 1 is uint8 \[32, 96, 3\].*as large as the first"),
    ],
)
def test_what_makes_no_video_is_refused(
    tmp_path: Path, name: str, pictures: list[np.ndarray], fps: float, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        write_video(tmp_path / name, pictures, fps)
    assert list(tmp_path.iterdir()) == []


def test_without_imageio_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingExtraError, match=r"`pip install 'imageio\[ffmpeg\]'`"):
        write_video(tmp_path / "a.mp4", frames(), 30)


def test_a_failing_encoder_is_reported_and_keeps_the_old_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tmp_path / "ffmpeg"
    encoder.write_text("#!/bin/sh\necho 'No space left on device' >&2\nexit 1\n")
    encoder.chmod(0o755)
    monkeypatch.setattr(video_module, "_ffmpeg", lambda: str(encoder))
    (tmp_path / "a.mp4").write_bytes(b"old")
    with pytest.raises(RunError, match=r"a\.mp4 could not be written: ffmpeg says 'No space left on device'"):
        write_video(tmp_path / "a.mp4", frames(50, height=400, width=600), 30)
    assert (tmp_path / "a.mp4").read_bytes() == b"old"
    assert {file.name for file in tmp_path.iterdir()} == {"a.mp4", "ffmpeg"}


def test_a_video_below_a_regular_file_is_refused_with_a_cure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write .*a\.mp4: .*not a directory"):
        write_video(tmp_path / "file" / "a.mp4", frames(), 30)


def test_heavy_libraries_load_only_when_needed() -> None:
    program = (
        "import sys, rl_lab.runs.report, rl_lab.runs.video, rl_lab.runs.index\n"
        "print([name for name in ('matplotlib', 'imageio', 'imageio_ffmpeg') if name in sys.modules])"
    )
    root = Path(video_module.__file__).parents[2]
    answer = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
