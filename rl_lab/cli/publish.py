"""Publish a run's policy on the Hugging Face Hub: its weights (no optimizer, no replay), its config, and a model card
with scores, learning curve, video, licence and how to load it. Nothing about your machine or folders goes along but
what config.yaml says. `rl_lab.load("USER/MODEL")`, `rl-lab evaluate USER/MODEL` and `rl-lab play USER/MODEL` use it.

Needs pip install 'rl-lab[hub]' and, once, `hf auth login`. --dry-run needs neither.

examples:
  rl-lab publish @best --repo ada/ppo-cartpole --dry-run
  rl-lab publish @best --repo ada/ppo-cartpole --private
"""

from __future__ import annotations

import argparse

from rl_lab.cli.parsing import CHECKPOINT, RUN, argument, chosen
from rl_lab.cli.printing import format_value

ARGUMENTS = (
    *RUN,
    argument("--repo", required=True, metavar="USER/MODEL", help="where to; it is made if it is not there"),
    argument("--private", action="store_true", help="make a new repository private"),
    argument("--dry-run", action="store_true", help="show every file with its size and the card; upload nothing"),
    argument("--license", default="mit", metavar="ID", help="of the weights, as the Hub spells it (default: mit)"),
    CHECKPOINT,
)


def run(arguments: argparse.Namespace) -> int:
    from rl_lab import api

    published = api.publish(
        arguments.run, **chosen(arguments, "repo", "private", "dry_run", "license", "checkpoint", "runs_dir")
    )
    if arguments.dry_run:
        print(published.card)
    for name, size in published.files.items():
        print(f"{size / 1000:>10,.1f} kB  {name}")
    print(f"{sum(published.files.values()) / 1000:>10,.1f} kB  in all, to {format_value(arguments.repo)}")
    print("Nothing was uploaded (--dry-run)." if arguments.dry_run else f"published: {published.url}")
    return 0
