"""Maps over nested dicts, lists and tuples."""

from __future__ import annotations

import numpy as np
import torch

from rl_lab.utils.tree import equal, leaves_with_paths, map_leaves, numpy_to_tensors, tensors_to_numpy

TREE = {"a": [1, (2, 3)], "b": {"c": None, "d": 4}}


def test_map_keeps_the_structure_and_leaves_none_alone() -> None:
    assert map_leaves(lambda leaf: leaf * 10, TREE) == {"a": [10, (20, 30)], "b": {"c": None, "d": 40}}


def test_leaves_come_with_dotted_paths_in_order() -> None:
    assert list(leaves_with_paths(TREE)) == [("a.0", 1), ("a.1.0", 2), ("a.1.1", 3), ("b.c", None), ("b.d", 4)]
    assert list(leaves_with_paths(5, "x")) == [("x", 5)]


def test_numpy_becomes_tensors_of_the_same_type_and_shape() -> None:
    tree = {"a": np.arange(3, dtype=np.uint8), "b": np.float32(1.5), "c": np.array(True), "d": "text", "e": None}
    converted = numpy_to_tensors(tree)
    assert converted["a"].dtype == torch.uint8
    assert converted["b"] == 1.5
    assert type(converted["b"]) is float
    assert converted["c"].shape == ()
    assert (converted["d"], converted["e"]) == ("text", None)
    converted["a"][0] = 9
    assert tree["a"][0] == 0, "it is a copy"  # type: ignore[index]


def test_tensors_become_numpy_again() -> None:
    tree = {"a": np.arange(3.0), "b": [np.array([True]), 1, None]}
    assert equal(tensors_to_numpy(numpy_to_tensors(tree)), tree)
    assert isinstance(tensors_to_numpy({"a": torch.zeros(2)})["a"], np.ndarray)


def test_equal_means_the_same_bits() -> None:
    nan = float("nan")
    assert equal({"a": torch.tensor([nan, 1.0])}, {"a": torch.tensor([nan, 1.0])})
    assert equal([nan, None, "x"], [nan, None, "x"])
    assert not equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not equal(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))
    assert not equal(torch.zeros(2), torch.zeros(2, 1))
    assert not equal({"a": 1}, {"b": 1})
    assert not equal({"a": 1}, {"a": 1, "b": None})
    assert equal(np.arange(3), torch.arange(3))
