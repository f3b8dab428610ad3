"""What a process meets: signals that ask it to leave, and the cores it may use."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Ctrl-C, a job queue's SIGTERM and SIGUSR1, a closed terminal's SIGHUP; Windows has only the first two.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
ASKING = tuple(signal.Signals[name] for name in NAMES if name in signal.Signals.__members__)


@contextmanager
def handled_by(handler: Callable[[int, object], None]) -> Iterator[None]:
    """While inside, `handler` is called instead. Outside the main thread signals are left alone, as are those that the
    process ignores, such as SIGHUP under `nohup`; Ctrl-C is never ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = [number for number in ASKING if signal.getsignal(number) is signal.SIG_IGN and number != signal.SIGINT]
    before = {number: signal.signal(number, handler) for number in ASKING if number not in ignored}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)  # None: not set from Python


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
