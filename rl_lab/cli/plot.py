"""Draw the curves of one or more runs as one picture. Runs that differ in nothing but their seed become one line with a
band; each environment and each metric has its panel. Runs are named, or chosen by --where, --tag or --sweep.

examples:
  rl-lab plot @last
  rl-lab plot --where algorithm=ppo --where env~Cart --x agent_steps
  rl-lab plot --sweep my_sweep --metrics eval/return,loss/value --output sweep.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.comparing import CURVES, make_comparison
from rl_lab.cli.parsing import quiet
from rl_lab.cli.printing import say
from rl_lab.cli.selection import SELECTION

ARGUMENTS = (*SELECTION, *CURVES, quiet("print only the paths written"))


def run(arguments: argparse.Namespace) -> int:
    comparison = make_comparison(arguments)
    paths = [comparison.write(path, band=arguments.band) for path in arguments.output or [Path("plot.png")]]
    if not arguments.quiet:
        for note in comparison.notes:
            say(f"note: {note}")
    for path in paths:
        print(path)
    return 0
