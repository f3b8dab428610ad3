"""What is printed while a live display owns the terminal: whole lines, handed on to appear above it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import IO, Any


class Relay(io.TextIOBase):
    """Stands in for a stream: takes text, hands on lines. Everything else is answered by the stream itself."""

    def __init__(self, stream: IO[str], take: Callable[[str], None]) -> None:
        self.stream = stream
        self._take = take
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._take(line.rpartition("\r")[2])  # a progress bar's last word
        return len(text)

    def hand_on_rest(self) -> None:
        if self._begun:
            self._take(self._begun.rpartition("\r")[2])
        self._begun = ""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(getattr(self.stream, "encoding", "utf-8"))

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return getattr(self.stream, "errors", None)

    def fileno(self) -> int:
        return self.stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Redirection:
    """`sys.stdout` and `sys.stderr` while the display owns the terminal they write to."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._relays: dict[str, Relay] = {}

    def start(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._relays[name] = Relay(stream, self._take)
                setattr(sys, name, self._relays[name])

    def stop(self) -> None:
        """Give both back, unless somebody else has taken them meanwhile."""
        for name, relay in self._relays.items():
            relay.hand_on_rest()
            if getattr(sys, name) is relay:
                setattr(sys, name, relay.stream)
        self._relays = {}
