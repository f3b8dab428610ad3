"""Watch a run's policy: in a window where there is a display, as an mp4 file otherwise.

examples:
  rl-lab play @last
  rl-lab play @best --episodes 3 --output best.mp4
  rl-lab play @last --task 1                          one of several tasks, by name or number (default: each in turn)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.parsing import POLICY, RUN, argument, chosen, positive, quiet
from rl_lab.cli.printing import format_value

ARGUMENTS = (
    *RUN,
    argument("--output", type=Path, metavar="FILE", help="write an mp4 instead of opening a window"),
    argument("--episodes", type=positive, default=1, metavar="N", help="how many (default: %(default)s)"),
    argument("--task", metavar="NAME", help="one of several tasks (default: each in turn)"),
    *POLICY,
    quiet(),
)


def run(arguments: argparse.Namespace) -> int:
    from rl_lab import api

    options = chosen(arguments, "episodes", "task", "output", "checkpoint", "seed", "runs_dir", "trust")
    video = api.play(arguments.run, **options)
    if video is not None and not arguments.quiet:
        print(f"video: {format_value(video)}")
    return 0
