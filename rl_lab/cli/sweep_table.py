"""The trials while a sweep runs: a live table in a terminal, one line per ended trial elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from rl_lab.cli.printing import format_value, say
from rl_lab.launch.search import Trial, best_of
from rl_lab.launch.sweep_plan import SweepPlan

SHOWN = 16  # newest trials in the live table
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
            self._live.update(self.render(trials), refresh=True)
            self._drawn = time.monotonic()

    def render(self, trials: list[Trial]) -> Any:
        from rich.table import Table

        best = best_of(trials, self._plan)
        ended = sum(trial.has_ended for trial in trials)
        score = f" · best {format_value(best.score)} in trial {best.number}" if best is not None else ""
        table = Table(title=f"{self._plan.name} · {ended} of {self._plan.trials} trials{score}", title_justify="left")
        for heading in ("trial", "state", "score", "s", *(each.key for each in self._plan.parameters)):
            table.add_column(heading, overflow="fold")
        for trial in trials[-SHOWN:]:
            state = trial.state if trial.has_ended else "running"
            cells = [trial.number, state, _score(trial), trial.seconds, *trial.parameters.values()]
            table.add_row(*map(format_value, cells), style="bold" if trial is best else None)
        return table


def line_of(trial: Trial, plan: SweepPlan) -> str:
    settings = "  ".join(f"{key}={format_value(value)}" for key, value in trial.parameters.items())
    reason = f"  ({trial.message})" if trial.message else ""
    score = format_value(_score(trial))
    return f"trial {trial.number:>4}/{plan.trials}  {trial.state:<8}  {score:>10}  {settings}{reason}"


def _score(trial: Trial) -> float | None:
    """The score or, while there is none, the newest value."""
    return trial.score if trial.score is not None else (trial.values[-1] if trial.values else None)
