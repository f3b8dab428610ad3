from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rl_lab.runs import files
from rl_lab.runs.files import read_json, write_atomic, write_json
from rl_lab.types import RunError


def test_write_atomic_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "status.json"
    write_atomic(target, "old")
    write_atomic(target, b"new")
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, ["disk full", "Free some space", "`rl-lab resume r1`"]),
        (errno.EDQUOT, ["disk quota used up", "Free some space", "`rl-lab resume r1`"]),
        (errno.EROFS, ["read-only file system", "--runs-dir", "`rl-lab resume r1`"]),
        (errno.EACCES, ["no permission", "chmod u+w", "--runs-dir"]),
        (errno.EPERM, ["not permitted", "chown", "--runs-dir"]),
        (errno.ENOTDIR, ["a file, not a directory", "--runs-dir"]),
        (errno.EEXIST, ["exists and is not a directory", "--runs-dir"]),
    ],
)
def test_disk_errors_name_the_path_and_the_cure_and_keep_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: list[str]
) -> None:
    target = tmp_path / "status.json"
    write_atomic(target, "old")

    def fail(path: Path, data: bytes) -> None:
        path.write_bytes(data[:1])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "write_durably", fail)
    with pytest.raises(RunError) as caught:
        write_atomic(target, "new", run_id="r1")
    for word in [*words, str(target)]:
        assert word in str(caught.value)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_without_a_run_the_cure_is_to_run_the_command_again(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match="Free some space, then run the command again"),
        files.readable_disk_errors(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_nobody_can_explain_passes_unchanged(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="strange"), files.readable_disk_errors(tmp_path):
        raise OSError(errno.EIO, "strange")


def test_json_comes_back_as_written(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"score": 1.5, "tags": ["x"]})
    assert read_json(tmp_path / "a.json") == {"score": 1.5, "tags": ["x"]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is missing"),
        (b'{"a": ', "is damaged: not valid JSON"),
        (b"\xff\xfe{}", "is damaged: not valid JSON"),
        (b"[1]", "it holds a list where an object belongs"),
    ],
)
def test_a_json_file_that_is_no_object_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "manifest.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunError, match=words) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_a_json_file_below_a_regular_file_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot be read: Not a directory"):
        read_json(tmp_path / "file" / "manifest.json")
