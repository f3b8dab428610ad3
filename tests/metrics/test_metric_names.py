"""The table of names, the page that shows it, and the lookup."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_lab.metrics.names import COUNTERS, NAMES, PREFIXES, check_name, is_wall_clock, label_of, meaning_of, rank_of
from rl_lab.types import ConfigError, Counts

ROOT = Path(__file__).parents[2]
PAGE, TABLES = ROOT / "docs" / "metrics.md", ROOT / "rl_lab" / "metrics" / "names.md"


def test_the_page_lists_exactly_the_names_of_the_table() -> None:
    between = PAGE.read_text(encoding="utf-8").split("<!-- names: begin -->\n")[1].split("\n<!-- names: end -->")[0]
    assert between + "\n" == TABLES.read_text(encoding="utf-8"), "put rl_lab/metrics/names.md between the markers"
    listed = [line.split("`")[1] for line in between.splitlines() if line.startswith("| `")]
    assert sorted(listed) == sorted([*COUNTERS, *NAMES])


def test_every_name_has_a_known_prefix_a_unit_and_a_meaning() -> None:
    for name, meaning in NAMES.items():
        assert name.startswith(PREFIXES)
        assert meaning.label and meaning.unit and meaning.description.endswith(".") and meaning.advice.endswith("."), (
            name
        )
    for line in TABLES.read_text(encoding="utf-8").splitlines():
        assert not line.startswith("| `") or line.count("|") == 6, "a bar would break the table"


def test_the_counters_are_those_of_counts_and_the_clock() -> None:
    assert list(COUNTERS) == [*Counts().as_dict(), "wall_s"]


def test_an_exact_name_is_found_before_a_pattern() -> None:
    assert meaning_of("loss/value") is NAMES["loss/value"]
    assert meaning_of("loss/of_a_plugin") is NAMES["loss/*"]
    assert meaning_of("controller/unheard_of") is None


def test_every_name_is_shown_by_a_short_friendly_one() -> None:
    labels = [meaning.label for meaning in NAMES.values()]
    assert all(len(label) <= 20 and "/" not in label.replace("/s", "") and "_" not in label for label in labels)
    assert label_of("controller/approx_kl") == "KL" and label_of("eval/episode_return_mean") == "evaluation return"
    assert label_of("train/actor_grad_norm") == label_of("train/grad_norm/actor") == "actor gradient norm"
    assert label_of("loss/next_frame") == "next frame loss" and label_of("controller/my_own") == "my own"


def test_names_are_sorted_as_the_table_lists_them() -> None:
    names = ["controller/my_own", "loss/policy", "controller/entropy", "loss/zebra", "collect/episode_return_mean"]
    assert sorted(names, key=rank_of) == [names[4], names[2], names[1], names[3], names[0]]


def test_wall_clock_values_are_told_apart() -> None:
    assert all(is_wall_clock(name) for name in ("wall_s", "time/eta_s", "system/ram_gib"))
    assert not any(is_wall_clock(name) for name in ("agent_steps", "loss/value", "eval/episodes"))


def test_a_name_that_cannot_be_printed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Metric 'train/\\x1b\[2J' holds characters that cannot be printed"):
        check_name("train/\x1b[2J", strict=False)
