"""`vectorization: envpool`: N environments of EnvPool's own ids, stepped in its C++ threads.

EnvPool resets on the step after an end, as rows want it; images come with channels first and are turned. Its seed is
set when the pool is built, so a young pool is saved as that seed and its actions and played again; one older than
REPLAY_STEPS steps cannot be saved, and new episodes begin after a resume, which says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rl_lab.environments.actions import ActionConverter
from rl_lab.environments.recipe import Blueprint, override_spec
from rl_lab.environments.spaces import ObservationConverter
from rl_lab.environments.vector import NativeEnvironment
from rl_lab.types import ConfigError, EnvSpec, MissingExtraError, did_you_mean

# Whose frame_skip is frames of a game; that of its MuJoCo is steps of the solver, which nobody counts.
GAMES = ("envpool.atari", "envpool.vizdoom")
REPLAY_STEPS = 5000  # steps of the whole pool that a resume plays again


class EnvPoolVector(VectorEnv):
    """A pool with Gymnasium's interface and our images."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}

    def __init__(self, env_id: str, num_envs: int, settings: Mapping[str, Any]) -> None:
        self.env_id, self.num_envs, self._settings = env_id, num_envs, dict(settings)
        self._seed = 0
        self._log: list[np.ndarray] | None = []  # actions since the reset; None: too many
        self._pool = self._make()
        seen = self._pool.observation_space
        self._turns = _is_channels_first(seen)
        self.single_observation_space = _turned(seen) if self._turns else seen
        self.single_action_space = self._pool.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def _make(self) -> Any:
        import envpool

        return envpool.make(
            self.env_id, env_type="gymnasium", num_envs=self.num_envs, seed=self._seed, **self._settings
        )

    def max_episode_steps(self) -> int | None:
        return getattr(getattr(self._pool.spec, "config", None), "max_episode_steps", None)

    def frames_per_step(self) -> int:
        """Frames of a game for which it holds an action."""
        from envpool.registration import registry

        is_game = registry.specs[self.env_id][0].startswith(GAMES)
        return max(1, int(self._pool.spec.config.frame_skip)) if is_game else 1

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if isinstance(seed, int):
            self._begin(seed)
        self._log = []
        return self._look(self._pool.reset()[0]), {}

    def _begin(self, seed: int) -> None:
        """A pool of this seed; it has another only when it is built anew."""
        self._pool.close()
        self._seed = seed
        self._pool = self._make()

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self._log is not None:
            self._log.append(np.array(actions))
            if len(self._log) > REPLAY_STEPS:
                self._log = None
        observation, reward, terminated, truncated, _ = self._pool.step(actions)
        return self._look(observation), reward, terminated, truncated, {}

    def _look(self, observation: Any) -> Any:
        return np.moveaxis(observation, 1, -1) if self._turns else observation

    def close_extras(self, **kwargs: Any) -> None:
        self._pool.close()

    # --- snapshots (see snapshot.py) ---

    def get_state(self) -> dict[str, Any]:
        return {"seed": self._seed, "log": None if self._log is None else [action.copy() for action in self._log]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Played again, if there is something to play; else a pool of another seed, which is another state."""
        log = state["log"]
        self._begin(int(state["seed"]) + (log is None))
        self._pool.reset()
        for action in log or ():
            self._pool.step(action)
        self._log = list(log or ())


def _is_channels_first(space: spaces.Space) -> bool:
    is_image = isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3
    return is_image and space.shape[0] < min(space.shape[1:])  # type: ignore[index]


def _turned(space: Any) -> spaces.Box:
    return spaces.Box(0, 255, (*space.shape[1:], space.shape[0]), np.uint8)


def make_envpool(
    env_id: str,
    *,
    num_envs: int,
    seed: int,
    kwargs: Mapping[str, Any],
    spec: Mapping[str, Any],
    max_restarts: int,
) -> NativeEnvironment:
    """N environments of EnvPool, or why there are none."""
    try:
        import envpool
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"environment.vectorization is 'envpool', which is not installed ({error}). Install it with: pip install "
            "'rl-lab[envpool]' (884 MB), or write vectorization: auto."
        ) from error
    known = envpool.list_all_envs()
    if env_id not in known:
        raise ConfigError(f"environment.id '{env_id}' is none of EnvPool's {len(known)}.{did_you_mean(env_id, known)}")
    make = partial(EnvPoolVector, env_id, num_envs, kwargs)
    try:
        first = make()
    except (ImportError, TypeError, ValueError, RuntimeError) as error:  # a library is missing, or kwargs are wrong
        raise ConfigError(f"EnvPool cannot make '{env_id}': {error} (environment.kwargs: {dict(kwargs)})") from error
    actions = ActionConverter(first.single_action_space, env_id=env_id)
    observations = ObservationConverter(first.single_observation_space, env_id=env_id)
    found = EnvSpec(
        env_id,
        observations.specs,
        actions.spec,
        max_episode_steps=first.max_episode_steps(),
        frames_per_step=first.frames_per_step(),
    )
    first.close()
    plan = Blueprint(override_spec(found, spec), observations, actions)
    return NativeEnvironment(make, plan, num_envs=num_envs, seed=seed, max_restarts=max_restarts)
