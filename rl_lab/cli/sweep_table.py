"""The trials while a sweep runs: a live table in a terminal, one line per ended trial elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from textwrap import wrap

from rl_lab.cli.printing import format_value, say
from rl_lab.launch.search import Trial, best_of
from rl_lab.launch.sweep_plan import SweepPlan
from rl_lab.utils.screen import Screen, line_of, size_of

SHOWN = 16  # newest trials in the live table
FACTS = 37  # columns of number, state, score and seconds
REFRESH_SECONDS = 0.5


class TrialTable:
    """`show(trials)` as often as one likes."""

    def __init__(self, plan: SweepPlan, *, is_quiet: bool) -> None:
        self._plan = plan
        self._is_quiet = is_quiet
        self._printed: set[int] = set()
        self._screen = Screen(sys.stdout) if sys.stdout.isatty() and not is_quiet else None
        self._above: list[str] = []  # lines that were said and are to stay
        self._drawn = 0.0

    def say(self, line: str) -> None:
        """A line that stays: above the table, or on stderr."""
        if self._screen is None:
            say(line, file=sys.stderr)
        else:
            self._above += line.strip().splitlines()

    def show(self, trials: list[Trial]) -> None:
        if self._is_quiet:
            return
        news = [trial for trial in trials if trial.has_ended and trial.number not in self._printed]
        self._printed |= {trial.number for trial in news}
        if self._screen is None:
            best = best_of(trials, self._plan)
            for trial in news:
                say(trial_line(trial, self._plan) + ("  best so far" if trial is best else ""))
        elif news or self._above or time.monotonic() - self._drawn > REFRESH_SECONDS:
            size = size_of(self._screen.stream)
            lines = self.render(trials, columns=size.columns, lines=size.lines)
            try:
                self._screen.paint(lines, columns=size.columns, above=self._above)
            except (OSError, ValueError):  # a terminal that is gone ends no sweep
                self._is_quiet = True
            self._above, self._drawn = [], time.monotonic()

    def render(self, trials: list[Trial], *, columns: int, lines: int) -> list[str]:
        """The newest trials: a column for each parameter where they fit, and else all of them in one, folded."""
        best, colours = best_of(trials, self._plan), not os.environ.get("NO_COLOR")
        ended = sum(trial.has_ended for trial in trials)
        score = f" · best {format_value(best.score)} in trial {best.number}" if best is not None else ""
        names = short_names([each.key for each in self._plan.parameters])
        shown = trials[-SHOWN:]
        values = [[format_value(value) for value in trial.parameters.values()] for trial in shown]
        widths = [max([len(name), *(len(row[index]) for row in values)]) for index, name in enumerate(names)]
        is_wide = sum(widths) + 2 * len(widths) + FACTS <= columns
        headings = "  ".join(map(str.rjust, names, widths)) if is_wide else "settings"
        blocks: list[list[str]] = []
        for trial, row in zip(shown, values, strict=True):
            said = " ".join(f"{name}={value}" for name, value in zip(names, row, strict=True))
            told = ["  ".join(map(str.rjust, row, widths))] if is_wide else wrap(said, max(20, columns - FACTS)) or [""]
            style = "bold" if trial is best else ""
            heads = [_facts(trial.number, trial.state, _score(trial), trial.seconds), *[" " * FACTS] * (len(told) - 1)]
            pairs = zip(heads, told, strict=True)
            blocks.append([line_of([(head + text, style)], columns, colours=colours) for head, text in pairs])
        title = f"{self._plan.name} · {ended} of {self._plan.trials} trials{score}"
        heading = f"{'trial':>5}  {'state':<8}  {'score':>9}  {'s':>7}  {headings}"
        top = [line_of([spans], columns, colours=colours) for spans in ((title, "bold"), (heading, "dim"))]
        while len(blocks) > 2 and sum(map(len, blocks)) > lines - 4:
            blocks.pop(0)
        return [*top, *(line for block in blocks for line in block)]


def _facts(number: int, state: str, score: float | None, seconds: float) -> str:
    cells = format_value(number), format_value(state), format_value(score), format_value(seconds)
    return f"{cells[0]:>5}  {cells[1]:<8}  {cells[2]:>9}  {cells[3]:>7}  "


def short_names(keys: list[str]) -> list[str]:
    """`algorithm.discount` is `discount`, unless another parameter ends so: as much of each key as tells it apart."""

    def ends(key: str) -> list[str]:
        words = key.split(".")
        return [".".join(words[-count:]) for count in range(1, len(words) + 1)]

    taken = Counter(end for key in keys for end in ends(key))
    return [next((end for end in ends(key) if taken[end] == 1), key) for key in keys]


def trial_line(trial: Trial, plan: SweepPlan) -> str:
    settings = "  ".join(f"{key}={format_value(value)}" for key, value in trial.parameters.items())
    reason = f"  ({trial.message})" if trial.message else ""
    score = format_value(_score(trial))
    return f"trial {trial.number:>4}/{plan.trials}  {trial.state:<8}  {score:>10}  {settings}{reason}"


def _score(trial: Trial) -> float | None:
    """The score or, while there is none, the newest value."""
    return trial.score if trial.score is not None else (trial.values[-1] if trial.values else None)
