"""`rl-lab sweep`: search for good settings, resumable at any instant; `sweep show` looks at what was found."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl_lab.cli.parsing import (
    Parser,
    UsageError,
    add_config_dir,
    add_json,
    add_quiet,
    add_runs_dir,
    nearest,
    positive,
    runs_dir_of,
    split_words,
)

ACTIONS = ("show",)

DESCRIPTION = """Search for good settings: grid, random or Bayesian (docs/sweeps.md says what stands in the file).

  sweep FILE.yaml [key=value ...]   start, or go on where it was stopped or killed (same name: same sweep)
  sweep show NAME                   the trials, the best, what each parameter explains, and pictures"""

EXAMPLES = """
rl-lab sweep my_sweep.yaml
rl-lab sweep my_sweep.yaml environment.num_envs=8 --jobs 4
rl-lab sweep my_sweep.yaml --trials 100            more trials for a sweep that has ended
rl-lab sweep show my_sweep
"""


def build_parser(prog: str) -> Parser:
    parser = Parser(prog, description=DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("words", nargs="*", metavar="FILE.yaml | show NAME | key=value", help="what to do")
    parser.add_argument("--name", metavar="NAME", help="of the sweep (default: the file's name)")
    add_search_options(parser)
    add_json(parser)
    return parser


def add_search_options(parser: Parser) -> None:
    """What `sweep` and `tune` share."""
    parser.add_argument("--trials", type=positive, metavar="N", help="how many sets of parameters to try in all")
    parser.add_argument("--minutes", type=_minutes, metavar="M", help="stop after so many minutes; the rest can follow")
    parser.add_argument("--jobs", type=positive, metavar="K", help="trainings at a time (default: one per core)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="best config (default: configs/experiment/NAME_best.yaml)"
    )
    add_runs_dir(parser)
    add_config_dir(parser)
    add_quiet(parser, "print only the best trial, warnings and errors")


def run(arguments: argparse.Namespace) -> int:
    names, overrides = split_words(arguments.words)
    if names[:1] == ["show"]:
        if len(names) != 2 or overrides:
            raise UsageError("say which sweep to show: rl-lab sweep show NAME")
        from rl_lab.cli.sweep_show import show

        return show(names[1], runs_dir_of(arguments), as_json=arguments.json)
    if len(names) != 1:
        raise UsageError("say which file describes the sweep: rl-lab sweep FILE.yaml (docs/sweeps.md shows one)")
    file = Path(names[0])
    if not file.is_file():
        close = nearest(file.name, [path.name for path in file.parent.glob("*.yaml")] + ["show"])
        raise UsageError(f"there is no sweep file {file}.{close}")

    from rl_lab.cli.sweep_run import start
    from rl_lab.config.files import read

    content: dict[str, Any] = {**read(file), **({"name": arguments.name} if arguments.name else {})}
    return start(content, place=str(file), default_name=file.stem, overrides=overrides, arguments=arguments)


def _minutes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number
