"""What there is to train on, for `rl-lab envs [filter]` and `rl-lab envs show ID`."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from rl_lab.environments.lookup import SUITES, Suite, newest_version, suite_of
from rl_lab.environments.recipe import Recipe, blueprint, close
from rl_lab.environments.snapshot import capture
from rl_lab.environments.timing import Timing, alone, is_worth_prefetching, is_worth_processes, measure
from rl_lab.types import EnvSpec
from rl_lab.utils.processes import available_cores


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


def list_environments(text: str | None = None, *, all_versions: bool = False) -> list[EnvInfo]:
    """Registered ids that contain `text` (any case) in their id or suite, newest versions only by default.
    Suites that register on import are imported when they are installed."""
    for suite in SUITES:
        if suite.module is not None and _is_installed(suite):
            importlib.import_module(suite.module)
    wanted = (text or "").lower()
    found = [_info(env_id, registered, suite_of(registered)) for env_id, registered in sorted(gym.registry.items())]
    return [
        info
        for info in found
        if (wanted in info.id.lower() or wanted in info.suite)
        and (all_versions or newest_version(info.id) in (info.id, None))
    ]


@dataclass(frozen=True)
class Missing:
    """A suite that is not installed, and how it is."""

    suite: str
    install: str
    ids: str  # how its ids begin, empty where any do


@dataclass(frozen=True)
class EnvDetails:
    """What is seen of an environment when it is built, reset and stepped a little."""

    spec: EnvSpec
    vectorization: str  # what `auto` would take, and why
    snapshot: str  # how exact resume saves it
    reward_range: tuple[float, float] | None
    frame: np.ndarray | None  # RGB uint8 [H, W, 3]
    why_no_frame: str = ""


SNAPSHOTS = {
    "own": "its own get_state and set_state",
    "attributes": "its attributes, which are plain data",
    "replay": "the actions of the episode are replayed from its seed",
}
LOOK_STEPS = 10
TRIED_ENVS = 8


def missing_suites(text: str | None = None) -> list[Missing]:
    """Suites that are not installed, each with how it is installed; their ids may not even be registered."""
    wanted = (text or "").lower()
    found = [
        Missing(suite.name, _install(suite), ", ".join(f"{prefix}..." for prefix in suite.prefixes))
        for suite in SUITES
        if not _is_installed(suite)
    ]
    return [each for each in found if wanted in each.suite.lower() or wanted in each.ids.lower()]


def how_to_install(id: str) -> str:
    """How an environment's suite is installed; empty where it is installed, or nothing is known of it."""
    name = id.rpartition(":")[2]
    suite = suite_of(gym.registry[name]) if name in gym.registry else None
    suite = suite or next((each for each in SUITES if each.prefixes and name.startswith(each.prefixes)), None)
    return "" if suite is None or _is_installed(suite) else _install(suite)


def look_at_environment(id: str) -> EnvDetails:
    """Its spec, how it would be run and saved, and a rendered frame: it is built, reset, stepped a little and timed."""
    recipe = Recipe(id, render=True)
    env = recipe.build()
    plan = blueprint(env, recipe)
    timing = measure(env, plan)
    single = alone(env, plan, max_restarts=LOOK_STEPS)
    action = np.zeros((1, *plan.spec.action.shape), plan.spec.action.dtype)
    single.reset()
    for _ in range(LOOK_STEPS):
        single.step(action)
    mode = capture(env, [])["mode"]
    single.drain_events()
    frame = single.render()
    why = " ".join(single.drain_events())
    close(env)
    bounds = getattr(env.unwrapped, "reward_range", None)
    is_known = bounds is not None and bool(np.isfinite(np.asarray(bounds, dtype=np.float64)).all())
    return EnvDetails(
        plan.spec,
        _way(gym.registry[id.rpartition(":")[2]], timing),
        SNAPSHOTS[mode],
        (float(bounds[0]), float(bounds[1])) if is_known and bounds is not None else None,
        frame,
        why,
    )


def _way(registered: Any, timing: Timing) -> str:
    cores = available_cores()
    speed = f"{_time(timing.step_s)} per step, {_time(timing.reset_s)} per reset"
    if registered.vector_entry_point is not None:
        return f"native where wrappers and settings allow it, else sync or async ({speed} alone)"
    if is_worth_prefetching(timing, TRIED_ENVS, cores):
        return f"async, episodes begun ahead of time ({speed})"
    way = "async" if is_worth_processes(timing.step_s, TRIED_ENVS, cores) else "sync"
    return f"{way} for {TRIED_ENVS} environments on {cores} cores ({speed})"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"


def describe_environment(id: str) -> EnvSpec:
    """Spaces, labels, limits and solved threshold of an environment, of which one is built and closed."""
    recipe = Recipe(id)
    env = recipe.build()
    found = blueprint(env, recipe).spec
    close(env)
    return found


def _info(env_id: str, registered: Any, suite: Suite | None) -> EnvInfo:
    is_installed = suite is None or _is_installed(suite)
    return EnvInfo(
        id=env_id,
        suite="user" if suite is None else suite.name,
        is_installed=is_installed,
        install="" if suite is None or is_installed else _install(suite),
        max_episode_steps=registered.max_episode_steps,
        solved_return=registered.reward_threshold,
        has_native_vector=registered.vector_entry_point is not None,
    )


def _install(suite: Suite) -> str:
    if suite.apart:  # installed here, it would replace what the others need
        return suite.apart
    package = f"'rl-lab[{suite.extra}]'" if suite.extra else suite.needs
    return f"pip install {package}"


def _is_installed(suite: Suite) -> bool:
    return suite.needs is None or importlib.util.find_spec(suite.needs) is not None
