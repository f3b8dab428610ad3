"""Compare runs: curves with bands over seeds as a picture, and tables with the interquartile mean, mean and median,
their bootstrap 95 % intervals, probabilities of improvement, and the settings that differ. Runs that differ in nothing
but their seed are one group. A run's score is the mean of the metric in the last tenth before the end that all reach.

examples:
  rl-lab compare RUN_A RUN_B RUN_C --metrics eval/return --x env_frames
  rl-lab compare --where algorithm=ppo --group-by algorithm.discount --output discount.html
  rl-lab compare --where env~walker_walk --against dreamerv3:dmc_state --against sac:dmc_state
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_lab.cli.comparing import CURVES, make_comparison
from rl_lab.cli.parsing import JSON
from rl_lab.cli.printing import answer, format_value, table
from rl_lab.cli.selection import SELECTION

if TYPE_CHECKING:
    from rl_lab.runs.compare import Comparison

ARGUMENTS = (*SELECTION, *CURVES, JSON)


def run(arguments: argparse.Namespace) -> int:
    comparison = make_comparison(arguments)
    paths = [comparison.write(path, band=arguments.band) for path in arguments.output or [Path("compare.png")]]
    if arguments.json:
        answer(arguments, _facts(comparison) | {"files": paths}, "")
        return 0
    blocks = [f"{format_value(each.title)}\n{table(each.columns, each.rows)}" for each in comparison.tables()]
    blocks += ["\n".join(f"note: {format_value(note)}" for note in comparison.notes)] if comparison.notes else []
    blocks.append("\n".join(f"written: {path}" for path in paths))
    print("\n\n".join(blocks))
    return 0


def _facts(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain data."""
    groups = [
        {
            "label": group.label,
            "runs": {each.run.id: each.manifest.get("seed") for each in group.members},
            "environments": {
                task: {
                    "scores": comparison.scores(group, task).tolist(),
                    **{name: asdict(found) for name, found in comparison.estimates(group, [task]).items()},
                }
                for task in comparison.tasks
                if group.of(task)
            },
            "settings": {key: group.settings.get(key) for key in comparison.differences()},
        }
        for group in comparison.groups
    ]
    improvements = [
        {"environment": task, "group": ours, "over": theirs, **asdict(found)}
        for task in comparison.tasks
        for (ours, theirs), found in comparison.improvements([task]).items()
    ]
    ends = {task: comparison.end(task, comparison.metrics[0]) for task in comparison.tasks}
    known = {"metric": comparison.metrics[0], "x": comparison.x, "at": ends, "notes": comparison.notes}
    return {**known, "groups": groups, "probability_of_improvement": improvements}
