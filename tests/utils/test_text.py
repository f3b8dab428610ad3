from __future__ import annotations

import json

import pytest

from rl_lab.utils.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ppo · café ▁▂█ 漢字 🙂", "ppo · café ▁▂█ 漢字 🙂"),
        ("\x1b[2Jgone\x07", "\\u001b[2Jgone\\u0007"),
        ("a\rb\nc\td\x7f", "a\\rb\\nc\\td\\u007f"),
        ("\x9b31m", "\\u009b31m"),
        ("exe\u202etxt\u2028", "exe\\u202etxt\\u2028"),
        ("half \ud800", "half \\ud800"),
        ("tag \U000e0001", "tag \\udb40\\udc01"),
    ],
)
def test_what_could_steer_a_terminal_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_some_characters_may_be_kept() -> None:
    assert printable("a\nb\tc\x1b", keep="\n\t") == "a\nb\tc\\u001b"


def test_json_stays_the_same_json() -> None:
    value = {"notes": "\x9b31m \u202e \U000e0001 \x1b"}
    assert json.loads(printable(json.dumps(value, indent=2, ensure_ascii=False), keep="\n")) == value
