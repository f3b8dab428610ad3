"""Write runs as a table that other programs read. What stands in it:

  rows    every logged row of every run, with run, group, environment and seed in front (csv, json and parquet)
  runs    one line for each run: what it is, its scores, every setting
  scores  one line for each group of seeds: IQM, mean and median with 95 % intervals (latex, html and markdown)

In brackets the formats for which it is the default. To write a policy, use `rl-lab export-policy`.

examples:
  rl-lab export @last --format csv
  rl-lab export --where algorithm=ppo --output ppo.parquet
  rl-lab export --sweep my_sweep --table runs --format json
  rl-lab export RUN_A RUN_B --output table.tex
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.comparing import MEASURE, make_comparison
from rl_lab.cli.parsing import UsageError, argument
from rl_lab.cli.selection import SELECTION

FORMATS = ("csv", "json", "latex", "html", "parquet", "markdown")
TABLES = ("rows", "runs", "scores")
OUTPUT_HELP = "where to (default: runs.csv and so on, by the format)"
ARGUMENTS = (
    *SELECTION,
    argument("--format", choices=FORMATS, help="of the file (default: as --output ends, or csv)"),
    argument("--table", choices=TABLES, help="what stands in it (default: see above)"),
    *MEASURE,
    argument("--output", type=Path, metavar="FILE", help=OUTPUT_HELP),
)


def run(arguments: argparse.Namespace) -> int:
    from rl_lab.runs.compare_report import write_export
    from rl_lab.runs.tables import SUFFIXES

    file_format = arguments.format or _format_of(arguments.output)
    what = arguments.table or ("rows" if file_format in ("csv", "json", "parquet") else "scores")
    comparison = make_comparison(arguments, needs_metrics=what == "scores")
    path = arguments.output or Path(f"{what}{SUFFIXES[file_format]}")
    write_export(path, comparison, what, file_format)
    print(path)
    return 0


def _format_of(path: Path | None) -> str:
    from rl_lab.runs.tables import SUFFIXES

    if path is None:
        return "csv"
    known = {suffix: name for name, suffix in SUFFIXES.items()}
    if path.suffix.lower() not in known:
        raise UsageError(f"{path} ends in '{path.suffix}': write {', '.join(known)}, or say --format.")
    return known[path.suffix.lower()]
