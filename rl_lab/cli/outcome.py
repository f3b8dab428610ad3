"""What became of a run: its best score, and how `train` and `resume` end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_lab.cli.printing import give_up_if_broken, say

if TYPE_CHECKING:
    from rl_lab.api import Run


def report(run: Run, *, quiet: bool) -> int:
    """The exit code of a training that came to its end, whether or not anybody can read what it prints."""
    if quiet:
        say(run.id)
    give_up_if_broken(sys.stdout)
    return 0


def best_score(status: Mapping[str, Any]) -> float | None:
    """The highest evaluation score of a run, or None before its first evaluation."""
    scores = [status[name] for name in ("best_score", "final_score") if status.get(name) is not None]
    return max(scores, default=None)
