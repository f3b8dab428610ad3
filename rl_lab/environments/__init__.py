"""Environments: any Gymnasium id as N environments that return rows. `make_environment` builds them.

Importing this package registers the environments of `suites/` (`rl_lab/Corridor-v0`, `dmc/walker_walk`, ...) and the
named wrappers.
"""

from rl_lab.environments import suites, wrappers_observation  # noqa: F401  (importing registers)
from rl_lab.environments.base import Environment
from rl_lab.environments.factory import make_environment
from rl_lab.environments.wrappers import register_wrapper

__all__ = ["Environment", "make_environment", "register_wrapper"]
