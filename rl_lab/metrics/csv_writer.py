"""metrics.csv: the rows as a table for spreadsheets; a new metric becomes a new column."""

from __future__ import annotations

import csv
import io
import os
from itertools import islice
from pathlib import Path

from rl_lab.metrics.writers import AppendFile, Row, Writer
from rl_lab.types import StateTree


class CsvWriter(Writer):
    """One line per row, floats exact, cells empty where a row lacks a metric.

    When a row brings a metric without a column, the table is written anew and replaced at once.
    """

    name = "csv"
    is_direct = True

    def __init__(self, directory: Path, *, file: str = "metrics.csv") -> None:
        self.path = Path(directory) / file
        self._columns: dict[str, None] = {}  # in their order
        self._file: AppendFile | None = None

    def write(self, row: Row) -> None:
        if self._file is None:
            self._begin()
        if new := [name for name in row if name not in self._columns]:
            self._rewrite([*self._columns, *new], self._lines())
        assert self._file is not None
        cells = [repr(row[name]) if name in row else "" for name in self._columns]
        self._file.append(f"{','.join(cells)}\n".encode())  # numbers need no quotes

    def set_state(self, state: StateTree) -> None:
        """Rows after the checkpoint vanish; the resumed run writes them again."""
        self._begin()
        if self._columns:
            self._rewrite([*self._columns], self._lines()[: state["rows"]])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> None:
        """Continue a table that is there; a line that a kill cut off is left out."""
        self.close()
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        self._columns = dict.fromkeys(next(iter(_parse(text)), []))
        self._file = AppendFile(self.path)
        self._file.truncate(len(text[: text.rfind("\n") + 1].encode()))

    def _lines(self) -> list[list[str]]:
        return _parse(self.path.read_text(encoding="utf-8"))[1:]

    def _rewrite(self, columns: list[str], lines: list[list[str]]) -> None:
        self.close()
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        temporary.unlink(missing_ok=True)
        table = AppendFile(temporary)
        try:
            empty = [""] * len(columns)
            table.append(b"".join(_line([*cells, *islice(empty, len(cells), None)]) for cells in [columns, *lines]))
        finally:
            table.close()
        os.replace(temporary, self.path)
        self._columns, self._file = dict.fromkeys(columns), AppendFile(self.path)


def _line(cells: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _parse(text: str) -> list[list[str]]:
    whole = text[: text.rfind("\n") + 1]
    return list(csv.reader(io.StringIO(whole, newline="")))
