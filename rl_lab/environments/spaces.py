"""Gymnasium observation spaces as our flat dict of arrays.

    Box of floats                vector  float32, flattened
    Box of uint8, three axes     image   uint8 [H, W, C]; two axes get a channel axis of one
    Box of other integers        vector  float32, flattened
    Discrete                     int64 scalar counted from 0, whatever the space's `start`
    MultiDiscrete, MultiBinary   int64 [K]
    Dict / Tuple                 their own names, nested ones joined with "." / item_0, item_1, ...
    Text, other spaces of str    left out, and named in the description

A lone space is called "vector", "image" or "discrete". A Dict key "action_mask" becomes bool [A].
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_lab.types import MODEL_KEYS, ROW_KEYS, ArraySpec, ConfigError

Path = tuple[str | int, ...]
MASK_KEY = "action_mask"
MANY_CHANNELS = 16


@dataclass(frozen=True)
class Leaf:
    """One array of the observation: where it lies, what we call it, what it becomes."""

    path: Path
    key: str
    spec: ArraySpec
    source_shape: tuple[int, ...]
    start: np.ndarray | int = 0  # subtracted from discrete values


class ObservationConverter:
    """Writes one environment's observation into row i of preallocated arrays, or a whole batch at once."""

    def __init__(self, space: spaces.Space, *, env_id: str, num_actions: int | None = None) -> None:
        self.space = without_texts(space)
        self.leaves: list[Leaf] = []
        left_out = []
        for path, part in _walk(space, ()):
            key = _key(path, part)
            if _is_text(part):
                left_out.append(key)
            elif path and path[-1] == MASK_KEY:
                self.leaves.append(_mask_leaf(path, part, env_id, num_actions))
            else:
                self.leaves.append(_leaf(path, key, part, env_id))
        twice = [key for key, count in Counter(leaf.key for leaf in self.leaves).items() if count > 1]
        if twice:
            raise ConfigError(
                f"environment '{env_id}': two parts of the observation would be called '{twice[0]}', since names of "
                "nested ones are joined with '.'. Give one of them another name."
            )
        if not self.leaves:
            raise ConfigError(
                f"environment '{env_id}': nothing of the observation space {space} can be given to a network. "
                "Write a gymnasium.ObservationWrapper that returns a Box, Discrete or Dict of them."
            )
        self.specs = {leaf.key: leaf.spec for leaf in self.leaves}
        self.description = f"Left out of the observation: {', '.join(left_out)} (text)." if left_out else ""

    def allocate(self, num_envs: int) -> dict[str, np.ndarray]:
        """Fresh, uninitialised arrays for N rows."""
        return {leaf.key: np.empty((num_envs, *leaf.spec.shape), leaf.spec.dtype) for leaf in self.leaves}

    def writer(self) -> Callable[[Any, dict[str, np.ndarray], int], None]:
        """The fastest correct `write`: a lone flat vector needs no walk."""
        only = self.leaves[0]
        is_lone = len(self.leaves) == 1 and not only.path
        if not is_lone or only.spec.dtype != "float32" or only.source_shape != only.spec.shape:
            return self.write

        def write_lone_vector(observation: Any, arrays: dict[str, np.ndarray], i: int) -> None:
            arrays[only.key][i] = observation

        return write_lone_vector

    def write(self, observation: Any, arrays: dict[str, np.ndarray], i: int) -> None:
        """Row i of every array."""
        for leaf in self.leaves:
            value = pick(observation, leaf.path)
            if leaf.source_shape != leaf.spec.shape:
                value = np.reshape(value, leaf.spec.shape)
            arrays[leaf.key][i] = value - leaf.start if leaf.spec.is_discrete else value

    def check(self, observation: Any) -> None:
        """Refuse shapes that numpy would silently broadcast. Called once per episode, not per step."""
        for key, found, expected in self.shapes(observation):
            if found != expected:
                raise ValueError(f"observation '{key}' has shape {found}, its space says {expected}")

    def shapes(self, observation: Any) -> Iterator[tuple[str, tuple[int, ...] | None, tuple[int, ...]]]:
        """Every leaf's key, the shape it has here (None: it is not there), and that of its space."""
        for leaf in self.leaves:
            found: tuple[int, ...] | None = None
            with suppress(KeyError, IndexError, TypeError, ValueError):  # no such key, or no array at all
                found = np.shape(pick(observation, leaf.path))
            yield leaf.key, found, leaf.source_shape

    def batch_size(self, observation: Any) -> int | None:
        """How many observations these are: None for one alone, else the length of the leading axis it has more."""
        leaf = self.leaves[0]
        array = np.asarray(pick(observation, leaf.path))
        return len(array) if array.ndim > len(leaf.source_shape) else None

    def batch(self, observation: Any, num_envs: int, *, is_new: bool = False) -> dict[str, np.ndarray]:
        """The arrays of a native vector environment, copied because its buffers may be written again, unless they are
        new ones."""
        rows = {}
        for leaf in self.leaves:
            value = pick(observation, leaf.path)
            if not is_new:
                value = contiguous_copy(value, leaf.spec.dtype)
            value = value.reshape(num_envs, *leaf.spec.shape)
            rows[leaf.key] = value - leaf.start if leaf.spec.is_discrete else value
        return rows


def contiguous_copy(values: Any, dtype: str) -> np.ndarray:
    """A copy in C order. Images whose channels lie far apart (stacked frames) are copied channel by channel, which
    takes a third of the time."""
    array = np.asarray(values)
    if array.ndim < 4 or array.flags.c_contiguous or array.shape[-1] > MANY_CHANNELS:
        return np.array(array, dtype=dtype, order="C")
    copy = np.empty(array.shape, dtype)
    for channel in range(array.shape[-1]):
        copy[..., channel] = array[..., channel]
    return copy


def pick(observation: Any, path: Path) -> Any:
    """The part of an observation that lies at a path."""
    for step in path:
        observation = observation[step]
    return observation


def _walk(space: spaces.Space, path: Path) -> Iterator[tuple[Path, spaces.Space]]:
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from _walk(part, (*path, name))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _walk(part, (*path, index))
    else:
        yield path, space


def without_texts(space: spaces.Space) -> spaces.Space:
    """The same space with plain texts in place of suites' own classes of strings, which hold functions."""
    if isinstance(space, spaces.Dict):
        # An OrderedDict keeps its order; of a plain one Gymnasium would sort the names.
        return spaces.Dict(OrderedDict((name, without_texts(part)) for name, part in space.spaces.items()))
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([without_texts(part) for part in space.spaces])
    return spaces.Text(1) if _is_text(space) else space


def _key(path: Path, space: spaces.Space) -> str:
    if not path:
        return lone_key(space)
    name = ".".join(f"item_{step}" if isinstance(step, int) else step for step in path)
    return f"observation.{name}" if name in (*ROW_KEYS, *MODEL_KEYS) else name


def _is_text(space: spaces.Space) -> bool:
    """Text, and spaces like MiniGrid's missions that hold strings without being Text."""
    return isinstance(space, spaces.Text) or (space.dtype is not None and np.dtype(space.dtype).kind == "U")


def is_image(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)


def value_counts(space: spaces.Space) -> tuple[int, ...] | None:
    """How many values each element of a discrete space has; None: it is another kind of space."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(int(n) for n in space.nvec.reshape(-1))
    return (2,) * int(np.prod(space.shape)) if isinstance(space, spaces.MultiBinary) else None


def lone_key(space: spaces.Space) -> str:
    """The name of an observation that is no Dict or Tuple."""
    return "image" if is_image(space) else "vector" if isinstance(space, spaces.Box) else "discrete"


def _leaf(path: Path, key: str, space: spaces.Space, env_id: str) -> Leaf:
    if space.shape is not None and 0 in space.shape:
        raise ConfigError(
            f"environment '{env_id}': observation '{key}' holds no numbers, its shape is {space.shape}. Leave it out, "
            "or drop it with the wrapper select_keys."
        )
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind in "fiub":
        if is_image(space):
            shape = space.shape if len(space.shape) == 3 else (*space.shape, 1)
            return Leaf(path, key, ArraySpec(shape, "uint8"), space.shape)
        return Leaf(path, key, _vector_spec(space), space.shape)
    counts = value_counts(space)
    if counts is not None:
        assert space.shape is not None
        start = np.asarray(getattr(space, "start", 0), dtype=np.int64).reshape(-1)
        shape = () if isinstance(space, spaces.Discrete) else (len(counts),)
        spec = ArraySpec(shape, "int64", num_values=counts)
        return Leaf(path, key, spec, tuple(space.shape), start if shape else int(start[0]))
    place = f"observation '{key}'" if path else "the observation"
    raise ConfigError(
        f"environment '{env_id}': {place} is a {type(space).__name__} space ({space}), which has no array form. "
        "Known: Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple, Text. "
        "Write a gymnasium.ObservationWrapper that turns it into one of them and list it under `wrappers:`."
    )


def _vector_spec(space: spaces.Box) -> ArraySpec:
    low, high = space.low.reshape(-1).astype(np.float64), space.high.reshape(-1).astype(np.float64)
    if np.isfinite(low).all() and np.isfinite(high).all():
        return ArraySpec((low.size,), "float32", tuple(low.tolist()), tuple(high.tolist()))
    return ArraySpec((low.size,), "float32")


def _mask_leaf(path: Path, space: spaces.Space, env_id: str, num_actions: int | None) -> Leaf:
    size = int(np.prod(space.shape)) if space.shape is not None else 0
    if num_actions is None or size != num_actions:
        expected = "a discrete or multi-discrete action space" if num_actions is None else f"{num_actions} entries"
        raise ConfigError(
            f"environment '{env_id}': observation 'action_mask' has {size} entries but needs {expected}: "
            "one boolean per action (for several sub-actions, their masks one after the other)."
        )
    assert space.shape is not None
    return Leaf(path, MASK_KEY, ArraySpec((size,), "bool"), tuple(space.shape))
