"""Brax as `brax/<environment>`: MuJoCo-like bodies simulated by JAX, which only this file imports.

Reset and step are compiled when they are first called, which takes 10 to 30 seconds. A state is a tree of arrays, so it
is saved as it is. Reaching the limit of 1,000 steps is a cut; falling is terminal.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_lab.environments.rendering import prepare_headless

ENVIRONMENTS = (
    "ant halfcheetah hopper humanoid humanoidstandup inverted_pendulum inverted_double_pendulum pusher reacher swimmer "
    "walker2d"
).split()
EPISODE_STEPS = 1000
VIDEO_SIZE = 240


class Brax(gym.Env):
    """`backend`: generalized, positional, spring or mjx; null: the environment's own."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}

    def __init__(self, name: str, backend: str | None = None, render_mode: str | None = None) -> None:
        prepare_headless()
        import jax
        from brax import envs

        self._jax = jax
        settings = {} if backend is None else {"backend": backend}
        self._body = envs.get_environment(name, **settings)
        self._reset, self._step = jax.jit(self._body.reset), jax.jit(self._typed_step)
        self.render_mode, self.max_agent_steps = render_mode, EPISODE_STEPS
        self.action_space = spaces.Box(-1.0, 1.0, (self._body.action_size,), np.float32)
        self.observation_space = spaces.Box(-np.inf, np.inf, (self._body.observation_size,), np.float32)
        self._state: Any = None
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._begin(int(self.np_random.integers(2**31 - 1)))
        return np.array(self._state.obs, np.float32), {}

    def _begin(self, seed: int) -> None:
        self._state, self.steps = self._reset(self._jax.random.PRNGKey(seed)), 0

    def _typed_step(self, state: Any, action: Any) -> Any:
        """The next state in the types of this one: for weak ones JAX would compile all of it once more."""
        tree_map, asarray = self._jax.tree_util.tree_map, self._jax.numpy.asarray
        types = tree_map(lambda leaf: leaf.dtype, state)  # first: some bodies write into the state's metrics
        return tree_map(asarray, self._body.step(state, action), types)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._state = self._step(self._state, np.asarray(action, np.float32))
        self.steps += 1
        terminated = bool(self._state.done)
        truncated = self.steps >= EPISODE_STEPS and not terminated
        return np.array(self._state.obs, np.float32), float(self._state.reward), terminated, truncated, {}

    def render(self) -> np.ndarray:  # type: ignore[override]
        from brax.io import image

        return np.asarray(image.render_array(self._body.sys, self._state.pipeline_state, VIDEO_SIZE, VIDEO_SIZE))

    # --- exact snapshots (see snapshot.py) ---

    def get_state(self) -> dict[str, Any]:
        leaves = [] if self._state is None else self._jax.tree_util.tree_leaves(self._state)
        return {"leaves": [np.array(leaf) for leaf in leaves], "steps": self.steps}

    def set_state(self, state: dict[str, Any]) -> None:
        if self._state is None:
            self._begin(0)  # for the form of the tree
        form = self._jax.tree_util.tree_structure(self._state)
        leaves = [self._jax.numpy.asarray(leaf) for leaf in state["leaves"]]
        self._state, self.steps = self._jax.tree_util.tree_unflatten(form, leaves), state["steps"]


for _name in ENVIRONMENTS:
    gym.register(f"brax/{_name}", entry_point="rl_lab.environments.suites.brax:Brax", kwargs={"name": _name})
