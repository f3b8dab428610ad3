"""A few lines of a terminal that are written over again and again, and text that stays above them.

    frame        painted in place; the cursor rests below it, so that `^C` and a prompt find a line of their own
    text above   scrolls away as ordinary output does, whole, so that it can be copied

Plain ANSI sequences in one write per frame: no cursor is hidden and no mode is set, so that a killed process leaves
nothing to mend.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import IO
from unicodedata import combining, east_asian_width

CODES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
    "grey": "90",
    "bright blue": "94",
    "bold red": "1;31",
    "bold green": "1;32",
}
DEFAULT_SIZE = os.terminal_size((80, 24))
Span = tuple[str, str]  # a text and its style, a key of CODES or empty


def text_width(text: str) -> int:
    """Columns that a text takes: wide characters two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)


def cut(text: str, width: int) -> str:
    """At most `width` columns, with an ellipsis where something was lost."""
    if text_width(text) <= width:
        return text
    kept, used = "", 0
    for each in text:
        used += text_width(each)
        if used > width - 1:
            break
        kept += each
    return kept + "…" if width > 0 else ""


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Exactly `width` columns; `right` puts the text there."""
    text = cut(text, width)
    space = " " * (width - text_width(text))
    return space + text if right else text + space


def line_of(spans: Iterable[Span], width: int, *, colours: bool = True) -> str:
    """Spans one after the other in exactly `width` columns."""
    parts: list[str] = []
    left = width
    for text, style in spans:
        shown = cut(text, left)
        left -= text_width(shown)
        parts.append(f"\x1b[{CODES[style]}m{shown}\x1b[0m" if style and shown and colours else shown)
    return "".join(parts) + " " * left


def size_of(stream: IO[str]) -> os.terminal_size:
    """Columns and lines of the terminal behind a stream; 80 x 24 where nobody knows."""
    size = shutil.get_terminal_size(DEFAULT_SIZE)
    with suppress(OSError, ValueError, AttributeError):  # no descriptor, or not that of a terminal
        size = os.get_terminal_size(stream.fileno())
    return size if size.columns > 0 and size.lines > 0 else DEFAULT_SIZE


class Screen:
    """Paints frames on one stream. Errors of the stream are the caller's."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self._descriptor: int | None = None
        with suppress(OSError, ValueError, AttributeError):  # a stream in memory has none
            self._descriptor = stream.fileno()
        self._lines = 0  # of the frame on the screen
        self._columns = 0  # of the terminal when it was painted

    def paint(self, lines: Sequence[str], *, columns: int, above: Iterable[str] = ()) -> None:
        """Write `lines` over the frame before, which is as wide as the terminal; `above` stays there for good."""
        kept = "".join(f"{line}\n" for line in above)
        start = f"\x1b[{self._lines}F" if self._lines else ""
        if self._lines and columns != self._columns:  # the terminal has broken our lines anew: begin on a clean one
            start = "\x1b[H\x1b[J"
        elif start and kept:
            start += "\x1b[J"
        self._write(f"{start}{kept}" + "".join(f"{line}\n" for line in lines) + "\x1b[J")
        self._lines, self._columns = len(lines), columns

    def erase(self) -> None:
        """Take the frame away."""
        if self._lines:
            self._write(f"\x1b[{self._lines}F\x1b[J")
        self._lines = 0

    def leave(self) -> None:
        """Let the frame stand; what is painted next comes below it."""
        self._lines = 0

    def _write(self, text: str) -> None:
        """Past the stream's buffer, whose lock a write that a halted terminal holds up would keep for ever."""
        if self._descriptor is None or self.stream.closed:
            self.stream.write(text)
            self.stream.flush()
            return
        self.stream.flush()
        encoding, errors = (getattr(self.stream, name, None) for name in ("encoding", "errors"))
        data = text.encode(encoding or "utf-8", errors or "strict")
        while data:
            data = data[os.write(self._descriptor, data) :]
