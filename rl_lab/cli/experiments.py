"""The named experiments, shipped and your own (./configs/experiment/*.yaml).

For an environment without one: rl-lab train ENV:ALGORITHM, or ENV:EXPERIMENT for one made for any.

examples:
  rl-lab experiments
  rl-lab experiments cartpole
  rl-lab experiments --json
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, astuple

from rl_lab.cli.parsing import CONFIG_DIR, JSON, argument, quiet
from rl_lab.cli.printing import answer, table

ARGUMENTS = (
    argument("filter", nargs="?", default="", metavar="FILTER", help="text that must stand in the line"),
    CONFIG_DIR,
    JSON,
    quiet("print the names alone, one per line"),
)


def run(arguments: argparse.Namespace) -> int:
    from rl_lab.config.experiments import list_experiments

    wanted = arguments.filter.lower()
    known = list_experiments(config_dir=arguments.config_dir)
    found = [experiment for experiment in known if wanted in " ".join(asdict(experiment).values()).lower()]
    text = table(("EXPERIMENT", "ALGORITHM", "ENVIRONMENT", "ABOUT"), map(astuple, found))
    nothing = f"No experiment matches '{arguments.filter}'. All of them: rl-lab experiments"
    answer(arguments, [asdict(each) for each in found], text if found else nothing, brief=[each.name for each in found])
    return 0
