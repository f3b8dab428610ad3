"""Rows on disk: exact, valid, cut back on resume, and honest about a full disk."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from rl_lab.metrics import writers
from rl_lab.metrics.writers import JsonlWriter, Row, TextLogWriter, Writer
from rl_lab.types import RunError


def row(agent_steps: int, **metrics: float) -> Row:
    counters: Row = {"env_frames": agent_steps, "agent_steps": agent_steps, "episodes": 0, "updates": 0, "wall_s": 0.5}
    return {**counters, **{name.replace("__", "/"): value for name, value in metrics.items()}}


def read(path: Path) -> list[dict[str, object]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# --- JSONL


def test_a_float_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    writer = JsonlWriter(path)
    values = [0.1 + 0.2, 1e-310, 1 / 3, -0.0, 1e22]
    for value in values:
        writer.write(row(1, loss__value=value))
        assert len(read(path)) >= 1  # with the operating system at once
    writer.close()
    assert [repr(line["loss/value"]) for line in read(path)] == [repr(value) for value in values]


def test_lines_stay_valid_json_with_nan_and_infinity(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(row(1, loss__value=math.nan, loss__policy=-math.inf, loss__entropy=1.0))
    writer.write(row(2, loss__value=1.0))
    first, second = read(tmp_path / "metrics.jsonl")
    assert first["loss/value"] is None and first["loss/policy"] is None and first["loss/entropy"] == 1.0
    assert first["non_finite"] == {"loss/value": "nan", "loss/policy": "-inf"}
    assert "non_finite" not in second


def test_rows_after_the_checkpoint_vanish_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(row(1))
    state = writer.get_state()
    assert state == {"bytes": path.stat().st_size}
    writer.write(row(2))
    writer.close()
    with path.open("a") as file:
        file.write('{"env_frames": 3, "agent')  # killed in mid-line

    resumed = JsonlWriter(path)
    resumed.set_state(state)
    resumed.write(row(20))
    resumed.close()
    assert [line["agent_steps"] for line in read(path)] == [1, 20]


def test_a_writer_may_go_back_while_it_is_open(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    state = writer.get_state()
    writer.write(row(1))
    writer.set_state(state)
    writer.write(row(2))
    assert [line["agent_steps"] for line in read(tmp_path / "metrics.jsonl")] == [2]


def test_a_missing_file_is_no_fault_when_nothing_had_been_written(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.set_state({"bytes": 0})
    writer.write(row(1))
    assert len(read(tmp_path / "metrics.jsonl")) == 1


def test_a_file_shorter_than_the_checkpoint_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl holds 3 bytes, but .* held 100: rows are missing.*warm_start"):
        JsonlWriter(path).set_state({"bytes": 100})
    with pytest.raises(RunError, match="holds 0 bytes"):
        JsonlWriter(tmp_path / "gone.jsonl").set_state({"bytes": 100})
    assert path.read_text() == "{}\n"


def fill_disk_after(monkeypatch: pytest.MonkeyPatch, room: int, code: int = errno.ENOSPC) -> None:
    real_write = os.write

    def write(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(code, os.strerror(code))
        written = real_write(descriptor, bytes(data)[:room])
        room -= written
        return written

    monkeypatch.setattr(writers.os, "write", write)


def test_a_full_disk_is_named_and_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(row(1))
    with monkeypatch.context() as patch:
        fill_disk_after(patch, room=10)
        with pytest.raises(RunError, match=r"disk is full: no space .*metrics\.jsonl\. Free some space, then resume"):
            writer.write(row(2))
    assert [line["agent_steps"] for line in read(path)] == [1]
    writer.write(row(2))
    assert [line["agent_steps"] for line in read(path)] == [1, 2]


def test_other_write_errors_are_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(row(1))
    fill_disk_after(monkeypatch, room=0, code=errno.EIO)
    with pytest.raises(RunError, match=r"Cannot write .*metrics\.jsonl: Input/output error\. Mend that"):
        writer.write(row(2))

    def failing_fsync(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Quota exceeded")

    monkeypatch.setattr(writers.os, "fsync", failing_fsync)
    with pytest.raises(RunError, match="disk is full"):
        writer.get_state()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"Cannot write .*file/metrics\.jsonl"):
        JsonlWriter(tmp_path / "file" / "metrics.jsonl").write(row(1))


def test_the_null_writer_takes_everything() -> None:
    writer = Writer()
    writer.write(row(1))
    writer.message("hello", "info")
    writer.set_state(writer.get_state())
    writer.flush()
    writer.close()


def test_a_log_line_cannot_steer_the_terminal_that_shows_it(tmp_path: Path) -> None:
    log = TextLogWriter(tmp_path / "run.log")
    log.message("Traceback\n\tin \x1b[2J\r", "error")
    log.close()
    assert (tmp_path / "run.log").read_text().endswith("error   Traceback\n\tin \\u001b[2J\\r\n")
