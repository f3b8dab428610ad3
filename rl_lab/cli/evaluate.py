"""Score a run's policy, acting without exploration, over whole episodes in environments of its own.

examples:
  rl-lab evaluate @last
  rl-lab evaluate @best --episodes 20 --video best.mp4
  rl-lab evaluate 20260101-1200 --checkpoint best --json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.parsing import JSON, POLICY, RUN, argument, chosen, positive, quiet, runs_dir_of
from rl_lab.cli.printing import answer, fields, format_value, only_json_on_stdout
from rl_lab.cli.progress import progress_line

ARGUMENTS = (
    *RUN,
    argument("--episodes", type=positive, default=100, metavar="N", help="how many (default: %(default)s)"),
    *POLICY,
    argument("--video", type=Path, metavar="FILE", help="record an episode as mp4"),
    JSON,
    quiet("print only the mean return"),
)


def run(arguments: argparse.Namespace) -> int:
    with (
        only_json_on_stdout(arguments.json),
        progress_line("evaluating", "episodes", quiet=arguments.quiet) as progress,
    ):
        from rl_lab import api
        from rl_lab.runs import hub
        from rl_lab.runs.index import resolve_run

        run: str | Path = arguments.run
        name = str(run)
        if not hub.is_hub_name(name):
            directory = resolve_run(name, runs_dir_of(arguments))
            run, name = directory.path, directory.id
        options = chosen(arguments, "episodes", "checkpoint", "seed", "video", "trust")
        scores = api.evaluate(run, **options, progress=progress)
    text = f"{format_value(name)}, checkpoint {arguments.checkpoint}, {arguments.episodes} episodes\n"
    text += fields(scores.items()) + (f"\n  video: {arguments.video}" if arguments.video else "")
    facts = {"run": name, **chosen(arguments, "checkpoint", "episodes"), "scores": scores}
    answer(arguments, facts, text, brief=[str(scores["eval/episode_return_mean"])])
    return 0
