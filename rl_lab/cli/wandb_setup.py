"""Set up a W&B workspace (docs/logging.md).

  wandb setup    make the workspace "RL Lab" in a project of yours: returns, episodes, policy, values, losses, world
                 model, optimizers, speed and machine, each over agent steps; the project too, if it is not there

A second call finds what the first has made and changes nothing. Panels that were changed since stay as they are, unless
--replace is given. Needs pip install 'rl-lab[wandb]' and, once, `wandb login`.

examples:
  rl-lab wandb setup
  rl-lab wandb setup --project cartpole --entity my-team
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rl_lab.cli.parsing import JSON, argument, quiet
from rl_lab.cli.printing import answer, format_value, only_json_on_stdout

DONE = {
    "made": "the workspace is made",
    "there": "the workspace was there already, and nothing was changed",
    "replaced": "the workspace has the panels of this version again",
}


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="setup", required=True)
    own = [
        argument("--project", metavar="NAME", help="as in the writer's settings (default: rl-lab)"),
        argument("--entity", metavar="NAME", help="your user name or a team (default: that of your account)"),
        argument("--replace", action="store_true", help="put our panels in place of ones that were changed"),
    ]
    action = actions.add_parser("setup", help="make a workspace", arguments=[*own, JSON, quiet("print only its URL")])
    action.prog = f"{parser.prog} setup"
    action.set_defaults(parser=action)


ARGUMENTS = (_add_actions,)


def run(arguments: argparse.Namespace) -> int:
    with only_json_on_stdout(arguments.json or arguments.quiet):
        from rl_lab.experiment.wandb_workspace import set_up_workspace

        named = {} if arguments.project is None else {"project": arguments.project}
        found = set_up_workspace(**named, entity=arguments.entity, replace=arguments.replace)
    text = f"{format_value(f'{found.entity}/{found.project}')}: {DONE[found.done]}\n{format_value(found.url)}"
    answer(arguments, asdict(found), text, brief=[format_value(found.url)])
    return 0
