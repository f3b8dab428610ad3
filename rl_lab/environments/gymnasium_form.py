"""The same environments in Gymnasium's own form: native observations and actions, like those of `policy.act`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from rl_lab.environments.lookup import find
from rl_lab.environments.recipe import Recipe
from rl_lab.environments.wrappers import check_wrappers
from rl_lab.types import ConfigError


def make_gymnasium(
    *,
    id: str,
    num_envs: int | None = None,
    wrappers: Sequence[Mapping[str, Any]] = (),
    kwargs: Mapping[str, Any] | None = None,
    action_repeat: int = 1,
    time_limit: int | None = None,
    action_masks: bool = False,
    render: bool = False,
) -> gym.Env | VectorEnv:
    """One environment with its wrappers or, with `num_envs`, a vector environment of so many, in which the observation
    that comes with the end of an episode is the first of the next one."""
    if num_envs is not None and (not isinstance(num_envs, int) or isinstance(num_envs, bool) or num_envs < 1):
        raise ConfigError(f"num_envs is {num_envs!r}: write a whole number of at least 1, or None for a single one.")
    find(id)  # first: a user's package may register the wrappers named below
    layers = dict(kwargs or {}), check_wrappers(wrappers)
    recipe = Recipe(id, *layers, action_repeat, time_limit, action_masks, render)
    if num_envs is None:
        return recipe.build()
    return SyncVectorEnv([recipe.build] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
