"""One line of text per row, for a file or a job queue's log: at most 100 columns, each in its place."""

from __future__ import annotations

from rl_lab.metrics.names import label_of
from rl_lab.metrics.pace import Reading
from rl_lab.metrics.panel import words_of
from rl_lab.metrics.view import EPISODE_LENGTH, EVALUATION_RETURN, TRAINING_RETURN, RunView
from rl_lab.utils.formatting import format_duration, format_number
from rl_lab.utils.screen import cut, pad

WIDEST = 100
GAP = 2
VALUE = 6  # columns of a number
SHORT = {TRAINING_RETURN: "return", EVALUATION_RETURN: "eval", EPISODE_LENGTH: "len"}


def plain_line(view: RunView) -> str:
    """Progress, speed, return, length, the algorithm's own metrics and the time left; what does not fit is left out."""
    phase = [cut(view.phase_name, 10).ljust(10)] if view.phase_count > 1 else []
    done = f"{view.run_fraction:.1%}" if view.run_fraction < 1.0 else "100%"
    begin = [f"{done:>5}", *phase, *_pace(view)]
    end = f"ETA {format_duration(view.eta_s):>5}"
    space = WIDEST - sum(len(text) + GAP for text in begin) - len(end)
    shown: list[str] = []
    evaluation = (EVALUATION_RETURN,) if EVALUATION_RETURN in view.latest else ()
    own = sorted(view.highlight, key=lambda name: name not in view.latest)  # a later phase's come last
    names = (*evaluation, *own) if _learns_alone(view) else (TRAINING_RETURN, *evaluation, *own, EPISODE_LENGTH)
    for name in dict.fromkeys(names):
        column = f"{SHORT.get(name) or label_of(name)} {pad(_short(view, name), VALUE, right=True)}"
        if len(column) + GAP <= space:
            shown.append(column)
            space -= len(column) + GAP
    return (" " * GAP).join([*begin, *shown, end])


def line_between(reading: Reading) -> str:
    """Where a run stands that has had no row for long: it learns from what is there, evaluates, compiles, ..."""
    phase = [cut(reading.phase_name, 10).ljust(10)] if reading.phase_count > 1 else []
    counts = [f"{reading.counts.agent_steps:>9,} steps", f"{reading.counts.updates:,} updates"]
    activity = [f"{words_of(reading)}, {reading.phase_fraction:.0%} of the phase", format_duration(reading.wall_s)]
    return cut((" " * GAP).join([f"{reading.run_fraction:>5.1%}", *phase, *counts, *activity]), WIDEST)


def _learns_alone(view: RunView) -> bool:
    """From a dataset: updates, and no step so far."""
    return view.counts.agent_steps == 0 and view.counts.updates > 0


def _pace(view: RunView) -> list[str]:
    if _learns_alone(view):
        mean = view.counts.updates / view.wall_s if view.wall_s > 0.0 else None
        speed = view.pace.updates_per_second or view.latest.get("time/updates_per_second") or mean
        return [f"{view.counts.updates:>9,} updates", f"{format_number(speed, 3):>6}/s"]
    return [f"{view.counts.agent_steps:>9,} steps", f"{format_number(view.agent_steps_per_second):>6}/s"]


def _short(view: RunView, name: str) -> str:
    """The newest value, in fewer digits where it would not fit."""
    value = view.latest.get(name)
    texts = [format_number(value, digits) for digits in range(view.digits, 1, -1)]
    return next((text for text in texts if len(text) <= VALUE), texts[-1])
