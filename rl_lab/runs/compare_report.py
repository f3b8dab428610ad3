"""A comparison as files: a picture, a page of HTML, markdown with pictures, tables for other programs."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable
from pathlib import Path

from rl_lab.runs.compare import Comparison
from rl_lab.runs.compare_figures import DPI, Band, comparison_figure
from rl_lab.runs.compare_tables import all_tables, row_table, run_table, score_tables
from rl_lab.runs.files import readable_disk_errors, write_atomic
from rl_lab.runs.tables import FORMATS, Table, html_page, to_html, to_markdown
from rl_lab.types import ConfigError
from rl_lab.utils.text import printable

ABOUT = (
    "A score is the mean of the metric in the last tenth before the end that all runs reach. IQM is the mean of the "
    "middle half of the runs; intervals are 95 % percentile bootstraps over runs; P is the probability that a run of "
    "the first group beats one of the second."
)


def write_comparison(path: Path, comparison: Comparison, spread: Band) -> Path:
    """A file by its ending."""
    if path.suffix not in WRITERS:
        raise ConfigError(f"{path} ends in '{path.suffix}': write {', '.join(WRITERS)}.")
    WRITERS[path.suffix](path, comparison, spread)
    return path


def _write_picture(path: Path, comparison: Comparison, spread: Band) -> None:
    _write(path, _picture(comparison, spread))


def _picture(comparison: Comparison, spread: Band) -> bytes:
    file = io.BytesIO()
    comparison_figure(comparison, spread=spread).savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def html_blocks(comparison: Comparison, spread: Band) -> list[str]:
    """The picture and the tables, with nothing that lies elsewhere."""
    data = base64.b64encode(_picture(comparison, spread)).decode("ascii")
    blocks = [f'<p><img alt="curves" src="data:image/png;base64,{data}"></p>\n']
    blocks += [to_html(table) for table in [*all_tables(comparison), _members(comparison)]]
    return [*blocks, *(f"<p>{html.escape(sentence)}</p>\n" for sentence in (*comparison.notes, ABOUT))]


def _write_html(path: Path, comparison: Comparison, spread: Band) -> None:
    _write(path, html_page(_title(comparison), *html_blocks(comparison, spread)))


def _write_markdown(path: Path, comparison: Comparison, spread: Band) -> None:
    picture = path.with_name("curves.png" if path.name == "report.md" else f"{path.stem}.png")
    _write_picture(picture, comparison, spread)
    blocks = [f"# {_title(comparison)}\n", f"![curves]({picture.name})\n"]
    for table in [*all_tables(comparison), _members(comparison)]:
        blocks.append(f"## {table.title}\n\n{to_markdown(table)}")
    blocks += [f"- {note}\n" for note in comparison.notes]
    _write(path, printable("\n".join([*blocks, f"{ABOUT}\n"]), keep="\n"))


WRITERS: dict[str, Callable[[Path, Comparison, Band], None]] = {
    ".png": _write_picture,
    ".html": _write_html,
    ".md": _write_markdown,
}


def write_export(path: Path, comparison: Comparison, what: str, format: str) -> None:
    """Rows, runs or scores in one of the formats."""
    tables = {
        "rows": lambda: [row_table(comparison)],
        "runs": lambda: [run_table(comparison)],
        "scores": lambda: score_tables(comparison),
    }[what]()
    if len(tables) == 1:
        content = FORMATS[format](tables[0])
    elif format == "html":
        content = html_page(_title(comparison), *map(to_html, tables))
    elif format in ("csv", "json", "parquet"):
        columns = ("title", *tables[0].columns)
        content = FORMATS[format](
            Table("scores", columns, [[each.title, *row] for each in tables for row in each.rows])
        )
    else:
        content = "\n".join(str(FORMATS[format](table)) for table in tables)
    _write(path, content)


def _title(comparison: Comparison) -> str:
    groups = "1 group" if len(comparison.groups) == 1 else f"{len(comparison.groups)} groups"
    return f"{comparison.metrics[0]}: {groups} in {', '.join(comparison.tasks)}"


def _members(comparison: Comparison) -> Table:
    rows = [
        [group.label, member.run.id, member.task, member.manifest.get("seed"), member.run.read_status()["state"]]
        for group in comparison.groups
        for member in group.members
    ]
    return Table("runs", ("group", "run", "environment", "seed", "state"), rows)


def _write(path: Path, content: str | bytes) -> None:
    with readable_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
