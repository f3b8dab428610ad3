"""A run on the terminal: a live panel for a person, a line in a notebook, plain lines for a file, or silence."""

from __future__ import annotations

import io
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from threading import Lock
from typing import IO

from rl_lab.metrics.notebook import NotebookLine, in_notebook
from rl_lab.metrics.pace import Reading
from rl_lab.metrics.panel import activity_words, one_line, render_panel, render_summary
from rl_lab.metrics.plain import WIDEST, line_between, plain_line
from rl_lab.metrics.relay import Redirection
from rl_lab.metrics.view import EVALUATION_RETURN, TRAINING_RETURN, RunView
from rl_lab.metrics.writers import Level, Row, Writer
from rl_lab.types import ConfigError, StateTree, did_you_mean
from rl_lab.utils.formatting import format_duration
from rl_lab.utils.reports import REPORTS_VARIABLE, report_line
from rl_lab.utils.screen import Screen, line_of, size_of, text_width
from rl_lab.utils.text import printable
from rl_lab.utils.ticker import Ticker

MODES = ("auto", "live", "plain", "quiet")
TICKING = {"live": 0.25, "notebook": 0.5, "reports": 0.5, "plain": 10.0}  # seconds between the frames of a thread
SECONDS_BETWEEN_LINES = 2.0
LONGEST_SILENCE_S = 60.0  # of plain lines
LEVEL_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


class LiveDisplay(Writer):
    """A writer for people.

    live      a panel, painted four times a second by a thread of its own, whatever the rows do
    plain     one aligned line per row, at most every two seconds, and always the last; in a file also one after a
              minute without a row, which says what goes on (on a terminal a debugger may wait)
    quiet     nothing
    auto      live on a terminal, a line that is written over in a notebook, plain elsewhere
    """

    name = "terminal"

    def __init__(
        self,
        *,
        title: str,
        total: int | None = None,
        mode: str = "auto",
        highlight: Sequence[str] = (),
        digits: int = 4,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """total is the run's agent steps, where known; highlight names metrics to show first; stream defaults to
        stdout."""
        if mode not in MODES:
            raise ConfigError(f"Display mode '{mode}' is unknown: write {', '.join(MODES)}.{did_you_mean(mode, MODES)}")
        self.view = RunView(title=printable(title), total=total, highlight=tuple(highlight), digits=digits)
        self._stream = stream or sys.stdout or io.StringIO()
        self.on_failure: Callable[[str], None] = lambda sentence: None  # called when the terminal is gone
        self.mode = self._find_mode() if mode == "auto" else mode
        self._failures: deque[str] = deque()  # noticed by the thread, told by the run's own
        self._probe: Callable[[], Reading] | None = None
        self._ticker: Ticker | None = None
        self._cost: float | None = None
        self._screen, self._line = Screen(self._stream), NotebookLine()
        self._above: deque[str] = deque()  # lines that wait to appear above the panel
        self._redirection = Redirection(self._above.append)
        self._lock = Lock()  # around the view: held for a row or for composing a frame, never while writing one
        self._colours = not os.environ.get("NO_COLOR")
        self._clock = clock
        self._due_at = self._last_line_at = clock()
        self._has_news = False
        self._is_closed = False

    def _find_mode(self) -> str:
        if os.environ.get(REPORTS_VARIABLE):
            return "reports"
        if self._stream.isatty() and os.environ.get("TERM") != "dumb":
            return "live"
        return "notebook" if self._stream is sys.stdout and in_notebook() else "plain"

    # --- what the run reports

    def start(self, probe: Callable[[], Reading]) -> None:
        """Show the run from now on, reading its counters with `probe`, from a thread where somebody watches."""
        self._probe = probe
        if self.mode in TICKING and self._ticker is None and not self._is_closed:
            if self.mode == "live" and self._stream is sys.stdout:
                self._redirection.start()
            self._ticker = Ticker(self._frame, TICKING[self.mode], on_fork=self._fall_silent)
            self._ticker.start()

    def write(self, row: Row) -> None:
        with self._lock:
            self.view.take(row)
        self._tell_failures()
        self._has_news = True
        if self.mode == "plain" and not self._is_closed and self._clock() >= self._due_at:
            self.flush()

    def update_progress(self, fraction: float, phase_name: str, phase_index: int, phase_count: int) -> None:
        """fraction is of the current phase; phase_index counts from 0."""
        view = self.view
        view.phase_fraction, view.phase_name = fraction, printable(phase_name)
        view.phase_index, view.phase_count = phase_index, phase_count

    def message(self, text: str, level: Level = "info") -> None:
        """A sentence, whole: above the panel, or among the plain lines."""
        self._tell_failures()
        if level == "detail" or self.mode == "quiet":
            return
        text = printable(text if level == "info" else f"{level}: {text}", keep="\n")
        if self.mode == "live" and self._ticker is not None:
            lines = text.split("\n")
            self._above.extend(
                line_of([(line, LEVEL_STYLES[level])], text_width(line), colours=self._colours) for line in lines
            )
        else:
            self._print(text)

    def get_state(self) -> StateTree:
        return self.view.get_state()

    def set_state(self, state: StateTree) -> None:
        with self._lock:
            self.view.set_state(state)

    def flush(self) -> None:
        """Show what is new, due or not; where a thread shows it, that is soon enough."""
        is_ours = self._ticker is None or self.mode == "plain"  # a terminal that could not show the panel gets lines
        if is_ours and self._has_news and not self._is_closed:
            self._due_at = self._clock() + SECONDS_BETWEEN_LINES
            self._has_news = False
            if self.mode == "plain":
                self._print(plain_line(self.view))
            elif self.mode in TICKING:
                self._frame()

    def close(self) -> None:
        """Show the last row, end the thread and give the terminal back. The view stays for `summary`."""
        if self._is_closed:
            return
        ticker = self._ticker
        if ticker is not None:
            if not ticker.stop():
                self.mode = "quiet"
                self._failures.append("nothing more is shown: the terminal takes no output")
            self._cost = ticker.cost
            self._redirection.stop()
            self._ticker = None
        self.flush()
        if ticker is not None:  # last: nothing goes on any more
            self._frame(is_last=True)
        self._is_closed = True
        self._screen.leave()
        self._tell_failures()

    @property
    def cost(self) -> float | None:
        """CPU time of the display's thread as a fraction of the time it showed something; None where there was none."""
        if self.mode == "plain":
            return None
        return self._ticker.cost if self._ticker is not None else self._cost

    @property
    def frames(self) -> int:
        """How often the thread has shown the run so far."""
        return self._ticker.ticks if self._ticker is not None else 0

    # --- the end of a run

    def summary(
        self,
        *,
        agent_steps: int,
        seconds: float,
        seconds_after: float = 0.0,
        score: float | None = None,
        facts: Mapping[str, str] | None = None,
        paths: Mapping[str, Path] | None = None,
        commands: Mapping[str, str] | None = None,
        title: str = "Finished",
    ) -> None:
        """Close the display, then say what the run did, where its files lie, and what to type next.

        seconds are those of the training, as the status and the report have them, seconds_after those of the video
        and the report. facts, paths and commands are label -> sentence, path or command line, in the order to show.
        """
        self.close()
        made = " and ".join(label for label in ("video", "report") if label in (paths or {}))
        then = f", then {seconds_after:,.1f} s for {made}" if seconds_after >= 0.1 and made else ""
        updates = self.view.counts.updates
        done = {"updates": updates} if updates and not agent_steps else {"agent steps": agent_steps}
        known = {label: f"{count:,}" for label, count in done.items()}
        known["time"] = f"{format_duration(seconds)} ({seconds:,.1f} s){then}"
        if score is not None:
            best = self.view.best_evaluation
            known["evaluation score"] = f"{score:,.2f}" + (f" (best {best:,.2f})" if best and best > score else "")
        facts = {**known, **(facts or {})}
        shown, commands = {label: _from_here(path) for label, path in (paths or {}).items()}, commands or {}
        if self.mode == "live":
            texts = [{label: printable(text) for label, text in each.items()} for each in (facts, shown, commands)]
            columns = min(size_of(self._stream).columns, 120)
            with self._without_failing():
                self._stream.write(
                    "\n".join(render_summary(title, *texts, columns=columns, colours=self._colours)) + "\n"
                )
                self._stream.flush()
        elif self.mode in ("plain", "notebook"):
            width = max(len(label) for label in (*facts, *shown, *commands))
            begun = {label: f"  {label:<{width}}  " for label in (*facts, *shown, *commands)}
            lines = [
                wrap(begun[label] + text, WIDEST, subsequent_indent=" " * (width + 4)) for label, text in facts.items()
            ]
            unbroken = [begun[label] + text for label, text in {**shown, **commands}.items()]  # to be copied
            self._print("\n".join([title, *(line for each in lines for line in each), *unbroken]))
        self._tell_failures()

    # --- showing

    def _frame(self, *, is_last: bool = False) -> None:
        """Look at the run and show it once; called by the thread, and by the run's own before and after it."""
        if self.mode not in TICKING:
            return
        if self.mode == "plain":
            self._break_silence()
            return
        reading = None if self._probe is None else self._probe()
        size = size_of(self._stream)
        with self._lock:
            if reading is not None:
                self.view.look(replace(reading, activity="", activity_s=0.0, total=0) if is_last else reading)
            self.view.display_fraction = self.cost
            lines = self._compose(size.columns, size.lines)
        with self._without_failing():
            if self.mode == "live":
                above = list(self._above)
                self._screen.paint(lines, columns=size.columns, above=above)
                for _ in above:  # shown: others may have come meanwhile
                    self._above.popleft()
            elif self.mode == "notebook":
                self._line.show(lines[0])
            elif self.mode == "reports":
                self._stream.write(f"{lines[0]}\n")
                self._stream.flush()

    def _break_silence(self) -> None:
        """A row may be long in coming: updates without steps, an evaluation, kernels that are compiled."""
        is_due = self._clock() - self._last_line_at >= LONGEST_SILENCE_S
        if is_due and self._probe is not None and not self._stream.isatty():
            self._print(line_between(self._probe()))

    def _compose(self, columns: int, height: int) -> list[str]:
        if self.mode == "live":
            return render_panel(self.view, columns=columns, height=height, colours=self._colours)
        return [report_of(self.view) if self.mode == "reports" else one_line(self.view)]

    def _print(self, text: str) -> None:
        self._last_line_at = self._clock()
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
            self.mode = "plain"
            self._failures.append("the terminal cannot show the live display")
            self._redirection.stop()
            for _ in range(len(self._above)):
                self._print(self._above.popleft())
        except (OSError, ValueError) as error:
            if not isinstance(error, OSError) and not self._stream.closed:
                raise
            self.mode = "quiet"
            self._redirection.stop()
            self._failures.append(f"nothing more is shown: the terminal or its reader is gone ({error})")
            with suppress(OSError, ValueError):  # what waits in the buffer must not fail again when Python ends
                if os.fstat(self._stream.fileno()):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, self._stream.fileno())
                    os.close(nowhere)

    def _tell_failures(self) -> None:
        while self._failures:
            self.on_failure(self._failures.popleft())

    def _fall_silent(self) -> None:
        """In a forked child: the terminal is the parent's."""
        self._lock = Lock()
        self.mode, self._ticker = "quiet", None
        self._redirection.stop()


def report_of(view: RunView) -> str:
    """One look at a run for whoever shows many of them."""
    return report_line(
        {
            "fraction": view.run_fraction,
            "agent_steps": view.counts.agent_steps,
            "steps_per_second": view.agent_steps_per_second,
            "return": view.latest.get(TRAINING_RETURN),
            "score": view.latest.get(EVALUATION_RETURN),
            "activity": activity_words(view),
            "eta_s": view.eta_s,
        }
    )


def _from_here(path: Path) -> str:
    """As short as it can be written from the working directory."""
    with suppress(ValueError, OSError):  # elsewhere, or the working directory is gone
        return str(path.relative_to(Path.cwd()))
    return str(path)
