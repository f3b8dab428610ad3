"""A policy's actions as the environment wants them.

Discrete actions count from 0 here and from `start` there. Continuous policies act in [-1, 1]: the value is clipped
and stretched to the space's finite bounds; a dimension without both bounds passes through (clipped where it has one).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_lab.environments.spaces import value_counts
from rl_lab.types import ActionSpec, ConfigError


class ActionConverter:
    """Converts a whole batch of actions at once; `rows` gives what each `env.step` receives."""

    def __init__(self, space: spaces.Space, *, env_id: str) -> None:
        self.space, self.spec = space, _action_spec(space, env_id)
        start = getattr(space, "start", 0)  # Discrete counts from an int, MultiDiscrete from an array
        self._start: Any = int(start) if self.spec.kind == "discrete" else start
        self._shape, self._dtype = space.shape or (), np.dtype(space.dtype)
        if isinstance(space, spaces.Box):
            self._low, self._high = (bound.reshape(-1).astype(np.float64) for bound in (space.low, space.high))
            self._bounded = np.isfinite(self._low) & np.isfinite(self._high)
            low, high = np.where(self._bounded, self._low, -1.0), np.where(self._bounded, self._high, 1.0)
            self._middle, self._half = 0.5 * (low + high), 0.5 * (high - low)

    @property
    def num_mask_entries(self) -> int | None:
        """Length of an action mask, None where masks make no sense."""
        return None if self.spec.kind == "continuous" else sum(self.spec.sizes)

    def rows(self, action: np.ndarray) -> Sequence[Any]:
        """One environment action per row: Python ints for Discrete, arrays of the space's shape otherwise."""
        if self.spec.kind == "discrete":
            return (action + self._start).tolist() if self._start else action.tolist()
        return list(self.batch(action))

    def batch(self, action: np.ndarray) -> np.ndarray:
        """The same as one array, for native vector environments."""
        if self.spec.kind == "continuous":
            values = action.reshape(len(action), -1).astype(np.float64)
            inside = np.where(self._bounded, np.clip(values, -1.0, 1.0), values)
            values = np.clip(self._middle + inside * self._half, self._low, self._high)
            return values.reshape(len(action), *self._shape).astype(self._dtype)
        if self.spec.kind == "multi_discrete":
            return (action.reshape(len(action), *self._shape) + self._start).astype(self._dtype)
        return action + self._start if self._start else action


def _action_spec(space: spaces.Space, env_id: str) -> ActionSpec:
    counts = value_counts(space)
    if counts is not None:
        return ActionSpec("discrete" if isinstance(space, spaces.Discrete) else "multi_discrete", counts)
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        low, high = space.low.reshape(-1), space.high.reshape(-1)
        return ActionSpec("continuous", (int(low.size),), tuple(map(float, low)), tuple(map(float, high)))
    raise ConfigError(
        f"environment '{env_id}': actions are a {type(space).__name__} space ({space}), which no policy can answer. "
        "Known: Discrete, MultiDiscrete, MultiBinary, Box of floats. "
        "Write a gymnasium.ActionWrapper whose action_space is one of them and list it under `wrappers:`."
    )
