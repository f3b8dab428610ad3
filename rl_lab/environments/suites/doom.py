"""VizDoom's scenarios as `vizdoom/<scenario>`; `rl_lab/Doom-v0` with `scenario:` plays any other.

A scenario is a name or a path to a .cfg file. Names are looked for in the folder that VIZDOOM_SCENARIOS_DIR names, then
in the package. One button at a time is pressed, or none; `image` is what the player sees, `variables` what the scenario
tells (health, ammunition). Death is terminal, the scenario's time-out is a cut and shows the last picture.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import vizdoom
from gymnasium import spaces

from rl_lab.environments.wrappers_observation import area_resize
from rl_lab.types import ConfigError, did_you_mean

FOLDER_VARIABLE = "VIZDOOM_SCENARIOS_DIR"


def find_scenario(scenario: str) -> Path:
    """The .cfg file of a scenario, or what there is instead."""
    own = os.environ.get(FOLDER_VARIABLE)
    folders = [Path(folder) for folder in (own, vizdoom.scenarios_path) if folder]
    places = [Path(scenario), *(folder / f"{scenario}.cfg" for folder in folders)]
    for place in places:
        if place.suffix == ".cfg" and place.is_file():
            return place
    known = sorted({file.stem for folder in folders for file in folder.glob("*.cfg")})
    raise ConfigError(
        f"environment.kwargs.scenario is '{scenario}': there is no such scenario.{did_you_mean(scenario, known)} Write "
        f"a path to a .cfg file, or one of: {', '.join(known)}. {FOLDER_VARIABLE} may name a folder of yours."
    )


@contextmanager
def _deaf_to(*signals: signal.Signals) -> Iterator[None]:
    """Processes that are started meanwhile never get these: Ctrl-C in a terminal, or closing it, signals every process
    there, and the engine has to go on until the run has saved itself. What comes for this process comes afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Doom(gym.Env):
    """One game, in a process that VizDoom starts."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 35}

    def __init__(
        self, scenario: str = "basic", size: int = 64, frame_skip: int = 4, render_mode: str | None = None
    ) -> None:
        if frame_skip < 1 or size < 1:
            raise ConfigError(
                f"environment.kwargs.frame_skip is {frame_skip} and size is {size}: both must be at least 1."
            )
        self._game = vizdoom.DoomGame()
        self._game.load_config(str(find_scenario(scenario).resolve()))
        # The engine keeps its settings in a file, by default of the working directory.
        self._game.set_doom_config_path(str(Path(tempfile.gettempdir()) / f"rl_lab_vizdoom_{os.getpid()}.ini"))
        self._game.set_window_visible(False)
        self._game.set_mode(vizdoom.Mode.PLAYER)
        self._game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        self._game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        buttons = [button for button in self._game.get_available_buttons() if not vizdoom.is_delta_button(button)]
        self._game.set_available_buttons(buttons)
        self.action_labels = ("nothing", *(button.name.replace("_", " ").lower() for button in buttons))
        self._pressed = [[0] * len(buttons), *np.eye(len(buttons), dtype=int).tolist()]
        self.action_space = spaces.Discrete(len(self._pressed))
        self.size, self.frames_per_agent_step, self.render_mode = size, frame_skip, render_mode
        self.max_agent_steps = -(-self._game.get_episode_timeout() // frame_skip) or None
        seen: dict[str, spaces.Space] = {"image": spaces.Box(0, 255, (size, size, 3), np.uint8)}
        self._num_variables = self._game.get_available_game_variables_size()
        if self._num_variables:
            seen["variables"] = spaces.Box(-np.inf, np.inf, (self._num_variables,), np.float32)
        self.observation_space = spaces.Dict(seen)
        self._screen = np.zeros((120, 160, 3), np.uint8)
        self._variables = np.zeros(self._num_variables, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._game.set_seed(int(self.np_random.integers(2**32)))
        if self._game.is_running():
            self._game.new_episode()
        else:
            with chdir(tempfile.gettempdir()), _deaf_to(signal.SIGINT, signal.SIGHUP):
                self._game.init()  # the engine leaves a folder where it is started
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = self._game.make_action(self._pressed[int(action)], self.frames_per_agent_step)
        is_over, is_late = self._game.is_episode_finished(), self._game.is_episode_timeout_reached()
        return self._observe(), float(reward), is_over and not is_late, is_over and is_late, {}

    def _observe(self) -> dict[str, np.ndarray]:
        state = self._game.get_state()
        if state is not None:  # after the end there is none: the last picture stays
            self._screen = state.screen_buffer
            if self._num_variables:
                self._variables = np.asarray(state.game_variables, np.float32)
        seen = {"image": area_resize(self._screen, self.size, self.size)}
        return {**seen, "variables": self._variables} if self._num_variables else seen

    def render(self) -> np.ndarray:  # type: ignore[override]
        return self._screen

    def close(self) -> None:
        self._game.close()
