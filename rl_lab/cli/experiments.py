"""`rl-lab experiments`: the names `rl-lab train` knows."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rl_lab.cli.parsing import Parser, add_config_dir, add_json, add_quiet
from rl_lab.cli.printing import print_json, table

DESCRIPTION = """The named experiments, shipped and your own (./configs/experiment/*.yaml).

For an environment without one: rl-lab train ENV:ALGORITHM, or ENV:EXPERIMENT for one made for any."""

EXAMPLES = """
rl-lab experiments
rl-lab experiments cartpole
rl-lab experiments --json
"""


def build_parser(prog: str) -> Parser:
    parser = Parser(prog, description=DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("filter", nargs="?", default="", metavar="FILTER", help="text that must stand in the line")
    add_config_dir(parser)
    add_json(parser)
    add_quiet(parser, "print the names alone, one per line")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from rl_lab.config.experiments import list_experiments

    wanted = arguments.filter.lower()
    known = list_experiments(config_dir=arguments.config_dir)
    found = [experiment for experiment in known if wanted in " ".join(asdict(experiment).values()).lower()]
    if arguments.json:
        print_json([asdict(experiment) for experiment in found])
    elif arguments.quiet:
        print("".join(f"{experiment.name}\n" for experiment in found), end="")
    elif found:
        rows = [(each.name, each.algorithm, each.environment, each.description) for each in found]
        print(table(("EXPERIMENT", "ALGORITHM", "ENVIRONMENT", "ABOUT"), rows))
    else:
        print(f"No experiment matches '{arguments.filter}'. All of them: rl-lab experiments")
    return 0
