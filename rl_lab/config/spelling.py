"""Python values as the words of a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.types import ConfigError, did_you_mean


def spell(value: Any, place: str = "setting") -> str:
    """A Python value as an override is written: texts that would read as something else are quoted."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{spell(str(key))}: {spell(item, place)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(spell(item, place) for item in value) + "]"
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str | Path):
        raise ConfigError(
            f"{place.replace('__', '.')} holds a {type(value).__name__} ({value!r}): a config holds numbers, texts, "
            "True, False, None, and lists and dicts of them."
        )
    text = str(value)
    words = ("null", "true", "false", "inf", "nan")
    if re.fullmatch(r"[A-Za-z_][\w./-]*", text) and text.lower() not in words:
        return text
    backslashes_before_the_end = "\\" * (len(text) - len(text.rstrip("\\")))
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", text) + backslashes_before_the_end + "'"


def words_of(overrides: Sequence[str], settings: Mapping[str, Any], *, callbacks: Sequence[str]) -> list[str]:
    """Overrides, and keywords as such; a dict may also add keys to its block, such as arguments of an environment."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides is the text {overrides!r}: write a list of them, [{overrides!r}].")
    for key, value in settings.items():
        if callable(value):
            hint = did_you_mean(key, callbacks)
            raise ConfigError(f"{key} is no setting, and no callback.{hint} Callbacks: {', '.join(callbacks)}.")
    prefixes = {key: "++" if isinstance(value, Mapping) else "" for key, value in settings.items()}
    return [*overrides, *(f"{prefixes[key]}{key.replace('__', '.')}={spell(settings[key], key)}" for key in settings)]
