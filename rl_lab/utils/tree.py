"""Maps over nested dicts, lists and tuples: the few tree functions the project needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with `function` applied to every leaf; None stays None."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        mapped = [map_leaves(function, value) for value in tree]
        return mapped if isinstance(tree, list) else tuple(mapped)
    return None if tree is None else function(tree)


def leaves_with_paths(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted path, in insertion order: `controllers.actor.weight`."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves_with_paths(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves_with_paths(value, f"{prefix}.{index}" if prefix else str(index))
    else:
        yield prefix, tree


def numpy_to_tensors(tree: Any) -> Any:
    """Numpy arrays and scalars become tensors and Python numbers, so that a tree is plain data."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return torch.from_numpy(np.ascontiguousarray(leaf).reshape(leaf.shape).copy())
        return leaf.item() if isinstance(leaf, np.generic) else leaf

    return map_leaves(convert, tree)


def tensors_to_numpy(tree: Any) -> Any:
    """Tensors become numpy arrays; everything else stays as it is."""
    return map_leaves(lambda leaf: leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf, tree)


def equal(left: Any, right: Any) -> bool:
    """Bit-for-bit equality of two trees; NaN equals NaN."""
    left_leaves, right_leaves = list(leaves_with_paths(left)), list(leaves_with_paths(right))
    if [path for path, _ in left_leaves] != [path for path, _ in right_leaves]:
        return False
    return all(_same_bits(a, b) for (_, a), (_, b) in zip(left_leaves, right_leaves, strict=True))


def _same_bits(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor | np.ndarray) or isinstance(right, torch.Tensor | np.ndarray):
        a, b = (np.asarray(each.cpu() if isinstance(each, torch.Tensor) else each) for each in (left, right))
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return bool(left == right or (left != left and right != right))
