"""Finds what is wrong with an environment, and says what to write instead.

for finding in check_environment(lambda: MyEnv()):
    print(finding.level, finding.what, finding.cure)
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import gymnasium as gym
import numpy as np

from rl_lab.environments.actions import ActionConverter
from rl_lab.environments.plain import text_or_none
from rl_lab.environments.recipe import close, outcomes_of, time_of
from rl_lab.environments.snapshot import capture, layers, what_is_not_plain
from rl_lab.environments.spaces import ObservationConverter, is_image
from rl_lab.types import ConfigError

RESET_CURE = "Write: def reset(self, *, seed=None, options=None): super().reset(seed=seed); ...; return observation, {}"
STEP_CURE = "Return observation, reward, terminated, truncated, info (five values)."
OUTCOME_CURE = "Write self.outcomes = ('success',) and, on the last step, info = {'outcome': {'success': 1.0}}."
CHANNELS = (1, 3, 4)  # grey, RGB, RGBA


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong ("error": training would fail or mislead) or worth knowing ("warning")."""

    level: Literal["error", "warning"]
    what: str
    cure: str


class _StopChecking(Exception):
    """What was found makes further checks pointless."""


def check_environment(make: Callable[[], gym.Env], *, steps: int = 200) -> list[Finding]:
    """Build environments with `make`, play `steps` random steps, and say what is wrong. An empty list: nothing."""
    check = _Check(make, steps)
    with suppress(_StopChecking):
        check.run()
    return check.findings


class _Check:
    def __init__(self, make: Callable[[], gym.Env], steps: int) -> None:
        self.make, self.steps = make, steps
        self.findings: list[Finding] = []
        self.has_bad_observation = False
        self.outcomes: tuple[str, ...] = ()  # the names that it and its wrappers declare
        self.seen_outcomes: set[str] = set()

    def note(self, what: str, cure: str, level: Literal["error", "warning"] = "error") -> None:
        if what not in [known.what for known in self.findings]:  # the same on every step: once is enough
            self.findings.append(Finding(level, what, cure))

    def stop(self, what: str, cure: str) -> NoReturn:
        self.note(what, cure)
        raise _StopChecking

    def run(self) -> None:
        self.env = self._call("construction", self.make, "The constructor must work without further arguments.")
        self.spaces()
        self.reset(self.env, seed=1)
        self.determinism()
        self.episodes()
        self.snapshot()
        if why := close(self.env):
            self.note(why.replace("while closing", "in close()"), "Close what is open; it may come twice.", "warning")

    def _call(self, place: str, function: Callable[[], Any], cure: str) -> Any:
        """User code may raise anything; here that is the finding."""
        try:
            return function()
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self.stop(f"{place} raised {type(error).__name__}: {error}{_line_of(error)}", cure)

    # --- spaces ---

    def spaces(self) -> None:
        if not isinstance(self.env, gym.Env):
            self.stop(f"the class {type(self.env).__name__} is no gymnasium.Env", "Write: class MyEnv(gymnasium.Env).")
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(self.env, name, None), gym.Space):
                self.stop(f"{name} is missing or no gymnasium.Space", f"Set self.{name} in __init__.")
        env_id = self.env.spec.id if self.env.spec is not None else type(self.env).__name__
        try:
            num_actions = ActionConverter(self.env.action_space, env_id=env_id).num_mask_entries
            ObservationConverter(self.env.observation_space, env_id=env_id, num_actions=num_actions)
        except ConfigError as error:
            self.stop(str(error), "Use one of the known spaces, or a wrapper that converts to one.")
        try:
            self.outcomes = tuple(name for layer in layers(self.env) for name in outcomes_of(layer))
        except ConfigError as error:
            self.stop(str(error), "Write a tuple of names.")
        self.images()
        space = self.env.action_space
        if isinstance(space, gym.spaces.Box) and not space.is_bounded():
            what = f"the action space {space} has no finite bounds, so policies act in [-1, 1] there"
            self.note(what, "Give the Box the bounds the simulator really has.", "warning")
        space.seed(0)
        if not space.contains(space.sample()):
            self.note(f"the action space {space} does not contain its own samples", "Check its dtype and bounds.")

    def images(self) -> None:
        """Boxes that look like images and would be taken for something else."""
        space = self.env.observation_space
        parts = space.spaces if isinstance(space, gym.spaces.Dict) else {"observation": space}
        for name, part in parts.items():
            if not isinstance(part, gym.spaces.Box) or len(part.shape) != 3:
                continue
            first, *_, last = part.shape
            if is_image(part) and first in CHANNELS and last not in CHANNELS:
                what = f"the image '{name}' of shape {part.shape} seems to have its channels first"
                self.note(what, "Images are height x width x channels: np.moveaxis(image, 0, -1).", "warning")
            elif not is_image(part) and (first in CHANNELS or last in CHANNELS) and min(part.shape[:2]) > 1:
                what = f"'{name}' of shape {part.shape} and dtype {part.dtype} becomes one long vector, no image"
                self.note(what, "An image is uint8: spaces.Box(0, 255, shape, np.uint8).", "warning")

    # --- reset and step ---

    def reset(self, env: gym.Env, *, seed: int | None) -> Any:
        answer = self._call("reset(seed=...)", lambda: env.reset(seed=seed), RESET_CURE)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            self.stop(f"reset returned {_shape_of(answer)}, not (observation, info)", RESET_CURE)
        self.observation(answer[0], "reset")
        if env.unwrapped._np_random_seed != seed:
            self.note("reset(seed=...) does not seed self.np_random", "Call super().reset(seed=seed) first in reset.")
        return answer[0]

    def step(self, env: gym.Env, action: Any) -> tuple[Any, ...]:
        answer = self._call(f"step({action!r})", lambda: env.step(action), "Accept every action of the action space.")
        if isinstance(answer, tuple) and len(answer) == 4:
            self.stop("step returned four values: that is the old Gym interface (done)", STEP_CURE)
        if not (isinstance(answer, tuple) and len(answer) == 5):
            self.stop(f"step returned {_shape_of(answer)}, not five values", STEP_CURE)
        observation, reward, terminated, truncated, info = answer
        self.observation(observation, "step")
        if not isinstance(reward, int | float | np.integer | np.floating):
            self.note(f"reward is a {type(reward).__name__}, not a number", "Return float(reward).")
        elif not np.isfinite(reward):
            self.note(f"reward is {reward}", "Find the division by zero or the overflow; training stops on it.")
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                self.note(f"{name} is {flag!r} ({type(flag).__name__}), not a boolean", f"Return bool({name}).")
        if not isinstance(info, dict):
            self.note(f"info is a {type(info).__name__}, not a dict", "Return {} when there is nothing to say.")
        elif self.outcomes and (terminated or truncated):
            self.outcome(info.get("outcome", {}))
        return answer

    def outcome(self, outcome: Any) -> None:
        """The numbers that an episode ended with."""
        if not isinstance(outcome, dict):
            return self.note(f"info['outcome'] is {outcome!r}, not a dict", OUTCOME_CURE)
        self.seen_outcomes |= outcome.keys()
        for name, value in outcome.items():
            if name not in self.outcomes:
                declared = ", ".join(self.outcomes)
                self.note(f"info['outcome'] has '{name}', but outcomes names only {declared}", OUTCOME_CURE)
            elif not isinstance(value, int | float | np.number | np.bool_):
                self.note(f"the outcome '{name}' is {value!r}, not a number", OUTCOME_CURE)

    def observation(self, observation: Any, place: str) -> None:
        space = self.env.observation_space
        is_box = isinstance(space, gym.spaces.Box)
        is_array = isinstance(observation, np.ndarray) or not is_box  # contains() takes lists
        if (is_array and space.contains(observation)) or self.has_bad_observation:
            return  # one example is enough
        self.has_bad_observation = True
        problem = _why_outside(space, observation)
        self.note(f"{place} returned an observation outside observation_space: {problem}", "Fix the one or the other.")

    # --- behaviour over time ---

    def determinism(self) -> None:
        """Two environments, one seed, the same actions: every number must agree."""
        if getattr(self.env.unwrapped, "is_alone_in_its_process", False):
            return self._determinism_in_turn()
        one, other = self.make(), self.make()
        try:
            self._compare(one, other)
        finally:
            for env in (one, other):
                close(env)
        return None

    def _compare(self, one: gym.Env, other: gym.Env) -> None:
        first, second = self.reset(one, seed=7), self.reset(other, seed=7)
        if _text(first) != _text(second):
            cure = "Draw every random number from self.np_random, after super().reset(seed=seed)."
            return self.note("reset(seed=7) gave two different observations", cure)
        observation = first
        for _ in range(20):
            action = self._action(observation)
            first, second = self.step(one, action), self.step(other, action)
            observation = first[0]
            if _text(first[:4]) != _text(second[:4]):
                cure = "Draw every random number from self.np_random; keep no state in class attributes or globals."
                return self.note("the same seed and actions led to different steps", cure)
            if first[2] or first[3]:
                return None
        return None

    def _determinism_in_turn(self) -> None:
        """Where two cannot live in one process: one episode, played twice."""
        actions = [self._action(None) for _ in range(20)]
        played = []
        for _ in range(2):
            rows = [_text(self.reset(self.env, seed=7))]
            for action in actions:
                answer = self.step(self.env, action)
                rows.append(_text(answer[:4]))
                if answer[2] or answer[3]:
                    break
            played.append(rows)
        if played[0] != played[1]:
            cure = "Draw every random number from self.np_random; keep no state in class attributes or globals."
            self.note("the same seed and actions led to different steps", cure)

    def episodes(self) -> None:
        """Random play: ends, observations that change behind the caller's back, everything `step` checks."""
        observation = self.reset(self.env, seed=3)
        episodes_ended = 0
        for _ in range(self.steps):
            kept, before = observation, _text(observation)
            answer = self.step(self.env, self._action(observation))
            observation = answer[0]
            if _text(kept) != before:
                self.note("an observation returned earlier was changed by a later step", "Return observation.copy().")
            if answer[2] or answer[3]:
                episodes_ended += 1
                observation = self.reset(self.env, seed=3 + episodes_ended)
        missing = [name for name in self.outcomes if name not in self.seen_outcomes] if episodes_ended else []
        if missing:
            what = f"{episodes_ended} episodes ended, none with the outcome '{missing[0]}', which outcomes names"
            self.note(what, OUTCOME_CURE, "warning")
        limit, _ = time_of(self.env)
        if episodes_ended == 0 and limit is None:
            what = f"no episode ended within {self.steps} random steps and no time limit is known"
            self.note(what, "Register it with max_episode_steps=..., or set environment.time_limit.", "warning")

    def snapshot(self) -> None:
        """Which way exact resume would take."""
        if capture(self.env, [])["mode"] == "replay":
            obstacle = what_is_not_plain(self.env)
            what = f"exact resume will replay the episode's actions, because {obstacle} is not plain data"
            cure = "Fine for short episodes. Otherwise add get_state() and set_state(state) with plain data."
            self.note(what, cure, "warning")

    def _action(self, observation: Any) -> Any:
        """A random action, one the mask allows where the observation has one."""
        space = self.env.action_space
        if isinstance(space, gym.spaces.Discrete) and isinstance(observation, dict) and "action_mask" in observation:
            mask = np.asarray(observation["action_mask"], dtype=np.int8)
            if not mask.any():
                self.note("the action mask allows no action", "Allow one at least, or end the episode there.")
            return space.sample(mask=mask)
        return space.sample()


def _line_of(error: BaseException) -> str:
    """` (my_env.py, line 12, in step)`: the innermost line of the environment's own, not of a library it calls."""
    homes = (str(Path(gym.__file__).parent), str(Path(__file__).parents[1]), str(Path(np.__file__).parent))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(homes)]
    frames = [frame for frame in frames if "site-packages" not in Path(frame.filename).parts] or frames
    return f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def _shape_of(answer: Any) -> str:
    return f"{len(answer)} values" if isinstance(answer, tuple) else f"one {type(answer).__name__}"


def _text(value: Any) -> str:
    return text_or_none(value) or repr(value)


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
