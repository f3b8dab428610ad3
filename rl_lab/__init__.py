"""RL Lab: model-free agents and world models trained from one YAML.

>>> import rl_lab
>>> run = rl_lab.train("ppo_cartpole", seed=1)
>>> policy = rl_lab.load(run)
>>> action = policy.act(observation)

Names are imported when first used, so that `import rl_lab` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rl_lab.api import (
        Run,
        check_environment,
        collect,
        compare,
        describe_environment,
        dream,
        evaluate,
        find_runs,
        list_environments,
        load,
        make_env,
        play,
        publish,
        resume,
        train,
    )
    from rl_lab.policy import Policy

__all__ = [
    "Policy",
    "Run",
    "check_environment",
    "collect",
    "compare",
    "describe_environment",
    "dream",
    "evaluate",
    "find_runs",
    "list_environments",
    "load",
    "make_env",
    "play",
    "publish",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        home = importlib.import_module("rl_lab.policy" if name == "Policy" else "rl_lab.api")
        return getattr(home, name)
    from difflib import get_close_matches

    close = get_close_matches(name, __all__, n=1)
    hint = f". Did you mean '{close[0]}'?" if close else ""
    if name.upper() in ("PPO", "DQN", "SAC", "REINFORCE", "DREAMER"):  # rl_lab.PPO("MlpPolicy", env).learn(...)
        hint = f": write rl_lab.train('{name.lower()}', env=..., total_timesteps=...)"
    raise AttributeError(f"module 'rl_lab' has no attribute '{name}'{hint}")


def __dir__() -> list[str]:
    """For completion: what is public, whether it was imported yet or not."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
