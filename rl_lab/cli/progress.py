"""One line on stderr that is written over while something takes long; nothing where nobody watches."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rl_lab.utils.formatting import format_duration
from rl_lab.utils.screen import cut, size_of
from rl_lab.utils.ticker import Ticker

INTERVAL_S = 0.25


@contextmanager
def progress_line(doing: str, unit: str, *, quiet: bool, then: str = "") -> Iterator[Callable[[int, int], None]]:
    """Gives `progress(done, total)` to call; the line moves in between, too, and is gone at the end. `then` is what
    goes on when all is done, such as writing a file."""
    stream = sys.stderr
    if quiet or not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda done, total: None
        return
    started, state = time.monotonic(), [0, 0]

    def show() -> None:
        with suppress(OSError, ValueError):  # a terminal that is gone ends nothing
            text = _words(doing, unit, then, state[0], state[1], time.monotonic() - started)
            stream.write(f"\r\x1b[K{cut(text, size_of(stream).columns - 1)}")
            stream.flush()

    def progress(done: int, total: int) -> None:
        state[:] = done, total

    ticker = Ticker(show, INTERVAL_S)
    ticker.start()
    try:
        yield progress
    finally:
        ticker.stop()
        with suppress(OSError, ValueError):
            stream.write("\r\x1b[K")
            stream.flush()


def _words(doing: str, unit: str, then: str, done: int, total: int, seconds: float) -> str:
    """`evaluating 37 of 100 episodes (37%) 0:12, ETA 0:20`."""
    clock = format_duration(seconds)
    if not total:
        return f"loading {clock}"
    if done >= total:
        return f"{then or 'ending'} {clock}"
    eta_s = seconds * (total - done) / done if done else None
    return f"{doing} {done:,} of {total:,} {unit} ({done / total:.0%}) {clock}, ETA {format_duration(eta_s)}"
