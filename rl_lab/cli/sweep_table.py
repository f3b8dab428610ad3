"""The trials while a sweep runs: a live table in a terminal, one line per ended trial elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from rl_lab.cli.printing import format_value, say
from rl_lab.launch.search import Trial, best_of
from rl_lab.launch.sweep_plan import SweepPlan

SHOWN = 16  # newest trials in the live table
FACTS = 36  # columns of number, state, score and seconds
REFRESH_SECONDS = 0.5


class TrialTable:
    """`show(trials)` as often as one likes."""

    def __init__(self, plan: SweepPlan, *, is_quiet: bool) -> None:
        self._plan = plan
        self._is_quiet = is_quiet
        self._printed: set[int] = set()
        self._live: Any = None
        self._drawn = 0.0

    def __enter__(self) -> TrialTable:
        if not self._is_quiet and sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, trials: list[Trial]) -> None:
        if self._is_quiet:
            return
        news = [trial for trial in trials if trial.has_ended and trial.number not in self._printed]
        self._printed |= {trial.number for trial in news}
        if self._live is None:
            best = best_of(trials, self._plan)
            for trial in news:
                say(line_of(trial, self._plan) + ("  best so far" if trial is best else ""))
        elif news or time.monotonic() - self._drawn > REFRESH_SECONDS:
            size = self._live.console.size
            self._live.update(self.render(trials, columns=size.width, lines=size.height), refresh=True)
            self._drawn = time.monotonic()

    def render(self, trials: list[Trial], *, columns: int, lines: int) -> Any:
        """The newest trials: a column for each parameter where they fit, and else all of them in one, folded."""
        from rich.table import Table

        best = best_of(trials, self._plan)
        ended = sum(trial.has_ended for trial in trials)
        score = f" · best {format_value(best.score)} in trial {best.number}" if best is not None else ""
        title = f"{self._plan.name} · {ended} of {self._plan.trials} trials{score}"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
        names = short_names([each.key for each in self._plan.parameters])
        widths = [max([len(name), *(len(cell) for cell in cells)]) for name, cells in self._cells(names, trials)]
        is_wide, folded = sum(widths) + 2 * len(widths) + FACTS <= columns, max(20, columns - FACTS)
        for heading in ("trial", "state", "score", "s", *(names if is_wide else ["settings"])):
            table.add_column(heading, overflow="fold", justify="left" if heading in ("state", "settings") else "right")
        height = 1 if is_wide else -(-(sum(widths) + sum(map(len, names)) + 2 * len(names)) // folded)
        for trial in trials[-max(2, min(SHOWN, (lines - 4) // max(1, height))) :]:
            cells = [format_value(each) for each in (trial.number, trial.state, _score(trial), trial.seconds)]
            values = [format_value(each) for each in trial.parameters.values()]
            said = " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
            table.add_row(*cells, *(values if is_wide else [said]), style="bold" if trial is best else None)
        return table

    @staticmethod
    def _cells(names: list[str], trials: list[Trial]) -> list[tuple[str, list[str]]]:
        rows = [[format_value(value) for value in trial.parameters.values()] for trial in trials[-SHOWN:]]
        return [(name, [row[index] for row in rows]) for index, name in enumerate(names)]


def short_names(keys: list[str]) -> list[str]:
    """`algorithm.discount` is `discount`, unless another parameter ends so: as much of each key as tells it apart."""

    def ends(key: str) -> list[str]:
        words = key.split(".")
        return [".".join(words[-count:]) for count in range(1, len(words) + 1)]

    taken = Counter(end for key in keys for end in ends(key))
    return [next((end for end in ends(key) if taken[end] == 1), key) for key in keys]


def line_of(trial: Trial, plan: SweepPlan) -> str:
    settings = "  ".join(f"{key}={format_value(value)}" for key, value in trial.parameters.items())
    reason = f"  ({trial.message})" if trial.message else ""
    score = format_value(_score(trial))
    return f"trial {trial.number:>4}/{plan.trials}  {trial.state:<8}  {score:>10}  {settings}{reason}"


def _score(trial: Trial) -> float | None:
    """The score or, while there is none, the newest value."""
    return trial.score if trial.score is not None else (trial.values[-1] if trial.values else None)
