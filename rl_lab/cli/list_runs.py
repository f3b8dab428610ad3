"""The runs, newest first. FILTER may stand in the id, name, algorithm, environment, tags or notes.

examples:
  rl-lab list
  rl-lab list cartpole --status finished
  rl-lab list --limit 100 --json
"""

from __future__ import annotations

import argparse
from typing import Any

from rl_lab.cli.parsing import JSON, RUNS_DIR, argument, positive, quiet, runs_dir_of
from rl_lab.cli.printing import answer, best_score, format_value, table

STATES = ("running", "finished", "stopped", "pruned", "interrupted", "failed", "killed", "created", "unknown")
DEFAULT_LIMIT = 20
LIMIT_HELP = f"at most N runs (default: {DEFAULT_LIMIT}; with --json or -q all)"

ARGUMENTS = (
    argument("filter", nargs="?", metavar="FILTER", help="show only runs that contain this text"),
    argument("--status", choices=STATES, metavar="STATE", help=f"one of {', '.join(STATES)}"),
    argument("--limit", type=positive, metavar="N", help=LIMIT_HELP),
    RUNS_DIR,
    JSON,
    quiet("print the ids alone, one per line"),
)


def run(arguments: argparse.Namespace) -> int:
    from rl_lab.runs.index import RunIndex

    runs_dir = runs_dir_of(arguments)
    found = RunIndex(runs_dir).find(arguments.filter, status=arguments.status)
    shown = found[: arguments.limit or (len(found) if arguments.json or arguments.quiet else DEFAULT_LIMIT)]
    text = f"No runs in {runs_dir} yet: rl-lab train"
    if shown:
        older = len(found) - len(shown)
        text = _table(shown) + (f"\n... and {older} older (--limit {len(found)})" if older else "")
    elif arguments.filter or arguments.status:
        text = f"No run in {runs_dir} matches. All of them: rl-lab list"
    answer(arguments, shown, text, brief=[format_value(row["id"]) for row in shown])
    return 0


def _table(rows: list[dict[str, Any]]) -> str:
    from rl_lab.utils.formatting import format_duration

    headers = ["RUN", "STATE", "ALGORITHM", "ENVIRONMENT", "SEED", "AGENT STEPS", "SCORE", "TIME"]
    names = ("id", "status", "algorithm", "environment", "seed", "agent_steps")
    cells = [[*(row[name] for name in names), best_score(row), format_duration(row["wall_s"])] for row in rows]
    if any(row["lineage"] for row in rows):  # resumed, continued, begun with weights of another
        headers.append("LINEAGE")
        cells = [[*cell, row["lineage"]] for cell, row in zip(cells, rows, strict=True)]
    return table(headers, cells)
