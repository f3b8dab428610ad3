"""The documentation as data: pages, links, fenced blocks and the command lines in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")],
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`]+)`")
_LAUNCHERS = {"python -m rl_lab": "rl-lab", "python scripts/train.py": "rl-lab train", ".venv/bin/rl-lab": "rl-lab"}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [body for kind, body in _FENCE.findall(page.read_text()) if kind == language]


def inline_code(page: Path) -> list[str]:
    """Code between single backticks, outside of fences, on one line each."""
    return [" ".join(code.split()) for code in _INLINE.findall(_FENCE.sub("", page.read_text()))]


def commands(page: Path) -> list[list[str]]:
    """The words after `rl-lab` of every command line on a page; bare mentions and placeholders are left out."""
    lines = [line for block in blocks(page, "bash") for line in _command_lines(block)] + inline_code(page)
    found = []
    for line in lines:
        words = _words_after_rl_lab(line)
        if words and words[0] != "COMMAND":
            found.append(words)
    return found


def _command_lines(block: str) -> list[str]:
    """One line per command: those that a backslash or an open quotation mark continues are joined."""
    lines: list[str] = []
    is_open = False
    for line in block.replace("\\\n", " ").splitlines():
        if is_open:
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
        is_open = "rl-lab " in lines[-1] and lines[-1].partition("#")[0].count('"') % 2 == 1
    return lines


def _words_after_rl_lab(line: str) -> list[str]:
    for launcher, command in _LAUNCHERS.items():
        line = line.replace(launcher, command)
    if not re.match(r"(\w+=\S+ )*rl-lab ", line):
        return []
    line = re.sub(r"\[[\w=, …]+\]$|\.\.\.|…", "", line)  # `[key=value …]` and dots stand for what a reader adds
    words = shlex.split(line.partition("rl-lab ")[2], comments=True)
    return [] if any("|" in word for word in words) else words
