"""Write a line below the notes of a run; without a text, print them. They lie in the run's own directory and may be
written while it is under way; `rl-lab list WORD` finds them.

examples:
  rl-lab note @last "diverges after 200k steps with this seed"
  rl-lab note @last
  rl-lab note @last --replace "fine after all"
"""

from __future__ import annotations

import argparse

from rl_lab.cli.parsing import JSON, RUN, UsageError, argument, runs_dir_of
from rl_lab.cli.printing import answer
from rl_lab.utils.text import printable

ARGUMENTS = (
    *RUN,
    argument("text", nargs="*", metavar="TEXT", help='one line; "" with --replace clears them'),
    argument("--replace", action="store_true", help="in place of the notes there are"),
    JSON,
)


def run(arguments: argparse.Namespace) -> int:
    if arguments.replace and not arguments.text:
        raise UsageError('--replace lacks its text: write rl-lab note RUN --replace "TEXT"; "" clears the notes.')

    from rl_lab.runs.index import RunIndex, resolve_run
    from rl_lab.runs.tags import add_note

    directory = resolve_run(arguments.run, runs_dir_of(arguments))
    if not arguments.text:
        notes = directory.read_tags()["notes"]
    else:
        notes = add_note(directory, " ".join(arguments.text), replace=arguments.replace)
        RunIndex(directory.path.parent).record(directory)
    answer(arguments, {"id": directory.id, "notes": notes}, printable(notes, keep="\n") or "no notes")
    return 0
