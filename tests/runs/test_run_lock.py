from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_lab.runs.lock import RunLock, is_held
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import RunError

MakeRun = Callable[..., RunDirectory]


@contextmanager
def child_process(work: Callable[[Callable[[], None]], None]) -> Iterator[int]:
    """Run `work(ready)` in a forked child; yields its pid once it called ready(), kills it at the end."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work(lambda: os.write(write_end, b"x") and None)
        finally:
            os._exit(0)
    os.close(write_end)
    try:
        assert os.read(read_end, 1) == b"x", "the child failed before it was ready"
        yield pid
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def hold(run: RunDirectory) -> Callable[[Callable[[], None]], None]:
    def work(ready: Callable[[], None]) -> None:
        with RunLock(run):
            ready()
            signal.pause()

    return work


def wait_until_free(path: Path) -> bool:
    deadline = time.monotonic() + 5.0
    while is_held(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_held(path)


def test_the_second_process_is_refused_and_told_who_is_first(make_run: MakeRun) -> None:
    run = make_run("mine")
    with child_process(hold(run)) as pid:
        assert is_held(run.lock_path)
        with pytest.raises(RunError) as caught:
            RunLock(run).acquire()
        message = str(caught.value)
        assert f"Run 'mine' is in use by process {pid} on {socket.gethostname()}" in message
        assert "Wait until that process ends, or stop it" in message
        assert "`rl-lab resume mine`" in message


def test_kill_minus_nine_frees_the_lock(make_run: MakeRun) -> None:
    run = make_run()
    with child_process(hold(run)):
        assert is_held(run.lock_path)
    assert wait_until_free(run.lock_path)
    with RunLock(run):
        assert is_held(run.lock_path)
    assert not is_held(run.lock_path)


def test_a_forked_worker_does_not_keep_the_lock_of_its_dead_parent(make_run: MakeRun, tmp_path: Path) -> None:
    run, worker_file = make_run(), tmp_path / "worker_pid"

    def parent(ready: Callable[[], None]) -> None:
        with RunLock(run):
            worker = os.fork()
            if worker == 0:
                signal.pause()
                os._exit(0)
            worker_file.write_text(str(worker))
            ready()
            signal.pause()

    with child_process(parent):
        assert is_held(run.lock_path)
    worker = int(worker_file.read_text())
    try:
        os.kill(worker, 0)  # still alive
        assert wait_until_free(run.lock_path)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_fork_does_not_free_the_lock_of_the_parent(make_run: MakeRun) -> None:
    run = make_run()
    with RunLock(run), child_process(lambda ready: ready()):
        assert is_held(run.lock_path)


def test_the_lock_is_free_after_an_error_inside(make_run: MakeRun) -> None:
    run = make_run()
    with pytest.raises(ValueError, match="boom"), RunLock(run):
        raise ValueError("boom")
    assert not is_held(run.lock_path)
    with RunLock(run):
        pass


def test_an_owner_who_has_not_signed_yet_is_another_process(make_run: MakeRun) -> None:
    run = make_run()
    with RunLock(run):
        run.lock_path.write_text("")
        with pytest.raises(RunError, match="in use by another process"):
            RunLock(run).acquire()


def test_a_reader_that_looks_at_the_lock_does_not_refuse_a_writer(make_run: MakeRun) -> None:
    run = make_run()
    run.lock_path.touch()

    def look(ready: Callable[[], None]) -> None:
        descriptor = os.open(run.lock_path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        ready()
        time.sleep(0.03)
        os.close(descriptor)
        signal.pause()

    with child_process(look), RunLock(run):
        assert is_held(run.lock_path)


def test_a_file_system_without_locks_is_refused(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(RunError, match=r"cannot lock files \(No locks available\).*local disk with --runs-dir"):
        RunLock(run).acquire()


def test_an_unwritable_run_is_refused_with_a_cure(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("mine")

    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RunError, match=r"read-only file system: cannot write .*\.lock.*`rl-lab resume mine`"):
        RunLock(run).acquire()


def test_a_lock_clears_what_killed_processes_left_in_the_run(make_run: MakeRun) -> None:
    run = make_run("mine")
    run.videos_dir.mkdir()
    old, young = run.videos_dir / ".a.mp4.tmp-7-abcdef", run.path / ".status.json.tmp-7-abcdef"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))
    with RunLock(run):
        assert not old.exists() and young.exists()
