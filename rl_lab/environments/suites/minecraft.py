"""Minecraft through MineRL (`minecraft/minerl`) and MineDojo (`minecraft/minedojo`): pixels and a dozen plain actions.

Both download the game when they are installed and want Java, so they live in a virtual environment of their own
(docs/environments.md). Their interface is the old `gym`'s: four results of a step, a seed of its own call. The table of
actions is the same for both; each adapter says what an action is in its package's words.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_lab.environments.suites.memory_maze import gymnasium_as_gym
from rl_lab.environments.wrappers_observation import area_resize

TURN_DEGREES = 15
ACTIONS = (
    "nothing", "forward", "back", "left", "right", "jump forward", "attack", "use",
    "look up", "look down", "turn left", "turn right",
)  # fmt: skip


class Minecraft(gym.Env):
    """What both packages share; `_make`, `_act` and `_picture` are theirs."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    action_labels = ACTIONS

    def __init__(self, task: str, size: int = 64, length: int = 18_000, render_mode: str | None = None) -> None:
        self.task, self.size, self.max_agent_steps, self.render_mode = task, size, length, render_mode
        self._world: Any = self._make()
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = spaces.Discrete(len(ACTIONS))
        self.steps = 0
        self._image = np.zeros((size, size, 3), np.uint8)

    def _make(self) -> Any:
        raise NotImplementedError

    def _act(self, action: str) -> Any:
        raise NotImplementedError

    def _picture(self, observation: Any) -> np.ndarray:
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._world.seed(int(self.np_random.integers(2**31 - 1)))
        self.steps = 0
        return self._look(self._world.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, is_over, _ = self._world.step(self._act(ACTIONS[int(action)]))
        self.steps += 1
        truncated = self.steps >= self.max_agent_steps and not is_over
        return self._look(observation), float(reward), bool(is_over), truncated, {}

    def _look(self, observation: Any) -> np.ndarray:
        self._image = self._picture(observation)
        return area_resize(self._image, self.size, self.size)

    def render(self) -> np.ndarray:  # type: ignore[override]
        return self._image

    def close(self) -> None:
        self._world.close()


class MineRL(Minecraft):
    """MineRL 0.4: actions are dicts of keys and a camera, observations have a `pov`."""

    def _make(self) -> Any:
        import gym as old_gym  # type: ignore[import-not-found]
        import minerl  # type: ignore[import-not-found]  # noqa: F401  (importing registers)

        return old_gym.make(self.task)

    def _act(self, action: str) -> Any:
        keys = self._world.action_space.noop()
        turns = {"look up": (-1, 0), "look down": (1, 0), "turn left": (0, -1), "turn right": (0, 1)}
        if action in turns:
            keys["camera"] = TURN_DEGREES * np.array(turns[action], np.float32)
        elif action != "nothing":
            for key in action.split():  # jump forward: both
                keys[key] = 1
        return keys

    def _picture(self, observation: Any) -> np.ndarray:
        return np.asarray(observation["pov"], np.uint8)


class MineDojo(Minecraft):
    """MineDojo: an action is a vector of eight numbers, observations have an `rgb` with channels first."""

    PITCH, YAW, NO_TURN = 3, 4, 12  # places in the vector; 12 of 24 steps of 15 degrees is straight on
    WORDS = {
        "forward": (0, 1), "back": (0, 2), "left": (1, 1), "right": (1, 2), "jump": (2, 1), "use": (5, 1),
        "attack": (5, 3),
    }  # fmt: skip

    def _make(self) -> Any:
        with gymnasium_as_gym():
            import minedojo  # type: ignore[import-not-found]

        return minedojo.make(task_id=self.task, image_size=(160, 256))

    def _act(self, action: str) -> Any:
        vector = np.zeros(8, np.int64)
        vector[[self.PITCH, self.YAW]] = self.NO_TURN
        kind, _, side = action.partition(" ")
        if kind in ("look", "turn"):
            vector[self.PITCH if kind == "look" else self.YAW] += -1 if side in ("up", "left") else 1
        elif action != "nothing":
            for word in action.split():
                place, value = self.WORDS[word]
                vector[place] = value
        return vector

    def _picture(self, observation: Any) -> np.ndarray:
        return np.moveaxis(np.asarray(observation["rgb"], np.uint8), 0, -1)


for _name, _task in (("MineRL", "MineRLObtainDiamond-v0"), ("MineDojo", "harvest_wool_with_shears_and_sheep")):
    gym.register(
        f"minecraft/{_name.lower()}",
        entry_point=f"rl_lab.environments.suites.minecraft:{_name}",
        kwargs={"task": _task},
    )
