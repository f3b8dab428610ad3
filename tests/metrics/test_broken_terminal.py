"""A stdout or terminal that is closed, full or gone silences the display and nothing else."""

from __future__ import annotations

import errno
import io
import os
import pty
import sys

import pytest

from rl_lab.metrics import terminal
from rl_lab.metrics.terminal import LiveDisplay


def use(display: LiveDisplay) -> None:
    """All that a run does with it."""
    display.message("hello")
    for step in range(3):
        display.write({"agent_steps": step, "wall_s": 1.0})
        display.update_progress(0.5, "train", 0, 1)
        display.flush()
    display.message("careful", "warning")
    display.close()
    display.message("bye")
    display.summary(agent_steps=3, seconds=1.0, score=1.0)


class Broken(io.StringIO):
    def __init__(self, code: int, *, after: int = 0) -> None:
        super().__init__()
        self.code, self.left = code, after

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.code, os.strerror(self.code))
        return super().write(text)


@pytest.mark.parametrize("mode", ["plain", "live"])
@pytest.mark.parametrize("code", [errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_stream_that_fails_silences_the_display(mode: str, code: int, after: int) -> None:
    said: list[str] = []
    before = sys.stdout
    display = LiveDisplay(title="t", mode=mode, stream=Broken(code, after=after))
    display.on_failure = said.append
    use(display)
    assert display.mode == "quiet"
    assert said == [f"nothing more is shown: the terminal or its reader is gone ({OSError(code, os.strerror(code))})"]
    assert sys.stdout is before


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_closed_stream_silences_the_display(mode: str) -> None:
    stream = io.StringIO()
    display = LiveDisplay(title="t", mode=mode, stream=stream)
    stream.close()
    use(display)
    assert display.mode == "quiet"


def test_a_process_without_stdout_has_a_display_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    use(LiveDisplay(title="t"))


def test_an_ascii_stream_gets_what_it_can_show() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    display = LiveDisplay(title="t", mode="plain", stream=stream)
    use(display)
    display.message("naïve")
    assert b"na?ve" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_an_ascii_terminal_gets_plain_lines() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    display = LiveDisplay(title="t", mode="live", stream=stream)
    use(display)
    stream.flush()
    assert display.mode == "plain"
    assert b"hello" in stream.buffer.getvalue() or b"careful" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_mistake_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(view: object) -> str:
        raise ValueError("a bug")

    monkeypatch.setattr(terminal, "plain_line", fail)
    with pytest.raises(ValueError, match="a bug"):
        LiveDisplay(title="t", mode="plain", stream=io.StringIO()).write({"agent_steps": 1, "wall_s": 1.0})


def end_with(stdout: int, mode: str) -> int:
    """The exit code of a process that shows a run on this stdout and then empties its buffer, as Python does."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            os.dup2(stdout, 1)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            display = LiveDisplay(title="t", mode=mode)
            use(display)
            print("the end", flush=True)
            code = 0 if display.mode == "quiet" else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("kind", ["a closed pipe", "a full device", "a terminal that is gone"])
@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_real_stdout_that_breaks_changes_nothing_about_the_end(kind: str, mode: str) -> None:
    if kind == "a closed pipe":
        other, stdout = os.pipe()
    elif kind == "a full device":
        other, stdout = os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)
    else:
        other, stdout = pty.openpty()
    os.close(other)
    assert end_with(stdout, mode) == 0
    os.close(stdout)
