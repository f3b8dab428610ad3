"""Every command line in docs/troubleshooting.md parses, and every setting it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rl_lab.cli.main import SUMMARIES, parser_of
from rl_lab.cli.parsing import split_words
from rl_lab.config.compose import compose, split_sweep

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
PLACEHOLDERS = ("my_experiment", "COMMAND")


def command_lines() -> list[str]:
    """What follows `rl-lab` at the start of a line, after a variable, or inside backticks."""
    found = re.findall(r"(?:^|`|OMP_NUM_THREADS=1 )rl-lab ([^`\n]+)", PAGE, flags=re.MULTILINE)
    return [line for line in dict.fromkeys(found) if not any(word in line for word in PLACEHOLDERS) and line[0] != "-"]


@pytest.mark.parametrize("line", command_lines())
def test_command_line_of_the_page(line: str) -> None:
    name, *words = shlex.split(line, comments=True)
    assert name in SUMMARIES
    arguments = parser_of(name).parse(words)
    if name == "train":
        names, overrides = split_words(arguments.words)
        compose(names[0] if names else None, split_sweep(overrides)[0])


def test_every_setting_in_backticks_exists() -> None:
    settings = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+=[^`\s]+)`", PAGE)
    assert len(settings) >= 5
    for setting in settings:
        compose(None, [setting])
