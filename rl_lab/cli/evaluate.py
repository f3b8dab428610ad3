"""`rl-lab evaluate`: score a run's policy over whole episodes."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.parsing import Parser, add_json, add_policy, add_quiet, add_run, chosen, positive, runs_dir_of
from rl_lab.cli.printing import fields, format_value, only_json_on_stdout, print_json
from rl_lab.cli.progress import progress_line

DESCRIPTION = """Score a run's policy, acting without exploration, over whole episodes in environments of its own."""

EXAMPLES = """
rl-lab evaluate @last
rl-lab evaluate @best --episodes 20 --video best.mp4
rl-lab evaluate 20260101-1200 --checkpoint best --json
"""


def build_parser(prog: str) -> Parser:
    parser = Parser(prog, description=DESCRIPTION, examples=EXAMPLES)
    add_run(parser)
    parser.add_argument("--episodes", type=positive, default=100, metavar="N", help="how many (default: %(default)s)")
    add_policy(parser)
    parser.add_argument("--video", type=Path, metavar="FILE", help="record an episode as mp4")
    add_json(parser)
    add_quiet(parser, "print only the mean return")
    return parser


def run(arguments: argparse.Namespace) -> int:
    with (
        only_json_on_stdout(arguments.json),
        progress_line("evaluating", "episodes", quiet=arguments.quiet) as progress,
    ):
        from rl_lab import api
        from rl_lab.runs.index import resolve_run

        directory = resolve_run(arguments.run, runs_dir_of(arguments))
        options = chosen(arguments, "episodes", "checkpoint", "seed", "video", "trust")
        scores = api.evaluate(directory.path, **options, progress=progress)
    if arguments.json:
        print_json(
            {"run": directory.id, "checkpoint": arguments.checkpoint, "episodes": arguments.episodes, "scores": scores}
        )
    elif arguments.quiet:
        print(scores["eval/episode_return_mean"])
    else:
        print(f"{format_value(directory.id)}, checkpoint {arguments.checkpoint}, {arguments.episodes} episodes")
        print(fields(scores.items()))
        if arguments.video:
            print(f"  video: {arguments.video}")
    return 0
