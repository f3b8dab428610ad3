"""Several trainings on this machine: one process each, so that one crash or one leak cannot reach its neighbours."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import IO, Any

from rl_lab.utils.processes import available_cores, handled_by
from rl_lab.utils.reports import REPORTS_VARIABLE, read_report

POLL_SECONDS = 0.1
PATIENCE = 3  # this many Ctrl-C mean: do not wait for checkpoints any longer


@dataclass
class Member:
    """One training of a sweep and, once started, its process."""

    label: str  # what sets it apart: `seed=1`
    run_id: str
    command: Sequence[str]
    process: subprocess.Popen[str] | None = None
    exit_code: int | None = None
    started: float = 0.0
    seconds: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)  # the newest, where reports are asked for
    relay: Thread | None = field(default=None, repr=False)


class Forwarding:
    """Passes the first signal on, so that each training can save, and then only Ctrl-C: a person hurries, while job
    queues and closing terminals send the same signal more than once."""

    def __init__(self, send: Callable[[int], None], on_first: Callable[[], None]) -> None:
        self.seen: list[int] = []
        self._send = send
        self._on_first = on_first

    def __call__(self, number: int, frame: object) -> None:
        if self.seen and number != signal.SIGINT:
            return
        self.seen.append(number)
        if len(self.seen) == 1:
            self._on_first()
        self._send(signal.SIGKILL if len(self.seen) >= PATIENCE else number)

    def first(self) -> int | None:
        return self.seen[0] if self.seen else None


def default_jobs() -> int:
    """Half the cores we may use: a training is one busy thread plus environments and writers."""
    return max(1, available_cores() // 2)


class Supervisor:
    """Starts processes as places become free and passes signals on, so that each training can save.

    `show` gets every line a process writes, with its label; `on_signal` is called at the first signal. With `tick`,
    which is called a few times a second, trainings report where they stand instead of writing lines about it.
    """

    def __init__(
        self,
        members: Sequence[Member],
        jobs: int,
        *,
        show: Callable[[str, str], None],
        on_signal: Callable[[], None],
        tick: Callable[[], None] | None = None,
    ) -> None:
        self.members = members
        self.jobs = jobs
        self._show = show
        self._signals = Forwarding(self._send, on_signal)
        self._tick = tick

    def run(self) -> int | None:
        """Until every process has ended; the number of the signal that cut the sweep short, if one did."""
        waiting = list(self.members)
        with handled_by(self._signals):
            while (waiting and not self._signals.seen) or self._running():
                while waiting and not self._signals.seen and len(self._running()) < self.jobs:
                    self._start(waiting.pop(0))
                self._collect_ended()
                if self._tick is not None:
                    self._tick()
                time.sleep(POLL_SECONDS)
        return self._signals.first()

    def _running(self) -> list[Member]:
        return [member for member in self.members if member.process is not None and member.exit_code is None]

    def _start(self, member: Member) -> None:
        # A session of its own: the terminal's Ctrl-C reaches only us, and we pass it on exactly once.
        member.started = time.monotonic()
        member.process = subprocess.Popen(
            member.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", REPORTS_VARIABLE: "" if self._tick is None else "1"},
        )
        assert member.process.stdout is not None
        member.relay = Thread(target=self._relay, args=(member.process.stdout, member), daemon=True)
        member.relay.start()

    def _relay(self, lines: IO[str], member: Member) -> None:
        for line in lines:
            report = read_report(line)
            if report is None:
                self._show(member.label, line)
            else:
                member.report |= report

    def _collect_ended(self) -> None:
        for member in self._running():
            assert member.process is not None and member.relay is not None
            exit_code = member.process.poll()
            if exit_code is not None:
                member.relay.join(timeout=5)  # a grandchild may hold the pipe open; do not wait for it forever
                member.seconds = time.monotonic() - member.started
                member.exit_code = exit_code

    def _send(self, number: int) -> None:
        for member in self._running():
            assert member.process is not None
            member.process.send_signal(number)
