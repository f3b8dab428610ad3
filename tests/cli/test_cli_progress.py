"""The line that shows how far a long command is: only where somebody watches, and gone at the end."""

from __future__ import annotations

import io
import time

import pytest

from rl_lab.cli import progress
from rl_lab.cli.progress import progress_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_moves_by_itself_and_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 0.02)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with progress_line("evaluating", "episodes", quiet=False, then="recording the video") as show:
        for done in (None, 1, 2, 4):
            if done is not None:
                show(done, 4)
            time.sleep(0.1)
    lines = [text.removeprefix("\x1b[K") for text in terminal.getvalue().split("\r")]
    words = [line.partition(" 0:")[0] for line in lines if line]
    assert list(dict.fromkeys(words)) == [
        "loading",
        "evaluating 1 of 4 episodes (25%)",
        "evaluating 2 of 4 episodes (50%)",
        "recording the video",
    ]
    assert all(words.count(each) >= 2 for each in words)
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(("quiet", "kind"), [(True, Terminal), (False, io.StringIO)])
def test_nothing_is_shown_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, quiet: bool, kind: type[io.StringIO]
) -> None:
    monkeypatch.setattr("sys.stderr", stream := kind())
    with progress_line("evaluating", "episodes", quiet=quiet) as show:
        show(1, 4)
    assert stream.getvalue() == ""


def test_a_terminal_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with progress_line("evaluating", "episodes", quiet=False) as show:
        terminal.close()
        show(1, 4)
