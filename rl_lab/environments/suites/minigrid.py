"""MiniGrid for networks: the wrapper `minigrid_view`. The mission is text and is left out; the direction stays.

kind: image       image   uint8 [size, size, 3], tiles of whole pixels, black around them
      symbolic    vector  float32, per tile: object, colour and state, one-hot
view: partial     the 7 x 7 tiles before the agent, as it sees them
      full        the whole grid
"""

from __future__ import annotations

from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_lab.environments.wrappers import StepResult, register_wrapper, require_positive, with_outcome
from rl_lab.types import ConfigError, did_you_mean

SMALLEST_TILE = 4  # pixels; below, keys and balls look alike
NUM_STATES = 4  # open, closed, locked; for the agent itself one of four directions
POINTS_UP = 3  # the agent's direction in its own view
CHOICES = {"kind": ("image", "symbolic"), "view": ("partial", "full")}


@register_wrapper("minigrid_view")
class MiniGridView(gym.ObservationWrapper):
    """What the agent (or, with view: full, a spectator) sees of a MiniGrid, as an image or as one-hot symbols.
    The outcome `success` is 1 where the goal was reached."""

    outcomes = ("success",)

    def __init__(self, env: gym.Env, kind: str = "image", view: str = "partial", size: int = 64) -> None:
        for name, value in (("kind", kind), ("view", view)):
            if value not in CHOICES[name]:
                raise ConfigError(
                    f"{name} is {value!r}.{did_you_mean(str(value), CHOICES[name])} "
                    f"Allowed: {', '.join(CHOICES[name])}."
                )
        require_positive(size=size)
        base: Any = env.unwrapped
        if not hasattr(base, "gen_obs_grid"):
            raise ConfigError(f"it needs a MiniGrid environment, this is {type(base).__name__}.")
        super().__init__(env)
        self.kind, self.view, self.size = kind, view, size
        columns, rows = (base.agent_view_size,) * 2 if view == "partial" else (base.width, base.height)
        self.tile = size // max(columns, rows)
        if kind == "image" and self.tile < SMALLEST_TILE:
            raise ConfigError(
                f"{columns} x {rows} tiles do not fit into {size} pixels, a tile needs "
                f"{SMALLEST_TILE}. Write size: {SMALLEST_TILE * max(columns, rows)} or view: partial."
            )
        from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX

        self.num_objects, self.num_colors = max(OBJECT_TO_IDX.values()) + 1, max(COLOR_TO_IDX.values()) + 1
        width = self.num_objects + self.num_colors + NUM_STATES
        seen: dict[str, spaces.Space] = {"image": spaces.Box(0, 255, (size, size, 3), np.uint8)}
        if kind == "symbolic":
            seen = {"vector": spaces.Box(0.0, 1.0, (columns * rows * width,), np.float32)}
        self.observation_space = spaces.Dict({**seen, "direction": spaces.Discrete(4)})

    def step(self, action: Any) -> StepResult:
        observation, reward, terminated, truncated, info = super().step(action)
        has_succeeded = terminated and float(reward) > 0
        return observation, reward, terminated, truncated, with_outcome(info, success=float(has_succeeded))

    def observation(self, observation: Any) -> dict[str, Any]:
        name, look = ("image", self._image) if self.kind == "image" else ("vector", self._symbols)
        return {name: look(observation), "direction": int(observation["direction"])}

    def _image(self, observation: Any) -> np.ndarray:
        base: Any = self.unwrapped
        is_partial = self.view == "partial"
        drawn = self._draw_view(observation["image"]) if is_partial else base.get_frame(base.highlight, self.tile)
        image = np.zeros((self.size, self.size, 3), np.uint8)
        top, left = ((self.size - length) // 2 for length in drawn.shape[:2])
        image[top : top + drawn.shape[0], left : left + drawn.shape[1]] = drawn
        return image

    def _draw_view(self, symbols: np.ndarray) -> np.ndarray:
        """The picture of `get_frame(agent_pov=True)`, put together from tiles drawn once."""
        middle, last = len(symbols) // 2, len(symbols) - 1
        columns = [
            np.concatenate([_tile(self.tile, *tile, (x, y) == (middle, last)) for y, tile in enumerate(column)], axis=0)
            for x, column in enumerate(symbols.tolist())
        ]
        return np.concatenate(columns, axis=1)

    def _symbols(self, observation: Any) -> np.ndarray:
        tiles = np.asarray(observation["image"])
        if self.view == "full":
            from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX

            base: Any = self.unwrapped
            tiles = base.grid.encode()
            tiles[tuple(base.agent_pos)] = (OBJECT_TO_IDX["agent"], COLOR_TO_IDX["red"], base.agent_dir)
        sizes = (self.num_objects, self.num_colors, NUM_STATES)
        parts = [np.eye(size, dtype=np.float32)[tiles[..., i]] for i, size in enumerate(sizes)]
        return np.concatenate(parts, axis=-1).reshape(-1)


@cache
def _tile(size: int, kind: int, color: int, state: int, has_agent: bool) -> np.ndarray:
    """uint8 [size, size, 3]; what is seen is lit."""
    from minigrid.core.constants import OBJECT_TO_IDX
    from minigrid.core.grid import Grid
    from minigrid.core.world_object import WorldObj

    is_seen = kind != OBJECT_TO_IDX["unseen"]
    thing = WorldObj.decode(kind, color, state) if is_seen else None
    return Grid.render_tile(thing, agent_dir=POINTS_UP if has_agent else None, highlight=is_seen, tile_size=size)
