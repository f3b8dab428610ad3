"""Small environments that test a rule or are learnt in seconds, registered as `rl_lab/<Name>-v0`.

Those made to be drawn live in toy_drawn.py. All of their attributes are plain data, so snapshots are exact.
"""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

Result = tuple[Any, float, bool, bool, dict[str, Any]]
LEAKED: list[np.ndarray] = []  # what `Faulty` never gives back
COUNTER_IDENTITIES = 1_000_003  # below 2**24, so that float32 holds each exactly


class Toy(gym.Env):
    """Base: `_begin` sets up a new episode after `np_random` was seeded, `_observe` returns what is seen now."""

    step_in_episode = 0

    def _begin(self) -> None:
        raise NotImplementedError

    def _observe(self) -> Any:
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.step_in_episode = 0
        self._begin()
        return self._observe(), {}


class Counter(Toy):
    """Shows [episode number, step in the episode, an identity drawn from its first seed] and rewards with the last
    action, so that a test can tell where every number of a row came from. Even episodes end as terminal, odd ones
    by a time limit, one step later."""

    def __init__(self, length: int = 5, num_actions: int = 10) -> None:
        high = np.array([np.inf, np.inf, COUNTER_IDENTITIES], np.float32)
        self.observation_space = spaces.Box(np.zeros(3, np.float32), high)
        self.action_space = spaces.Discrete(num_actions)
        self.length = length
        self.episode_number = -1
        self.identity: int | None = None

    def _observe(self) -> np.ndarray:
        return np.array([self.episode_number, self.step_in_episode, self.identity], np.float32)

    def _begin(self) -> None:
        if self.identity is None:
            self.identity = int(self.np_random.integers(COUNTER_IDENTITIES))
        self.episode_number += 1

    def step(self, action: Any) -> Result:
        self.step_in_episode += 1
        is_even = self.episode_number % 2 == 0
        terminated = is_even and self.step_in_episode >= self.length
        truncated = not is_even and self.step_in_episode >= self.length + 1
        return self._observe(), float(action), terminated, truncated, {}


class NativeCounter(VectorEnv):
    """Counter as a vector environment, with array operations and next-step autoreset"""

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int = 1, length: int = 5, num_actions: int = 10) -> None:
        single = Counter(length, num_actions)
        self.num_envs, self.length = num_envs, length
        self.single_observation_space, self.single_action_space = single.observation_space, single.action_space
        self.observation_space = batch_space(single.observation_space, num_envs)
        self.action_space = batch_space(single.action_space, num_envs)
        self.counts = np.zeros((num_envs, 3), np.float32)
        self.is_done = np.zeros(num_envs, bool)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.counts[:, :2] = 0
        self.counts[:, 2] = self.np_random.integers(COUNTER_IDENTITIES, size=self.num_envs)
        self.is_done[:] = False
        return self.counts, {}  # its own buffer, on purpose: callers must copy

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        begins = self.is_done.copy()
        self.counts[:, 1] += 1
        self.counts[begins, 0] += 1
        self.counts[begins, 1] = 0
        is_even = self.counts[:, 0] % 2 == 0
        terminated = ~begins & is_even & (self.counts[:, 1] >= self.length)
        truncated = ~begins & ~is_even & (self.counts[:, 1] >= self.length + 1)
        self.is_done[:] = terminated | truncated
        return self.counts, np.where(begins, 0.0, actions), terminated, truncated, {}


class Recall(Toy):
    """A cue is shown in the first observation only; after `delay` blank ones a signal asks for it. The answer earns
    1 or 0, so that a policy without memory gets 1 / num_cues.

    observation    cue 0   cue 1   ...   asked
    """

    def __init__(self, delay: int = 3, num_cues: int = 2) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (num_cues + 1,), np.float32)
        self.action_space = spaces.Discrete(num_cues)
        self.delay, self.num_cues, self.cue = delay, num_cues, 0

    def _observe(self) -> np.ndarray:
        observation = np.zeros(self.num_cues + 1, np.float32)
        if self.step_in_episode == 0:
            observation[self.cue] = 1.0
        elif self.step_in_episode > self.delay:
            observation[-1] = 1.0
        return observation

    def _begin(self) -> None:
        self.cue = int(self.np_random.integers(self.num_cues))

    def step(self, action: Any) -> Result:
        is_answer = self.step_in_episode > self.delay
        self.step_in_episode += 1
        return self._observe(), float(is_answer and int(action) == self.cue), is_answer, False, {}


class MultiTarget(Toy):
    """Several digits are shown; each sub-action must repeat its digit. The reward is the fraction that did."""

    def __init__(self, sizes: tuple[int, ...] = (3, 4), length: int = 10) -> None:
        self.observation_space = spaces.MultiDiscrete(list(sizes))
        self.action_space = spaces.MultiDiscrete(list(sizes))
        self.sizes, self.length = tuple(sizes), length
        self.digits = np.zeros(len(sizes), np.int64)

    def _observe(self) -> np.ndarray:
        return self.digits.copy()

    def _begin(self) -> None:
        self.digits = self.np_random.integers(self.sizes)

    def step(self, action: Any) -> Result:
        reward = float(np.mean(np.asarray(action) == self.digits))
        self._begin()
        self.step_in_episode += 1
        return self._observe(), reward, self.step_in_episode >= self.length, False, {}


class MaskedChain(Toy):
    """A chain of places where two of four actions are allowed: one goes on, one goes back to the start. Any other
    action raises, so that a policy that ignores the mask is found out at once."""

    num_actions = 4

    def __init__(self, length: int = 6) -> None:
        self.observation_space = spaces.Dict(
            {"place": spaces.Box(0.0, 1.0, (length,), np.float32), "action_mask": spaces.MultiBinary(self.num_actions)}
        )
        self.action_space = spaces.Discrete(self.num_actions)
        self.length, self.place = length, 0

    def _observe(self) -> dict[str, np.ndarray]:
        place, mask = np.zeros(self.length, np.float32), np.zeros(self.num_actions, np.int8)
        place[min(self.place, self.length - 1)] = 1.0
        mask[[self.place % self.num_actions, (self.place + 1) % self.num_actions]] = 1
        return {"place": place, "action_mask": mask}

    def _begin(self) -> None:
        self.place = 0

    def step(self, action: Any) -> Result:
        forward, back = self.place % self.num_actions, (self.place + 1) % self.num_actions
        if action not in (forward, back):
            raise ValueError(f"action {action} is masked at place {self.place}; allowed: {forward}, {back}")
        self.place = self.place + 1 if action == forward else 0
        is_home = self.place >= self.length
        return self._observe(), 1.0 if is_home else -0.01, is_home, False, {}


class Faulty(Toy):
    """Fails on request, counting steps since it was built: raises, answers NaN, ends its process, or hangs; is slow, or
    takes memory with every step that it never gives back"""

    def __init__(
        self,
        length: int = 6,
        raise_at: int | None = None,
        raise_in_reset_at: int | None = None,
        nan_at: int | None = None,
        exit_at: int | None = None,
        hang_at: int | None = None,
        slow_s: float = 0.0,
        slow_reset_s: float = 0.0,
        leak_mib: int = 0,
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length, self.slow_s, self.slow_reset_s, self.leak_mib = length, slow_s, slow_reset_s, leak_mib
        self.raise_at, self.raise_in_reset_at = raise_at, raise_in_reset_at
        self.nan_at, self.exit_at, self.hang_at = nan_at, exit_at, hang_at
        self.total_steps, self.resets, self.start = 0, 0, 0.0

    def _observe(self) -> np.ndarray:
        first = np.nan if self.total_steps == self.nan_at else self.start
        return np.array([first, self.step_in_episode], np.float32)

    def _begin(self) -> None:
        self.resets += 1
        time.sleep(self.slow_reset_s)
        if self.resets == self.raise_in_reset_at:
            raise RuntimeError("requested failure of reset")
        self.start = float(self.np_random.random())

    def step(self, action: Any) -> Result:
        self.total_steps += 1
        self.step_in_episode += 1
        time.sleep(self.slow_s)
        if self.leak_mib:
            LEAKED.append(np.ones((self.leak_mib, 2**20), np.uint8))
        if self.total_steps == self.raise_at:
            raise RuntimeError("requested failure")
        if self.total_steps == self.exit_at:
            os._exit(3)
        if self.total_steps == self.hang_at:
            time.sleep(3600.0)
        reward = float("nan") if self.total_steps == self.nan_at else 1.0
        return self._observe(), reward, self.step_in_episode >= self.length, False, {}


def register_toy(name: str, entry_point: str, max_episode_steps: int | None = None, **settings: Any) -> None:
    # Our environments are tested here; Gymnasium's checker would add warnings to every step of a scratch run.
    entry_point = f"rl_lab.environments.suites.{entry_point}"
    settings |= {"max_episode_steps": max_episode_steps, "disable_env_checker": True}
    gym.register(f"rl_lab/{name}-v0", entry_point=entry_point, **settings)


register_toy("Counter", "toy:Counter")
register_toy("NativeCounter", "toy:Counter", vector_entry_point="rl_lab.environments.suites.toy:NativeCounter")
register_toy("Recall", "toy:Recall", 100, reward_threshold=0.95)
register_toy("MultiTarget", "toy:MultiTarget", 100, reward_threshold=9.5)
register_toy("MaskedChain", "toy:MaskedChain", 50, reward_threshold=0.9)
register_toy("Faulty", "toy:Faulty", 1000)
register_toy("Corridor", "toy_drawn:Corridor", 30, reward_threshold=0.9)
register_toy("Maze", "toy_drawn:Maze", 40, reward_threshold=0.9)
register_toy("PointMass", "toy_drawn:PointMass", 50, reward_threshold=-4.0)
register_toy("PixelCatch", "toy_drawn:PixelCatch", 50, reward_threshold=0.9)
register_toy("Detour", "toy_drawn:Detour", 60, reward_threshold=0.95)
register_toy("PixelFollow", "toy_drawn:PixelFollow", 50, reward_threshold=45.0)
