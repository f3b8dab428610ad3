"""make_environment: N environments of one id, run in the way that suits them."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.envs.registration import load_env_creator

from rl_lab.environments.async_environment import WORKER_TIMEOUT_S, AsyncEnvironment, available_cores
from rl_lab.environments.base import Environment
from rl_lab.environments.cell import Cell
from rl_lab.environments.lookup import find
from rl_lab.environments.recipe import Blueprint, Recipe, blueprint
from rl_lab.environments.rendering import prepare_headless
from rl_lab.environments.snapshot import capture, layers
from rl_lab.environments.vector import NativeEnvironment, SyncEnvironment, allocate_rows
from rl_lab.environments.wrappers import check_wrappers
from rl_lab.environments.wrappers_observation import ActionMask
from rl_lab.types import ConfigError, EnvironmentFault, did_you_mean
from rl_lab.utils.seeding import STREAMS, stream_seed

VECTORIZATIONS = ("auto", "native", "sync", "async")
MESSAGE_S = 1.5e-4  # what a message to a worker and back costs the parent
ASYNC_WORTH = 0.6  # processes must promise at least this part of the time, or busy cores eat up what they win
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
    _check_numbers(num_envs, action_repeat, time_limit, max_restarts, worker_timeout_s)
    _check_names(vectorization, stream)
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
    native = _native_maker(registered, recipe, scratch, num_envs)
    with untouched_chance():
        if any(isinstance(layer, ActionMask) for layer in layers(scratch)):
            _ask_for_mask(scratch, plan)
        chosen = _choose(vectorization, registered, recipe, plan, scratch, num_envs, native)
    scratch.close()
    seeds = [stream_seed(seed, stream, i) for i in range(num_envs)]
    if chosen == "native":
        return NativeEnvironment(native, plan, num_envs=num_envs, seed=seeds[0], max_restarts=max_restarts)
    if chosen == "sync":
        return SyncEnvironment(recipe, plan, num_envs=num_envs, seeds=seeds, max_restarts=max_restarts)
    return AsyncEnvironment(
        recipe, plan, num_envs=num_envs, seeds=seeds, max_restarts=max_restarts, worker_timeout_s=worker_timeout_s
    )


def _ask_for_mask(scratch: gym.Env, plan: Blueprint) -> None:
    """Masks show themselves with the first row only: where there are none, no run should have begun."""
    with suppress(EnvironmentFault):  # errors of its own come later, where they are forgiven
        cell = Cell(lambda: scratch, plan.observations, index=0, seed=0, max_restarts=0, events=[])
        cell.begin(allocate_rows(plan.observations, 1), 0)


def _check_numbers(
    num_envs: int, action_repeat: int, time_limit: int | None, max_restarts: int, worker_timeout_s: float
) -> None:
    smallest = {"num_envs": (num_envs, 1), "action_repeat": (action_repeat, 1), "max_restarts": (max_restarts, 0)}
    if time_limit is not None:
        smallest["time_limit"] = (time_limit, 1)
    for name, (value, least) in smallest.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"environment.{name} is {value!r}: it must be a whole number of at least {least}.")
    if not worker_timeout_s > 0:
        raise ConfigError(
            f"environment.worker_timeout_s is {worker_timeout_s!r}: it must be a number of seconds above 0."
        )


def _check_names(vectorization: str, stream: str) -> None:
    for name, value, known in (("vectorization", vectorization, VECTORIZATIONS), ("stream", stream, tuple(STREAMS))):
        if value not in known:
            raise ConfigError(
                f"environment.{name} is '{value}'.{did_you_mean(str(value), known)} Allowed: {', '.join(known)}."
            )


@contextmanager
def untouched_chance() -> Iterator[None]:
    """Trying an environment out must not move the process's generators, which some environments draw from: how
    often they would be moved depends on the clock."""
    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)


def is_debugged() -> bool:
    """A debugger cannot follow into subprocesses. Coverage tools trace too, but follow nobody."""
    if "debugpy" in sys.modules or "pydevd" in sys.modules:
        return True
    trace = sys.gettrace()
    module = getattr(trace, "__module__", None) or type(trace).__module__
    return trace is not None and not module.startswith("coverage")


def _choose(
    vectorization: str,
    registered: GymnasiumSpec,
    recipe: Recipe,
    plan: Blueprint,
    scratch: gym.Env,
    num_envs: int,
    native: Callable[[], gym.vector.VectorEnv],
) -> str:
    if vectorization == "native":
        obstacle = why_not_native(registered, recipe)
        if obstacle is not None:
            raise _not_native(recipe, obstacle)
        return "native"
    if vectorization == "auto" and why_not_native(registered, recipe) is None and not recipe.kwargs:
        if _can_be_saved(native):
            return "native"
    can_fork_out = num_envs > 1 and not is_debugged()
    if vectorization == "async":
        return "async" if not is_debugged() else "sync"
    if vectorization == "auto" and can_fork_out and available_cores() > 1:
        return "async" if is_worth_processes(_seconds_per_step(scratch, plan), num_envs, available_cores()) else "sync"
    return "sync"


def is_worth_processes(seconds_per_step: float, num_envs: int, num_cores: int) -> bool:
    """Whether workers, one per core, would move all environments clearly sooner than this process alone."""
    num_workers = min(num_envs, num_cores)
    together = seconds_per_step * -(-num_envs // num_workers) + MESSAGE_S * num_workers
    return together < ASYNC_WORTH * seconds_per_step * num_envs


def why_not_native(registered: GymnasiumSpec, recipe: Recipe) -> str | None:
    """What stands in the way of the vector entry point, None when nothing does."""
    obstacles = {
        "it has no vector entry point": registered.vector_entry_point is None,
        "wrappers need single environments": bool(recipe.wrappers) or bool(registered.additional_wrappers),
        "action_repeat needs single environments": recipe.action_repeat > 1,
        "time_limit needs single environments": recipe.time_limit is not None,
        "action_masks need single environments": recipe.action_masks,
    }
    return next((why for why, holds in obstacles.items() if holds), None)


def _native_maker(
    registered: GymnasiumSpec, recipe: Recipe, scratch: gym.Env, num_envs: int
) -> Callable[[], gym.vector.VectorEnv]:
    """Builds the registered vector environment, or says why its rows would not be those of single environments."""

    def make() -> gym.vector.VectorEnv:
        settings = dict(recipe.kwargs)
        try:
            creator: Any = registered.vector_entry_point
            creator = load_env_creator(creator) if isinstance(creator, str) else creator
            modes = getattr(creator, "metadata", {}).get("render_modes", ())
            if recipe.render and "rgb_array" in modes:
                settings["render_mode"] = "rgb_array"
            env = gym.make_vec(registered.id, num_envs=num_envs, vectorization_mode="vector_entry_point", **settings)
        except Exception as error:  # whatever its constructor raises
            raise _not_native(recipe, f"its vector entry point raised {type(error).__name__}: {error}") from error
        mode = env.metadata.get("autoreset_mode")
        if mode != gym.vector.AutoresetMode.NEXT_STEP:
            raise _not_native(recipe, f"its vector entry point resets in mode {mode}, rows need NEXT_STEP")
        for name in ("observation_space", "action_space"):
            single, vector = getattr(scratch, name), getattr(env, f"single_{name}")
            if single != vector:
                raise _not_native(recipe, f"its vector entry point has the {name} {vector}, alone it has {single}")
        # Our actions follow the spec; CartPole's own check of each one takes a third of its step.
        env.unwrapped.action_space.contains = lambda x: True  # type: ignore[method-assign]
        return env

    return make


def _not_native(recipe: Recipe, why: str) -> ConfigError:
    return ConfigError(
        f"environment.vectorization is 'native' but environment '{recipe.id}' cannot be: {why}. "
        "Write vectorization: auto, sync or async."
    )


def _can_be_saved(native: Callable[[], gym.vector.VectorEnv]) -> bool:
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
    cell = Cell(lambda: scratch, plan.observations, index=0, seed=0, max_restarts=1, events=[])
    rows = allocate_rows(plan.observations, 1)
    action = plan.actions.rows(np.zeros((1, *plan.spec.action.shape), plan.spec.action.dtype))[0]
    seconds: list[float] = []
    begin = time.perf_counter()
    try:
        cell.begin(rows, 0)
        while len(seconds) < 2 or (len(seconds) < TIMING_STEPS and time.perf_counter() - begin < TIMING_S):
            start = time.perf_counter()
            cell.step(action, rows, 0)
            seconds.append(time.perf_counter() - start)
    except EnvironmentFault:
        return 0.0
    return float(np.median(seconds[1:]))
