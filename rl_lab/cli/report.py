"""Write a report as markdown with pictures. Of one run: its report.md anew, in its own directory. Of several: a folder
with report.md and curves.png, with curves, scores, probabilities of improvement, settings that differ, and the runs.

examples:
  rl-lab report @last
  rl-lab report --where algorithm=ppo --where env~Cart --output reports/ppo
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.comparing import CURVES, make_comparison
from rl_lab.cli.selection import SELECTION, select_runs

ARGUMENTS = (*SELECTION, *CURVES)


def run(arguments: argparse.Namespace) -> int:
    from rl_lab.runs.report import write_report

    runs = select_runs(arguments)
    if len(runs) == 1 and not arguments.output:
        print(write_report(runs[0]))
        return 0
    comparison = make_comparison(arguments)
    for folder in arguments.output or [Path("report")]:
        path = folder if folder.suffix == ".md" else folder / "report.md"
        print(comparison.write(path, band=arguments.band))
    return 0
