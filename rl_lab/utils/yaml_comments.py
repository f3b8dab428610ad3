"""The comments of a YAML file, which parsers throw away: they are the documentation of the settings."""

from __future__ import annotations

import re
from collections.abc import Sequence


def comments_of_keys(lines: Sequence[str], prefix: str = "") -> dict[str, str]:
    """Every key of a YAML text, as its path below `prefix`, with the comment beside it or else above it."""
    found: dict[str, str] = {}
    stack: list[tuple[int, str]] = []
    above: list[str] = []
    for line in lines:
        match = re.match(r"^(\s*)([A-Za-z_][\w]*):(.*)$", line)
        if match is None:
            above = [*above, line.strip().lstrip("# ")] if line.strip().startswith("#") else []
            continue
        indent, name, rest = len(match[1]), match[2], match[3]
        while stack and stack[-1][0] >= indent:
            stack.pop()
        stack.append((indent, name))
        path = ".".join(part for part in (prefix, *(name for _, name in stack)) if part)
        beside = rest.split(" #", 1)[1].strip() if " #" in rest else ""
        found[path] = beside or " ".join(above)
        above = []
    return found
