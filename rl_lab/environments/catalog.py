"""What there is to train on, for `rl-lab envs [filter]` and `rl-lab envs show ID`."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from rl_lab.environments.lookup import SUITES, Suite, newest_version, suite_of
from rl_lab.environments.recipe import Recipe, blueprint
from rl_lab.types import EnvSpec


@dataclass(frozen=True)
class EnvInfo:
    """One line of the list."""

    id: str
    suite: str
    is_installed: bool
    install: str  # the command that installs it, empty when it is
    max_episode_steps: int | None  # as registered, without action repeat
    solved_return: float | None
    has_native_vector: bool


def list_environments(filter: str | None = None, *, all_versions: bool = False) -> list[EnvInfo]:
    """Registered ids that contain `filter` (any case) in their id or suite, newest versions only by default.
    Suites that register on import are imported when they are installed."""
    for suite in SUITES:
        if suite.module is not None and _is_installed(suite):
            importlib.import_module(suite.module)
    wanted = (filter or "").lower()
    found = [_info(env_id, registered, suite_of(registered)) for env_id, registered in sorted(gym.registry.items())]
    return [
        info
        for info in found
        if (wanted in info.id.lower() or wanted in info.suite)
        and (all_versions or newest_version(info.id) in (info.id, None))
    ]


def describe(id: str) -> EnvSpec:
    """An environment's spec. Builds one environment and closes it."""
    recipe = Recipe(id)
    env = recipe.build()
    found = blueprint(env, recipe).spec
    env.close()
    return found


def _info(env_id: str, registered: Any, suite: Suite | None) -> EnvInfo:
    is_installed = suite is None or _is_installed(suite)
    package = (f"'rl-lab[{suite.extra}]'" if suite.extra else suite.needs) if suite is not None else ""
    return EnvInfo(
        id=env_id,
        suite="user" if suite is None else suite.name,
        is_installed=is_installed,
        install="" if is_installed else f"pip install {package}",
        max_episode_steps=registered.max_episode_steps,
        solved_return=registered.reward_threshold,
        has_native_vector=registered.vector_entry_point is not None,
    )


def _is_installed(suite: Suite) -> bool:
    names = [name for name in (suite.needs, suite.module) if name is not None]
    return all(importlib.util.find_spec(name) is not None for name in names)
