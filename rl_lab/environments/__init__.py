"""Environments: any Gymnasium id as N environments that speak rows. `make_environment` is the door.

Importing this package registers the toy environments (`rl_lab/Corridor-v0`, ...), the bandits, DeepMind Control
(`dmc/walker_walk`, ...) and the named wrappers.
"""

from rl_lab.environments import bandits, dmc, minigrid, toy, wrappers_observation  # noqa: F401  (importing registers)
from rl_lab.environments.base import Environment
from rl_lab.environments.factory import make_environment
from rl_lab.environments.wrappers import register_wrapper

__all__ = ["Environment", "make_environment", "register_wrapper"]
