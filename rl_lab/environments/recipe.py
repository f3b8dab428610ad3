"""How one gymnasium.Env is made: plain data that a worker process can be sent, and the EnvSpec that follows from it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.envs.registration import load_env_creator

from rl_lab.environments import handed
from rl_lab.environments.actions import ActionConverter
from rl_lab.environments.handed import is_handed
from rl_lab.environments.labels import action_labels
from rl_lab.environments.lookup import find, missing_extra, newest_version, suite_of
from rl_lab.environments.mujoco_drawing import draw_alone
from rl_lab.environments.rendering import prepare_headless
from rl_lab.environments.snapshot import layers
from rl_lab.environments.spaces import ObservationConverter
from rl_lab.environments.wrappers import WRAPPERS, apply_wrappers, wrong_kinds
from rl_lab.types import ActionSpec, ConfigError, EnvSpec, RLLabError, did_you_mean

SPEC_KEYS = {"labels": list | tuple, "solved_return": int | float, "max_episode_steps": int, "description": str}
SPEC_VALUES = {"labels": "a list of names", "description": "a text"}  # anything else is a number


@dataclass(frozen=True)
class Recipe:
    """One environment's settings. `time_limit` counts agent steps and replaces the registered limit."""

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: tuple[dict[str, Any], ...] = ()
    action_repeat: int = 1
    time_limit: int | None = None
    action_masks: bool = False
    render: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)  # the `spec:` block

    def modules(self) -> tuple[str, ...]:
        """What a fresh process must import before it can build: packages that register wrappers."""
        names = {getattr(WRAPPERS[entry["id"]], "__module__", "") for entry in self.wrappers}
        return tuple(sorted(name for name in names if name and not name.startswith(("rl_lab.", "__main__"))))

    def build(self) -> gym.Env:
        """The environment with its wrappers, not yet reset."""
        entries: list[dict[str, Any]] = [*self.wrappers]
        if self.action_repeat > 1:
            entries.insert(0, {"id": "action_repeat", "count": self.action_repeat})
        if self.action_masks:
            entries.append({"id": "action_mask"})
        if self.time_limit is not None:
            entries.append({"id": "time_limit", "steps": self.time_limit})
        return apply_wrappers(self._make(find(self.id)), entries)

    def _make(self, spec: GymnasiumSpec) -> gym.Env:
        suite = suite_of(spec)
        prepare_headless(uses_mujoco=suite is None or suite.uses_mujoco)
        settings = dict(self.kwargs)
        needs_render = any(getattr(WRAPPERS[entry["id"]], "needs_render", False) for entry in self.wrappers)
        try:
            if is_handed(spec.id):
                return handed.make(spec, settings, render=self.render or needs_render)
            self._check_kwargs(spec)
            if self.time_limit is not None:
                settings["max_episode_steps"] = -1  # Gymnasium's way to say: no limit
            if (self.render or needs_render) and can_render(spec.entry_point):
                settings["render_mode"] = "rgb_array"
            # Our checker examines environments once, on request; Gymnasium's would do so on every step.
            env = gym.make(spec, disable_env_checker=True, **settings)
            draw_alone(env)
            return env
        except RLLabError:
            raise
        except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
            raise missing_extra(self.id, suite, error) from error
        except ImportError as error:
            newest = newest_version(spec.id)
            hint = f" Write {newest}." if newest and newest != spec.id else ""
            raise ConfigError(f"environment '{self.id}' cannot be made: {error}{hint}") from error
        except Exception as error:  # whatever a constructor raises when it is given wrong arguments
            raise ConfigError(self._why_not_made(spec, error)) from error

    def _check_kwargs(self, spec: GymnasiumSpec) -> None:
        """Of our own suites: the annotations of others may mean less."""
        creator = _creator(spec.entry_point) if self.kwargs else None
        if creator is not None and str(getattr(creator, "__module__", "")).startswith("rl_lab."):
            for key, allowed in wrong_kinds(creator, self.kwargs).items():
                raise ConfigError(
                    f"environment.kwargs.{key} of '{self.id}' is {self.kwargs[key]!r}: it must be {allowed}."
                )

    def _why_not_made(self, spec: GymnasiumSpec, error: Exception) -> str:
        reason = f"{type(error).__name__}: {error}".partition(" was raised from the environment creator")[0]
        if not self.kwargs:
            return f"environment '{self.id}' cannot be made: its constructor raised {reason}."
        known = [*inspect.signature(_creator(spec.entry_point)).parameters]
        unknown = [key for key in self.kwargs if key not in known and "argument" in reason]
        hint = f"{did_you_mean(unknown[0], known)} It takes: {', '.join(known)}." if unknown else ""
        return f"environment '{self.id}' does not accept kwargs {self.kwargs}: {reason}.{hint}"


def close(env: gym.Env | gym.vector.VectorEnv) -> str:
    """Close an environment; what it raised, if it did: nothing depends on it, the garbage collector has the rest."""
    try:
        env.close()
    except Exception as error:  # noqa: BLE001 (user code)
        return f"raised {type(error).__name__}: {error} while closing"
    return ""


def _creator(entry_point: Any) -> Any:
    return load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point


def can_render(entry_point: Any) -> bool:
    """Whether it takes a render mode, and, where it is a class, says that it draws RGB arrays."""
    creator = _creator(entry_point)
    parameters = inspect.signature(creator).parameters.values()
    if inspect.isfunction(creator):
        return any(parameter.name == "render_mode" for parameter in parameters)
    takes_mode = any(each.name == "render_mode" or each.kind is each.VAR_KEYWORD for each in parameters)
    metadata = getattr(creator, "metadata", None)
    return takes_mode and isinstance(metadata, Mapping) and "rgb_array" in metadata.get("render_modes", ())


@dataclass(frozen=True)
class Blueprint:
    """What is known of an environment before N of them run: its spec and how to convert for it."""

    spec: EnvSpec
    observations: ObservationConverter
    actions: ActionConverter


def blueprint(env: gym.Env, recipe: Recipe) -> Blueprint:
    """Read an environment's spaces and limits."""
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(env, name, None), gym.Space):
            raise ConfigError(f"environment '{recipe.id}' has no {name}: set self.{name} in its __init__.")
    actions = ActionConverter(env.action_space, env_id=recipe.id)
    observations = ObservationConverter(env.observation_space, env_id=recipe.id, num_actions=actions.num_mask_entries)
    max_episode_steps, frames_per_step = time_of(env)
    spec = EnvSpec(
        id=recipe.id,
        observation=observations.specs,
        action=replace(actions.spec, labels=action_labels(env, _num_labels(actions.spec))),
        max_episode_steps=max_episode_steps,
        solved_return=None if env.spec is None else env.spec.reward_threshold,
        frames_per_step=frames_per_step,
        render_fps=max(1, round((env.metadata.get("render_fps") or 30) / frames_per_step)),
        description=observations.description,
        outcomes=tuple(dict.fromkeys(name for layer in reversed(layers(env)) for name in outcomes_of(layer))),
    )
    return Blueprint(override_spec(spec, recipe.overrides), observations, actions)


def outcomes_of(layer: gym.Env) -> tuple[str, ...]:
    """The names of the numbers that an episode of this environment or wrapper ends with."""
    names = getattr(layer, "outcomes", ())
    if isinstance(names, str):
        raise ConfigError(f"{type(layer).__name__}.outcomes is '{names}': write self.outcomes = ('{names}',).")
    return tuple(names)


def _num_labels(action: ActionSpec) -> int:
    return len(action.sizes) if action.kind == "multi_discrete" else action.sizes[0]


def time_of(env: gym.Env) -> tuple[int | None, int]:
    """The time limit in agent steps and the frames of one agent step, seen through all wrappers."""
    limit, frames = None, 1
    for layer in reversed(layers(env)):
        if isinstance(layer, gym.wrappers.TimeLimit):
            own = layer._max_episode_steps
            limit = own if limit is None else min(limit, own)
        repeat = vars(layer).get("frames_per_agent_step", 1)
        frames *= repeat
        limit = None if limit is None else -(-limit // repeat)
        limit = vars(layer).get("max_agent_steps", limit)  # an environment that counts for itself
    return limit, frames


def override_spec(spec: EnvSpec, overrides: Mapping[str, Any]) -> EnvSpec:
    """Apply a user's `spec:` block."""
    changes: dict[str, Any] = {}
    for key, value in overrides.items():
        if key not in SPEC_KEYS:
            raise ConfigError(
                f"environment.spec has no key '{key}'.{did_you_mean(key, SPEC_KEYS)} It takes: {', '.join(SPEC_KEYS)}."
            )
        if value is not None:
            if not isinstance(value, SPEC_KEYS[key]) or isinstance(value, bool):
                wanted = SPEC_VALUES.get(key, "a number")
                raise ConfigError(f"environment.spec.{key} is {value!r}: write {wanted}, or null.")
            changes[key] = value
    labels = changes.pop("labels", None)
    if labels is not None:
        expected = _num_labels(spec.action)
        if len(labels) != expected:
            raise ConfigError(
                f"environment.spec.labels has {len(labels)} entries, this environment has {expected} actions: "
                f"write {expected} names."
            )
        changes["action"] = replace(spec.action, labels=tuple(str(label) for label in labels))
    return replace(spec, **changes)
