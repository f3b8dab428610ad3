"""N Atari games in ALE's own threads, with the rows of `atari.Atari`: the vector entry point of `atari/<game>`.

What ALE does another way is done here:
- Its `episodic_life` begins a new game after every lost life. Here the game goes on, as in Mnih et al. 2015: the row
  after a lost life is the first of an episode, its action is FIRE where the game wants that, else nothing.
- It clips rewards before anyone sees them. Here they are clipped behind it, so that `game_score` is known.
- It cannot be saved. Here each of the N begins from a seed of its own now and then, between two games, so it is played
  again from that seed and the actions since: all N at once, each joining in when no more are left than it has seen.

    actions left     5      4      3      2      1      0
    0 (saw 5)        seed   a0     a1     a2     a3     a4
    1 (saw 2)                             seed   a0     a1
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rl_lab.environments.suites.atari import (
    FRAMES_PER_SECOND,
    SETTINGS,
    arguments_of_one,
    check_settings,
    observation_space,
)
from rl_lab.types import ConfigError

NEW_SEED_AFTER = 5000  # agent steps: a seed costs 0.1 s (ALE loads the game again), a resume plays them again


class AtariVector(VectorEnv):
    """The arguments of `atari.Atari`; pixels only."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": [], "render_fps": FRAMES_PER_SECOND}
    has_the_arguments_of_one = True  # factory.py: kwargs mean here what they mean in a single environment

    def __init__(self, num_envs: int, num_threads: int = 0, **settings: Any) -> None:
        one = arguments_of_one(settings)
        game, observation, size, stack = one["game"], one["observation"], one["size"], one["stack"]
        check_settings(game, observation, {name: one[name] for name in SETTINGS})
        if observation not in ("grey", "rgb"):
            raise ConfigError(f"ALE's vector environment shows grey or rgb, not {observation!r}")
        import ale_py

        self._ale = ale_py.AtariVectorEnv(
            game,
            num_envs,
            num_threads=num_threads,
            max_num_frames_per_episode=one["max_frames"],
            repeat_action_probability=one["sticky_probability"],
            full_action_space=one["full_action_space"],
            img_height=size,
            img_width=size,
            grayscale=observation == "grey",
            stack_num=stack,
            frameskip=one["frame_skip"],
            maxpool=one["max_pool"],
            noop_max=one["noop_max"],
            use_fire_reset=one["fire_reset"],
            reward_clipping=False,
        )
        self.num_envs, self.clip_reward, self.episodic_life = num_envs, one["clip_reward"], one["episodic_life"]
        self.single_observation_space = observation_space(observation, game, size, stack)
        self.single_action_space = spaces.Discrete(len(self._ale.ale.get_action_set()))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        actions = self._ale.ale.get_action_set()
        fire = ale_py.Action.FIRE
        presses_fire = one["fire_reset"] and fire in actions
        self._after_a_life = actions.index(fire) if presses_fire else 0  # 0: do nothing
        self._stack, self._is_grey = stack, observation == "grey"
        self._seeds = np.random.default_rng(0)
        self._logs: list[list[int]] = []  # the actions of each since its seed

    # --- playing ---

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self._seeds = np.random.default_rng(seed)  # type: ignore[arg-type]
        self._game_seeds = self._seeds.integers(2**31 - 1, size=self.num_envs)
        self._logs = [[] for _ in range(self.num_envs)]
        self._scores = np.zeros(self.num_envs)
        self._is_over, self._is_life_lost = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        observation, info = self._ale.reset(seed=self._game_seeds)
        self._lives = np.array(info["lives"], np.int64)
        return self._as_images(observation), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        actions = np.where(self._is_life_lost, self._after_a_life, actions)
        was_over, was_lost = self._is_over, self._is_life_lost
        observation, score, terminated, truncated, info = self._ale.step(actions)
        for log, action in zip(self._logs, actions.tolist(), strict=True):
            log.append(action)
        lives = np.array(info["lives"], np.int64)
        is_long = was_over & np.array([len(log) > NEW_SEED_AFTER for log in self._logs])
        if is_long.any():
            observation, lives = self._begin_from_seeds(is_long)
        self._scores = np.where(was_over, 0.0, self._scores + score)
        self._is_over = terminated | truncated
        self._is_life_lost = (lives < self._lives) & ~self._is_over & ~was_over & self.episodic_life
        self._lives = lives
        reward = np.where(was_over | was_lost, 0.0, np.clip(score, -1, 1) if self.clip_reward else score)
        outcome = {"game_score": np.where(self._is_over, self._scores, np.nan)}
        return self._as_images(observation), reward, terminated | self._is_life_lost, truncated, {"outcome": outcome}

    def _begin_from_seeds(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """These have just begun a game: they begin it again, from seeds of their own."""
        self._game_seeds[which] = self._seeds.integers(2**31 - 1, size=int(which.sum()))
        for i in np.flatnonzero(which).tolist():
            self._logs[i] = []
        observation, info = self._ale.reset(seed=self._game_seeds[which], options={"reset_mask": which})
        return observation, np.array(info["lives"], np.int64)

    def _as_images(self, stacked: np.ndarray) -> np.ndarray:
        """[N, stack, H, W] or [N, stack, H, W, 3] as [N, H, W, channels]: a view of greys, which are copied later."""
        last = np.moveaxis(stacked, 1, 3)
        return last if self._is_grey else last.reshape(*last.shape[:3], -1)

    def close_extras(self, **kwargs: Any) -> None:
        del self._ale.ale  # its threads end with it

    # --- exact snapshots (see snapshot.py) ---

    def get_state(self) -> dict[str, Any]:
        return {
            "generator": self._seeds,
            "game_seeds": self._game_seeds.copy(),
            "logs": [np.array(log, np.uint8) for log in self._logs],
            "scores": self._scores.copy(),
            "lives": self._lives.copy(),
            "is_over": self._is_over.copy(),
            "is_life_lost": self._is_life_lost.copy(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._seeds, self._game_seeds = state["generator"], state["game_seeds"]
        self._logs = [log.tolist() for log in state["logs"]]
        self._scores, self._lives = state["scores"], state["lives"]
        self._is_over, self._is_life_lost = state["is_over"], state["is_life_lost"]
        lengths = np.array([len(log) for log in self._logs])
        self._ale.reset(seed=self._game_seeds)
        for left in range(int(lengths.max(initial=0)), 0, -1):
            joins = lengths == left
            if joins.any() and left < lengths.max():
                self._ale.reset(seed=self._game_seeds[joins], options={"reset_mask": joins})
            self._ale.step(np.array([log[-left] if len(log) >= left else 0 for log in self._logs]))
        joins = lengths == 0
        if joins.any() and not joins.all():
            self._ale.reset(seed=self._game_seeds[joins], options={"reset_mask": joins})
