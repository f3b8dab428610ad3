"""Wrappers by name, for `wrappers: [{id: frame_stack, count: 4}, ...]` in YAML.

The first wrapper of the list is closest to the environment. A user's package adds its own:

    @register_wrapper("my_wrapper")
    class MyWrapper(gymnasium.Wrapper):
        def __init__(self, env: gymnasium.Env, *, strength: float = 1.0) -> None: ...

Attributes of a wrapper should be plain data, so that exact resume can save them (see snapshot.py).
Those that change actions and rewards live here, those that change observations in wrappers_observation.py.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_lab.types import ConfigError, did_you_mean

StepResult = tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]
WRAPPERS: dict[str, Callable[..., gym.Env]] = {}
KINDS: dict[Any, tuple[type, str]] = {  # of an argument, by its annotation
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "true or false"),
    str: (str, "a text"),
}


def register_wrapper(name: str) -> Callable[[Callable[..., gym.Env]], Callable[..., gym.Env]]:
    """Class decorator: the wrapper can be named in YAML. A name is given once."""

    def add(wrapper: Callable[..., gym.Env]) -> Callable[..., gym.Env]:
        known = WRAPPERS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (wrapper.__module__, wrapper.__qualname__):
            raise ConfigError(f"wrapper '{name}' is already registered by {known.__module__}: choose another name.")
        WRAPPERS[name] = wrapper
        return wrapper

    return add


def with_outcome(info: dict[str, Any], **outcome: float) -> dict[str, Any]:
    """The info with these outcomes beside those of the layers within."""
    within = info.get("outcome")  # some environments use the word for something else
    return {**info, "outcome": {**(within if isinstance(within, dict) else {}), **outcome}}


def check_wrappers(wrappers: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The same list with every id and argument known, or a ConfigError before anything is built."""
    for place, entry in enumerate(wrappers):
        where = f"environment.wrappers[{place}]"
        if not isinstance(entry, Mapping) or "id" not in entry:
            raise ConfigError(f"{where} is {entry!r}: write a mapping with an id, such as {{id: grey}}.")
        name = entry["id"]
        if not isinstance(name, str) or name not in WRAPPERS:
            raise ConfigError(
                f"{where}: there is no wrapper '{name}'.{did_you_mean(str(name), WRAPPERS)} "
                f"Known: {', '.join(sorted(WRAPPERS))}."
            )
        parameters = list(inspect.signature(WRAPPERS[name]).parameters.values())[1:]  # the first is the environment
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            continue
        names = [parameter.name for parameter in parameters]
        for key in entry:
            if key not in (*names, "id"):
                raise ConfigError(
                    f"{where}: wrapper '{name}' has no argument '{key}'.{did_you_mean(key, names)} "
                    f"It takes: {', '.join(names) or 'none'}."
                )
        missing = [p.name for p in parameters if p.default is p.empty and p.name not in entry]
        if missing:
            raise ConfigError(f"{where}: wrapper '{name}' needs {', '.join(missing)}.")
        _check_kinds(where, entry)
    return tuple({str(key): value for key, value in entry.items()} for entry in wrappers)


def _check_kinds(where: str, entry: Mapping[str, Any]) -> None:
    arguments = {key: value for key, value in entry.items() if key != "id"}
    for key, allowed in wrong_kinds(WRAPPERS[entry["id"]], arguments).items():
        raise ConfigError(f"{where}: wrapper '{entry['id']}': {key} is {entry[key]!r}, it must be {allowed}.")


def wrong_kinds(creator: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, str]:
    """The arguments that are not what their annotations say, such as a text where a number belongs, and what each must
    be: much would be taken at first and fail at every step."""
    try:
        parameters = inspect.signature(creator, eval_str=True).parameters
    except NameError:  # an annotation of a user's that cannot be read
        return {}
    wrong = {}
    for key, value in arguments.items():
        hint = parameters[key].annotation if key in parameters else None
        kind, allowed = KINDS.get(hint, (object, ""))
        if not isinstance(value, kind) or (isinstance(value, bool) and hint in (int, float)):
            wrong[key] = allowed
    return wrong


def apply_wrappers(env: gym.Env, wrappers: Sequence[Mapping[str, Any]]) -> gym.Env:
    """Wrap from the inside out."""
    for entry in wrappers:
        name, arguments = entry["id"], {key: value for key, value in entry.items() if key != "id"}
        try:
            env = WRAPPERS[name](env, **arguments)
        except ConfigError as error:
            raise ConfigError(f"wrapper '{name}': {error}") from error
        except Exception as error:  # a user's wrapper, or an argument of the wrong kind
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"wrapper '{name}' cannot be made with {arguments}: {what}.") from error
    return env


def require_positive(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}, it must be a whole number of at least 1.")


def require_order(low: float, high: float) -> None:
    if low >= high:
        raise ConfigError(f"low={low} must be below high={high}.")


def can_be_flat(space: spaces.Space) -> bool:
    """Whether an observation can be made one vector."""
    try:
        return space.is_np_flattenable
    except NotImplementedError:  # spaces of other packages
        return False


# --- time --------------------------------------------------------------------------------------


@register_wrapper("action_repeat")
@register_wrapper("frame_skip")
class ActionRepeat(gym.Wrapper):
    """Each action is taken `count` times: rewards add up, the last observation is returned, an end stops early.
    `frame_skip` is the same under the name it has for video games.

    An environment with an attribute `is_observed` and a method `observe()` renders no frame in between.
    """

    def __init__(self, env: gym.Env, count: int) -> None:
        require_positive(count=count)
        super().__init__(env)
        self.frames_per_agent_step = count
        between = env
        while isinstance(between, gym.wrappers.TimeLimit | gym.wrappers.OrderEnforcing):
            between = between.env
        self.looks_on_demand = hasattr(between, "is_observed")  # no other wrapper needs the frames in between

    def step(self, action: Any) -> StepResult:
        base: Any = self.unwrapped if self.looks_on_demand else None
        if base is not None:
            base.is_observed = False
        total = 0.0
        for _ in range(self.frames_per_agent_step):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        if base is not None:
            base.is_observed = True
            observation = base.observe()
        return observation, total, terminated, truncated, info


@register_wrapper("time_limit")
class TimeLimit(gym.wrappers.TimeLimit):
    """Ends an episode after `steps` steps, not as a terminal: values are bootstrapped there."""

    def __init__(self, env: gym.Env, steps: int) -> None:
        require_positive(steps=steps)
        super().__init__(env, max_episode_steps=steps)


# --- rewards -----------------------------------------------------------------------------------


@register_wrapper("scale_reward")
class ScaleReward(gym.wrappers.TransformReward):
    """reward * scale"""

    def __init__(self, env: gym.Env, scale: float) -> None:
        super().__init__(env, lambda reward: float(reward) * scale)


@register_wrapper("clip_reward")
class ClipReward(gym.wrappers.TransformReward):
    """reward clipped to [low, high]"""

    def __init__(self, env: gym.Env, low: float = -1.0, high: float = 1.0) -> None:
        require_order(low, high)
        super().__init__(env, lambda reward: float(np.clip(float(reward), low, high)))  # NaN stays NaN


@register_wrapper("sign_reward")
class SignReward(gym.wrappers.TransformReward):
    """-1, 0 or 1"""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env, lambda reward: float(np.sign(float(reward))))


@register_wrapper("shift_reward")
class ShiftReward(gym.wrappers.TransformReward):
    """reward + shift"""

    def __init__(self, env: gym.Env, shift: float) -> None:
        super().__init__(env, lambda reward: float(reward) + shift)


@register_wrapper("step_penalty")
class StepPenalty(gym.wrappers.TransformReward):
    """reward - penalty on every step, so that short episodes pay"""

    def __init__(self, env: gym.Env, penalty: float) -> None:
        super().__init__(env, lambda reward: float(reward) - penalty)


@register_wrapper("state_count_bonus")
class StateCountBonus(gym.Wrapper):
    """reward + scale / sqrt(visits of this observation rounded to `decimals`); visits outlive episodes"""

    remembers_episodes = True

    def __init__(self, env: gym.Env, scale: float = 0.1, decimals: int = 1) -> None:
        super().__init__(env)
        if not can_be_flat(env.observation_space):
            raise ConfigError(f"it cannot count {env.observation_space}: use select_keys to drop a part before it.")
        self.scale, self.decimals = scale, decimals
        self.visits: dict[str, int] = {}

    def step(self, action: Any) -> StepResult:
        observation, reward, terminated, truncated, info = self.env.step(action)
        flat = np.asarray(spaces.flatten(self.env.observation_space, observation), dtype=np.float64)
        # + 0.0 makes -0.0 and 0.0 one state.
        key = hashlib.blake2b((np.round(flat, self.decimals) + 0.0).tobytes(), digest_size=8).hexdigest()
        self.visits[key] = self.visits.get(key, 0) + 1
        return observation, float(reward) + self.scale / self.visits[key] ** 0.5, terminated, truncated, info


# --- actions -----------------------------------------------------------------------------------


def _require_action_space(env: gym.Env, kind: type[spaces.Space]) -> Any:
    if not isinstance(env.action_space, kind):
        raise ConfigError(f"it needs a {kind.__name__} action space, this environment has {env.action_space}.")
    return env.action_space


@register_wrapper("remap_actions")
class RemapActions(gym.Wrapper):
    """Only the listed actions remain, in the listed order; masks are remapped with them (those that a method tells by
    the wrapper `action_mask`)."""

    def __init__(self, env: gym.Env, actions: Sequence[int]) -> None:
        space = _require_action_space(env, spaces.Discrete)
        self.allowed = [int(action) for action in actions]
        outside = [action for action in self.allowed if not space.contains(action)]
        if outside or not self.allowed:
            raise ConfigError(
                f"actions {list(actions)} must name at least one of "
                f"{int(space.start)} to {int(space.start + space.n - 1)}; wrong: {outside}."
            )
        super().__init__(env)
        self.first_action = int(space.start)
        self.action_space = spaces.Discrete(len(self.allowed))
        seen = env.observation_space
        self.shows_mask = isinstance(seen, spaces.Dict) and "action_mask" in seen.spaces
        if self.shows_mask:
            mask = spaces.MultiBinary(len(self.allowed))
            self.observation_space = spaces.Dict({**seen.spaces, "action_mask": mask})  # type: ignore[attr-defined]

    def remap(self, values: Sequence[Any]) -> list[Any]:
        """The entries (labels, mask bits) of the actions that remain."""
        return [values[action - self.first_action] for action in self.allowed]

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        return self._remap_observation(observation), self._remap_mask(info)

    def step(self, action: Any) -> StepResult:
        observation, reward, terminated, truncated, info = self.env.step(self.allowed[int(action)])
        return self._remap_observation(observation), reward, terminated, truncated, self._remap_mask(info)

    def _remap_observation(self, observation: Any) -> Any:
        return self._remap_mask(observation) if self.shows_mask else observation

    def _remap_mask(self, holder: dict[str, Any]) -> dict[str, Any]:
        if "action_mask" in holder:
            return {**holder, "action_mask": np.asarray(self.remap(holder["action_mask"]), np.int8)}
        return holder


@register_wrapper("discretise_actions")
class DiscretiseActions(gym.wrappers.TransformAction):
    """A bounded Box as `bins` evenly spaced values per dimension, both bounds included"""

    def __init__(self, env: gym.Env, bins: int) -> None:
        space = _require_action_space(env, spaces.Box)
        if not isinstance(bins, int) or bins < 2 or not space.is_bounded():
            raise ConfigError(
                f"bins is {bins!r} for {space}; it must be a whole number of at least 2 "
                "and the space must have finite bounds (clip_actions gives it some)."
            )
        values = np.linspace(space.low.reshape(-1), space.high.reshape(-1), bins).astype(space.dtype)  # [bins, A]
        dimensions = np.arange(values.shape[1])
        chosen = spaces.Discrete(bins) if len(dimensions) == 1 else spaces.MultiDiscrete([bins] * len(dimensions))
        super().__init__(env, lambda action: values[action, dimensions].reshape(space.shape), chosen)
        self.alone = [f"{value:.3g}" for value in values[:, 0].tolist()] if len(dimensions) == 1 else []

    def remap(self, labels: Sequence[Any]) -> list[Any]:
        """`torque -2`, `torque 0`, `torque 2`; with several dimensions each keeps its own label."""
        return [f"{labels[0]} {value}" for value in self.alone] if self.alone and len(labels) == 1 else list(labels)


@register_wrapper("clip_actions")
class ClipActions(gym.wrappers.TransformAction):
    """Narrows a Box to [low, high], so that policies reach those bounds with -1 and 1"""

    def __init__(self, env: gym.Env, low: float = -1.0, high: float = 1.0) -> None:
        space = _require_action_space(env, spaces.Box)
        require_order(low, high)
        box = spaces.Box(np.maximum(space.low, low), np.minimum(space.high, high), dtype=space.dtype)
        super().__init__(env, lambda action: np.clip(action, box.low, box.high), box)


@register_wrapper("widen_actions")
class WidenActions(gym.wrappers.TransformAction):
    """A Box with wider bounds, one number or one for each dimension; what lies beyond the environment's own is cut"""

    def __init__(self, env: gym.Env, low: float | Sequence[float], high: float | Sequence[float]) -> None:
        space = _require_action_space(env, spaces.Box)
        bounds = [np.asarray(bound, space.dtype) for bound in (low, high)]
        if any(bound.shape not in ((), space.shape) for bound in bounds):
            raise ConfigError(f"low={low} and high={high} must be a number, or {space.shape[0]} for the dimensions.")
        wide = [np.broadcast_to(bound, space.shape) for bound in bounds]
        if (wide[0] > space.low).any() or (wide[1] < space.high).any():
            raise ConfigError(f"low={low} and high={high} must hold the bounds {space.low} and {space.high}.")
        box = spaces.Box(wide[0], wide[1], dtype=space.dtype)
        super().__init__(env, lambda action: np.clip(action, space.low, space.high), box)


@register_wrapper("normalise_actions")
class NormaliseActions(gym.wrappers.TransformAction):
    """A bounded Box as [low, high] in every dimension, stretched to the bounds that the environment has"""

    def __init__(self, env: gym.Env, low: float = -1.0, high: float = 1.0) -> None:
        space = _require_action_space(env, spaces.Box)
        require_order(low, high)
        if not space.is_bounded():
            raise ConfigError(f"it needs finite bounds, this environment has {space} (clip_actions gives it some).")
        box = spaces.Box(low, high, space.shape, space.dtype)
        stretch = (space.high.astype(np.float64) - space.low) / (high - low)

        def to_bounds(action: Any) -> np.ndarray:
            inside = np.clip(np.asarray(action, np.float64), low, high)
            return np.clip(space.low + (inside - low) * stretch, space.low, space.high).astype(space.dtype)

        super().__init__(env, to_bounds, box)


@register_wrapper("sticky_actions")
class StickyActions(gym.Wrapper):
    """With `probability` the previous action is taken again, drawn from the environment's own generator"""

    def __init__(self, env: gym.Env, probability: float = 0.25) -> None:
        if not 0.0 <= probability <= 1.0:
            raise ConfigError(f"probability is {probability}, it must lie in [0, 1].")
        super().__init__(env)
        self.probability = probability
        self.previous_action: Any = None

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.previous_action = None
        return self.env.reset(**options)

    def step(self, action: Any) -> StepResult:
        is_stuck = self.env.unwrapped.np_random.random() < self.probability
        if is_stuck and self.previous_action is not None:
            action = self.previous_action
        self.previous_action = action.copy() if isinstance(action, np.ndarray) else action
        return self.env.step(action)
