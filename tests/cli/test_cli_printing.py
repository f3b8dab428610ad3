"""Tables, fields and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_lab.cli.printing import cut, fields, format_size, format_value, plain, print_json, table


def test_table_aligns_numbers_to_the_right() -> None:
    assert table(("name", "count"), [("a", 1), ("bb", 1234)]).splitlines() == [
        "name  count",
        "a         1",
        "bb    1,234",
    ]


def test_table_of_nothing_is_its_head() -> None:
    assert table(("name", "count"), []) == "name  count"


def test_a_narrow_window_leaves_out_what_matters_least_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    headers, row = ("RUN", "SEED", "STEPS", "SCORE"), ("a-long-name", 3, 1000, 2.5)
    shown = {}
    for columns in (80, 28, 22, 10):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = table(headers, [row], optional=("STEPS", "SEED")).splitlines()
        shown[columns] = lines[0].split(), lines[2:]
    assert shown[80] == (["RUN", "SEED", "STEPS", "SCORE"], [])
    assert shown[28][0] == ["RUN", "STEPS", "SCORE"] and "no space for SEED" in shown[28][1][0]
    assert shown[22][0] == ["RUN", "SCORE"] and shown[22][1] == ["... no space for SEED,", "STEPS"]
    assert table(headers, [row], optional=("STEPS", "SEED")).splitlines()[1].startswith("a-long-name  ")  # never cut


def test_fields_leave_out_what_is_empty() -> None:
    assert fields([("a", 1), ("long", "x"), ("none", None), ("empty", [])]) == "  a     1\n  long  x"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (12345, "12,345"),
        (0.00012345, "0.0001234"),
        (1234.5, "1,234.5"),
        ([1, 2.5], "1, 2.5"),
    ],
)
def test_values_are_short(value: object, text: str) -> None:
    assert format_value(value) == text


def test_plain_knows_arrays_tensors_paths_and_nan() -> None:
    tree = {"a": np.float32(0.5), "b": torch.tensor(2), "c": (Path("x"), float("inf")), 3: {1}, "d": np.zeros(2)}
    assert plain(tree) == {"a": 0.5, "b": 2, "c": ["x", None], "3": [1], "d": "[0. 0.]"}


def test_json_is_valid_for_strict_readers(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"score": float("nan")})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"score": None}


def test_cut_marks_what_it_lost() -> None:
    assert cut("abcdef", 4) == "abc…" and cut("abc", 4) == "abc"


def test_sizes_have_three_digits() -> None:
    sizes = [(512, "512 B"), (1023, "0.999 KiB"), (1536, "1.5 KiB"), (1014 * 1024, "0.99 MiB"), (20 * 2**30, "20 GiB")]
    assert [format_size(size) for size, _ in sizes] == [text for _, text in sizes]
