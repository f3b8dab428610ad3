"""make_environment: N environments of one id, run in the way that suits them."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from rl_lab.environments.async_environment import WORKER_TIMEOUT_S, AsyncEnvironment
from rl_lab.environments.base import Environment
from rl_lab.environments.handed import is_handed
from rl_lab.environments.lookup import find
from rl_lab.environments.recipe import Blueprint, Recipe, blueprint, can_render
from rl_lab.environments.rendering import prepare_headless
from rl_lab.environments.snapshot import capture, layers
from rl_lab.environments.vector import NativeEnvironment, SyncEnvironment, empty_rows
from rl_lab.environments.wrappers import check_wrappers
from rl_lab.environments.wrappers_observation import ActionMask
from rl_lab.types import ConfigError, EnvironmentFault, did_you_mean
from rl_lab.utils.processes import available_cores
from rl_lab.utils.seeding import STREAMS, stream_seed

VECTORIZATIONS = ("auto", "native", "sync", "async")
MESSAGE_S = 1.5e-4  # what a message to a worker and back costs the parent
ASYNC_WORTH = 0.6  # processes must promise at most this fraction of the time, or busy cores eat up what they win
TIMING_STEPS, TIMING_S = 20, 0.1


def make_environment(
    *,
    id: str,
    num_envs: int = 1,
    vectorization: str = "auto",
    seed: int = 0,
    stream: str = "train_environment",
    wrappers: Sequence[Mapping[str, Any]] = (),
    kwargs: Mapping[str, Any] | None = None,
    action_repeat: int = 1,
    time_limit: int | None = None,
    action_masks: bool = False,
    max_restarts: int = 10,
    worker_timeout_s: float = WORKER_TIMEOUT_S,
    render: bool = False,
    spec: Mapping[str, Any] | None = None,
) -> Environment:
    """Build and check everything an `environment:` block says; nothing is reset yet.

    `time_limit` counts agent steps and replaces the registered limit; `action_repeat` is innermost, then `wrappers`
    in their order. `max_restarts` renews itself: every 1,000 steps of an environment without a failure forgive one.
    A worker process that does not answer for `worker_timeout_s` is replaced. `spec` overrides labels, solved_return,
    max_episode_steps and description.
    """
    _check_numbers({"num_envs": num_envs, "action_repeat": action_repeat, "time_limit": time_limit}, least=1)
    _check_numbers({"max_restarts": max_restarts}, least=0)
    if not worker_timeout_s > 0:
        raise ConfigError(f"environment.worker_timeout_s is {worker_timeout_s!r}: write a number of seconds above 0.")
    _check_name("vectorization", vectorization, VECTORIZATIONS)
    _check_name("stream", stream, tuple(STREAMS))
    registered = find(id)  # first: a user's package may register the wrappers named below
    recipe = Recipe(
        id=id,
        kwargs=dict(kwargs or {}),
        wrappers=check_wrappers(wrappers),
        action_repeat=action_repeat,
        time_limit=time_limit,
        action_masks=action_masks,
        render=render,
        overrides=dict(spec or {}),
    )
    prepare_headless()
    scratch = recipe.build()
    plan = blueprint(scratch, recipe)
    native = partial(make_native, registered, recipe, scratch, num_envs)
    with preserved_random_state():
        if any(isinstance(layer, ActionMask) for layer in layers(scratch)):
            # Masks show themselves with the first row only: where there are none, no run should have begun.
            with suppress(EnvironmentFault):  # errors of its own come later, where they are forgiven
                _alone(scratch, plan, max_restarts=0).reset()
        if vectorization == "auto":
            vectorization = _choose(recipe, plan, scratch, num_envs, native)
    scratch.close()
    seeds = [stream_seed(seed, stream, i) for i in range(num_envs)]
    if vectorization == "native":
        return NativeEnvironment(native, plan, num_envs=num_envs, seed=seeds[0], max_restarts=max_restarts)
    if vectorization == "sync" or is_debugged():
        return SyncEnvironment(recipe.build, plan, seeds=seeds, max_restarts=max_restarts)
    return AsyncEnvironment(recipe, plan, seeds=seeds, max_restarts=max_restarts, worker_timeout_s=worker_timeout_s)


def _alone(scratch: gym.Env, plan: Blueprint, *, max_restarts: int) -> SyncEnvironment:
    return SyncEnvironment(lambda: scratch, plan, seeds=[0], max_restarts=max_restarts)


def _check_numbers(numbers: Mapping[str, int | None], *, least: int) -> None:
    for name, value in numbers.items():
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not is_number and not (value is None and name == "time_limit"):
            raise ConfigError(f"environment.{name} is {value!r}: it must be a whole number of at least {least}.")


def _check_name(key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        hint = did_you_mean(str(value), known)
        raise ConfigError(f"environment.{key} is '{value}'.{hint} Allowed: {', '.join(known)}.")


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Trying an environment out must not move the process's generators, which some environments draw from: how
    often they would be moved depends on the clock."""
    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)


def is_debugged() -> bool:
    """A debugger cannot follow into subprocesses. Coverage tools trace too, but step through nothing."""
    if "debugpy" in sys.modules or "pydevd" in sys.modules:
        return True
    trace = sys.gettrace()
    module = getattr(trace, "__module__", None) or type(trace).__module__
    return trace is not None and not module.startswith("coverage")


def _choose(recipe: Recipe, plan: Blueprint, scratch: gym.Env, num_envs: int, native: Callable[[], VectorEnv]) -> str:
    if not recipe.kwargs and _can_be_saved(native):
        return "native"
    cores = available_cores()
    if num_envs == 1 or cores == 1 or is_debugged() or is_handed(recipe.id):  # a script's objects stay in its process
        return "sync"
    return "async" if is_worth_processes(_seconds_per_step(scratch, plan), num_envs, cores) else "sync"


def is_worth_processes(seconds_per_step: float, num_envs: int, num_cores: int) -> bool:
    """Whether workers, one per core, would move all environments clearly sooner than this process alone."""
    num_workers = min(num_envs, num_cores)
    together = seconds_per_step * -(-num_envs // num_workers) + MESSAGE_S * num_workers
    return together < ASYNC_WORTH * seconds_per_step * num_envs


def _can_be_saved(native: Callable[[], VectorEnv]) -> bool:
    """Only a vector environment of plain attributes can be resumed exactly."""
    try:
        env = native()
    except ConfigError:
        return False  # single environments work
    env.reset(seed=0)
    env.step(np.zeros(env.action_space.shape, env.action_space.dtype))
    mode = capture(env)["mode"]
    env.close()
    return mode != "restart"


def _seconds_per_step(scratch: gym.Env, plan: Blueprint) -> float:
    """The median of a few steps after a warm-up; a failing environment counts as cheap, its errors come later."""
    alone, rows = _alone(scratch, plan, max_restarts=1), empty_rows(plan.observations.allocate(1))
    action = np.zeros((1, *plan.spec.action.shape), plan.spec.action.dtype)
    seconds: list[float] = []
    begin = time.perf_counter()
    try:
        alone.fill(rows, None)
        while len(seconds) < 2 or (len(seconds) < TIMING_STEPS and time.perf_counter() - begin < TIMING_S):
            start = time.perf_counter()
            alone.fill(rows, action)
            seconds.append(time.perf_counter() - start)
    except EnvironmentFault:
        return 0.0
    return float(np.median(seconds[1:]))


# --- vector entry points -----------------------------------------------------------------------


def make_native(registered: GymnasiumSpec, recipe: Recipe, scratch: gym.Env, num_envs: int) -> VectorEnv:
    """The registered vector environment, or why its rows would not be those of single environments."""
    obstacles = {
        "it has no vector entry point": registered.vector_entry_point is None,
        "wrappers need single environments": bool(recipe.wrappers) or bool(registered.additional_wrappers),
        "action_repeat needs single environments": recipe.action_repeat > 1,
        "time_limit needs single environments": recipe.time_limit is not None,
        "action_masks need single environments": recipe.action_masks,
    }
    for why, holds in obstacles.items():
        if holds:
            raise _not_native(recipe, why)
    try:
        render = {"render_mode": "rgb_array"} if recipe.render and can_render(registered.vector_entry_point) else {}
        settings: Any = {"vectorization_mode": "vector_entry_point", **recipe.kwargs, **render}
        env = gym.make_vec(registered.id, num_envs=num_envs, **settings)
    except Exception as error:  # whatever its constructor raises
        raise _not_native(recipe, f"its vector entry point raised {type(error).__name__}: {error}") from error
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.NEXT_STEP:
        raise _not_native(recipe, f"its vector entry point resets in mode {mode}, rows need NEXT_STEP")
    for name in ("observation_space", "action_space"):
        single, vector = getattr(scratch, name), getattr(env, f"single_{name}")
        if single != vector:
            raise _not_native(recipe, f"its vector entry point has the {name} {vector}, alone it has {single}")
    # Our actions follow the spec; CartPole's own check of each one takes a third of its step.
    env.unwrapped.action_space.contains = lambda x: True  # type: ignore[method-assign]
    return env


def _not_native(recipe: Recipe, why: str) -> ConfigError:
    return ConfigError(
        f"environment.vectorization is 'native' but environment '{recipe.id}' cannot be: {why}. "
        "Write vectorization: auto, sync or async."
    )
