"""Random observations of a space, for checks that need no environment."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_lab.environments.recipe import Blueprint
from rl_lab.environments.spaces import MASK_KEY

WIDEST = 1e6  # bounds beyond it are none: nobody observes numbers that size


def draw_observations(blueprint: Blueprint, count: int, *, seed: int) -> list[Any]:
    """Random observations of the environment's own form; always with an action that is allowed."""
    space, generator = copy.deepcopy(blueprint.observations.space), np.random.default_rng(seed)
    space.seed(seed)
    return [_usable(space.sample(), space, blueprint, generator) for _ in range(count)]


def _usable(drawn: Any, space: spaces.Space, blueprint: Blueprint, generator: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        parts = {name: _usable(drawn[name], part, blueprint, generator) for name, part in space.spaces.items()}
        if MASK_KEY in parts:
            parts[MASK_KEY] = _with_an_allowed_action(parts[MASK_KEY], blueprint, generator)
        return parts
    if isinstance(space, spaces.Tuple):
        return tuple(_usable(each, part, blueprint, generator) for each, part in zip(drawn, space.spaces, strict=True))
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        return np.where(np.abs(drawn) > WIDEST, generator.normal(size=drawn.shape), drawn).astype(space.dtype)
    return drawn


def _with_an_allowed_action(mask: Any, blueprint: Blueprint, generator: np.random.Generator) -> np.ndarray:
    """The mask with one more action allowed, of each sub-action."""
    flat, begin = np.array(mask).reshape(-1), 0
    for size in blueprint.actions.spec.sizes:
        flat[begin + generator.integers(size)] = 1
        begin += size
    return flat.reshape(np.shape(mask))
