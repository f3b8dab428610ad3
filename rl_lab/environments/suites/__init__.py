"""One file per suite; importing this package registers their environments. The machinery lies one level up.

Files that import their simulator at the top are named here as entry points and imported on use.
"""

import gymnasium as gym

from rl_lab.environments.suites import (  # noqa: F401  (importing registers)
    atari,
    bandits,
    behaviour,
    brax,
    dmc,
    meta_world,
    minecraft,
    minigrid,
    robotics,
    toy,
)

_HERE = "rl_lab.environments.suites"
DOOM_SCENARIOS = (
    "basic deadly_corridor deathmatch defend_the_center defend_the_line health_gathering health_gathering_supreme "
    "my_way_home predict_position take_cover"
).split()

# Gymnasium's, rendered faster.
gym.register(
    "rl_lab/CarRacing-v3",
    entry_point=f"{_HERE}.car_racing:CarRacing",
    max_episode_steps=1000,
    reward_threshold=900,
)
gym.register("rl_lab/Crafter-v1", entry_point=f"{_HERE}.crafter:Crafter")
gym.register("rl_lab/Retro-v0", entry_point=f"{_HERE}.retro:Retro")
gym.register("rl_lab/Doom-v0", entry_point=f"{_HERE}.doom:Doom")
for _scenario in DOOM_SCENARIOS:
    gym.register(f"vizdoom/{_scenario}", entry_point=f"{_HERE}.doom:Doom", kwargs={"scenario": _scenario})
for _maze in ("9x9", "11x11", "13x13", "15x15"):
    gym.register(f"memory_maze/{_maze}", entry_point=f"{_HERE}.memory_maze:MemoryMaze", kwargs={"maze": _maze})
