"""One writer per run. The kernel holds the lock, so it ends with the process, even after kill -9."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from rl_lab.runs.files import entries_below, read_json, readable_disk_errors, refuse_links_out_of, remove_leftovers
from rl_lab.types import RunError

if TYPE_CHECKING:
    from rl_lab.runs.run_directory import RunDirectory

# A look at the lock (`is_held`) takes it for an instant; a writer tries again rather than losing to a reader.
_ATTEMPTS = 5
_PAUSE_S = 0.02

_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """`with RunLock(run): ...` or a RunError that names the process at work on this run, or a link that leaves it."""

    def __init__(self, run: RunDirectory) -> None:
        self.run_id = run.id
        self.path = run.lock_path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        assert self._descriptor is None, f"run {self.run_id} is locked twice by one RunLock"
        refuse_links_out_of(self.path.parent)
        with readable_disk_errors(self.path, run_id=self.run_id):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self.path, flags, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RunError(f"{self.path} is not an ordinary file, so it cannot serve as a lock: remove it.")
            self._take(descriptor)
            owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
            with readable_disk_errors(self.path, run_id=self.run_id):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, owner.encode(), 0)
            self._descriptor = descriptor
            _held.add(self)
            remove_leftovers(entries_below(self.path.parent))
        finally:
            if self._descriptor is None:
                os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if attempt + 1 < _ATTEMPTS:
                    time.sleep(_PAUSE_S)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                raise RunError(
                    f"{self.path.parent} lies on a file system that cannot lock files ({error.strerror}), so two "
                    "processes could spoil one run. Choose a local disk with --runs-dir."
                ) from error
        raise RunError(
            f"Run '{self.run_id}' is in use by {_owner(self.path)}. Wait until that process ends, or stop it "
            f"(it saves first on `kill <pid>`), then continue with `rl-lab resume {self.run_id}`."
        )

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)  # the file stays: removing it would let two processes lock two files
            self._descriptor = None
            _held.discard(self)

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def is_held(lock_path: Path) -> bool:
    """Whether a living process (this one included) holds the lock; True where that cannot be found out."""
    try:
        descriptor = os.open(lock_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False  # nobody locks a pipe
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _owner(lock_path: Path) -> str:
    try:
        owner = read_json(lock_path)
        return f"process {owner['pid']} on {owner['host']}"
    except (RunError, KeyError):  # taken this instant: its owner has not signed yet
        return "another process"


def _forget_in_forked_child() -> None:
    """A forked worker must not keep its dead parent's lock alive; the parent's own copy stays locked."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_forked_child)
