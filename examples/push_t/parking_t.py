"""Push-T for an agent that learns from rewards: it is paid for where the T lies until the time is up.

gym-pusht ends an episode as soon as 95 % of the goal are covered, and what would have been earned after that is lost:
an agent that is paid by the step learns to stay just below. Here an episode always takes its 300 frames. Actions say
how far to move the pusher rather than where to, and everything is seen and done in [-1, 1].
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

SIZE = 512.0  # of the table, in pixels
FARTHEST = 64.0  # pixels between the pusher and where an action can send it
TURN = 2.0 * np.pi


class ParkingT(gym.Wrapper):
    """`shaping` pays for the T being nearer to its goal and the pusher nearer to the T, and takes it back for the
    contrary (Ng et al. 1999): what is best to do stays the same."""

    def __init__(self, env: gym.Env, shaping: float = 0.0) -> None:
        super().__init__(env)
        self.shaping, self.potential = shaping, 0.0
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (20,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self.potential = self.nearness()
        return self.scaled(observation), info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        pusher = np.asarray(self.unwrapped.agent.position, dtype=np.float64)
        target = np.clip(pusher + FARTHEST * np.asarray(action, dtype=np.float64), 0.0, SIZE)
        observation, reward, _, truncated, info = self.env.step(target)
        before, self.potential = self.potential, self.nearness()
        return self.scaled(observation), reward + self.shaping * (self.potential - before), False, truncated, info

    def nearness(self) -> float:
        """0 where the T lies in its goal with the pusher at it, less elsewhere."""
        table = self.unwrapped
        block, pusher, goal = (
            np.asarray(each)[:2] for each in (table.block.position, table.agent.position, table.goal_pose)
        )
        turned = (table.block.angle - table.goal_pose[2]) % TURN
        away, far = np.linalg.norm(block - goal), np.linalg.norm(pusher - block)
        return float(-2.0 * away / SIZE - min(turned, TURN - turned) / np.pi - 0.5 * far / SIZE)

    def scaled(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        """The T's eight corners, the pusher and how fast it moves, `[20]`."""
        pixels = np.concatenate((observation["environment_state"], observation["agent_pos"]))
        speed = np.asarray(self.unwrapped.agent.velocity) / SIZE
        return np.clip(np.concatenate((pixels / (SIZE / 2.0) - 1.0, speed)), -1.0, 1.0).astype(np.float32)


def make(shaping: float = 0.0, **settings: Any) -> gym.Env:
    import gym_pusht  # noqa: F401 (registers PushT-v0)

    table = gym.make("gym_pusht/PushT-v0", obs_type="environment_state_agent_pos", disable_env_checker=True, **settings)
    return ParkingT(table, shaping)


gym.register("ParkingT-v0", entry_point=make)
