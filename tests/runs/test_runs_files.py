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
        (errno.EIO, ["the disk failed", "Check the disk", "`rl-lab resume r1`"]),
        (errno.ELOOP, ["is a symbolic link, which is not followed. Remove it."]),
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


def test_an_error_without_a_cure_of_its_own_is_a_sentence_too(tmp_path: Path) -> None:
    words = f"cannot write {tmp_path}: Stale file handle. Mend that, then run the command again"
    with pytest.raises(RunError, match=words), files.readable_disk_errors(tmp_path):
        raise OSError(errno.ESTALE, "Stale file handle")


def test_the_broken_pipe_of_a_worker_is_no_disk_error(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), files.readable_disk_errors(tmp_path):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_json_comes_back_as_written(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"score": 1.5, "tags": ["x"]})
    assert read_json(tmp_path / "a.json") == {"score": 1.5, "tags": ["x"]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is missing"),
        (b'{"a": ', "is damaged: not valid JSON"),
        (b"\xff\xfe{}", "is damaged: not valid UTF-8"),
        (b'{"name": "\\ud800"}', "is damaged: not valid JSON .*surrogates not allowed"),
        (b'{"a": ' * 100_000, "is damaged: not valid JSON .*recursion"),
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


def test_what_would_block_or_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match=r"pipe cannot be read: not an ordinary file"):
        read_json(tmp_path / "pipe")
    with pytest.raises(RunError, match=r"cannot be read: Is a directory"):
        read_json(tmp_path)
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(RunError, match=r"huge.json cannot be read: 1,099,511,627,776 bytes are more than the"):
        read_json(tmp_path / "huge.json")


def test_links_are_removed_and_not_what_they_name(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.tex").touch()
    link = tmp_path / "link"
    link.symlink_to(victim)
    files.remove(link)
    assert not link.exists() and (victim / "thesis.tex").exists()
