"""What `plot`, `compare`, `export` and `report` share: their options, the comparison, the files they write."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rl_lab.cli.parsing import Argument, argument
from rl_lab.cli.selection import select_runs

if TYPE_CHECKING:
    from rl_lab.runs.compare import Comparison

COUNTERS = ("env_frames", "agent_steps", "episodes", "updates", "wall_s")
METRICS_HELP = "one or more, with commas between; the first is the score (default: eval/return)"
X_HELP = f"what curves are drawn over: {', '.join(COUNTERS)} (default: env_frames; updates where no run takes steps)"
AT_HELP = "compare at this number of --x (default: the end that all runs reach)"
GROUP_HELP = "a setting that decides which runs belong together, in place of all settings; can be repeated"
OUTPUT_HELP = "a .png, .html or .md file; can be repeated"

MEASURE: tuple[Argument, ...] = (
    argument("--metrics", default="eval/return", metavar="NAMES", help=METRICS_HELP),
    argument("--x", choices=COUNTERS, metavar="COUNTER", help=X_HELP),
    argument("--at", type=float, metavar="X", help=AT_HELP),
    argument("--group-by", action="append", default=[], metavar="SETTING", help=GROUP_HELP),
)
AGAINST_HELP = "published curves, such as dreamerv3:dmc_state; can be repeated"
CURVES: tuple[Argument, ...] = (
    *MEASURE,
    argument("--band", default="ci", choices=("ci", "std", "range"), help="around the mean over runs (default: ci)"),
    argument("--against", action="append", default=[], metavar="METHOD:SUITE", help=AGAINST_HELP),
    argument("--output", action="append", type=Path, default=[], metavar="FILE", help=OUTPUT_HELP),
)


def make_comparison(arguments: argparse.Namespace, *, needs_metrics: bool = True) -> Comparison:
    """The runs that were asked for, sorted into groups, and the published curves beside them."""
    from rl_lab.runs.compare import compare_runs

    return compare_runs(
        select_runs(arguments),
        metrics=[name for name in arguments.metrics.split(",") if name],
        x=arguments.x,
        at=arguments.at,
        group_by=arguments.group_by,
        against=getattr(arguments, "against", ()),
        needs_metrics=needs_metrics,
    )
