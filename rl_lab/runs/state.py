"""One save loop and one load loop over everything that has state, and a readable diff when it does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch

from rl_lab.types import RunError, StateTree
from rl_lab.utils.tree import leaves_with_paths

_SHOWN_LINES = 12


class _AnyState:
    """Stands for the state of an object whose inner layout only the object itself knows (an optimizer)."""


def gather_state(targets: Mapping[str, Any]) -> dict[str, StateTree]:
    """The state tree of nested dicts of objects. Tensors are the live ones: save before anything changes them."""
    return {name: _state_of(target, name) for name, target in targets.items()}


def apply_state(targets: Mapping[str, Any], state: Mapping[str, StateTree]) -> None:
    """Put a state tree back into nested dicts of objects: all of it, or, when anything differs, nothing."""
    mismatch = describe_mismatch(_expected_tree(targets, state), state)
    if mismatch:
        raise RunError(f"The checkpoint does not fit this run:\n{mismatch}")
    for path, target, subtree in _pairs(targets, state):
        if not hasattr(target, "load_state_dict"):
            target.set_state(subtree)
            continue
        try:
            target.load_state_dict(subtree)
        except (ValueError, KeyError) as error:  # an optimizer whose parameter groups differ
            raise RunError(f"The checkpoint does not fit this run:\n  {path}: {error}") from error


def describe_mismatch(expected: StateTree, found: StateTree) -> str:
    """Where a checkpoint (`found`) differs in layout from this run (`expected`), one line per path; '' if nowhere.

    Values are not compared, only names, shapes and dtypes.
    """
    here, there = dict(leaves_with_paths(expected)), dict(leaves_with_paths(found))
    missing = [path for path in here if path not in there]
    unexpected = [path for path in there if path not in here]
    differing = [(path, *_kinds(here[path], there[path])) for path in here if path in there]
    changed = [(path, this_run, checkpoint) for path, this_run, checkpoint in differing if this_run != checkpoint]

    count = len(missing) + len(unexpected) + len(changed)
    lines = [f"{path}: checkpoint {checkpoint}, this run {this_run}" for path, this_run, checkpoint in changed]
    lines += [f"{path}: missing in the checkpoint{_nearest(path, unexpected)}" for path in missing[:_SHOWN_LINES]]
    lines += [f"{path}: only in the checkpoint{_nearest(path, missing)}" for path in unexpected[:_SHOWN_LINES]]
    shown = [f"  {line}" for line in lines[:_SHOWN_LINES]]
    if count > len(shown):
        shown.append(f"  ... and {count - len(shown)} more differences")
    return "\n".join(shown)


def _state_of(target: Any, path: str) -> StateTree:
    if isinstance(target, Mapping):
        return {name: _state_of(child, f"{path}.{name}") for name, child in target.items()}
    if hasattr(target, "state_dict") and hasattr(target, "load_state_dict"):
        return target.state_dict()
    if hasattr(target, "get_state") and hasattr(target, "set_state"):
        return target.get_state()
    raise TypeError(
        f"'{path}' is a {type(target).__name__}, which has neither state_dict/load_state_dict nor get_state/set_state."
    )


def _expected_tree(target: Any, found: StateTree) -> StateTree:
    """What `found` should look like; an opaque object expects whatever was found for it."""
    if isinstance(target, Mapping):
        children = found if isinstance(found, Mapping) else {}
        return {name: _expected_tree(child, children.get(name, _AnyState())) for name, child in target.items()}
    return target.state_dict() if isinstance(target, torch.nn.Module) else found


def _pairs(
    targets: Mapping[str, Any], state: Mapping[str, StateTree], prefix: str = ""
) -> Iterator[tuple[str, Any, StateTree]]:
    """Every object with its dotted path and its part of the state."""
    for name, target in targets.items():
        path = f"{prefix}{name}"
        if isinstance(target, Mapping):
            yield from _pairs(target, state.get(name, {}), f"{path}.")
        elif name in state:  # a module without parameters has nothing to miss
            yield path, target, state[name]


def _kinds(here: Any, there: Any) -> tuple[str, str]:
    """Two leaves in words, just precise enough to show how they differ."""
    is_array = [isinstance(leaf, torch.Tensor | np.ndarray) for leaf in (here, there)]
    if not any(is_array):
        return "", ""
    if is_array == [True, False]:
        return f"a tensor {list(here.shape)}", f"a plain {type(there).__name__}"
    if is_array == [False, True]:
        return f"a plain {type(here).__name__}", f"a tensor {list(there.shape)}"
    if tuple(here.shape) != tuple(there.shape):
        return str(list(here.shape)), str(list(there.shape))
    return str(here.dtype).removeprefix("torch."), str(there.dtype).removeprefix("torch.")


def _nearest(path: str, others: list[str]) -> str:
    close = get_close_matches(path, others, n=1, cutoff=0.6)
    return f" (nearest: {close[0]})" if close else ""
