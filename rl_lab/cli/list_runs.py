"""`rl-lab list`: the runs on this machine, newest first."""

from __future__ import annotations

import argparse
from typing import Any

from rl_lab.cli.parsing import Parser, add_json, add_quiet, add_runs_dir, positive, runs_dir_of
from rl_lab.cli.printing import best_score, format_value, print_json, table

STATES = ("running", "finished", "stopped", "pruned", "interrupted", "failed", "killed", "created", "unknown")
DEFAULT_LIMIT = 20
LIMIT_HELP = f"at most N runs (default: {DEFAULT_LIMIT}; with --json or -q all)"

DESCRIPTION = """The runs, newest first. FILTER may stand in the id, name, algorithm, environment, tags or notes."""

EXAMPLES = """
rl-lab list
rl-lab list cartpole --status finished
rl-lab list --limit 100 --json
"""


def build_parser(prog: str) -> Parser:
    parser = Parser(prog, description=DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("filter", nargs="?", metavar="FILTER", help="show only runs that contain this text")
    parser.add_argument("--status", choices=STATES, metavar="STATE", help=f"one of {', '.join(STATES)}")
    parser.add_argument("--limit", type=positive, metavar="N", help=LIMIT_HELP)
    add_runs_dir(parser)
    add_json(parser)
    add_quiet(parser, "print the ids alone, one per line")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from rl_lab.runs.index import RunIndex

    runs_dir = runs_dir_of(arguments)
    found = RunIndex(runs_dir).find(arguments.filter, status=arguments.status)
    shown = found[: arguments.limit or (len(found) if arguments.json or arguments.quiet else DEFAULT_LIMIT)]
    if arguments.json:
        print_json(shown)
    elif arguments.quiet:
        print("".join(f"{format_value(row['id'])}\n" for row in shown), end="")
    elif shown:
        print(_table(shown))
        if len(shown) < len(found):
            print(f"... and {len(found) - len(shown)} older (--limit {len(found)})")
    elif arguments.filter or arguments.status:
        print(f"No run in {runs_dir} matches. All of them: rl-lab list")
    else:
        print(f"No runs in {runs_dir} yet: rl-lab train")
    return 0


def _table(rows: list[dict[str, Any]]) -> str:
    from rl_lab.utils.formatting import format_duration

    headers = ("RUN", "STATE", "ALGORITHM", "ENVIRONMENT", "SEED", "AGENT STEPS", "SCORE", "TIME")
    names = ("id", "status", "algorithm", "environment", "seed", "agent_steps")
    cells = [(*(row[name] for name in names), best_score(row), format_duration(row["wall_s"])) for row in rows]
    return table(headers, cells)
