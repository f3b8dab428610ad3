"""Several trainings as one table that is painted a few times a second: progress, return, what each does, time left."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import IO

from rl_lab.launch.local import Member
from rl_lab.utils.formatting import format_duration, format_number
from rl_lab.utils.screen import Screen, Span, line_of, pad, size_of, text_width
from rl_lab.utils.text import printable

INTERVAL_S = 0.25
WIDEST, BAR = 120, 10
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
    label = max(8, min(max(text_width(each.label) for each in members), width - 62))
    titles = f"{pad('TRAINING', label)}  {pad('PROGRESS', BAR + 5)}  {'STEPS':>11}  {'RETURN':>9}  {'ETA':>7}  NOW"
    lines.append(line_of([(titles, "dim")], width, colours=colours))
    lines += [line_of(_row(each, label), width, colours=colours) for each in shown]
    if len(shown) < len(members):
        lines.append(line_of([(f"… and {len(members) - len(shown)} more", "dim")], width, colours=colours))
    return lines


def _row(member: Member, label: int) -> list[Span]:
    report, fraction = member.report, _fraction(member)
    full = int(fraction * BAR)
    state, style = _state(member)
    number = report.get("score") if member.exit_code == 0 and report.get("score") is not None else report.get("return")
    eta_s = report.get("eta_s") if member.exit_code is None else None
    return [
        (f"{pad(member.label, label)}  ", "bold" if member.process is not None and member.exit_code is None else ""),
        ("━" * full, "green"),
        ("─" * (BAR - full), "dim"),
        (f" {fraction:>4.0%}  {format_number(report.get('agent_steps')):>11}  ", ""),
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
        return (printable(str(member.report.get("activity") or "starting")), "cyan")
    if member.exit_code == 0:
        return (f"finished in {format_duration(member.seconds)}", "green")
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
