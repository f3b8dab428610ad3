"""Several runs on one command line: by name, by condition, by tag, by sweep."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rl_lab.cli.parsing import RUNS_DIR, WHERE, UsageError, argument, conditions, runs_dir_of

if TYPE_CHECKING:
    from rl_lab.runs.run_directory import RunDirectory

SELECTION = (
    argument("runs", nargs="*", metavar="RUN", help="ids, unique prefixes, paths, @last, @best or @best:ENVIRONMENT"),
    *WHERE,
    argument("--sweep", metavar="NAME", help="the runs of this sweep"),
    RUNS_DIR,
)


def select_runs(arguments: argparse.Namespace) -> list[RunDirectory]:
    """The runs that the words name, then those that all conditions fit; each once, at least one."""
    from rl_lab.runs.index import RunIndex, resolve_run
    from rl_lab.runs.run_directory import RunDirectory
    from rl_lab.runs.sweeps import open_sweep
    from rl_lab.types import RunError

    runs_dir, where = runs_dir_of(arguments), conditions(arguments)
    if arguments.sweep:
        where.append(f"tags=sweep:{arguments.sweep}")
    if not arguments.runs and not where:
        raise UsageError("no run is named: write RUN, or --where, --tag or --sweep, such as --where algorithm=ppo.")
    found = [resolve_run(word, runs_dir) for word in arguments.runs]
    if where:
        rows = RunIndex(runs_dir).find(where=where)
        if not rows:
            if arguments.sweep:
                open_sweep(arguments.sweep, runs_dir)  # which says what sweeps there are
            raise RunError(f"No run in {runs_dir} fits {' and '.join(where)}. `rl-lab list` shows them all.")
        found += [RunDirectory.open(runs_dir / row["id"]) for row in reversed(rows)]
    return list({run.path: run for run in found}.values())
