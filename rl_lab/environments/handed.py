"""Environments that a script hands over as objects: a class, a function that makes one, or one environment.

They get an id of this process, `python/Name`, under which everything else finds them like any registered one.
"""

from __future__ import annotations

import copy
import inspect
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from rl_lab.types import ConfigError

NAMESPACE = "python/"
EnvSource = str | gym.Env | Callable[..., gym.Env]
"""What `env=` takes: an id, one environment, or what makes environments."""

_sources: dict[str, Any] = {}  # id -> what was handed over, kept so that its address is not used twice
_newest: dict[str, weakref.ref[gym.Env]] = {}  # id -> the environment made last


class Copies:
    """Makes copies of one environment, which itself is never reset, stepped or closed."""

    def __init__(self, env: gym.Env) -> None:
        self._original = env
        self()  # what cannot be copied is refused here

    def __call__(self) -> gym.Env:
        try:
            return copy.deepcopy(self._original)
        except Exception as error:  # whatever a simulator inside raises
            name = type(self._original.unwrapped).__name__
            raise ConfigError(
                f"env: this {name} cannot be copied ({type(error).__name__}: {error}), and evaluations need "
                f"environments of their own. Hand over what makes one: env={name}, or env=lambda: {name}(...)."
            ) from error


def is_handed(env_id: str) -> bool:
    return env_id.startswith(NAMESPACE)


def hand_over(env: EnvSource) -> str:
    """The id under which an environment object is found in this process; an id stays as it is."""
    if isinstance(env, str):
        return env
    if isinstance(env, gym.vector.VectorEnv) or (isinstance(env, type) and issubclass(env, gym.vector.VectorEnv)):
        raise ConfigError(
            "env is a vector environment; RL Lab runs the copies itself. Hand over what makes one of them, such as "
            "env=MyEnv with environment__num_envs=8."
        )
    if not isinstance(env, gym.Env) and not callable(env):
        raise ConfigError(
            f"env is {env!r}: write an id such as 'CartPole-v1', a gymnasium.Env, or what makes one "
            "(its class, or a function without arguments)."
        )
    known = next((env_id for env_id, source in _sources.items() if source is env), None)
    if known is None:
        known = _free_id(env)
        entry_point: Any = Copies(env) if isinstance(env, gym.Env) else env
        gym.registry[known] = GymnasiumSpec(known, entry_point=entry_point)
        _sources[known] = env
    return known


def is_one(env: EnvSource) -> bool:
    """Whether it is one environment and nothing that makes more."""
    return isinstance(env, gym.Env)


def make(spec: GymnasiumSpec, settings: dict[str, Any], *, render: bool) -> gym.Env:
    """One environment from what was handed over under this spec's id."""
    source: Any = spec.entry_point
    if render and _takes_render_mode(source):
        settings = {"render_mode": "rgb_array", **settings}
    env = source(**settings)
    if not isinstance(env, gym.Env):
        raise ConfigError(
            f"env: what was handed over as '{spec.id}' returned a {type(env).__name__}, not a gymnasium.Env. Return "
            "an environment, such as gymnasium.make('CartPole-v1') or MyEnv()."
        )
    if (before := _newest.get(spec.id)) is not None and before() is env.unwrapped:
        raise ConfigError(
            f"env: what was handed over as '{spec.id}' returned the same environment twice. Make a new one in every "
            "call, or hand over the environment itself, which is then copied."
        )
    _newest[spec.id] = weakref.ref(env.unwrapped)
    return env


def not_here(env_id: str) -> str:
    """Why an id of another process means nothing in this one."""
    return (
        f"environment '{env_id}' is an object that a Python script handed over (env=...), and no config can hold it. "
        "Hand it over again in Python: rl_lab.resume(run, env=...), and likewise rl_lab.evaluate, play and load. "
        "The command line finds environments that a package registers: package:Name-v0 (docs/add_an_environment.md)."
    )


def _free_id(env: Any) -> str:
    """A class or function defined anew, as by a notebook's cell, takes its old place; others get a number."""
    maker = env.func if isinstance(env, partial) else env
    name = type(env.unwrapped).__name__ if isinstance(env, gym.Env) else getattr(maker, "__name__", "")
    plain = re.sub(r"\W", "_", "" if name == "<lambda>" else name) or "environment"
    number, env_id = 1, f"{NAMESPACE}{plain}"
    while env_id in _sources and not _is_redefined(_sources[env_id], env):
        number, env_id = number + 1, f"{NAMESPACE}{plain}_{number + 1}"
    return env_id


def _is_redefined(before: Any, now: Any) -> bool:
    places = [(getattr(each, "__module__", None), getattr(each, "__qualname__", None)) for each in (before, now)]
    return places[0] == places[1] and places[0][1] is not None and "<lambda>" not in str(places[0][1])


def _takes_render_mode(source: Any) -> bool:
    """A class must also say that it draws RGB arrays."""
    modes = getattr(source, "metadata", {"render_modes": ["rgb_array"]}).get("render_modes", ())
    try:
        return "render_mode" in inspect.signature(source).parameters and "rgb_array" in modes
    except (TypeError, ValueError):  # no signature: something written in C
        return False
