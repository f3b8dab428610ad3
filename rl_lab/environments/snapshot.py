"""An environment in mid-episode as plain data, by the first of three ways that is exact for it.

own         the environment has get_state() and set_state(state): those, its generator, and its wrappers' attributes
attributes  every attribute of the environment and its wrappers is plain data: all of them
replay      anything else (physics engines, emulators): the episode's seed and the actions since its reset

Nothing is pickled, so reading a snapshot cannot run code. `capture` and `restore` are each other's inverse on a
freshly built environment of the same id and wrappers; `restore` says when it could not be.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from rl_lab.environments.plain import NotPlainError, from_text, text_or_none, to_text
from rl_lab.types import RunError

# How an environment is built and drawn, not where it stands; the freshly built one has its own.
IGNORED_NAMES = frozenset(
    "env spec _cached_spec metadata _metadata render_mode _saved_kwargs _ezpickle_args _ezpickle_kwargs "
    "action_space observation_space _action_space _observation_space "
    "single_action_space single_observation_space _single_action_space _single_observation_space _previous_data".split()
)
IGNORED_KINDS = (
    gym.Space,
    GymnasiumSpec,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
DRAWING_MODULES = ("pygame", "glfw", "OpenGL")


def layers(env: Any) -> list[Any]:
    """The wrapper chain, outermost first, ending with the environment itself (single or vector)."""
    chain = [env]
    while isinstance(env, gym.Wrapper | gym.vector.VectorWrapper):
        env = env.env
        chain.append(env)
    return chain


def capture(env: Any, log: Sequence[Any] | None = None) -> dict[str, Any]:
    """A snapshot. `log` holds the actions since the last reset; without it an environment that is neither plain
    nor has its own state can only be restarted."""
    chain = layers(env)
    snapshot: dict[str, Any] = {"classes": [type(layer).__name__ for layer in chain]}
    if has_own_state(chain[-1]) and (text := text_or_none(_own_content(chain))) is not None:
        return {"mode": "own", **snapshot, "text": text}
    if (text := text_or_none([attributes(layer, chain) for layer in chain])) is not None:
        return {"mode": "attributes", **snapshot, "text": text}
    if log is None:
        return {"mode": "restart", **snapshot}
    wrappers = [text_or_none(attributes(layer, chain)) for layer in chain[:-1]]
    return {"mode": "replay", **snapshot, "actions": np.asarray(log), "wrappers": wrappers}


def what_is_not_plain(env: Any) -> str | None:
    """The first attribute that stands in the way of an attribute snapshot, None when all is plain."""
    chain = layers(env)
    for layer in chain:
        try:
            to_text(attributes(layer, chain))
        except NotPlainError as obstacle:
            return f"{type(layer).__name__}{obstacle}"
    return None


def restore(env: Any, snapshot: dict[str, Any], *, episode_seed: int | None) -> tuple[bool, Any]:
    """Put `env` where the snapshot was taken. Returns (exact as far as can be seen here, the observation a replay
    ended with or None); the caller compares that observation with the stored one."""
    chain = layers(env)
    names = [type(layer).__name__ for layer in chain]
    if names != list(snapshot["classes"]):
        raise RunError(
            f"the checkpoint's environment is built of {' > '.join(snapshot['classes'])}, this one of "
            f"{' > '.join(names)}: resume with the same environment and wrappers, or use a warm start."
        )
    mode = snapshot["mode"]
    if mode == "attributes":
        _set_attributes(chain, from_text(snapshot["text"]))
        return True, None
    if mode == "own":
        return _restore_own(chain, snapshot["text"]), None
    if mode == "replay":
        return True, _replay(chain, snapshot, episode_seed)
    return False, None


def attributes(layer: Any, chain: list[Any]) -> dict[str, Any]:
    """The attributes that say where one layer stands. A class with __slots__ hides some, so it counts as not plain."""
    if any(cls.__dict__.get("__slots__") for cls in type(layer).__mro__):
        return {"__slots__": object()}

    def is_ignored(name: str, value: Any) -> bool:
        if name in IGNORED_NAMES or isinstance(value, IGNORED_KINDS) or _is_drawing(value):
            return True
        return any(value is other for other in chain)

    return {name: value for name, value in vars(layer).items() if not is_ignored(name, value)}


def has_own_state(env: Any) -> bool:
    """Whether get_state() and set_state(state) can be called that way (MuJoCo's set_state takes two arguments)."""
    try:
        inspect.signature(env.get_state).bind()
        inspect.signature(env.set_state).bind(None)
    except (AttributeError, TypeError, ValueError):  # not there, other arguments, or a C function without a signature
        return False
    return True


def _is_drawing(value: Any) -> bool:
    """Surfaces, clocks, fonts and windows, alone or collected in a list or dict."""
    if isinstance(value, list | tuple | dict) and len(value) > 0:
        items = value.values() if isinstance(value, dict) else value
        return all(_is_drawing(item) for item in items)
    return type(value).__module__.partition(".")[0] in DRAWING_MODULES


def _own_content(chain: list[Any]) -> dict[str, Any]:
    return {
        "state": chain[-1].get_state(),
        "random": vars(chain[-1]).get("_np_random"),
        "wrappers": [attributes(layer, chain) for layer in chain[:-1]],
    }


def _restore_own(chain: list[Any], text: str) -> bool:
    content = from_text(text)
    chain[-1].set_state(content["state"])
    chain[-1].__dict__["_np_random"] = content["random"]  # get_state rarely includes it
    _set_attributes(chain, content["wrappers"])
    return to_text(_own_content(chain)) == text


def _set_attributes(chain: list[Any], saved: Sequence[dict[str, Any] | None]) -> None:
    """Outermost first; None, or nothing saved of the innermost: a layer stays as it is."""
    for layer, values in zip(chain, saved, strict=False):
        if values is not None:
            for name, value in attributes(layer, chain).items():
                if name not in values and value is not None:  # None: a window not opened yet
                    del layer.__dict__[name]
            layer.__dict__.update(values)  # not setattr: a property would do more than put the value back


def _replay(chain: list[Any], snapshot: dict[str, Any], episode_seed: int | None) -> Any:
    env = chain[0]
    observation, _ = env.reset(seed=episode_seed)
    actions = np.asarray(snapshot["actions"])
    for action in actions.tolist() if actions.ndim == 1 else actions:
        observation = env.step(action)[0]
    # Counters that outlive an episode (visit counts, say) were not replayed from the first episode on.
    _set_attributes(chain, [None if text is None else from_text(text) for text in snapshot["wrappers"]])
    return observation
