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
        self.start: Any = int(start) if self.spec.kind == "discrete" else start
        self.shape, self.dtype = space.shape or (), np.dtype(space.dtype)
        if isinstance(space, spaces.Box):
            self.range = _range(space)
            is_unit = bool((space.low == -1.0).all() and (space.high == 1.0).all())
            self._is_unit = is_unit and len(self.shape) == 1 and self.dtype == np.float32

    @property
    def num_mask_entries(self) -> int | None:
        """Length of an action mask, None where masks make no sense."""
        return None if self.spec.kind == "continuous" else sum(self.spec.sizes)

    def rows(self, action: np.ndarray) -> Sequence[Any]:
        """One environment action per row: Python ints for Discrete, arrays of the space's shape otherwise."""
        if self.spec.kind == "discrete":
            return (action + self.start).tolist() if self.start else action.tolist()
        return list(self.batch(action))

    def batch(self, action: np.ndarray) -> np.ndarray:
        """The same as one array, for native vector environments."""
        if self.spec.kind == "continuous" and self._is_unit and action.dtype == np.float32:
            values = np.maximum(action, -1.0)
            np.minimum(values, 1.0, out=values)
            return np.add(values, 0.0, out=values)  # 0.0, never -0.0: the bits of `in_range`
        if self.spec.kind == "continuous":
            values = self._in_range_fast(action.reshape(len(action), -1).astype(np.float64))
            return values.reshape(len(action), *self.shape).astype(self.dtype)
        if self.spec.kind == "multi_discrete":
            return (action.reshape(len(action), *self.shape) + self.start).astype(self.dtype)
        return action + self.start if self.start else action

    def _in_range_fast(self, values: np.ndarray) -> np.ndarray:
        """`in_range` in place, to the same bits: `clip` takes several times as long on few numbers."""
        np.maximum(values, self.range["inner_low"], out=values)
        np.minimum(values, self.range["inner_high"], out=values)
        np.multiply(values, self.range["half"], out=values)
        np.add(values, self.range["middle"], out=values)
        np.maximum(values, self.range["low"], out=values)
        return np.minimum(values, self.range["high"], out=values)


def in_range(values: Any, *, inner_low: Any, inner_high: Any, middle: Any, half: Any, low: Any, high: Any) -> Any:
    """A policy's numbers `[N, A]` in the environment's range; all are numpy arrays, or all are tensors."""
    return (middle + values.clip(inner_low, inner_high) * half).clip(low, high)


def _range(space: spaces.Box) -> dict[str, np.ndarray]:
    """The numbers of `in_range`, `[A]` each."""
    low, high = (bound.reshape(-1).astype(np.float64) for bound in (space.low, space.high))
    bounded = np.isfinite(low) & np.isfinite(high)
    from_low, to_high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
    return {
        "inner_low": np.where(bounded, -1.0, -np.inf),
        "inner_high": np.where(bounded, 1.0, np.inf),
        "middle": 0.5 * (from_low + to_high),
        "half": 0.5 * (to_high - from_low),
        "low": low,
        "high": high,
    }


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
