"""One file per suite; importing this package registers their environments. The machinery lies one level up."""

import gymnasium as gym

from rl_lab.environments.suites import bandits, dmc, minigrid, toy  # noqa: F401  (importing registers)

gym.register(
    "rl_lab/CarRacing-v3",  # Gymnasium's, rendered faster; its module needs Box2D, so it is imported on use
    entry_point="rl_lab.environments.suites.car_racing:CarRacing",
    max_episode_steps=1000,
    reward_threshold=900,
)
