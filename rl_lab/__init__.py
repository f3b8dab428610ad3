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
    from rl_lab.api import Run, collect, evaluate, load, make_env, play, resume, train
    from rl_lab.experiment.dream import dream
    from rl_lab.policy import Policy

_HOMES = dict.fromkeys(("Run", "collect", "evaluate", "load", "make_env", "play", "resume", "train"), "rl_lab.api")
_HOMES |= {"dream": "rl_lab.experiment.dream", "Policy": "rl_lab.policy"}

__all__ = ["Policy", "Run", "collect", "dream", "evaluate", "load", "make_env", "play", "resume", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'rl_lab' has no attribute '{name}'")
