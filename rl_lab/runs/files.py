"""Writing files so that a crash, a full disk or a power cut never leaves half of one."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_lab.types import RunError

_ELSEWHERE = "choose another place with --runs-dir"


@contextmanager
def readable_disk_errors(path: Path, *, run_id: str | None = None) -> Iterator[None]:
    """Turn the disk errors a person can cure into a RunError with the cure; let every other error pass."""
    try:
        yield
    except OSError as error:
        sentence = _explain(error, path, run_id)
        if sentence is None:
            raise
        raise RunError(sentence) from error


def _explain(error: OSError, path: Path, run_id: str | None) -> str | None:
    go_on = f"continue with `rl-lab resume {run_id}`" if run_id else "run the command again"
    blocker = error.filename or path
    sentences = {
        errno.ENOSPC: f"disk full: cannot write {path}. Free some space, then {go_on}.",
        errno.EDQUOT: f"disk quota used up: cannot write {path}. Free some space, then {go_on}.",
        errno.EROFS: f"read-only file system: cannot write {path}. Make it writable or {_ELSEWHERE}, then {go_on}.",
        errno.EACCES: f"no permission: cannot write {path}. Allow it (chmod u+w) or {_ELSEWHERE}, then {go_on}.",
        errno.EPERM: f"not permitted: cannot write {path}. Allow it (chown, chattr) or {_ELSEWHERE}, then {go_on}.",
        errno.ENOTDIR: f"cannot write {path}: a part of that path is a file, not a directory. Move it or {_ELSEWHERE}.",
        errno.EEXIST: f"cannot write {path}: {blocker} exists and is not a directory. Move it or {_ELSEWHERE}.",
    }
    return sentences.get(error.errno or 0)


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Write a file and wait until the disk has it. Not atomic: for files nobody looks at yet."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the disk knows the names in a directory (a rename alone may be lost in a power cut)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes | str, *, run_id: str | None = None) -> None:
    """Replace a file at one instant: a reader sees the old content or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with readable_disk_errors(path, run_id=run_id):
        try:
            write_durably(temporary, data.encode() if isinstance(data, str) else data)
            os.replace(temporary, path)
            sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any, *, run_id: str | None = None) -> None:
    write_atomic(path, json.dumps(content, indent=2) + "\n", run_id=run_id)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a missing file or one that is no JSON object is a RunError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is missing.") from None
    except (NotADirectoryError, PermissionError) as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise RunError(f"{path} is damaged: not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it holds a {type(content).__name__} where an object belongs.")
    return content
