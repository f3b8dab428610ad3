"""Atari 2600 games as `atari/<game>`, played by the Arcade Learning Environment with the usual preprocessing built in.

    observation: grey      image   uint8 [size, size, stack], the newest frame last; before the first: black
                 rgb       image   uint8 [size, size, 3 * stack]
                 ram       vector  float32, 128 bytes of memory divided by 255, per stacked frame
                 objects   vector  float32, positions read from memory (atari_objects.py), per stacked frame

A step repeats its action for `frame_skip` frames and shows the brighter of the last two, because the console draws some
sprites in every other frame only. `atari_vector.py` is the same game in ALE's own threads, to the same pixels.
Nothing of ale_py is imported before an environment is built.
"""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_lab.environments.suites.atari_objects import object_table
from rl_lab.types import ConfigError, did_you_mean

# The 57 games that papers report (Bellemare et al. 2013, Hessel et al. 2018), then the others that ALE brings.
GAMES_57 = (
    "alien amidar assault asterix asteroids atlantis bank_heist battle_zone beam_rider berzerk bowling boxing breakout "
    "centipede chopper_command crazy_climber defender demon_attack double_dunk enduro fishing_derby freeway frostbite "
    "gopher gravitar hero ice_hockey jamesbond kangaroo krull kung_fu_master montezuma_revenge ms_pacman "
    "name_this_game phoenix pitfall pong private_eye qbert riverraid road_runner robotank seaquest skiing solaris "
    "space_invaders star_gunner surround tennis time_pilot tutankham up_n_down venture video_pinball wizard_of_wor "
    "yars_revenge zaxxon"
).split()
OTHER_GAMES = (
    "adventure air_raid atlantis2 backgammon basic_math blackjack carnival casino crossbow darkchambers donkey_kong "
    "earthworld elevator_action entombed et flag_capture frogger galaxian hangman haunted_house human_cannonball "
    "journey_escape joust kaboom keystone_kapers king_kong klax koolaid laser_gates lost_luggage mario_bros "
    "miniature_golf mr_do othello pacman pitfall2 pooyan sir_lancelot space_war superman tetris tic_tac_toe_3d "
    "trondead turmoil video_checkers video_chess video_cube word_zapper"
).split()
OBSERVATIONS = ("grey", "rgb", "ram", "objects")
RAM_SIZE = 128
FRAMES_PER_SECOND = 60
SETTINGS = {  # of the constructor: what a number may be
    "size": (1, None),
    "stack": (1, None),
    "frame_skip": (1, None),
    "noop_max": (0, None),
    "sticky_probability": (0, 1),
    "max_frames": (1, None),
}


def check_settings(game: str, observation: str, numbers: dict[str, float]) -> None:
    """Refuse what no game takes, naming the key."""
    if observation not in OBSERVATIONS:
        raise ConfigError(
            f"environment.kwargs.observation of 'atari/{game}' is {observation!r}."
            f"{did_you_mean(str(observation), OBSERVATIONS)} Allowed: {', '.join(OBSERVATIONS)}."
        )
    for name, value in numbers.items():
        low, high = SETTINGS[name]
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"environment.kwargs.{name} of 'atari/{game}' is {value!r}: write a number of {bounds}.")


def observation_space(observation: str, game: str, size: int, stack: int) -> spaces.Box:
    """The space of one stacked observation."""
    if observation in ("grey", "rgb"):
        return spaces.Box(0, 255, (size, size, stack * (3 if observation == "rgb" else 1)), np.uint8)
    width = RAM_SIZE if observation == "ram" else object_table(game).size
    return spaces.Box(0.0, 1.0, (stack * width,), np.float32)


def label(action: Any) -> str:
    """UPRIGHTFIRE as people say it: up right fire."""
    words = ("NOOP", "UP", "DOWN", "LEFT", "RIGHT", "FIRE")
    return " ".join(word.lower() for word in words if word in action.name)


class Atari(gym.Env):
    """One game. `episodic_life`: a lost life ends the episode, and the next one goes on in the same game.

    The outcome `game_score` is the unclipped score of a whole game, reported when it is over.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": FRAMES_PER_SECOND}
    outcomes = ("game_score",)

    def __init__(
        self,
        game: str,
        observation: str = "grey",
        size: int = 84,
        stack: int = 4,
        frame_skip: int = 4,
        max_pool: bool = True,
        noop_max: int = 30,
        fire_reset: bool = True,
        episodic_life: bool = False,
        sticky_probability: float = 0.0,
        clip_reward: bool = False,
        full_action_space: bool = False,
        max_frames: int = 108_000,
        render_mode: str | None = None,
    ) -> None:
        numbers = {"size": size, "stack": stack, "frame_skip": frame_skip, "noop_max": noop_max}
        check_settings(
            game, observation, {**numbers, "sticky_probability": sticky_probability, "max_frames": max_frames}
        )
        self.observation_space = observation_space(observation, game, size, stack)
        import ale_py
        import cv2
        from ale_py import roms

        self._resize = cv2.resize
        self._area = cv2.INTER_AREA
        self._emulator = ale_py.ALEInterface()
        self._emulator.setLoggerMode(ale_py.LoggerMode.Error)
        self._emulator.setFloat("repeat_action_probability", 0.0)  # ours, see _act
        self._emulator.setInt("random_seed", 0)
        self._emulator.setInt("max_num_frames_per_episode", max_frames)
        self._emulator.loadROM(str(roms.get_rom_path(game)))
        self._switched_on = self._emulator.cloneState(include_rng=True)  # loading again would cost 0.1 s per game
        self._actions = (
            self._emulator.getLegalActionSet() if full_action_space else self._emulator.getMinimalActionSet()
        )
        self._new_state = ale_py.ALEState
        self.action_labels = tuple(map(label, self._actions))
        self.action_space = spaces.Discrete(len(self._actions))
        self.presses_fire = fire_reset and ale_py.Action.FIRE in self._actions
        self._after_a_life = self._actions.index(ale_py.Action.FIRE) if self.presses_fire else 0  # 0: do nothing
        self.game, self.observation_kind, self.size, self.stack = game, observation, size, stack
        self.frames_per_agent_step, self.max_agent_steps = frame_skip, -(-max_frames // frame_skip)
        self.max_pool, self.noop_max, self.sticky_probability = max_pool, noop_max, sticky_probability
        self.episodic_life, self.clip_reward = episodic_life, clip_reward
        self.remembers_episodes = episodic_life  # of the same game
        self.render_mode = render_mode
        self._width = self.observation_space.shape[-1] // stack  # channels or numbers of one frame
        self._stacked = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        self._lives, self._score, self._is_game_over, self._last_action = 0, 0.0, True, 0
        self._table = object_table(game) if observation == "objects" else None

    # --- playing ---

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.episodic_life and not self._is_game_over:
            # A life was lost: the game goes on, with a new ball where one must be asked for.
            frames, _ = self._act(self._after_a_life)
            if not self._emulator.game_over():
                self._lives = self._emulator.lives()
                return self._observe(frames), {}
        self._begin_game()
        return self._observe([self._look()]), {}

    def _begin_game(self) -> None:
        self._emulator.restoreState(self._switched_on)  # forgets every earlier game: a seed determines what follows
        self._emulator.reset_game()
        self._stacked[...] = 0
        self._score, self._is_game_over, self._last_action = 0.0, False, 0
        num_noops = int(self.np_random.integers(self.noop_max + 1)) if self.noop_max else 0
        for action in [self._actions[0]] * num_noops + [self._actions[self._after_a_life]] * self.presses_fire:
            self._score += self._emulator.act(action)
            if self._emulator.game_over():
                self._emulator.reset_game()
        self._lives = self._emulator.lives()

    def _act(self, action: int) -> tuple[list[np.ndarray], float]:
        """Repeat an action; the frames to show, of which the brightest pixels count, and the score it brought.
        Sticky actions are drawn per frame, as ALE does, but from the environment's own generator: that can be saved."""
        frames: list[np.ndarray] = []
        reward = 0.0
        for left in reversed(range(self.frames_per_agent_step)):
            if not self.sticky_probability or self.np_random.random() >= self.sticky_probability:
                self._last_action = action
            reward += self._emulator.act(self._actions[self._last_action])
            is_over = self._emulator.game_over()
            if left == 0 or is_over or (left == 1 and self.max_pool):
                frames.append(self._look())
            if is_over:
                break
        self._score += reward
        return frames, reward

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        frames, reward = self._act(int(action))
        truncated = bool(self._emulator.game_truncated())
        self._is_game_over = bool(self._emulator.game_over())  # truncated or not
        terminated = self._is_game_over and not truncated
        info: dict[str, Any] = {"lives": self._emulator.lives()}
        if self._is_game_over:
            info["outcome"] = {"game_score": self._score}
        elif self.episodic_life and info["lives"] < self._lives:
            terminated = True
        self._lives = info["lives"]
        shown = float(np.clip(reward, -1.0, 1.0)) if self.clip_reward else float(reward)
        return self._observe(frames), shown, terminated, truncated, info

    # --- looking ---

    def _look(self) -> np.ndarray:
        if self.observation_kind == "grey":
            return self._emulator.getScreenGrayscale()
        return self._emulator.getScreenRGB() if self.observation_kind == "rgb" else self._emulator.getRAM()

    def _observe(self, frames: list[np.ndarray]) -> np.ndarray:
        """The stack with one more frame; at a reset there is only that one."""
        self._stacked = np.concatenate([self._stacked[..., self._width :], self._one(frames)], axis=-1)
        return self._stacked.copy()

    def _one(self, frames: list[np.ndarray]) -> np.ndarray:
        if self.observation_kind in ("grey", "rgb"):
            pooled = frames[0] if len(frames) == 1 else np.maximum(frames[0], frames[1])
            image = self._resize(pooled, (self.size, self.size), interpolation=self._area)
            return image.reshape(self.size, self.size, self._width)
        ram = frames[-1]
        return np.asarray(ram, np.float32) / 255 if self._table is None else self._table.read(ram)

    def render(self) -> np.ndarray:  # type: ignore[override]
        return self._emulator.getScreenRGB()

    # --- exact snapshots (see snapshot.py) ---

    def get_state(self) -> dict[str, Any]:
        """The console and what this class remembers; the generator of sticky actions is `np_random`."""
        return {
            "console": self._emulator.cloneState(include_rng=True).__getstate__(),
            "stacked": self._stacked.copy(),
            "lives": self._lives,
            "score": self._score,
            "is_game_over": self._is_game_over,
            "last_action": self._last_action,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        console = self._new_state.__new__(self._new_state)  # empty, for what comes next
        console.__setstate__(state["console"])
        self._emulator.restoreState(console)
        self._stacked = state["stacked"]
        self._lives, self._score = state["lives"], state["score"]
        self._is_game_over, self._last_action = state["is_game_over"], state["last_action"]


def arguments_of_one(settings: dict[str, Any]) -> dict[str, Any]:
    """Every argument of `Atari` with its default where none was given: `atari_vector.py` takes the same."""
    arguments = inspect.signature(Atari).bind(**settings)
    arguments.apply_defaults()
    return arguments.arguments


for _game in (*GAMES_57, *OTHER_GAMES):
    gym.register(
        f"atari/{_game}",
        entry_point="rl_lab.environments.suites.atari:Atari",
        vector_entry_point="rl_lab.environments.suites.atari_vector:AtariVector",
        kwargs={"game": _game},
    )
