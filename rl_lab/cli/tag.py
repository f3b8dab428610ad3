"""Add tags to a run, or remove them; without words, print those it has. They lie in the run's own directory and may be
changed while it is under way. A run tagged `keep` is never touched by `rl-lab cleanup`.

examples:
  rl-lab tag @last paper good-one
  rl-lab tag @last --remove good-one
  rl-lab list --tag paper
"""

from __future__ import annotations

import argparse

from rl_lab.cli.parsing import JSON, RUN, argument, runs_dir_of
from rl_lab.cli.printing import answer, format_value

REMOVE_HELP = "a tag to take away; can be repeated"
ARGUMENTS = (
    *RUN,
    argument("words", nargs="*", metavar="WORD", help="tags to add"),
    argument("--remove", action="append", default=[], metavar="WORD", help=REMOVE_HELP),
    JSON,
)


def run(arguments: argparse.Namespace) -> int:
    from rl_lab.runs.index import RunIndex, resolve_run
    from rl_lab.runs.tags import change_tags

    directory = resolve_run(arguments.run, runs_dir_of(arguments))
    if arguments.words or arguments.remove:
        tags = change_tags(directory, add=arguments.words, remove=arguments.remove)
        RunIndex(directory.path.parent).record(directory)
    else:
        tags = directory.read_tags()["tags"]
    text = f"{format_value(directory.id)}: {format_value(tags) or 'no tags'}"
    answer(arguments, {"id": directory.id, "tags": tags}, text)
    return 0
