"""Continue a run from its newest intact checkpoint. In mode `exact` the result is the same, bit for
bit, as if it had never stopped.

  exact                 the same run goes on: weights, optimiser, environments in mid-episode, random state (default);
                        overrides say how long: durations of phases and stop rules, also of a run that has finished
  warm_start            a new run begins with its weights and normalisers; overrides are allowed
  warm_start_optimizer  like warm_start, with the optimiser's state

examples:
  rl-lab resume @last
  rl-lab resume @last training.phases.train.duration_steps=200000        more steps than it was meant to have
  rl-lab resume 20260101-1200                                   a unique prefix of an id is enough
  rl-lab resume @best --mode warm_start seed=7                  a new run that begins with its weights
  rl-lab resume @last --mode warm_start_optimizer training.phases.train.duration_steps=500000
"""

from __future__ import annotations

import argparse

from rl_lab.cli.parsing import RUN, TRUST, UsageError, argument, chosen, quiet, split_words
from rl_lab.cli.printing import end_training

MODES = ("exact", "warm_start", "warm_start_optimizer")
ARGUMENTS = (
    *RUN,
    argument("words", nargs="*", metavar="key=value", help="settings to change (mode exact: only some)"),
    argument("--mode", choices=MODES, default="exact", help="how much to carry over (see above)"),
    TRUST,
    quiet("print only the run's id, warnings and errors"),
)


def run(arguments: argparse.Namespace) -> int:
    names, overrides = split_words(arguments.words)
    if names:
        raise UsageError(f"'{names[0]}' is not an override. After RUN come settings, written key=value.")

    from rl_lab import api

    options = chosen(arguments, "mode", "runs_dir", "trust", "quiet")
    resumed = api.resume(arguments.run, **options, overrides=overrides)
    return end_training(resumed.id, quiet=arguments.quiet)
