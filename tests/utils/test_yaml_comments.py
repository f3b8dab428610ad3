from __future__ import annotations

from rl_lab.utils.yaml_comments import comments_of_keys


def test_a_comment_stands_beside_its_key_or_above_it() -> None:
    lines = [
        "# Said above,",
        "# in two lines.",
        "one: 1",
        "two: 2   # said beside",
        "three: '#not'",
        "# far",
        "",
        "four: 4",
    ]
    assert comments_of_keys(lines) == {
        "one": "Said above, in two lines.",
        "two": "said beside",
        "three": "",
        "four": "",
    }


def test_keys_are_paths_below_the_prefix() -> None:
    lines = ["outer:", "  inner:   # deep", "    leaf: 1", "next: 2"]
    assert comments_of_keys(lines, "block") == {
        "block.outer": "",
        "block.outer.inner": "deep",
        "block.outer.inner.leaf": "",
        "block.next": "",
    }
