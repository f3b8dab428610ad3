"""One line of text per row, for a file or a job queue's log: at most 100 columns, each in its place."""

from __future__ import annotations

from rl_lab.metrics.names import label_of
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
    begin = [f"{done:>5}", *phase, f"{view.counts.agent_steps:>9,} steps"]
    begin.append(f"{format_number(view.agent_steps_per_second):>6}/s")
    end = f"ETA {format_duration(view.eta_s):>5}"
    space = WIDEST - sum(len(text) + GAP for text in begin) - len(end)
    shown: list[str] = []
    evaluation = (EVALUATION_RETURN,) if EVALUATION_RETURN in view.latest else ()
    for name in dict.fromkeys((TRAINING_RETURN, *evaluation, *view.highlight, EPISODE_LENGTH)):
        column = f"{SHORT.get(name) or label_of(name)} {pad(_short(view, name), VALUE, right=True)}"
        if len(column) + GAP <= space:
            shown.append(column)
            space -= len(column) + GAP
    return (" " * GAP).join([*begin, *shown, end])


def _short(view: RunView, name: str) -> str:
    """The newest value, in fewer digits where it would not fit."""
    value = view.latest.get(name)
    texts = [format_number(value, digits) for digits in range(view.digits, 1, -1)]
    return next((text for text in texts if len(text) <= VALUE), texts[-1])
