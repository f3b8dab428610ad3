"""What a run keeps of its environment (environment.json), so that its policy acts where that is not installed: the
spaces and what a spec says beside them, as plain JSON data."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_lab.environments.actions import ActionConverter
from rl_lab.environments.recipe import Blueprint
from rl_lab.environments.spaces import ObservationConverter
from rl_lab.types import EnvSpec, RunError, TaskSpec

MOST_ENTRIES = 2**24  # of a space: an image of 2048 x 2048 x 4
FACTS = ("id", "max_episode_steps", "solved_return", "frames_per_step", "render_fps", "description")


def to_plain(blueprint: Blueprint) -> dict[str, Any]:
    """A blueprint as JSON data."""
    facts = {name: getattr(blueprint.spec, name) for name in FACTS}
    return {
        **{name: value.item() if isinstance(value, np.generic) else value for name, value in facts.items()},
        "tasks": [vars(task) for task in blueprint.spec.tasks],
        "action_labels": list(blueprint.spec.action.labels),
        "observation_space": _plain_space(blueprint.observations.space),
        "action_space": _plain_space(blueprint.actions.space),
    }


def from_plain(plain: Mapping[str, Any], *, place: str) -> Blueprint:
    """The blueprint that `to_plain` wrote; `place` is the file, for the error of one that was changed."""
    try:
        facts = {name: plain[name] for name in FACTS}
        facts["tasks"] = tuple(TaskSpec(**task) for task in plain.get("tasks", ()))
        actions = ActionConverter(_space(plain["action_space"]), env_id=facts["id"])
        observations = ObservationConverter(
            _space(plain["observation_space"]), env_id=facts["id"], num_actions=actions.num_mask_entries
        )
        action = replace(actions.spec, labels=tuple(map(str, plain["action_labels"])))
        return Blueprint(EnvSpec(observation=observations.specs, action=action, **facts), observations, actions)
    except (KeyError, TypeError, ValueError, OverflowError, AssertionError) as error:
        raise RunError(
            f"{place} does not describe an environment ({type(error).__name__}: {error}). Remove it, and the "
            "environment itself is asked, if it is installed."
        ) from error


def _plain_space(space: spaces.Space) -> dict[str, Any]:
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": [[name, _plain_space(part)] for name, part in space.spaces.items()]}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [_plain_space(part) for part in space.spaces]}
    if isinstance(space, spaces.Box):
        bounds = {"low": _numbers(space.low), "high": _numbers(space.high)}
        return {"type": "Box", **bounds, "shape": list(space.shape), "dtype": str(space.dtype)}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        arrays = {"nvec": space.nvec.tolist(), "start": np.asarray(space.start).tolist()}
        return {"type": "MultiDiscrete", **arrays, "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.n)}
    assert isinstance(space, spaces.Text), f"{space} was refused when the converters were made"
    return {"type": "Text"}


def _refuse_huge(count: int) -> None:
    """A space is made with arrays of its size: what no environment has may not take the memory."""
    if count > MOST_ENTRIES:
        raise ValueError(f"a space of {count:,} entries; at most {MOST_ENTRIES:,} are read")


def _space(plain: Mapping[str, Any]) -> spaces.Space:
    kind = plain["type"]
    if kind in ("Box", "MultiBinary"):
        shape = plain["shape" if kind == "Box" else "n"]
        _refuse_huge(math.prod(map(int, [shape] if isinstance(shape, int | float) else shape)))
    if kind in ("Discrete", "MultiDiscrete"):
        _refuse_huge(int(np.asarray(plain["n" if kind == "Discrete" else "nvec"], dtype=object).sum()))
    if kind == "Dict":
        return spaces.Dict(OrderedDict((name, _space(part)) for name, part in plain["spaces"]))
    if kind == "Tuple":
        return spaces.Tuple([_space(part) for part in plain["spaces"]])
    if kind == "Box":
        shape, dtype = tuple(plain["shape"]), np.dtype(plain["dtype"])
        low, high = (np.broadcast_to(np.array(plain[end], dtype=dtype), shape) for end in ("low", "high"))
        return spaces.Box(low, high, dtype=dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(plain["n"], start=plain["start"])
    if kind == "MultiDiscrete":
        dtype = np.dtype(plain["dtype"])
        return spaces.MultiDiscrete(
            np.array(plain["nvec"], dtype=dtype), dtype=dtype.type, start=np.array(plain["start"], dtype=dtype)
        )
    if kind == "MultiBinary":
        return spaces.MultiBinary(plain["n"])
    if kind == "Text":
        return spaces.Text(1)
    raise ValueError(f"no space is called {kind!r}")


def _numbers(bound: np.ndarray) -> Any:
    """A bound as JSON: one number where all are alike, as in images; JSON has no infinity, so that is a word."""
    values = bound.reshape(-1)
    if len(values) and (values == values[0]).all():
        return _number(values[0])
    return np.array([_number(value) for value in values], dtype=object).reshape(bound.shape).tolist()


def _number(value: Any) -> float | int | str:
    number = value.item()
    return number if math.isfinite(number) else str(number)
