"""A run on the terminal: a live panel for a person, plain lines for a file, or silence."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rl_lab.metrics.view import EVALUATION_RETURN, RunView
from rl_lab.metrics.writers import Level, Row, Writer
from rl_lab.types import ConfigError, StateTree, did_you_mean
from rl_lab.utils.formatting import format_duration, format_number
from rl_lab.utils.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

MODES = ("auto", "live", "plain", "quiet")
INTERVAL_S = {"live": 0.25, "plain": 2.0}  # between frames, between lines
COST_LIMIT = 0.01  # fraction of the time that showing may take
PLAIN_COLUMNS = {
    "collect/episode_return_mean": "return",
    EVALUATION_RETURN: "eval",
    "collect/episode_length_mean": "length",
    "controller/entropy": "entropy",
    "controller/approx_kl": "KL",
}
WORLD_MODEL_KL = "train/model_kl"  # in the place of the policy's, which a world model's workflow does not have


class LiveDisplay(Writer):
    """A writer for people.

    live   a panel, drawn by whoever calls (no thread), at most four times a second and for at most 1 % of the time
    plain  one aligned line per row, at most every two seconds, and always the last
    quiet  nothing
    auto   live on a terminal, plain elsewhere
    """

    name = "terminal"

    def __init__(
        self,
        *,
        title: str,
        total: int | None = None,
        mode: str = "auto",
        stream: IO[str] | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """total is the run's agent steps, where known; console (for live) and stream (for plain) default to stdout."""
        if mode not in MODES:
            raise ConfigError(f"Display mode '{mode}' is unknown: write {', '.join(MODES)}.{did_you_mean(mode, MODES)}")
        self.view = RunView(title=printable(title), total=total)
        self._stream = stream or (console.file if console is not None else sys.stdout or io.StringIO())
        self.on_failure: Callable[[str], None] = lambda sentence: None  # called when the terminal is gone
        is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self.mode = ("live" if is_terminal else "plain") if mode == "auto" else mode
        self._console = console
        self._live: Live | None = None
        self._clock = clock
        self._due_at = clock()
        self._has_news = False
        self._is_closed = False

    # --- what the run reports

    def write(self, row: Row) -> None:
        self.view.take(row)
        self._take_news()

    def update_progress(self, fraction: float, phase_name: str, phase_index: int, phase_count: int) -> None:
        """fraction is of the current phase; phase_index counts from 0. Cheap enough for every cycle."""
        view = self.view
        view.phase_fraction, view.phase_name = fraction, printable(phase_name)
        view.phase_index, view.phase_count = phase_index, phase_count
        if self.mode == "live":  # a plain line waits for numbers
            self._take_news()

    def message(self, text: str, level: Level = "info") -> None:
        """The panel keeps the last few; plain lines print each at once."""
        if level == "detail":
            return
        text = printable(text, keep="\n")
        self.view.messages.append((level, text))
        if self.mode == "plain" or (self.mode == "live" and self._is_closed):
            self._print(text if level == "info" else f"{level}: {text}")
        elif self.mode == "live":
            self._take_news()

    def get_state(self) -> StateTree:
        return self.view.get_state()

    def set_state(self, state: StateTree) -> None:
        self.view.set_state(state)

    def flush(self) -> None:
        """Show what is new, due or not."""
        if self._has_news and not self._is_closed:
            self._show()

    def close(self) -> None:
        """Show the last row and give the terminal back. The view stays for `summary`."""
        self.flush()
        self._is_closed = True
        live, self._live = self._live, None
        if live is not None:
            with self._without_failing():
                live.stop()

    # --- the end of a run

    def summary(
        self,
        *,
        agent_steps: int,
        seconds: float,
        score: float | None = None,
        paths: Mapping[str, Path] | None = None,
        commands: Mapping[str, str] | None = None,
        title: str = "Finished",
    ) -> None:
        """Close the display, then say what the run did, where its files lie, and what to type next.

        paths and commands are label -> path and label -> command line, in the order to show them.
        """
        self.close()
        facts = {"agent steps": f"{agent_steps:,}", "time": f"{format_duration(seconds)} ({seconds:,.1f} s)"}
        if score is not None:
            facts["evaluation score"] = f"{score:,.2f}"
        shown, commands = {label: _from_here(path) for label, path in (paths or {}).items()}, commands or {}
        if self.mode == "live":
            from rl_lab.metrics.panel import render_summary

            with self._without_failing():
                self._rich_console().print(render_summary(title, facts, shown, commands))
        elif self.mode == "plain":
            lines = {**facts, **shown, **commands}
            width = max(len(label) for label in lines)
            self._print("\n".join([title, *(f"  {label:<{width}}  {text}" for label, text in lines.items())]))

    # --- showing

    def _take_news(self) -> None:
        self._has_news = True
        if self._clock() >= self._due_at and not self._is_closed:
            self._show()

    def _show(self) -> None:
        begin = self._clock()
        if self.mode == "live":
            self._draw()
        elif self.mode == "plain":
            self._print(plain_line(self.view))
        self._has_news = False
        end = self._clock()
        # A frame that took 10 ms is followed by a second of rest: slow terminals get fewer frames, not slower runs.
        self._due_at = begin + max(INTERVAL_S.get(self.mode, 0.0), (end - begin) / COST_LIMIT)

    def _draw(self) -> None:
        from rich.live import Live

        from rl_lab.metrics.panel import render_panel

        console = self._rich_console()
        with self._without_failing():
            if self._live is None:
                self._live = Live(console=console, auto_refresh=False)
                self._live.start()
            self._live.update(render_panel(self.view, height=console.size.height), refresh=True)

    def _rich_console(self) -> Console:
        if self._console is None:
            from rl_lab.metrics.panel import NonExitingConsole

            self._console = NonExitingConsole(file=self._stream, force_terminal=True)
        return self._console

    def _print(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with self._without_failing():
            self._stream.write(printable(text, keep="\n").encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()

    @contextmanager
    def _without_failing(self) -> Iterator[None]:
        """A terminal that is closed, full or broken ends no run: the display falls silent, or plain where it must."""
        try:
            yield
        except UnicodeEncodeError:  # blocks and frames on a terminal of another alphabet
            self._leave("plain", "the terminal cannot show the live display")
        except (OSError, ValueError) as error:
            if not isinstance(error, OSError) and not self._stream.closed:
                raise
            self._leave("quiet", f"nothing more is shown: the terminal or its reader is gone ({error})")
            with suppress(OSError, ValueError):  # what waits in the buffer must not fail again when Python ends
                if os.fstat(self._stream.fileno()):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, self._stream.fileno())
                    os.close(nowhere)

    def _leave(self, mode: str, sentence: str) -> None:
        self.mode = mode
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError, ValueError):
                live.stop()  # gives sys.stdout back, whatever it can still write
        self.on_failure(sentence)


def plain_line(view: RunView) -> str:
    """One line whose columns stay in place from row to row."""
    phase = f"{view.phase_name:<12}  " if view.phase_count > 1 else ""
    shown = {"controller/approx_kl": view.latest.get(WORLD_MODEL_KL), **view.latest}
    columns = [
        f"{view.run_fraction:>6.1%}  {phase}{view.latest.get('agent_steps', 0):>11,} steps",
        f"{format_number(view.agent_steps_per_second):>9}/s",
        *(f"{label} {format_number(shown.get(name)):>8}" for name, label in PLAIN_COLUMNS.items()),
        f"ETA {format_duration(view.eta_s):>8}",
    ]
    return "  ".join(columns)


def _from_here(path: Path) -> str:
    """As short as it can be written from the working directory."""
    with suppress(ValueError, OSError):  # elsewhere, or the working directory is gone
        return str(path.relative_to(Path.cwd()))
    return str(path)
