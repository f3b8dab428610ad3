"""The signals that ask a process to leave: Ctrl-C, a job queue's SIGTERM and SIGUSR1, a closed terminal's SIGHUP."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")  # Windows has only the first two
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
            signal.signal(number, earlier)
