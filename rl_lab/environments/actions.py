"""A policy's actions as the environment wants them.

Discrete actions count from 0 here and from `start` there. Continuous policies act in [-1, 1]: the value is clipped
and stretched to the space's finite bounds; a dimension without both bounds passes through (clipped where it has one).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_lab.types import ActionSpec, ConfigError


class ActionConverter:
    """Converts a whole batch of actions at once; `rows` gives what each `env.step` receives."""

    def __init__(self, space: spaces.Space, *, env_id: str) -> None:
        self.spec = _action_spec(space, env_id)
        self._start: Any = 0
        self._shape: tuple[int, ...] = ()
        self._dtype: np.dtype = np.dtype(np.int64)
        if isinstance(space, spaces.Discrete):
            self._start = int(space.start)
        elif isinstance(space, spaces.MultiDiscrete):
            self._start, self._shape, self._dtype = np.asarray(space.start), space.nvec.shape, np.dtype(space.dtype)
        elif isinstance(space, spaces.MultiBinary):
            self._shape, self._dtype = tuple(space.shape), np.dtype(space.dtype)
        else:
            assert isinstance(space, spaces.Box)
            self._shape, self._dtype = space.shape, np.dtype(space.dtype)
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
    if isinstance(space, spaces.Discrete):
        return ActionSpec("discrete", (int(space.n),))
    if isinstance(space, spaces.MultiDiscrete):
        return ActionSpec("multi_discrete", tuple(int(n) for n in space.nvec.reshape(-1)))
    if isinstance(space, spaces.MultiBinary):
        return ActionSpec("multi_discrete", (2,) * int(np.prod(space.shape)))
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        low, high = space.low.reshape(-1), space.high.reshape(-1)
        return ActionSpec("continuous", (int(low.size),), tuple(map(float, low)), tuple(map(float, high)))
    raise ConfigError(
        f"environment '{env_id}': actions are a {type(space).__name__} space ({space}), which no policy can answer. "
        "Known: Discrete, MultiDiscrete, MultiBinary, Box of floats. "
        "Write a gymnasium.ActionWrapper whose action_space is one of them and list it under `wrappers:`."
    )
