"""Search for good settings: grid, random or Bayesian (docs/sweeps.md says what stands in the file).

  sweep FILE.yaml [key=value ...]   start, or go on where it was stopped or killed (same name: same sweep)
  sweep show NAME                   the trials, the best, what each parameter explains, and pictures

examples:
  rl-lab sweep my_sweep.yaml
  rl-lab sweep my_sweep.yaml environment.num_envs=8 --jobs 4
  rl-lab sweep my_sweep.yaml --trials 100            more trials for a sweep that has ended
  rl-lab sweep show my_sweep
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.parsing import (
    CONFIG_DIR,
    JSON,
    RUNS_DIR,
    UsageError,
    argument,
    nearest,
    positive,
    quiet,
    runs_dir_of,
    split_words,
)


def _minutes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number


ACTIONS = ("show",)
SEARCH = (  # what `sweep` and `tune` share
    argument("--trials", type=positive, metavar="N", help="how many sets of parameters to try in all"),
    argument("--minutes", type=_minutes, metavar="M", help="stop after so many minutes; the rest can follow"),
    argument("--jobs", type=positive, metavar="K", help="trainings at a time (default: one per core)"),
    argument(
        "--output", dest="best_config", metavar="FILE", help="best config (default: configs/experiment/NAME_best.yaml)"
    ),
    RUNS_DIR,
    CONFIG_DIR,
    quiet("print only the best trial, warnings and errors"),
)
ARGUMENTS = (
    argument("words", nargs="*", metavar="FILE.yaml | show NAME | key=value", help="what to do"),
    argument("--name", metavar="NAME", help="of the sweep (default: the file's name)"),
    *SEARCH,
    JSON,
)


def run(arguments: argparse.Namespace) -> int:
    names, overrides = split_words(arguments.words)
    if names[:1] == ["show"]:
        if len(names) != 2 or overrides:
            from rl_lab.runs.sweeps import listed_sweeps

            listed = listed_sweeps(runs_dir_of(arguments))
            raise UsageError(f"say which sweep to show: rl-lab sweep show NAME. {listed}")
        from rl_lab.cli.sweep_show import show

        return show(names[1], arguments)
    if len(names) != 1:
        raise UsageError("say which file describes the sweep: rl-lab sweep FILE.yaml (docs/sweeps.md shows one)")
    file = Path(names[0])
    if not file.is_file():
        close = nearest(file.name, [path.name for path in file.parent.glob("*.yaml")] + ["show"])
        raise UsageError(f"there is no sweep file {file}.{close} docs/sweeps.md shows one; `rl-lab tune` needs none.")

    from rl_lab.cli.sweep_run import start
    from rl_lab.config.files import read

    return start(read(file), place=str(file), default_name=file.stem, overrides=overrides, arguments=arguments)
