"""Python values as the words of a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def spell(value: Any) -> str:
    """A Python value as an override is written: texts that would read as something else are quoted."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {spell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(spell(item) for item in value) + "]"
    if not isinstance(value, str):
        return str(value)
    words = ("null", "true", "false", "inf", "nan")
    if re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in words:
        return value
    backslashes_before_the_end = "\\" * (len(value) - len(value.rstrip("\\")))
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", value) + backslashes_before_the_end + "'"
