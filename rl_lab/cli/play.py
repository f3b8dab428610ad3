"""`rl-lab play`: watch a run's policy."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.parsing import Parser, add_policy, add_quiet, add_run, chosen, positive
from rl_lab.cli.printing import format_value

DESCRIPTION = """Watch a run's policy: in a window where there is a display, as an mp4 file otherwise."""

EXAMPLES = """
rl-lab play @last
rl-lab play @best --episodes 3 --output best.mp4
"""


def build_parser(prog: str) -> Parser:
    parser = Parser(prog, description=DESCRIPTION, examples=EXAMPLES)
    add_run(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write an mp4 instead of opening a window")
    parser.add_argument("--episodes", type=positive, default=1, metavar="N", help="how many (default: %(default)s)")
    add_policy(parser)
    add_quiet(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from rl_lab import api

    options = chosen(arguments, "episodes", "output", "checkpoint", "seed", "runs_dir", "trust")
    video = api.play(arguments.run, **options)
    if video is not None and not arguments.quiet:
        print(f"video: {format_value(video)}")
    return 0
