"""TensorBoard reads back every row, picture and histogram; a resumed run leaves no point twice."""

from __future__ import annotations

import io
import math
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_lab.metrics import tensorboard_writer
from rl_lab.metrics.event_file import (
    BLOCK_BYTES,
    EventFile,
    crc32c,
    masked_checksum,
    next_event_path,
    varint,
)
from rl_lab.metrics.media import Distribution, Frames, encode, histogram
from rl_lab.metrics.sinks import Sink
from rl_lab.metrics.tensorboard_writer import TensorBoardWriter
from rl_lab.metrics.writers import Row
from rl_lab.types import MissingExtraError


def row(agent_steps: int, **metrics: float) -> Row:
    return {"agent_steps": agent_steps, "wall_s": 0.5, **{name.replace("__", "/"): v for name, v in metrics.items()}}


def events(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_tensorboard_reads_every_row_over_agent_steps(tmp_path: Path) -> None:
    writer = Sink(TensorBoardWriter(tmp_path))
    writer.write(row(10, loss__value=0.5))
    writer.write(row(20, loss__value=1e300, loss__policy=math.nan))
    writer.flush()
    assert events(tmp_path, "loss/value") == [(10, 0.5), (20, math.inf)]
    writer.close()
    assert events(tmp_path, "counters/wall_s") == [(10, 0.5), (20, 0.5)]
    assert math.isnan(events(tmp_path, "loss/policy")[0][1])


def test_tensorboard_drops_points_after_the_checkpoint_on_resume(tmp_path: Path) -> None:
    writer = Sink(TensorBoardWriter(tmp_path))
    writer.write(row(10, loss__value=1.0))
    state = writer.get_state()
    writer.write(row(20, loss__value=2.0))
    writer.write(row(30, loss__value=3.0))
    writer.close()
    resumed = Sink(TensorBoardWriter(tmp_path))
    resumed.set_state(state)
    resumed.write(row(25, loss__value=2.5))
    resumed.close()
    assert resumed.get_state() == {"rows": 2, "agent_steps": 25, "updates": -1, "taken_rows": 2}
    assert events(tmp_path, "loss/value") == [(10, 1.0), (25, 2.5)]


def test_a_run_without_steps_is_drawn_over_updates_and_goes_on_there_on_resume(tmp_path: Path) -> None:
    writer = Sink(TensorBoardWriter(tmp_path, axis="updates"))
    for updates in (100, 200):
        writer.write(row(0, updates=updates, loss__value=updates / 100))
    state = writer.get_state()
    writer.write(row(0, updates=300, loss__value=9.0))
    writer.close()
    resumed = Sink(TensorBoardWriter(tmp_path, axis="updates"))
    resumed.set_state(state)
    resumed.write(row(0, updates=300, loss__value=3.0))
    resumed.close()
    assert events(tmp_path, "loss/value") == [(100, 1.0), (200, 2.0), (300, 3.0)]


def test_rows_are_written_without_a_thread_and_nobody_waits_for_a_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    may_encode, original = threading.Event(), tensorboard_writer.summary_value

    def slow(*arguments: Any) -> Any:
        may_encode.wait(10)
        return original(*arguments)

    monkeypatch.setattr(tensorboard_writer, "summary_value", slow)
    writer = Sink(TensorBoardWriter(tmp_path), timeout_s=0.01)
    writer.write(row(10, loss__value=1.0))
    writer.deliver()
    assert events(tmp_path, "loss/value") == [(10, 1.0)]
    assert [each.name for each in threading.enumerate() if each.name == "tensorboard-writer"] == []
    writer.show("eval/picture", Frames([np.zeros((4, 4, 3), dtype=np.uint8)]), 10)
    writer.flush()  # returns although the picture is still being encoded
    writer.write(row(20, loss__value=2.0))
    writer.deliver()
    assert events(tmp_path, "loss/value") == [(10, 1.0), (20, 2.0)]
    may_encode.set()
    writer.timeout_s = 10.0
    writer.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [image.step for image in found.Images("eval/picture")] == [10]


def test_tensorboard_writes_nothing_until_there_is_a_row(tmp_path: Path) -> None:
    writer = Sink(TensorBoardWriter(tmp_path))
    writer.set_state({"agent_steps": 5})
    writer.flush()
    writer.close()
    assert not (tmp_path / "tensorboard").exists()


def test_an_unwritable_tensorboard_directory_is_reported_once_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")
    sink, said = Sink(TensorBoardWriter(tmp_path)), []
    sink.report = said.append
    for steps in (10, 20):
        sink.write(row(steps))
        sink.flush()
    sink.close()
    assert len(said) == 1 and "tensorboard: nothing more is written there, training goes on. Cannot write" in said[0]


def test_a_missing_tensorboard_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard_writer, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"'tensorboard', which is not installed: run `pip install tensorboard`"
    ):
        Sink(TensorBoardWriter(tmp_path))


def test_event_files_sort_in_the_order_they_were_begun(tmp_path: Path) -> None:
    future = tmp_path / "events.out.tfevents.9000000000.rl_lab"
    future.touch()
    (tmp_path / "events.out.tfevents.odd").touch()
    assert next_event_path(tmp_path).name == "events.out.tfevents.9000000001.rl_lab"


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 16, BLOCK_BYTES, BLOCK_BYTES + 1, BLOCK_BYTES + 3, 5000])
def test_checksums_are_those_of_tensorboard(length: int) -> None:
    from tensorboard.summary.writer.record_writer import masked_crc32c

    data = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8).tobytes()
    assert masked_checksum(data) == struct.pack("<I", masked_crc32c(data))


def test_a_checksum_known_from_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def test_events_are_the_messages_that_protocol_buffers_writes(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    scalars = {"loss/value": -0.5, "loss/näht": 1e-40, "x" * 200: 3.0, "big": -1e39}
    file = EventFile(tmp_path)
    file.add_scalars(1.5, 2**40, tuple(scalars), list(scalars.values()))
    file.purge(2.5, 7)
    file.close()
    reader, found = PyRecordReader_New(str(next(tmp_path.iterdir()))), []
    for _ in range(3):
        reader.GetNext()
        found.append(Event.FromString(reader.record()))
    assert found[0].file_version == "brain.Event:2"
    values = {value.tag: value.simple_value for value in found[1].summary.value}
    assert (found[1].wall_time, found[1].step) == (1.5, 2**40)
    assert values == {**scalars, "loss/näht": float(np.float32(1e-40)), "big": -math.inf}
    assert (found[2].step, found[2].session_log.status) == (7, found[2].session_log.START)
    assert varint(300) == b"\xac\x02", "the example of the encoding's own description"


# --- pictures, videos and histograms


def test_tensorboard_reads_back_videos_pictures_and_histograms(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = Sink(TensorBoardWriter(tmp_path))
    writer.write(row(5))
    moving = [np.full((300, 600, 3), 20 * index, dtype=np.uint8) for index in range(5)]
    writer.show("eval/episode", Frames(moving, fps=20.0), 5)
    writer.show("eval/picture", Frames(moving[:1]), 5)
    writer.show("eval/episode_return", Distribution(np.array([1.0, 2.0, 2.0, np.nan])), 5)
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    video, picture = (events.Images(name)[0] for name in ("eval/episode", "eval/picture"))
    assert (video.encoded_image_string[:6], video.width, video.height, video.step) == (b"GIF89a", 256, 128, 5)
    assert (picture.encoded_image_string[1:4], picture.width, picture.height) == (b"PNG", 600, 300)
    found = events.Histograms("eval/episode_return")[0].histogram_value
    assert (found.num, found.min, found.max, found.sum) == (3.0, 1.0, 2.0, 5.0)
    assert found.bucket[0] == 1.0 and found.bucket[-1] == 2.0


def test_a_long_video_keeps_its_length_with_fewer_frames() -> None:
    frames = [np.full((4, 4, 3), index % 256, dtype=np.uint8) for index in range(301)]
    encoded, width, height = encode(Frames(frames, fps=30.0))
    picture = Image.open(io.BytesIO(encoded))
    assert (picture.n_frames, picture.info["duration"], width, height) == (101, 100, 4, 4)


def test_no_finite_value_is_an_empty_looking_histogram_and_no_error() -> None:
    assert histogram(np.array([np.nan]))["num"] == 1.0
