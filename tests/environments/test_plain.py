"""Plain data as text: every bit comes back, and what is not plain is named by its path."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_lab.environments.plain import NotPlainError, from_text, to_text

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.frozensets(KEYS),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_any_plain_tree_survives(tree: Any) -> None:
    assert repr(from_text(to_text(tree))) == repr(tree) or to_text(from_text(to_text(tree))) == to_text(tree)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.int64(3),
        np.bool_(True),
        np.str_("heart"),
        np.arange(6, dtype=np.int8).reshape(2, 3),
        np.asfortranarray(np.random.default_rng(0).normal(size=(3, 4))),
        np.array([[b"S", b"F"]]),
        np.array(["abc"]),
        np.zeros((0, 3), np.float32),
        np.array(np.nan),
    ],
)
def test_arrays_and_scalars_keep_type_order_and_bits(value: Any) -> None:
    back = from_text(to_text(value))
    assert type(back) is type(value) and back.dtype == value.dtype and back.tobytes() == value.tobytes()
    if isinstance(value, np.ndarray):
        assert back.flags.f_contiguous == value.flags.f_contiguous and back.flags.writeable


def test_containers_keep_their_kind() -> None:
    value = {
        1: deque([1, 2], maxlen=3),
        "set": {3, 1},
        (1, 2): OrderedDict(b=1, a=2),
        "counter": Counter("aab"),
        "big": 2**200,
    }
    back = from_text(to_text(value))
    assert back == value and back[1].maxlen == 3
    assert [type(item) for item in back.values()] == [type(item) for item in value.values()]


def test_generators_continue_where_they_were() -> None:
    for bits in (np.random.PCG64(1), np.random.MT19937(1), np.random.Philox(1), np.random.SFC64(1)):
        generator = np.random.Generator(bits)
        generator.normal(size=3)
        generator.spawn(1)
        back = from_text(to_text(generator))
        assert back.normal() == generator.normal()
        assert back.spawn(1)[0].normal() == generator.spawn(1)[0].normal()
    for old in (np.random.RandomState(1), random.Random(1)):
        old.random()
        assert from_text(to_text(old)).random() == old.random()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, object()]}, r"\['a'\]\[1\] \(builtins.object\)"),
        ({"a": np.array([None])}, r"\['a'\] \(array of object\)"),
        ([iter([])], r"\[0\] \(builtins.list_iterator\)"),
    ],
)
def test_what_is_not_plain_is_named(value: Any, message: str) -> None:
    with pytest.raises(NotPlainError, match=message):
        to_text(value)


def test_one_object_under_two_names_is_refused() -> None:
    shared = [1]
    with pytest.raises(NotPlainError, match=r"\['b'\] \(shared with another attribute\)"):
        to_text({"a": shared, "b": shared})
    array = np.zeros(3)
    with pytest.raises(NotPlainError, match="shared"):
        to_text({"a": array[1:], "b": array})
