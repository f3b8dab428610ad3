"""A small table, and how it is written: CSV, JSON, markdown, LaTeX, HTML, parquet."""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_lab.types import MissingExtraError
from rl_lab.utils.text import printable

_LATEX = {each: f"\\{each}" for each in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
}

LATIN_END = 0x180  # of the letters that pdflatex has without further packages


@dataclass(frozen=True)
class Table:
    """Named columns and rows of plain values; lists and dicts in cells are written as JSON."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def _repr_html_(self) -> str:
        return to_html(self)


def to_csv(table: Table) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([_plain(cell) for cell in row] for row in table.rows)
    return text.getvalue()


def to_json(table: Table) -> str:
    rows = [dict(zip(table.columns, map(_finite, row), strict=True)) for row in table.rows]
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def to_markdown(table: Table) -> str:
    head = f"| {' | '.join(map(_cell, table.columns))} |\n|{'---|' * len(table.columns)}\n"
    return head + "".join(f"| {' | '.join(_cell(shown(cell)) for cell in row)} |\n" for row in table.rows)


def to_latex(table: Table) -> str:
    """A tabular with booktabs' rules; what LaTeX would read as a command is escaped. pdflatex knows Latin letters
    alone: a table with others says what compiles it."""
    is_number = [all(isinstance(row[index], int | float) for row in table.rows) for index in range(len(table.columns))]
    kinds = "".join("r" if numeric and table.rows else "l" for numeric in is_number)
    lines = [_latex_line(row) for row in (table.columns, *table.rows)]
    body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    is_latin = all(ord(each) < LATIN_END for line in lines for each in line)
    needs = "\\usepackage{booktabs}" + ("" if is_latin else ", and lualatex or xelatex for its letters")
    opening = f"% {printable(table.title)}; needs {needs}\n\\begin{{tabular}}{{{kinds}}}\n"
    return opening + "\n".join(body) + "\n\\end{tabular}\n"


def to_html(table: Table) -> str:
    """A <table>; `html_page` puts it on a page."""
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in table.columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(shown(cell))}</td>' for cell in row)}</tr>\n" for row in table.rows
    )
    caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
    return f"<table>{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n"


def html_page(title: str, *blocks: str) -> str:
    """A whole page that needs nothing from elsewhere."""
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#222}"
        "table{border-collapse:collapse;margin:1.5rem 0;font-variant-numeric:tabular-nums}"
        "caption{text-align:left;font-weight:600;padding:.3rem 0}"
        "th,td{padding:.25rem .8rem .25rem 0;text-align:left;border-bottom:1px solid #ddd;vertical-align:top}"
        "img{max-width:100%}"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n{''.join(blocks)}</body>\n</html>\n"
    )


def to_parquet(table: Table) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("Parquet files need pyarrow: `pip install 'rl-lab[parquet]'`.") from error
    columns = {
        name: pyarrow.array(_of_one_kind([_plain(row[index]) for row in table.rows]), from_pandas=True)
        for index, name in enumerate(table.columns)
    }
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def _of_one_kind(values: list[Any]) -> list[Any]:
    """A column has one type: a setting that is a number in one run and `auto` in another becomes text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        return values
    kind = float if kinds == {int, float} else str
    return [None if value is None else kind(value) for value in values]


FORMATS: dict[str, Callable[[Table], str | bytes]] = {
    "csv": to_csv,
    "json": to_json,
    "latex": to_latex,
    "html": lambda table: html_page(table.title, to_html(table)),
    "parquet": to_parquet,
    "markdown": to_markdown,
}
SUFFIXES = {"csv": ".csv", "json": ".json", "latex": ".tex", "html": ".html", "parquet": ".parquet", "markdown": ".md"}


def shown(value: Any) -> str:
    """As a person reads it: four digits, nothing for nothing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    return str(_plain(value))


def _plain(value: Any) -> Any:
    return json.dumps(value, default=str) if isinstance(value, list | dict) else value


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _latex_line(cells: Sequence[Any]) -> str:
    line = " & ".join("".join(_LATEX.get(each, each) for each in _line(shown(cell))) for cell in cells)
    guard = "{}" if line.startswith(("[", "*")) else ""  # else an argument of the command that ends the line before
    return f"{guard}{line} \\\\"


def _line(text: str) -> str:
    return printable(" ".join(text.split()))
