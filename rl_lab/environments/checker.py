"""Tells the author of an environment exactly what is wrong with it, and what to write instead.

for finding in check_environment(lambda: MyEnv()):
    print(finding.level, finding.what, finding.cure)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from rl_lab.environments.actions import ActionConverter
from rl_lab.environments.plain import NotPlainError, to_text
from rl_lab.environments.snapshot import capture, layers, what_is_not_plain
from rl_lab.environments.spaces import ObservationConverter
from rl_lab.types import ConfigError

RESET_CURE = "Write: def reset(self, *, seed=None, options=None): super().reset(seed=seed); ...; return observation, {}"
STEP_CURE = "Return observation, reward, terminated, truncated, info (five values)."


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong ("error": training would fail or mislead) or worth knowing ("warning")."""

    level: Literal["error", "warning"]
    what: str
    cure: str


class _StopChecking(Exception):
    """What was found makes further checks pointless."""


def check_environment(make: Callable[[], gym.Env], *, steps: int = 200) -> list[Finding]:
    """Build environments with `make`, play `steps` random steps, and say what is wrong. An empty list is praise."""
    check = _Check(make, steps)
    try:
        check.run()
    except _StopChecking:
        pass
    return check.findings


class _Check:
    def __init__(self, make: Callable[[], gym.Env], steps: int) -> None:
        self.make, self.steps = make, steps
        self.findings: list[Finding] = []
        self.has_bad_observation = False

    def error(self, what: str, cure: str) -> None:
        self._add(Finding("error", what, cure))

    def warn(self, what: str, cure: str) -> None:
        self._add(Finding("warning", what, cure))

    def _add(self, finding: Finding) -> None:
        if finding.what not in [known.what for known in self.findings]:  # the same on every step: once is enough
            self.findings.append(finding)

    def run(self) -> None:
        self.env = self._call("construction", self.make, "The constructor must work without further arguments.")
        self.spaces()
        self.reset(self.env, seed=1)
        self.determinism()
        self.episodes()
        self.snapshot()

    def _call(self, place: str, function: Callable[[], Any], cure: str) -> Any:
        """User code may raise anything; here that is the finding."""
        try:
            return function()
        except Exception as error:
            self.error(f"{place} raised {type(error).__name__}: {error}", cure)
            raise _StopChecking from error

    # --- spaces ---

    def spaces(self) -> None:
        if not isinstance(self.env, gym.Env):
            self.error(f"the class {type(self.env).__name__} is no gymnasium.Env", "Write: class MyEnv(gymnasium.Env).")
            raise _StopChecking
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(self.env, name, None), gym.Space):
                self.error(f"{name} is missing or no gymnasium.Space", f"Set self.{name} in __init__.")
                raise _StopChecking
        try:
            self.actions = ActionConverter(self.env.action_space, env_id=_name(self.env))
            self.observations = ObservationConverter(
                self.env.observation_space, env_id=_name(self.env), num_actions=self.actions.num_mask_entries
            )
        except ConfigError as error:
            self.error(str(error), "Use one of the known spaces, or a wrapper that converts to one.")
            raise _StopChecking from error
        space = self.env.action_space
        if isinstance(space, gym.spaces.Box) and not space.is_bounded():
            self.warn(
                f"the action space {space} has no finite bounds, so policies act in [-1, 1] there",
                "Give the Box the bounds the simulator really has.",
            )
        space.seed(0)
        if not space.contains(space.sample()):
            self.error(f"the action space {space} does not contain its own samples", "Check its dtype and bounds.")

    # --- reset and step ---

    def reset(self, env: gym.Env, *, seed: int | None) -> Any:
        answer = self._call("reset(seed=...)", lambda: env.reset(seed=seed), RESET_CURE)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            self.error(f"reset returned {_shape_of(answer)}, not (observation, info)", RESET_CURE)
            raise _StopChecking
        self.observation(answer[0], "reset")
        if env.unwrapped._np_random_seed != seed:
            self.error("reset(seed=...) does not seed self.np_random", "Call super().reset(seed=seed) first in reset.")
        return answer[0]

    def step(self, env: gym.Env, action: Any) -> tuple[Any, ...]:
        answer = self._call(f"step({action!r})", lambda: env.step(action), "Accept every action of the action space.")
        if isinstance(answer, tuple) and len(answer) == 4:
            self.error("step returned four values: that is the old Gym interface (done)", STEP_CURE)
            raise _StopChecking
        if not (isinstance(answer, tuple) and len(answer) == 5):
            self.error(f"step returned {_shape_of(answer)}, not five values", STEP_CURE)
            raise _StopChecking
        observation, reward, terminated, truncated, info = answer
        self.observation(observation, "step")
        self.reward(reward)
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                self.error(f"{name} is {flag!r} ({type(flag).__name__}), not a boolean", f"Return bool({name}).")
        if not isinstance(info, dict):
            self.error(f"info is a {type(info).__name__}, not a dict", "Return {} when there is nothing to say.")
        return answer

    def observation(self, observation: Any, place: str) -> None:
        space = self.env.observation_space
        is_array = isinstance(observation, np.ndarray) or not isinstance(
            space, gym.spaces.Box
        )  # contains() takes lists
        if (is_array and space.contains(observation)) or self.has_bad_observation:
            return  # one example is enough
        self.has_bad_observation = True
        problem = _why_outside(space, observation)
        self.error(f"{place} returned an observation outside observation_space: {problem}", "Fix the one or the other.")

    def reward(self, reward: Any) -> None:
        if not isinstance(reward, int | float | np.integer | np.floating):
            self.error(f"reward is a {type(reward).__name__}, not a number", "Return float(reward).")
        elif not np.isfinite(reward):
            self.error(f"reward is {reward}", "Find the division by zero or the overflow; training stops on it.")

    # --- behaviour over time ---

    def determinism(self) -> None:
        """Two environments, one seed, the same actions: every number must agree."""
        one, other = self.make(), self.make()
        first, second = self.reset(one, seed=7), self.reset(other, seed=7)
        if _text(first) != _text(second):
            self.error(
                "reset(seed=7) gave two different observations",
                "Draw every random number from self.np_random, after super().reset(seed=seed).",
            )
            return
        observation = first
        for _ in range(20):
            action = self._action(observation)
            first, second = self.step(one, action), self.step(other, action)
            observation = first[0]
            if _text(first[:4]) != _text(second[:4]):
                self.error(
                    "the same seed and actions led to different steps",
                    "Draw every random number from self.np_random; keep no state in class attributes or globals.",
                )
                return
            if first[2] or first[3]:
                return

    def episodes(self) -> None:
        """Random play: ends, observations that change behind the caller's back, everything `step` checks."""
        observation = self.reset(self.env, seed=3)
        episodes_ended = 0
        for _ in range(self.steps):
            kept, before = observation, _text(observation)
            answer = self.step(self.env, self._action(observation))
            observation = answer[0]
            if _text(kept) != before:
                self.error(
                    "an observation returned earlier was changed by a later step",
                    "Return a copy: observation.copy().",
                )
            if answer[2] or answer[3]:
                episodes_ended += 1
                observation = self.reset(self.env, seed=3 + episodes_ended)
        has_limit = any(isinstance(layer, gym.wrappers.TimeLimit) for layer in layers(self.env))
        if episodes_ended == 0 and not has_limit:
            self.warn(
                f"no episode ended within {self.steps} random steps and there is no time limit",
                "Register it with max_episode_steps=..., or set environment.time_limit.",
            )

    def snapshot(self) -> None:
        """Which way exact resume would take."""
        mode = capture(self.env, [])["mode"]
        if mode == "replay":
            obstacle = what_is_not_plain(self.env)
            self.warn(
                f"exact resume will replay the episode's actions, because {obstacle} is not plain data",
                "Fine for short episodes. Otherwise add get_state() and set_state(state) with plain data.",
            )

    def _action(self, observation: Any) -> Any:
        """A random action, one the mask allows where the observation has one."""
        space = self.env.action_space
        if isinstance(space, gym.spaces.Discrete) and isinstance(observation, dict) and "action_mask" in observation:
            return space.sample(mask=np.asarray(observation["action_mask"], dtype=np.int8))
        return space.sample()


def _name(env: gym.Env) -> str:
    return env.spec.id if env.spec is not None else type(env).__name__


def _shape_of(answer: Any) -> str:
    return f"{len(answer)} values" if isinstance(answer, tuple) else f"one {type(answer).__name__}"


def _text(value: Any) -> str:
    try:
        return to_text(value)
    except NotPlainError:
        return repr(value)


def _why_outside(space: gym.Space, value: Any) -> str:
    if isinstance(space, gym.spaces.Dict) and isinstance(value, dict):
        if value.keys() != space.spaces.keys():
            return f"keys {sorted(value)} instead of {sorted(space.spaces)}"
        wrong = next((key for key in value if not space[key].contains(value[key])), None)
        return "?" if wrong is None else f"'{wrong}': {_why_outside(space[wrong], value[wrong])}"
    if isinstance(space, gym.spaces.Box):
        if not isinstance(value, np.ndarray):
            return f"a {type(value).__name__} instead of a numpy array"
        if value.shape != space.shape:
            return f"shape {value.shape} instead of {space.shape}"
        if not np.can_cast(value.dtype, space.dtype):
            return f"dtype {value.dtype} instead of {space.dtype}"
        if np.isnan(value).any():
            return "it holds NaN"
        outside = np.argwhere((value < space.low) | (value > space.high))[0]
        index = tuple(int(i) for i in outside)
        return f"element {index} is {value[index]}, bounds {space.low[index]} to {space.high[index]}"
    return f"{value!r} is not in {space}"
