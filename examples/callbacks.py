"""An environment of your own as an object, a callback that ends the run, and the policy in a loop of your own.

    python examples/callbacks.py

docs/from_python.md says more.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

import rl_lab


class Corridor(gymnasium.Env):
    """Reach the right end; every step costs."""

    def __init__(self, length: int = 6) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.length, self.place = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place = max(0, self.place + (1 if action else -1))
        is_there = self.place == self.length
        return self._observe(), 1.0 if is_there else -0.1, is_there, False, {}

    def _observe(self) -> np.ndarray:
        return np.array([self.place / self.length], np.float32)


def is_unsolved(row: dict[str, Any]) -> bool:
    """Called with every row; False ends the run."""
    print(
        f"{row['agent_steps']:>7,} agent steps   mean return {row.get('collect/episode_return_mean', float('nan')):.2f}"
    )
    return row.get("collect/episode_return_mean", 0.0) < 0.4


def main(**settings: Any) -> float:
    """Train, then play one episode; its return."""
    settings = {"environment__num_envs": 8, "environment__time_limit": 30, "evaluation__video": False, **settings}
    run = rl_lab.train("ppo", env=Corridor, on_row=is_unsolved, quiet=True, **settings)
    print(run)
    policy = rl_lab.load(run)
    env = policy.environment()
    observation, _ = env.reset(seed=0)
    policy.reset()
    total, is_over = 0.0, False
    while not is_over:
        observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
        total, is_over = total + float(reward), terminated or truncated
    print(f"one episode: {total:.1f}")
    return total


if __name__ == "__main__":
    main()
