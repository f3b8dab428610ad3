"""One gymnasium.Env made into rows: autoreset, seeds per episode, restarts, snapshots.

    env.step     o1        o2 (ends)   reset: o0'   o1'
    row          o1        o2          o0'          o1'
    is_last      0         1           0            0
    is_first     0         0           1            0

An exception ends the episode: the row repeats the last observation with is_last and no terminal, the environment is
built anew, and the next row begins a fresh episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from rl_lab.environments.plain import from_text, to_text
from rl_lab.environments.recipe import close
from rl_lab.environments.snapshot import capture, restore
from rl_lab.environments.spaces import ObservationConverter
from rl_lab.types import EnvironmentFault, EnvRows, RLLabError

MAX_EPISODE_SEED = 2**31 - 1
HEALTHY_STEPS = 1000  # steps in a row without a failure that forgive an earlier one
NOT_EXACT = {
    "replay": "it is not deterministic: replaying its seed and actions led to another observation",
    "own": "its set_state does not restore what its get_state returned",
    "restart": "its state could not be saved",
}


def too_many_restarts(max_restarts: int, last_failure: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"the environments failed more than max_restarts={max_restarts} times altogether. {last_failure} "
        "`rl-lab envs check ID` examines an environment; environment.max_restarts sets the limit."
    )


@dataclass
class Restarts:
    """How often an environment failed: altogether, and what of it still counts against `max_restarts`."""

    total: int = 0
    recent: int = 0
    healthy_steps: int = 0

    def add(self) -> None:
        self.total, self.recent, self.healthy_steps = self.total + 1, self.recent + 1, 0

    def step(self) -> None:
        """A step without a failure."""
        if self.recent:
            self.healthy_steps += 1
            if self.healthy_steps == HEALTHY_STEPS:
                self.recent, self.healthy_steps = self.recent - 1, 0

    def get_state(self) -> dict[str, int]:
        return {"restarts": self.total, "recent_restarts": self.recent, "healthy_steps": self.healthy_steps}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.total = state["restarts"]
        self.recent = state.get("recent_restarts", self.total)  # checkpoints of earlier versions forgave nothing
        self.healthy_steps = state.get("healthy_steps", 0)


@dataclass(kw_only=True, eq=False)
class Cell:
    """One environment and its place (`index`) among N. `rows` given to it have zeroed flags and rewards."""

    build: Callable[[], gym.Env]
    converter: ObservationConverter
    outcomes: tuple[str, ...] = ()  # names in info["outcome"] of an episode's last step
    index: int
    seed: int
    max_restarts: int
    events: list[str]  # sentences about restarts are added here
    is_lost: bool = False  # the episode under way cannot go on: the next row ends it
    restarts: Restarts = field(default_factory=Restarts)

    def __post_init__(self) -> None:
        self.env = self.build()
        self._write = self.converter.writer()
        self._episode_seeds = np.random.default_rng(self.seed)
        self._episode_seed: int | None = None
        self._prepared: tuple[int, Any] | None = None  # an episode begun ahead of time: its seed, its observation
        self._needs_reset = True
        self._episode_steps = 0
        self._log: list[Any] | None = []  # actions since the reset; None once the environment proved plain
        self._is_log_decided = False

    @property
    def has_begun(self) -> bool:
        """There was an episode, or one was restored."""
        return self._episode_seed is not None

    def begin(self, rows: EnvRows, i: int) -> None:
        """A new episode in row i."""
        while True:
            self._episode_seed = int(self._episode_seeds.integers(MAX_EPISODE_SEED))
            prepared, self._prepared = self._prepared, None
            try:
                if prepared is not None and prepared[0] == self._episode_seed:
                    observation = prepared[1]
                else:
                    observation, _ = self.env.reset(seed=self._episode_seed)
                self.converter.check(observation)
                self._write(observation, rows.observation, i)
                break
            except RLLabError:  # already says what to do
                raise
            except Exception as error:  # noqa: BLE001 (see _restart)
                self._restart(error, "reset")
        rows.is_first[i] = True
        self._needs_reset = self.is_lost = False
        self._episode_steps = 0
        if self._log is not None:
            self._log = []

    def prepare(self, seed: int) -> None:
        """Begin the episode of `seed` ahead of time. A reset that fails is tried again when its turn comes, and counted
        then."""
        self._prepared = None
        try:
            observation, _ = self.env.reset(seed=seed)
        except RLLabError:
            raise
        except Exception:  # noqa: BLE001 (see _restart)
            return
        self._prepared = (seed, observation)

    def hand_over(self) -> dict[str, Any]:
        """What another cell needs to begin the next episode in this one's place."""
        return {"episode_seeds": to_text(self._episode_seeds), **self.restarts.get_state()}

    def take_over(self, handed: dict[str, Any], count: int) -> list[int]:
        """Go on in the place of the cell that handed over; the seeds of the next `count` episodes."""
        self._episode_seeds = from_text(handed["episode_seeds"])
        self.restarts.set_state(handed)
        self._needs_reset, self.is_lost = True, False
        return self.upcoming(count)

    def upcoming(self, count: int) -> list[int]:
        """The seeds of the next episodes, as `begin` will draw them."""
        ahead = from_text(to_text(self._episode_seeds))
        return [int(ahead.integers(MAX_EPISODE_SEED)) for _ in range(count)]

    def step(self, action: Any, rows: EnvRows, i: int) -> bool:
        """Row i after `action`. False: the environment failed and the caller repeats the last observation."""
        if self.is_lost:
            return self._end(rows, i)
        if self._needs_reset:
            self.begin(rows, i)
            return True
        if self._log is not None:
            self._log.append(action.copy() if isinstance(action, np.ndarray) else action)
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
            rows.reward[i] = reward
            self._write(observation, rows.observation, i)
            if self.outcomes and (terminated or truncated):
                outcome = info.get("outcome", {})
                for name in self.outcomes:
                    if name in outcome:
                        rows.outcome[name][i] = outcome[name]
        except RLLabError:
            raise
        except Exception as error:  # noqa: BLE001 (see _restart)
            self._restart(error, "step")
            return self._end(rows, i)
        self._episode_steps += 1
        self.restarts.step()
        if terminated or truncated:
            rows.is_last[i] = True
            rows.is_terminal[i] = terminated
            self._needs_reset = True
        if not self._is_log_decided:
            self._drop_log_if_plain()
        return True

    def _end(self, rows: EnvRows, i: int) -> bool:
        rows.reward[i] = 0.0
        rows.is_last[i] = True
        self._needs_reset, self.is_lost = True, False
        return False

    def _drop_log_if_plain(self) -> None:
        """Endless episodes would grow the log for nothing. After one step lazily made attributes exist."""
        self._is_log_decided = True
        if capture(self.env, None)["mode"] != "restart":
            self._log = None

    def _restart(self, error: Exception, call: str) -> None:
        """The one place that survives any exception: whatever an environment raises, the run goes on."""
        self.restarts.add()
        what = (
            f"Environment {self.index} raised {type(error).__name__}: {error} in {call} "
            f"after {self._episode_steps} steps of its episode"
        )
        if self.restarts.recent > self.max_restarts:
            raise too_many_restarts(self.max_restarts, f"{what}.") from error
        self.events.append(f"{what}; it was restarted (restart {self.restarts.total}).")
        self._rebuild()

    def _rebuild(self) -> None:
        self.close()
        try:
            self.env = self.build()
        except RLLabError:
            raise
        except Exception as error:
            raise EnvironmentFault(
                f"environment {self.index} could not be built again: {type(error).__name__}: {error}."
            ) from error

    def close(self) -> None:
        """Close the environment; one that cannot even close is left to the garbage collector."""
        if why := close(self.env):
            self.events.append(f"Environment {self.index} {why}.")

    def get_state(self) -> dict[str, Any]:
        return {
            "episode_seeds": to_text(self._episode_seeds),
            "episode_seed": self._episode_seed,
            "episode_steps": self._episode_steps,
            "needs_reset": self._needs_reset,
            "is_lost": self.is_lost,
            **self.restarts.get_state(),
            "snapshot": None if self._episode_seed is None else capture(self.env, self._log),
        }

    def set_state(self, state: dict[str, Any], observation: dict[str, np.ndarray]) -> None:
        """Continue from `state`; `observation` holds the arrays of the last row, this cell's at `index`."""
        if self._episode_seed is not None:  # used before: a replay must not see what earlier episodes left behind
            self._rebuild()
        self._prepared = None
        self._episode_seeds = from_text(state["episode_seeds"])
        self._episode_seed = state["episode_seed"]
        self._episode_steps = state["episode_steps"]
        self._needs_reset, self.is_lost = state["needs_reset"], state["is_lost"]
        self.restarts.set_state(state)
        snapshot = state["snapshot"]
        self._log, self._is_log_decided = [], snapshot is not None
        if snapshot is None:
            return
        if snapshot["mode"] == "replay":
            actions = np.asarray(snapshot["actions"])
            self._log = actions.tolist() if actions.ndim == 1 else list(actions)
        elif snapshot["mode"] != "restart":
            self._log = None
        if not self._is_restored(snapshot, observation):
            self.is_lost = not self._needs_reset  # between episodes there is nothing to end
            self.events.append(
                f"Environment {self.index} could not be restored exactly: {NOT_EXACT[snapshot['mode']]}. "
                "A new episode was started instead."
            )

    def _is_restored(self, snapshot: dict[str, Any], observation: dict[str, np.ndarray]) -> bool:
        try:
            is_exact, replayed = restore(self.env, snapshot, episode_seed=self._episode_seed)
            if replayed is None:
                return is_exact
            fresh = self.converter.allocate(1)
            self._write(replayed, fresh, 0)
        except RLLabError:
            raise
        except Exception as error:  # noqa: BLE001 (see _restart)
            self._restart(error, "a replay")
            return False
        return all(fresh[key][0].tobytes() == np.asarray(observation[key])[self.index].tobytes() for key in fresh)
