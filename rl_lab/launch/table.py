"""Several trainings as one table that is painted a few times a second: progress, return, what each does, time left."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from rl_lab.launch.local import Member
from rl_lab.utils.formatting import format_duration, format_number
from rl_lab.utils.screen import Screen, Span, line_of, pad, size_of, text_width
from rl_lab.utils.text import printable

INTERVAL_S = 0.25
WIDEST, BAR, NOW = 120, 10, 20  # columns of the table, of a bar, of what a training does
INTERRUPTED = (-2, -15, 130, 143)  # exit codes of SIGINT and SIGTERM


class LiveTable:
    """What a supervisor shows: `tick` while processes run, `say` for lines that they print, which stay above."""

    def __init__(self, members: Sequence[Member], jobs: int, stream: IO[str]) -> None:
        self._members, self._jobs = members, jobs
        self._screen = Screen(stream)
        self.above: deque[str] = deque()
        self._started = time.monotonic()
        self._due_at = 0.0
        self._is_broken = False
        self._colours = not os.environ.get("NO_COLOR")

    def say(self, label: str, line: str) -> None:
        self.above.append(printable(f"[{label}] {line.rstrip()}"))

    def tick(self) -> None:
        if time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + INTERVAL_S
            self._paint()

    def close(self) -> None:
        """Take the table away: the closing one comes in its place."""
        self._paint()
        if not self._is_broken:
            self._screen.erase()

    def _paint(self) -> None:
        size = size_of(self._screen.stream)
        elapsed_s = time.monotonic() - self._started
        lines = render_table(
            self._members, self._jobs, elapsed_s, columns=size.columns, height=size.lines, colours=self._colours
        )
        above = [self.above.popleft() for _ in range(len(self.above))]
        try:
            if not self._is_broken:
                self._screen.paint(lines, columns=size.columns, above=above)
        except (OSError, ValueError):  # a terminal that is gone ends no training
            self._is_broken = True


def render_table(
    members: Sequence[Member], jobs: int, elapsed_s: float, *, columns: int, height: int, colours: bool = True
) -> list[str]:
    """One line per training, those under way first where there is not space for all."""
    width = min(columns, WIDEST)
    running = [each for each in members if each.process is not None and each.exit_code is None]
    ended = [each for each in members if each.exit_code is not None]
    head = f"{len(members)} trainings · {len(running)} running · {len(ended)} ended · {format_duration(elapsed_s)}"
    lines = [line_of([(f"{head} · ETA {format_duration(_eta_s(members, jobs))}", "bold")], width, colours=colours)]
    shown = list(members)
    if len(shown) > max(1, height - 4):
        first = [*running, *(each for each in members if each.process is None), *ended[::-1]][: max(1, height - 5)]
        shown = [each for each in members if any(each is other for other in first)]
    layout = _Layout.of(members, width)
    steps = f"{'STEPS':>11}  " if layout.has_steps else ""
    titles = f"{pad('TRAINING', layout.label)}  {pad('DONE', layout.bar + 5)}  {steps}{'RETURN':>9}  {'ETA':>7}  NOW"
    lines.append(line_of([(titles, "dim")], width, colours=colours))
    lines += [line_of(_row(each, layout), width, colours=colours) for each in shown]
    if len(shown) < len(members):
        lines.append(line_of([(f"… and {len(members) - len(shown)} more", "dim")], width, colours=colours))
    return lines


@dataclass(frozen=True)
class _Layout:
    """What a table of some width has space for."""

    label: int
    bar: int
    has_steps: bool

    @classmethod
    def of(cls, members: Sequence[Member], width: int) -> _Layout:
        bar, has_steps = BAR if width >= 100 else 0, width >= 76
        taken = bar + 5 + 2 + (13 if has_steps else 0) + 11 + 9 + (NOW if width >= 76 else NOW // 2)
        return cls(
            max(8, min(max(text_width(short_label(each.label)) for each in members), width - taken - 2)), bar, has_steps
        )


def short_label(label: str) -> str:
    """`seed=0 gae_lambda=0.9`: settings without the blocks they lie in."""
    parts = [word.partition("=") for word in label.split()]
    return " ".join(key.rpartition(".")[2] + sign + value for key, sign, value in parts)


def _row(member: Member, layout: _Layout) -> list[Span]:
    report, fraction = member.report, _fraction(member)
    full = int(fraction * layout.bar)
    state, style = _state(member)
    number = report.get("score") if member.exit_code == 0 and report.get("score") is not None else report.get("return")
    eta_s = report.get("eta_s") if member.exit_code is None else None
    is_running = member.process is not None and member.exit_code is None
    return [
        (f"{pad(short_label(member.label), layout.label)}  ", "bold" if is_running else ""),
        ("━" * full, "green"),
        ("─" * (layout.bar - full), "dim"),
        (f" {fraction:>4.0%}  ", ""),
        (f"{format_number(report.get('agent_steps')):>11}  " if layout.has_steps else "", ""),
        (f"{format_number(number):>9}  {format_duration(eta_s):>7}  ", ""),
        (state, style),
    ]


def _fraction(member: Member) -> float:
    return 1.0 if member.exit_code == 0 else float(member.report.get("fraction") or 0.0)


def _state(member: Member) -> Span:
    """What a training does now, or how it ended."""
    if member.process is None:
        return ("waiting", "dim")
    if member.exit_code is None:
        return (printable(str(member.report.get("activity") or ("ending" if member.report else "starting"))), "cyan")
    if member.exit_code == 0:
        return ("finished", "green")
    if member.exit_code in INTERRUPTED:
        return ("interrupted", "yellow")
    return (f"failed (exit code {member.exit_code})", "red")


def _eta_s(members: Sequence[Member], jobs: int) -> float | None:
    """As long as the trainings so far took for their share, over the places there are."""
    seconds, done = 0.0, 0.0
    for member in members:
        if member.process is not None and _fraction(member) > 0.0:
            seconds += member.seconds or time.monotonic() - member.started
            done += _fraction(member)
    left = sum(1.0 - _fraction(member) for member in members if member.exit_code is None)
    return left * seconds / done / max(1, jobs) if done > 0.0 else None
