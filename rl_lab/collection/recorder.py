"""Rows of N environments, cut into whole episodes for a dataset.

The Collector writes here as it writes to a buffer. Environments run side by side, a dataset holds one episode after
the other; so rows are kept until the episode they belong to has ended.

    environment 0   f . . . L f . . . . .       an episode: from an is_first row to its is_last row
    environment 1   f . . . . . . L f . .
                                        ^       enough: what has not ended is cut here, as by a time limit
"""

from __future__ import annotations

import numpy as np
import torch

from rl_lab.collection.episodes import episode_quota
from rl_lab.types import ROW_KEYS, Batch, ConfigError, EnvSpec, Episode

Arrays = dict[str, np.ndarray]
NO_LIMIT = 2**62  # episodes


class EpisodeRecorder:
    """Takes exactly `steps` agent steps, or `episodes` whole episodes, as many from each environment.

    What a policy keeps beside its action (log_prob, value, latents) is left out. Continuous actions
    are stored as the environment took them: clipped to [-1, 1] where it has bounds.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, *, steps: int | None = None, episodes: int | None = None) -> None:
        if (steps is None) == (episodes is None):
            raise ConfigError("Say how much to collect: steps or episodes, one of the two.")
        for name, value in {"steps": steps, "episodes": episodes}.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: write a whole number of at least 1.")
        self.num_envs = num_envs
        self.agent_steps = 0
        self.finished: list[Episode] = []
        self.cut_episodes = 0
        self.num_rows = 0
        self._steps = steps
        self._quota = episode_quota(episodes if episodes is not None else NO_LIMIT, num_envs)
        self._total = steps or episodes or 0
        self._keys = (*spec.observation, *ROW_KEYS)
        self._rows: list[Arrays] = []  # the newest rows of all environments
        self._first_time = 0  # the time of the first of them
        self._begin = np.full(num_envs, -1)  # when the episode under way began; -1: there is none
        self._done: list[Arrays] = []
        self._is_closing = False  # every step has been taken: the next row ends what is under way
        self.is_full = False
        # Which dimensions of a continuous action are clipped; discrete actions have no bounds.
        self._bounded = np.isfinite(spec.action.low) & np.isfinite(spec.action.high)

    @property
    def progress(self) -> tuple[int, int]:
        """How much of what is wanted is there: steps, or finished episodes."""
        return (self.agent_steps if self._steps is not None else len(self.finished)), self._total

    def take(self) -> list[Arrays]:
        """The episodes that ended since the last call, each `[length + 1, ...]` per key."""
        done, self._done = self._done, []
        return done

    def add(self, row: Batch) -> None:
        if self.is_full:
            return
        arrays = {key: row[key].cpu().numpy().copy() for key in self._keys}  # policies may reuse their memory
        if self._bounded.any():
            arrays["action"] = np.where(self._bounded, np.clip(arrays["action"], -1.0, 1.0), arrays["action"])
        self._store(arrays)
        if self._is_closing:
            self._cut(np.flatnonzero(self._begin >= 0))
            self.is_full = True
            return
        acting = np.flatnonzero(~arrays["is_last"] & (self._begin >= 0))
        if self._steps is not None and len(acting) > self._steps - self.agent_steps:
            acting, surplus = np.split(acting, [self._steps - self.agent_steps])
            self._cut(surplus)
        self.agent_steps += len(acting)
        self._is_closing = self._steps is not None and self.agent_steps == self._steps

    def set_pending(self, row: Batch) -> None:
        """The Collector adds this row again with its action; only the very last one is stored without."""
        if self._is_closing:
            self.add({**row, "action": torch.from_numpy(np.zeros_like(self._rows[-1]["action"]))})

    def _store(self, arrays: Arrays) -> None:
        time = self._first_time + len(self._rows)
        self._rows.append(arrays)
        self._begin[arrays["is_first"] & (self._quota > 0) & (not self._is_closing)] = time
        for env_index in np.flatnonzero(arrays["is_last"] & (self._begin >= 0)).tolist():
            episode = self._episode(env_index)
            total, length = float(episode["reward"].sum(dtype=np.float64)), len(episode["reward"]) - 1
            self.finished.append(Episode(env_index, total, length, bool(episode["is_terminal"][-1])))
            self._quota[env_index] -= 1
        self.is_full = not self._quota.any()
        under_way = self._begin[self._begin >= 0]
        keep_from = int(under_way.min()) if len(under_way) else time + 1
        del self._rows[: max(0, keep_from - self._first_time - 1)]  # the newest row stays: its action has the shape
        self._first_time = time + 1 - len(self._rows)

    def _cut(self, environments: np.ndarray) -> None:
        for env_index in environments.tolist():
            if self._begin[env_index] == self._first_time + len(self._rows) - 1:
                self._begin[env_index] = -1  # it has just begun: there is no step in it
                continue
            episode = self._episode(env_index)
            episode["is_last"][-1] = True
            self.cut_episodes += 1

    def _episode(self, env_index: int) -> Arrays:
        rows = self._rows[self._begin[env_index] - self._first_time :]
        episode = {key: np.stack([row[key][env_index] for row in rows]) for key in self._keys}
        episode["action"][-1] = 0  # no action is taken there
        self._begin[env_index] = -1
        self._done.append(episode)
        self.num_rows += len(rows)
        return episode
