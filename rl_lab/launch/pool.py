"""Warm workers: processes that import once and then do one task after another, each bound to cores of its own.

A worker that dies is replaced; workers whose parent dies leave at once, so that nobody holds a run's lock.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Report = Callable[[Any], Any]
Work = Callable[[Any, Report], Any]
"""Does one task. `report(value)` tells the parent something and returns its answer."""

LEAVE_SECONDS = 5.0


@dataclass(frozen=True)
class Event:
    """What a worker said: `report` (answer it), `done`, or `died` with its exit code."""

    kind: str
    task: Any
    value: Any


@dataclass(eq=False)
class _Worker:
    process: Any
    connection: Connection
    cores: list[int]
    task: Any = None


class Pool:
    """At most `jobs` workers that do `work`, given as `module:function` so that this process need not import it. They
    start when there is something to do for them."""

    def __init__(self, work: str, jobs: int, *, log_path: Path) -> None:
        self._work = work
        self._log_path = log_path
        self._free_cores = self.cores_by_worker(jobs)  # cores for which there is no worker yet, or none any more
        self._workers: list[_Worker] = []

    @staticmethod
    def cores_by_worker(jobs: int) -> list[list[int]]:
        """The cores of each worker; with more workers than cores some share one. Empty where nothing can be bound."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        return [cores[index % max(len(cores), 1) :: jobs] for index in range(jobs)]

    def _start(self) -> _Worker:
        context = get_context("spawn")  # a forked torch is a broken torch
        ours, theirs = context.Pipe()
        cores = self._free_cores.pop(0)
        process = context.Process(target=_serve, args=(theirs, self._work, cores, str(self._log_path)))
        process.start()
        theirs.close()
        worker = _Worker(process, ours, cores)
        self._workers.append(worker)
        return worker

    @property
    def idle(self) -> int:
        """How many tasks could be taken now."""
        return len(self._free_cores) + sum(worker.task is None for worker in self._workers)

    def tasks(self) -> list[Any]:
        return [worker.task for worker in self._workers if worker.task is not None]

    def submit(self, task: Any) -> None:
        worker = next((worker for worker in self._workers if worker.task is None), None) or self._start()
        worker.task = task
        with suppress(OSError):  # it died while it had nothing to do: `events` sees that, too, and the task comes back
            worker.connection.send(task)

    def answer(self, task: Any, value: Any) -> None:
        worker = next(worker for worker in self._workers if worker.task is task)
        with suppress(OSError):  # it died while it waited: `events` sees that, too
            worker.connection.send(value)

    def events(self, timeout_s: float) -> Iterator[Event]:
        """What happened within `timeout_s`; returns as soon as something did."""
        wait([worker.connection for worker in self._workers], timeout_s)
        for worker in list(self._workers):
            is_alive, task = worker.process.is_alive(), worker.task
            has_news = worker.connection.poll()
            if is_alive and not has_news:
                continue
            try:
                if not has_news:  # a process that it forked may hold the pipe open after its death
                    raise EOFError
                kind, value = worker.connection.recv()
            except (EOFError, OSError):
                self._bury(worker)
                if task is not None:
                    yield Event("died", task, worker.process.exitcode)
                continue
            if kind == "done":
                worker.task = None
            yield Event(kind, task, value)

    def _bury(self, worker: _Worker) -> None:
        worker.connection.close()
        worker.process.join()
        self._workers.remove(worker)
        self._free_cores.append(worker.cores)

    def interrupt(self, number: int = signal.SIGTERM) -> None:
        """Ask the busy workers to save and leave, or with SIGKILL make them."""
        for worker in self._workers:
            if worker.task is not None and worker.process.is_alive():
                os.kill(worker.process.pid, number)

    def close(self) -> None:
        """Every worker leaves: the idle ones by themselves, the others as they are."""
        for worker in self._workers:
            if worker.task is not None:
                worker.process.kill()
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(LEAVE_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []


def _serve(connection: Connection, work: str, cores: list[int], log_path: str) -> None:
    """The life of a worker. Its environment is set before anything large is imported."""
    os.setsid()  # the terminal's Ctrl-C reaches the parent alone, which passes it on once
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)  # what libraries print must not disturb the parent's table
    os.dup2(descriptor, 2)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    module, _, name = work.partition(":")
    function: Work = getattr(import_module(module), name)

    def report(value: Any) -> Any:
        connection.send(("report", value))
        return connection.recv()

    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(("done", function(task, report)))


def _leave_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
