"""What became of a run: its best score, and the exit code that `train` and `resume` end with."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_lab.utils.text import printable

if TYPE_CHECKING:
    from rl_lab.api import Run

# `stopped` is a run that reached a goal or a limit of its own; the work is done.
EXIT_CODES = {"finished": 0, "stopped": 0}


def report(run: Run, *, quiet: bool) -> int:
    """The exit code of a training that returned; quiet runs say at least where they lie."""
    status = run.status
    if quiet:
        print(printable(run.id))
        if status["message"]:
            print(printable(f"{status['state']}: {status['message']}", keep="\n"), file=sys.stderr)
    if status["state"] == "interrupted":
        return 128 + (run.signal_number or signal.SIGINT)  # as shells say it: 130 after Ctrl-C, 143 after SIGTERM
    return EXIT_CODES.get(status["state"], 1)


def best_score(status: Mapping[str, Any]) -> float | None:
    """The highest evaluation score of a run, or None before its first evaluation."""
    scores = [status[name] for name in ("best_score", "final_score") if status.get(name) is not None]
    return max(scores, default=None)
