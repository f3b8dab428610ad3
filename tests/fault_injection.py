"""Makes the n-th file operation below a directory fail, or kills the process there.

with Operations(root) as seen: ...            counts: seen.names lists every operation, in order
with failing(root, at=3, code=errno.EIO): ... the fourth operation raises; with `lasting` every later one too
killed_at(root, 3, work)                      runs `work` in a forked process that dies before its fourth operation
"""

from __future__ import annotations

import errno
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

CHANGING = ("mkdir", "rename", "replace", "symlink", "unlink", "rmdir", "truncate")
ON_DESCRIPTORS = ("write", "pwrite", "fsync", "ftruncate")
READING = ("scandir", "listdir", "stat", "lstat", "readlink")
CODES = (errno.EIO, errno.ENOSPC, errno.EACCES)

tried: dict[str, int] = {"kills": 0, "faults": 0}
"""How many were tried in this process; printed at the end of the session."""


class Operations:
    """Sees every file operation of this process below `root`, and calls `meet` before each.

    What `meet` returns stands for the result. Nothing waits for the disk: a kill does not empty its caches.
    """

    def __init__(self, root: Path, meet: Callable[[int, str, Callable[[], Any] | None], Any] | None = None) -> None:
        self.root = os.path.abspath(root)
        self.names: list[str] = []
        self._meet = meet or (lambda number, name, half: None)
        self._original: dict[str, Callable[..., Any]] = {}
        self._descriptors: set[int] = set()

    def __enter__(self) -> Operations:
        for name in ("open", "close", *CHANGING, *ON_DESCRIPTORS, *READING):
            self._original[name] = getattr(os, name)
            setattr(os, name, self._watched(name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, function in self._original.items():
            setattr(os, name, function)

    def _is_ours(self, target: Any, options: dict[str, Any]) -> bool:
        if isinstance(target, int):
            return target in self._descriptors
        if options.get("dir_fd") is not None:
            return options["dir_fd"] in self._descriptors
        return isinstance(target, str | os.PathLike) and os.path.abspath(os.fspath(target)).startswith(self.root)

    def _watched(self, name: str) -> Callable[..., Any]:
        original = self._original[name]

        def watched(*arguments: Any, **options: Any) -> Any:
            target = arguments[1] if name == "symlink" else arguments[0] if arguments else None
            if not self._is_ours(target, options):
                return original(*arguments, **options)
            if name == "close":
                self._descriptors.discard(target)
                return original(*arguments, **options)
            self.names.append(name)
            half = None
            if name in ("write", "pwrite"):
                data = bytes(arguments[1])
                half = lambda: original(target, data[: len(data) // 2], *arguments[2:])  # noqa: E731
            result = self._meet(len(self.names) - 1, name, half)
            if result is None and name != "fsync":
                result = original(*arguments, **options)
            if name == "open":
                self._descriptors.add(result)
            return result

        return watched


@contextmanager
def failing(root: Path, *, at: int, code: int, lasting: bool = False, reads: bool = True) -> Iterator[Operations]:
    """Let one operation (or all from there on) fail. A write is short first: it writes half, and the rest fails."""
    failing_at = [at]

    def meet(number: int, name: str, half: Callable[[], Any] | None) -> Any:
        if name in READING and (not reads or code == errno.ENOSPC):
            return None
        if half is not None and number == at == failing_at[0]:
            failing_at[0] += 1
            return half()
        if number == failing_at[0] or (lasting and number > failing_at[0]):
            raise OSError(code, os.strerror(code))
        return None

    tried["faults"] += 1
    with Operations(root, meet) as operations:
        yield operations


def killed_at(root: Path, at: int, work: Callable[[], None], *, half_way: bool = False) -> bool:
    """Run `work` in a forked process that is killed (SIGKILL) at one of its operations; False if it got to the end."""

    def meet(number: int, name: str, half: Callable[[], Any] | None) -> None:
        if number == at:
            if half_way and half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    def watched() -> None:
        with Operations(root, meet):
            work()

    tried["kills"] += 1
    return forked(watched) == -signal.SIGKILL


def forked(work: Callable[[], Any]) -> int:
    """Run `work` in a forked process; its exit code, negative for a signal. An error there is an error here."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code <= 0, "the forked process failed; its traceback stands above"
    return code


def operations_of(root: Path, work: Callable[[], None]) -> list[str]:
    with Operations(root) as operations:
        work()
    return operations.names
