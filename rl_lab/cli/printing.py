"""Plain text that survives pipes, narrow terminals and `--json`."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import IO, Any

from rl_lab.cli.parsing import UsageError
from rl_lab.utils.text import printable

MINIMUM_LAST_COLUMN = 12


def say(*words: object, sep: str = " ", end: str = "\n", file: IO[str] | None = None) -> None:
    """Print at once; where nobody can read it any more (a closed terminal, a full disk) go on without a word."""
    stream = file or sys.stdout
    try:
        print(*words, sep=sep, end=end, file=stream, flush=True)
    except OSError:
        give_up_if_broken(stream)


def give_up_if_broken(stream: IO[str], probe: str = "") -> bool:
    """Whether a stream can no longer be written to, not even `probe`; what follows on it is then thrown away."""
    try:
        print(probe, end="", file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return True
    return False


def end_training(run_id: str, *, quiet: bool) -> int:
    """The exit code of a training that came to its end, whether or not anybody can read what it prints."""
    if quiet:
        say(printable(run_id))
    give_up_if_broken(sys.stdout)
    return 0


def open_closed_streams() -> None:
    """Python has None for a stream that was closed before it began (`>&-`); the next file would get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8"))


def answer(arguments: argparse.Namespace, facts: object, text: str, *, brief: Sequence[str] = ()) -> None:
    """What a command found: as JSON, as lines for a script (-q), or as text for a person."""
    if arguments.json:
        print_json(facts)
    elif getattr(arguments, "quiet", False):
        print("".join(f"{line}\n" for line in brief), end="")
    else:
        print(text)


def confirm(arguments: argparse.Namespace, question: str) -> bool:
    """Ask a person; --yes answers for scripts, which nobody could ask."""
    if arguments.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to ask: add --yes.")
    print(f"{question} [y/N] ", end="", flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("nothing was removed")
    return False


def print_json(value: object) -> None:
    """One JSON document. NaN and infinity, which JSON has no words for, become null."""
    print(printable(json.dumps(plain(value), indent=2, ensure_ascii=False), keep="\n"))


def plain(value: object) -> Any:
    """Nested data reduced to what JSON knows."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and not getattr(value, "shape", ()):  # a zero-dimensional array or tensor
        return plain(value.item())
    return str(value)


def only_json_on_stdout(enabled: bool) -> AbstractContextManager[object]:
    """While enabled, what libraries print goes to stderr, so that stdout holds the JSON alone."""
    return redirect_stdout(sys.stderr) if enabled else nullcontext()


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], *, optional: Sequence[str] = (), uncut: str = ""
) -> str:
    """Aligned columns; numbers to the right.

    On a terminal, of the `optional` columns, most important first, those stand that fit, and a last line names the
    others; the last column is cut to fit the window unless it is the `uncut` one.
    """
    body = [[format_value(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(headers), *body]) for column in range(len(headers))]
    missing: list[str] = []
    window = shutil.get_terminal_size().columns
    if sys.stdout.isatty():
        last = widths[-1] if headers[-1] == uncut else min(widths[-1], MINIMUM_LAST_COLUMN)
        kept = _columns_that_fit(headers, [*widths[:-1], last], optional, window)
        missing = [header for column, header in enumerate(headers) if column not in kept]
        headers, widths, body = _chosen(headers, kept), _chosen(widths, kept), [_chosen(line, kept) for line in body]
        left = window - sum(widths[:-1]) - 2 * (len(widths) - 1)
        widths[-1] = widths[-1] if headers[-1] == uncut else min(widths[-1], max(left, MINIMUM_LAST_COLUMN))
    numeric = [bool(body) and all(_is_number(line[column]) for line in body) for column in range(len(headers))]

    def render(line: Sequence[str]) -> str:
        cells = [
            cut(cell, width).rjust(width) if right else cut(cell, width).ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        return "  ".join(cells).rstrip()

    remark = textwrap.wrap(f"... no space for {', '.join(missing)}", window) if missing else []
    return "\n".join([render(headers), *(render(line) for line in body), *remark])


def _columns_that_fit(headers: Sequence[str], widths: Sequence[int], optional: Sequence[str], window: int) -> list[int]:
    """Which columns stand side by side in the window: all that are needed, then the most important that still fit."""
    kept = [column for column, header in enumerate(headers) if header not in optional]
    for header in optional:
        if header in headers:
            tried = sorted([*kept, headers.index(header)])
            if sum(widths[column] for column in tried) + 2 * (len(tried) - 1) <= window:
                kept = tried
    return kept


def _chosen(cells: Sequence[Any], columns: Sequence[int]) -> list[Any]:
    return [cells[column] for column in columns]


BEST_SCORE = "BEST EVAL"  # the header of a column of best scores


def best_score(status: Mapping[str, Any]) -> float | None:
    """The highest evaluation score of a run, or None before its first evaluation."""
    scores = [status[name] for name in ("best_score", "final_score") if status.get(name) is not None]
    return max(scores, default=None)


def fields(pairs: Iterable[tuple[str, object]], indent: int = 2) -> str:
    """`name   value` lines with aligned values; empty values are left out."""
    shown = [(printable(name), format_value(value)) for name, value in pairs if value not in (None, "", [], {})]
    width = max((len(name) for name, _ in shown), default=0)
    return "\n".join(f"{'':{indent}}{name:<{width}}  {value}" for name, value in shown)


def format_value(value: object) -> str:
    """Short and readable: 4 significant digits for floats, thousands separated for counts, `-` for nothing.

    Control characters are escaped: the text may come from somebody else's run.
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value)
    return printable(str(value))


def format_size(size: float) -> str:
    """`512 B`, `1.5 KiB`, `20 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:  # else three digits do not hold it
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.4g} TiB"


def cut(text: str, width: int) -> str:
    """At most `width` characters, with an ellipsis where something was lost."""
    return text if len(text) <= width else text[: width - 1] + "…"


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(",", "").replace(".", "").lstrip("-").replace("e-", "").isdigit()
