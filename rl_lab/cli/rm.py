"""Remove whole runs: directory, checkpoints, metrics, everything. A run that is under way is refused. To free space and
keep configs, metrics and reports, use `rl-lab cleanup`.

examples:
  rl-lab rm 20260101-120000-ppo_cartpole-s1-ab12
  rl-lab rm --tag failed-idea --yes
"""

from __future__ import annotations

import argparse

from rl_lab.cli.parsing import YES, quiet
from rl_lab.cli.printing import confirm, format_size, format_value, table
from rl_lab.cli.selection import SELECTION, select_runs

ARGUMENTS = (*SELECTION, YES, quiet("print only warnings and errors"))


def run(arguments: argparse.Namespace) -> int:
    from rl_lab.runs.cleanup import folder_size, remove_run
    from rl_lab.runs.index import RunIndex
    from rl_lab.runs.lock import RunLock

    runs = select_runs(arguments)
    for each in runs:  # before anything is asked or removed
        with RunLock(each):
            pass
    rows = [(each.id, each.read_status()["state"], format_size(folder_size(each.path))) for each in runs]
    if not arguments.quiet:
        print(table(("RUN", "STATE", "SIZE"), rows))
    if not confirm(arguments, f"Remove {len(runs)} run{'s' * (len(runs) > 1)} with everything in them?"):
        return 1
    for each in runs:
        freed = remove_run(each)
        if not arguments.quiet:
            print(f"removed {format_value(each.id)} ({format_size(freed)})")
    for runs_dir in {each.path.parent for each in runs}:
        RunIndex(runs_dir).find()
    return 0
