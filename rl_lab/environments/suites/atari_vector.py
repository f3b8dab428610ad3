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

# Agent steps, which a resume plays again. ALE loads a game anew for its seed: 63 ms in which all games wait, 1.3 % of
# the time of 8 Pongs on two cores; every 5,000 it would be 10 %.
NEW_SEED_AFTER = 40_000


class AtariVector(VectorEnv):
    """The arguments of `atari.Atari`; pixels only."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": [], "render_fps": FRAMES_PER_SECOND}
    has_the_arguments_of_one = True  # factory.py: kwargs mean here what they mean in a single environment
    shows_new_arrays = True  # vector.py: what was shown is never written again

    def __init__(self, num_envs: int, num_threads: int = 0, **settings: Any) -> None:
        one = arguments_of_one(settings)
        game, observation, size, stack = one["game"], one["observation"], one["size"], one["stack"]
        check_settings(game, observation, {name: one[name] for name in SETTINGS})
        if observation not in ("grey", "rgb"):
            raise ConfigError(f"ALE's vector environment shows grey or rgb, not {observation!r}")
        import ale_py
        import cv2

        self._merge = cv2.merge  # three times as fast as NumPy at putting planes side by side
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
        self._actions: list[np.ndarray] = []  # of all games, one array for each step
        self._strengths: Any = [1.0] * num_envs  # how far a paddle is turned: ALE wants it beside each action

    # --- playing ---

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self._seeds = np.random.default_rng(seed)  # type: ignore[arg-type]
        self._game_seeds = self._seeds.integers(2**31 - 1, size=self.num_envs)
        self._actions, self._begins = [], np.zeros(self.num_envs, np.int64)  # where in them the seed of each came
        self._scores = np.zeros(self.num_envs)
        self._is_over, self._is_life_lost = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        observation, info = self._ale.reset(seed=self._game_seeds)
        self._lives = np.array(info["lives"], np.int64)
        return self._as_images(observation), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        was_over, was_lost = self._is_over, self._is_life_lost
        if was_lost.any():
            actions = np.where(was_lost, self._after_a_life, actions)
        observation, score, terminated, truncated, info = self._play(actions)
        self._actions.append(actions.astype(np.uint8))
        lives, self._scores = info["lives"], self._scores + score
        reward = np.clip(score, -1, 1) if self.clip_reward else score
        if (is_new := was_over | was_lost).any():
            reward, self._scores = np.where(is_new, 0.0, reward), np.where(was_over, 0.0, self._scores)
            is_long = was_over & (len(self._actions) - self._begins > NEW_SEED_AFTER)
            if is_long.any():
                observation, lives = self._begin_from_seeds(is_long)
        self._is_over = terminated | truncated
        if self.episodic_life:
            self._is_life_lost = (lives < self._lives) & ~self._is_over & ~was_over
            terminated = terminated | self._is_life_lost
        self._lives = np.array(lives, np.int64)
        outcome = {"game_score": np.where(self._is_over, self._scores, np.nan)}
        return self._as_images(observation), reward, terminated, truncated, {"outcome": outcome}

    def _play(self, actions: np.ndarray) -> Any:
        """One step of all games. Lists: ALE would take arrays element by element, which costs it more."""
        self._ale.ale.send(actions.tolist(), self._strengths)
        return self._ale.ale.recv()

    def _begin_from_seeds(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """These have just begun a game: they begin it again, from seeds of their own."""
        self._game_seeds[which] = self._seeds.integers(2**31 - 1, size=int(which.sum()))
        self._begins[which] = len(self._actions)
        seen_by_none = self._begins.min()
        self._actions, self._begins = self._actions[seen_by_none:], self._begins - seen_by_none
        observation, info = self._ale.reset(seed=self._game_seeds[which], options={"reset_mask": which})
        return observation, info["lives"]

    def _as_images(self, stacked: np.ndarray) -> np.ndarray:
        """[N, stack, H, W] or [N, stack, H, W, 3] as a new array [N, H, W, channels]."""
        if not self._is_grey:
            last = np.array(np.moveaxis(stacked, 1, 3), order="C")
            return last.reshape(*last.shape[:3], -1)
        images = np.empty((self.num_envs, *stacked.shape[2:], self._stack), np.uint8)
        planes = stacked.reshape(self.num_envs, self._stack, -1).swapaxes(0, 1)  # views: [stack, N, H * W]
        self._merge(list(planes), images.reshape(self.num_envs, -1, self._stack))
        return images

    def close_extras(self, **kwargs: Any) -> None:
        del self._ale.ale  # its threads end with it

    # --- exact snapshots (see snapshot.py) ---

    def get_state(self) -> dict[str, Any]:
        return {
            "generator": self._seeds,
            "game_seeds": self._game_seeds.copy(),
            "logs": self._actions_since_seeds(),
            "scores": self._scores.copy(),
            "lives": self._lives.copy(),
            "is_over": self._is_over.copy(),
            "is_life_lost": self._is_life_lost.copy(),
        }

    def _actions_since_seeds(self) -> list[np.ndarray]:
        """What each game was told since its seed."""
        told = np.array(self._actions, np.uint8).reshape(-1, self.num_envs)
        return [told[begin:, i].copy() for i, begin in enumerate(self._begins)]

    def set_state(self, state: dict[str, Any]) -> None:
        self._seeds, self._game_seeds = state["generator"], state["game_seeds"]
        logs = state["logs"]
        lengths = np.array([len(log) for log in logs])
        longest = int(lengths.max(initial=0))
        rows = np.stack(
            [np.pad(log, (longest - len(log), 0)) for log in logs], axis=1
        )  # [longest, N], all end together
        self._actions, self._begins = list(rows), longest - lengths
        self._scores, self._lives = state["scores"], state["lives"]
        self._is_over, self._is_life_lost = state["is_over"], state["is_life_lost"]
        self._ale.reset(seed=self._game_seeds)
        for begin, actions in enumerate(rows):
            joins = self._begins == begin
            if joins.any() and begin:
                self._ale.reset(seed=self._game_seeds[joins], options={"reset_mask": joins})
            self._play(actions)
        joins = lengths == 0
        if joins.any() and not joins.all():
            self._ale.reset(seed=self._game_seeds[joins], options={"reset_mask": joins})
