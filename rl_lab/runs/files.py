"""Writing files so that a crash, a full disk or a power cut never leaves half of one."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rl_lab.types import RunError

_ELSEWHERE = "choose another place with --runs-dir"
_NOT_THE_DISK = (ConnectionError, ChildProcessError, TimeoutError, InterruptedError)
_LEFTOVER = re.compile(r"\..+\.tmp-\d+(-.+)?")
_LEFTOVER_AGE_S = 600.0  # what is older was left by a process that no longer runs
_LARGEST_TEXT_BYTES = 64 * 2**20
_FOREIGN = "wandb"  # W&B's folder in a run, with a folder of its own making for each process

Kinds = Mapping[str, type | tuple[type, ...]]
"""Name of an entry -> the types it may have."""


class MissingFile(RunError):
    """A file of a run is not there."""


class UnreadableFile(RunError):
    """A file of a run is there, but the disk or its permissions do not give it out."""


@contextmanager
def readable_disk_errors(path: Path, *, run_id: str | None = None) -> Iterator[None]:
    """Turn a disk error into a RunError that names the path and the cure; let every other error pass."""
    try:
        yield
    except _NOT_THE_DISK:
        raise
    except OSError as error:
        raise RunError(_explain(error, path, run_id)) from error


def _explain(error: OSError, path: Path, run_id: str | None) -> str:
    go_on = f"continue with `rl-lab resume {run_id}`" if run_id else "run the command again"
    blocker = error.filename or path
    sentences = {
        errno.ENOSPC: f"disk full: cannot write {path}. Free some space, then {go_on}.",
        errno.EDQUOT: f"disk quota used up: cannot write {path}. Free some space, then {go_on}.",
        errno.EROFS: f"read-only file system: cannot write {path}. Make it writable or {_ELSEWHERE}, then {go_on}.",
        errno.EACCES: f"no permission: cannot write {path}. Allow it (chmod u+w) or {_ELSEWHERE}, then {go_on}.",
        errno.EPERM: f"not permitted: cannot write {path}. Allow it (chown, chattr) or {_ELSEWHERE}, then {go_on}.",
        errno.EIO: f"the disk failed (input/output error): cannot write {path}. Check the disk, then {go_on}.",
        errno.ENOTDIR: f"cannot write {path}: a part of that path is a file, not a directory. Move it or {_ELSEWHERE}.",
        errno.EEXIST: f"cannot write {path}: {blocker} exists and is not a directory. Move it or {_ELSEWHERE}.",
        errno.ELOOP: f"cannot write {path}: {blocker} is a symbolic link, which is not followed. Remove it.",
    }
    where = f" ({error.filename})" if error.filename else ""
    default = f"cannot write {path}: {error.strerror or error}{where}. Mend that, then {go_on}."
    return sentences.get(error.errno or 0, default)


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no run, checkpoint or report can have; `remove_leftovers` knows it again."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(3)}")


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A temporary name to write under, which becomes `path` at the end: whole, or not at all."""
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        remove(temporary)  # gone already, unless something failed


def is_leftover(name: str) -> bool:
    return _LEFTOVER.fullmatch(name) is not None


def remove_leftovers(entries: Iterable[os.DirEntry[str]]) -> None:
    """Remove what killed processes left under temporary names, once it is too old to belong to a living one."""
    with suppress(OSError):  # tidying up never stops anybody
        for entry in [each for each in entries if is_leftover(each.name)]:
            if time.time() - entry.stat(follow_symlinks=False).st_mtime >= _LEFTOVER_AGE_S:
                remove(Path(entry.path))


def remove(path: Path) -> None:
    """Remove a file, a link (not what it names) or a whole directory, as far as that is possible."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_at_once(path: Path) -> None:
    """Remove so that a kill in between leaves nothing under that name; an OSError where it cannot be moved away."""
    doomed = temporary_name(path)
    os.rename(path, doomed)
    remove(doomed)


def refuse_links_out_of(directory: Path) -> None:
    """Refuse a run with a symbolic link that leaves it: writing through one would change somebody else's files.
    W&B links the log in each of its own folders to its cache; nothing of ours writes there."""
    try:
        inside = os.path.realpath(directory)
        for entry in entries_below(directory):
            if not entry.is_symlink() or os.path.realpath(entry.path).startswith(inside + os.sep):
                continue
            place = Path(entry.path).relative_to(directory).parts
            if place[0] != _FOREIGN or len(place) < 3:
                raise RunError(
                    f"{entry.path} is a symbolic link to {os.readlink(entry.path)}, outside the run, and is not "
                    "followed: remove it. A run as a whole may lie elsewhere: move its directory there and link that."
                )
    except OSError as error:
        raise UnreadableFile(f"{error.filename or directory} cannot be read: {error.strerror}.") from error


def entries_below(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Everything in a directory and in those below it; no link is followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from entries_below(entry.path)


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Write a new file and wait until the disk has it. Not atomic: for files nobody looks at yet."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        left = memoryview(data)
        while left:  # one call takes at most 2 GiB
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Wait until the disk knows the names in a directory (a rename alone may be lost in a power cut)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes | str, *, run_id: str | None = None) -> None:
    """Replace a file at one instant: a reader sees the old content or the new one, never half of it."""
    with readable_disk_errors(path, run_id=run_id):
        with appearing(path) as temporary:
            write_durably(temporary, data.encode() if isinstance(data, str) else data)
        sync_directory(path.parent)


def to_json(content: Mapping[str, Any]) -> str:
    return json.dumps(dict(content), indent=2) + "\n"


def write_json(path: Path, content: Mapping[str, Any], *, run_id: str | None = None) -> None:
    write_atomic(path, to_json(content), run_id=run_id)


def read_text(path: Path) -> str:
    """The text of an ordinary file. A RunError names one that is missing, unreadable, a pipe, not UTF-8 or huge."""
    try:
        return read_bytes(path, at_most=_LARGEST_TEXT_BYTES).decode()
    except FileNotFoundError:
        raise MissingFile(f"{path} is missing.") from None
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is damaged: not valid UTF-8 ({error.reason} at byte {error.start}).") from error


def read_bytes(path: Path, *, at_most: int | None = None) -> bytes:
    """The content of an ordinary file; an OSError for what could block forever or fill the memory."""
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "not an ordinary file", str(path))
        if at_most is not None and facts.st_size > at_most:
            raise OSError(errno.EFBIG, f"{facts.st_size:,} bytes are more than the {at_most:,} expected", str(path))
        return file.read()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a missing file or one that is no JSON object is a RunError."""
    try:
        text = read_text(path)
        content = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(content, ensure_ascii=False).encode()  # half a character could not be stored or printed
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it holds a {type(content).__name__} where an object belongs.")
    return content


def check_types(content: Mapping[str, Any], kinds: Kinds, *, place: str) -> None:
    """Refuse an entry of another type than its readers expect; one that is not there is their business."""
    for name in content.keys() & kinds.keys():
        value = content[name]
        is_huge = isinstance(value, int) and not -(2**63) <= value < 2**63
        if not isinstance(value, kinds[name]) or isinstance(value, bool) or is_huge:
            raise RunError(f"{place} is damaged: '{name}' is {json.dumps(value)[:60]}.")
