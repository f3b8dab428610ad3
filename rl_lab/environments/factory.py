"""make_environment: N environments of one id, run in the way that suits them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv

from rl_lab.environments.async_environment import AsyncEnvironment, Limits
from rl_lab.environments.base import Environment
from rl_lab.environments.envpool_backend import make_envpool
from rl_lab.environments.handed import is_handed
from rl_lab.environments.lookup import find
from rl_lab.environments.prefetch import PrefetchEnvironment
from rl_lab.environments.recipe import Blueprint, Recipe, blueprint, can_render, close
from rl_lab.environments.several import make_several
from rl_lab.environments.snapshot import capture, has_own_state, layers
from rl_lab.environments.timing import (
    alone,
    begins_anew,
    is_worth_prefetching,
    is_worth_processes,
    measure,
    prefetch_depth,
)
from rl_lab.environments.vector import NativeEnvironment, SyncEnvironment
from rl_lab.environments.wrappers import check_wrappers
from rl_lab.environments.wrappers_observation import ActionMask
from rl_lab.types import ConfigError, EnvironmentFault, did_you_mean
from rl_lab.utils.processes import available_cores
from rl_lab.utils.seeding import STREAMS, stream_seed

ENVPOOL = "envpool/"  # ids that only EnvPool has, however they are asked to run
VECTORIZATIONS = ("auto", "native", "sync", "async", "envpool")
PREFETCH = ("auto", True, False)


def make_environment(
    *,
    id: str,
    num_envs: int = 1,
    vectorization: str = "auto",
    seed: int = 0,
    stream: str = "train_environment",
    wrappers: Sequence[Mapping[str, Any]] = (),
    kwargs: Mapping[str, Any] | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
    action_repeat: int = 1,
    time_limit: int | None = None,
    action_masks: bool = False,
    max_restarts: int = 10,
    worker_timeout_s: float = Limits.worker_timeout_s,
    worker_growth_mib: float | None = Limits.worker_growth_mib,
    prefetch_resets: bool | str = "auto",
    render: bool = False,
    spec: Mapping[str, Any] | None = None,
    tasks: Sequence[str | Mapping[str, Any]] | None = None,
) -> Environment:
    """Build and check everything an `environment:` block says; nothing is reset yet.

    `time_limit` counts agent steps and replaces the registered limit; `action_repeat` is innermost, then `wrappers`
    in their order. `max_restarts` renews itself: every 1,000 steps of an environment without a failure forgive one.
    A worker process that does not answer for `worker_timeout_s` is replaced, and so is one whose memory grew by more
    than `worker_growth_mib`. `prefetch_resets` begins episodes ahead of time in processes of their own. `spec`
    overrides labels, solved_return, max_episode_steps, description. `eval_kwargs` replace `kwargs` outside training.
    `tasks` are ids, or blocks of settings with one: several environments as one, which `id` then only names.
    """
    settings = {name: value for name, value in locals().items() if name != "tasks"}
    if tasks:
        _check_numbers({"num_envs": num_envs}, least=1)
        return make_several(tasks, settings, make_environment)
    _check_numbers({"num_envs": num_envs, "action_repeat": action_repeat, "time_limit": time_limit}, least=1)
    _check_numbers({"max_restarts": max_restarts}, least=0)
    _check_name("vectorization", vectorization, VECTORIZATIONS)
    _check_workers(worker_timeout_s, worker_growth_mib, prefetch_resets, vectorization)
    _check_name("stream", stream, tuple(STREAMS))
    seeds = [stream_seed(seed, stream, i) for i in range(num_envs)]
    limits = Limits(max_restarts, worker_timeout_s, worker_growth_mib)
    arguments = {**(kwargs or {}), **((eval_kwargs or {}) if stream != "train_environment" else {})}
    if vectorization == "envpool" or id.startswith(ENVPOOL):
        _refuse_single_settings(wrappers, action_repeat, time_limit, action_masks)
        pool = {"num_envs": num_envs, "seed": seeds[0], "max_restarts": max_restarts}
        return make_envpool(id.removeprefix(ENVPOOL), kwargs=arguments, spec=spec or {}, **pool)
    find(id)  # first: a user's package may register the wrappers named below
    recipe = Recipe(
        id=id,
        kwargs=arguments,
        wrappers=check_wrappers(wrappers),
        action_repeat=action_repeat,
        time_limit=time_limit,
        action_masks=action_masks,
        render=render,
        overrides=dict(spec or {}),
    )
    return _run(recipe, seeds, vectorization, prefetch_resets, limits)


def _run(
    recipe: Recipe, seeds: list[int], vectorization: str, prefetch_resets: bool | str, limits: Limits
) -> Environment:
    """The environments, in the way that was asked for or that suits them."""
    scratch = recipe.build()
    plan = blueprint(scratch, recipe)
    native = partial(make_native, find(recipe.id), recipe, scratch, len(seeds))
    is_alone = _is_alone(scratch)
    with preserved_random_state():
        _ask_for_masks(scratch, plan)
        way, depth = ("async" if prefetch_resets is True else vectorization), int(prefetch_resets is True)
        if is_alone:
            way, depth = "async", 0
        elif way == "auto":
            way, depth = _choose(recipe, plan, scratch, len(seeds), native, prefetch_resets)
    close(scratch)
    if way == "native":
        return NativeEnvironment(native, plan, num_envs=len(seeds), seed=seeds[0], max_restarts=limits.max_restarts)
    if way == "sync" or (is_debugged() and not is_alone):
        return SyncEnvironment(recipe.build, plan, seeds=seeds, max_restarts=limits.max_restarts)
    if depth:
        return PrefetchEnvironment(recipe, plan, seeds=seeds, limits=limits, depth=depth)
    return AsyncEnvironment(recipe, plan, seeds=seeds, limits=limits, num_workers=len(seeds) if is_alone else None)


def _refuse_single_settings(
    wrappers: Sequence[Any], action_repeat: int, time_limit: int | None, action_masks: bool
) -> None:
    """EnvPool has settings of its own for these: `kwargs`."""
    if wrappers or action_repeat > 1 or time_limit is not None or action_masks:
        raise ConfigError(
            "environment.vectorization is 'envpool', which takes no wrappers, action_repeat, time_limit or "
            "action_masks: write EnvPool's own settings into environment.kwargs, or vectorization: auto."
        )


def _is_alone(env: gym.Env) -> bool:
    """Some simulators allow one environment per process, evaluation's included."""
    return getattr(env.unwrapped, "is_alone_in_its_process", False)


def _ask_for_masks(scratch: gym.Env, plan: Blueprint) -> None:
    """Masks show themselves with the first row only: where there are none, no run should have begun."""
    if any(isinstance(layer, ActionMask) for layer in layers(scratch)):
        with suppress(EnvironmentFault):  # errors of its own come later, where they are forgiven
            alone(scratch, plan, max_restarts=0).reset()


def _check_workers(timeout_s: float, growth_mib: float | None, prefetch_resets: bool | str, vectorization: str) -> None:
    if not timeout_s > 0:
        raise ConfigError(f"environment.worker_timeout_s is {timeout_s!r}: write a number of seconds above 0.")
    if growth_mib is not None and not growth_mib > 0:
        raise ConfigError(
            f"environment.worker_growth_mib is {growth_mib!r}: write a number of MiB above 0, or null for none."
        )
    if prefetch_resets not in PREFETCH:
        raise ConfigError(f"environment.prefetch_resets is {prefetch_resets!r}: write auto, true or false.")
    if prefetch_resets is True and vectorization in ("sync", "native"):
        raise ConfigError(
            f"environment.prefetch_resets is true, but vectorization: {vectorization} has no processes that could "
            "begin episodes ahead of time. Write vectorization: async or auto."
        )


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


def _choose(
    recipe: Recipe,
    plan: Blueprint,
    scratch: gym.Env,
    num_envs: int,
    native: Callable[[], VectorEnv],
    prefetch: bool | str,
) -> tuple[str, int]:
    """The way, and how many episodes each environment begins ahead of time. Whatever it is, the rows are the same, but
    for native vector environments, which draw from one generator."""
    if (not recipe.kwargs or _has_the_arguments_of_one(recipe)) and _can_be_saved(native):
        return "native", 0
    cores = available_cores()
    if cores == 1 or is_debugged() or is_handed(recipe.id) or (num_envs == 1 and prefetch is False):
        return "sync", 0  # a script's objects stay in its process
    timing = measure(scratch, plan)
    if prefetch and is_worth_prefetching(timing, num_envs, cores) and begins_anew(recipe, plan, scratch):
        return "async", prefetch_depth(timing, num_envs, cores)
    return ("async" if num_envs > 1 and is_worth_processes(timing.step_s, num_envs, cores) else "sync"), 0


def _has_the_arguments_of_one(recipe: Recipe) -> bool:
    """Whether the vector entry point takes the kwargs of a single environment, to the same effect."""
    entry_point = find(recipe.id).vector_entry_point
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    return getattr(creator, "has_the_arguments_of_one", False)


def _can_be_saved(native: Callable[[], VectorEnv]) -> bool:
    """Only a vector environment of plain attributes can be resumed exactly."""
    try:
        env = native()
    except ConfigError:
        return False  # single environments work
    if has_own_state(env.unwrapped):
        close(env)
        return True
    env.reset(seed=0)
    env.step(np.zeros(env.action_space.shape, env.action_space.dtype))
    mode = capture(env)["mode"]
    close(env)
    return mode != "restart"


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
