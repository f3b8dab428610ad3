"""`rl-lab envs`: search environments, describe one, check your own."""

from __future__ import annotations

import argparse

from rl_lab.cli.parsing import Parser, UsageError, add_json, add_quiet
from rl_lab.cli.printing import only_json_on_stdout

ACTIONS = ("show", "check")

DESCRIPTION = """Environments: search all that are installed, describe one, or check your own.

  envs [FILTER]     every id that contains FILTER
  envs show ID      observation, actions, time limit, solved threshold
  envs check ID     look for mistakes in an environment and say how to mend them

ID is a Gymnasium id; package:Env-v0 imports `package` first."""

EXAMPLES = """
rl-lab envs cart
rl-lab envs show CartPole-v1
rl-lab envs check my_package:MyEnv-v0
"""


def build_parser(prog: str) -> Parser:
    parser = Parser(prog, description=DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("words", nargs="*", metavar="FILTER | show ID | check ID", help="what to look at")
    add_json(parser)
    add_quiet(parser, "print the ids alone, one per line")
    return parser


def run(arguments: argparse.Namespace) -> int:
    words = arguments.words
    if words and words[0] in ACTIONS:
        if len(words) != 2:
            raise UsageError(f"`envs {words[0]}` takes one environment id: rl-lab envs {words[0]} CartPole-v1")
        return {"show": _show, "check": _check}[words[0]](words[1], arguments)
    if len(words) > 1:
        raise UsageError(f"`envs` takes one FILTER, or show ID, or check ID; got {' '.join(words)}")
    return _search(words[0] if words else "", arguments)


def _search(text: str, arguments: argparse.Namespace) -> int:
    with only_json_on_stdout(arguments.json):
        from rl_lab import api

        found = api.list_environments(text)
    raise NotImplementedError
