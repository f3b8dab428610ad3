"""The runs, newest first or by --sort. FILTER may stand in the id, name, algorithm, environment, tags or notes.

--where takes FIELD OPERATOR VALUE with = != ~ (contains) < <= > >=, and may be repeated: all of them hold.
A field is a column (algorithm, env, seed, status, tags, created, host, git, ...), a metric by its last value
(eval/return is short for eval/episode_return_mean), or a setting by its dotted key.

BEST EVAL is the highest mean return of a run's evaluations, TIME that of its training, evaluations included.

examples:
  rl-lab list
  rl-lab list cartpole --status finished
  rl-lab list --where algorithm=ppo --where env~Cart --sort eval/return --limit 20
  rl-lab list --where 'algorithm.discount<0.99' --show optimizers.controller.learning_rate
  rl-lab list --tag paper --csv
  rl-lab list --rebuild
"""

from __future__ import annotations

import argparse
import csv
import io
from typing import Any

from rl_lab.cli.parsing import JSON, RUNS_DIR, WHERE, argument, conditions, positive, quiet, runs_dir_of
from rl_lab.cli.printing import BEST_SCORE, answer, format_value, table

STATES = ("running", "finished", "stopped", "pruned", "interrupted", "failed", "killed", "created", "unknown")
CRASHED = "crashed"  # by an error or by a kill
DEFAULT_LIMIT = 20
LIMIT_HELP = f"at most N runs (default: {DEFAULT_LIMIT}; with --json, --csv or -q all)"
STATUS_HELP = f"one of {', '.join(STATES)}, or {CRASHED}: failed or killed"
OPTIONAL = (
    "LINEAGE",
    "AGENT STEPS",
    "UPDATES",
    "TIME",
    "ENVIRONMENT",
    "ALGORITHM",
    "SEED",
)  # columns of a wide enough window

SORT_HELP = "greatest or newest first, texts from A to Z (default: newest first); -FIELD: texts from Z to A"
ARGUMENTS = (
    argument("filter", nargs="?", metavar="FILTER", help="show only runs that contain this text"),
    argument("--status", choices=(*STATES, CRASHED), metavar="STATE", help=STATUS_HELP),
    *WHERE,
    argument("--sort", metavar="FIELD", help=SORT_HELP),
    argument("--reverse", action="store_true", help="the other way round"),
    argument("--show", action="append", default=[], metavar="FIELD", help="a column more; can be repeated"),
    argument("--limit", type=positive, metavar="N", help=LIMIT_HELP),
    argument("--rebuild", action="store_true", help="forget the index and read every run directory anew"),
    argument("--csv", action="store_true", help="print comma-separated values"),
    RUNS_DIR,
    JSON,
    quiet("print the ids alone, one per line"),
)


def run(arguments: argparse.Namespace) -> int:
    from rl_lab.runs.index import RunIndex
    from rl_lab.runs.query import Condition, Field

    runs_dir, where = runs_dir_of(arguments), conditions(arguments)
    index = RunIndex(runs_dir)
    if arguments.rebuild:
        index.rebuild()
    status = ("failed", "killed") if arguments.status == CRASHED else arguments.status
    found = index.find(
        arguments.filter,
        status=status,
        where=where,
        sort=arguments.sort,
        is_reversed=arguments.reverse,
        show=arguments.show,
    )
    takes_all = arguments.json or arguments.csv or arguments.quiet
    shown = found[: arguments.limit or (len(found) if takes_all else DEFAULT_LIMIT)]
    if arguments.csv:
        print(_csv(shown), end="")
        return 0
    text = f"No runs in {runs_dir} yet: rl-lab train"
    if shown:
        asked = [Condition.parse(word).field.name for word in where]
        asked += [
            Field.parse(word).name
            for word in (*([arguments.sort.removeprefix("-")] if arguments.sort else []), *arguments.show)
        ]
        others = len(found) - len(shown)
        rest = f"\n... and {others} {'more' if arguments.sort else 'older'} (--limit {len(found)})" if others else ""
        text = _table(shown, list(dict.fromkeys(asked))) + rest
    elif arguments.filter or arguments.status or where:
        text = f"No run in {runs_dir} matches. All of them: rl-lab list"
    answer(arguments, shown, text, brief=[format_value(row["id"]) for row in shown])
    return 0


def _table(rows: list[dict[str, Any]], asked: list[str]) -> str:
    """The usual columns, then those that the question named."""
    from rl_lab.utils.formatting import format_duration

    counts = _counts(rows)
    counted = [name.replace("_", " ").upper() for name in counts]
    headers = ["RUN", "STATE", "ALGORITHM", "ENVIRONMENT", "SEED", *counted, BEST_SCORE, "TIME"]
    names = ("id", "status", "algorithm", "environment", "seed", *counts, "score", "wall_s")
    cells = [
        [row["id"], _state(row), *(row[name] for name in names[2:-1]), format_duration(row["wall_s"])] for row in rows
    ]
    more = [name for name in asked if name not in names]
    if any(row["lineage"] for row in rows) and "lineage" not in more:  # resumed, continued, with weights of another
        more.append("lineage")
    cells = [[*cell, *(row[name] for name in more)] for cell, row in zip(cells, rows, strict=True)]
    return table([*headers, *(name.replace("_", " ").upper() for name in more)], cells, optional=OPTIONAL)


def _counts(rows: list[dict[str, Any]]) -> list[str]:
    """What tells how long the runs are: agent steps, and updates where some learn without taking any."""
    offline = [row for row in rows if row["updates"] and not row["agent_steps"]]
    return [*(["agent_steps"] if len(offline) < len(rows) else []), *(["updates"] if offline else [])]


def _state(row: dict[str, Any]) -> str:
    """With how far a run is that is under way."""
    is_under_way = row["status"] == "running" and row["progress"] is not None
    return f"{row['status']} {row['progress']:.0%}" if is_under_way else row["status"]


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {name: " ".join(value) if isinstance(value, list) else value for name, value in row.items()}
            )
    return text.getvalue()
