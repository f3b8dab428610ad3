"""Deterministic evaluation in environments of their own: as many episodes from each, those it cuts included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from rl_lab.collection.collector import Policy, row_of, to_time_step
from rl_lab.collection.episodes import EpisodeTracker, episode_quota, outcome_metrics
from rl_lab.environments.base import Environment, TaskEnvironment
from rl_lab.types import Batch, ConfigError, EnvRows, Episode, Metrics, StateTree

DEFAULT_TIMEOUT_STEPS = 100_000  # agent steps after which an episode is cut where the environment has no limit


@dataclass(frozen=True)
class Recording:
    """One rendered episode."""

    frames: list[np.ndarray]
    fps: int
    episode_return: float


@dataclass(eq=False)
class Evaluator:
    """Every evaluation of a run starts from the same environment states, so scores differ by the policy alone."""

    make_environment: Callable[[], Environment]
    _: KW_ONLY
    make_render_environment: Callable[[], Environment]
    device: torch.device
    widen: Callable[[Environment, int], Environment] = lambda environment, episodes: (
        environment
    )  # more at once, if cheap
    timeout_steps: int | None = None  # agent steps; None: the environment's limit
    progress: Callable[[int, int], None] = lambda done, total: None  # episodes, or rows of a film, so far and in all
    report: Callable[[str], None] = lambda sentence: None  # why there is no video, once
    last_returns: np.ndarray | None = field(default=None, init=False)  # of the newest evaluation's episodes
    _wide: dict[int, Environment] = field(default_factory=dict, init=False)  # by how many episodes are played in them
    _starts: dict[int, tuple[StateTree, EnvRows]] = field(default_factory=dict, init=False)  # by their number
    _reported: set[str] = field(default_factory=set, init=False)

    def evaluate(self, policy: Policy, *, episodes: int) -> Metrics:
        """Return and length statistics of `episodes` episodes; cut ones count with their return so far."""
        played = self.play_episodes(policy, episodes=episodes)
        self.last_returns = returns = np.array([episode.episode_return for episode in played])
        return {
            "eval/episodes": len(played),
            "eval/timed_out_episodes": sum(not episode.is_terminal for episode in played),
            "eval/cut_episodes": sum(episode.is_cut for episode in played),
            "eval/episode_return_mean": float(returns.mean()),
            "eval/episode_return_std": float(returns.std()),
            "eval/episode_return_min": float(returns.min()),
            "eval/episode_return_max": float(returns.max()),
            "eval/episode_length_mean": float(np.mean([episode.length for episode in played])),
            **outcome_metrics([episode.outcome for episode in played], prefix="eval"),
        }

    def play_episodes(self, policy: Policy, *, episodes: int) -> list[Episode]:
        """The first episodes of each environment, so that short episodes are not counted more often.

        An episode that outlives the time-out is cut: it counts as it stands. What its environment does until that
        episode ends is ignored; when nothing else is being played, all environments are reset.
        """
        _refuse_none(episodes)
        environment, rows = self._begin(episodes)
        quota = episode_quota(episodes, environment.num_envs)
        limit = self.timeout_steps or environment.spec.max_episode_steps or DEFAULT_TIMEOUT_STEPS
        tracker = EpisodeTracker(environment.num_envs)
        is_cut = np.zeros(environment.num_envs, bool)  # the episode under way was cut
        played: list[Episode] = []
        state: Any = None
        rounds = 0  # since all environments began: no episode is longer
        while len(played) < episodes:
            self.progress(len(played), episodes)
            if rounds >= limit and is_cut[quota > 0].all():
                rows, state, rounds = environment.reset(), None, 0
                tracker, is_cut = EpisodeTracker(environment.num_envs), np.zeros(environment.num_envs, bool)
            rows, state = self._advance(policy, environment, rows, state)
            rounds += 1
            ended = tracker.track(rows)
            if rounds >= limit:
                is_cut &= ~rows.is_first
                ended = [episode for episode in ended if not is_cut[episode.env_index]]
                outlived = np.flatnonzero(~is_cut & ~rows.is_last & (tracker.lengths >= limit))
                is_cut[outlived] = True
                ended += tracker.cut(outlived)
            for episode in ended:
                if quota[episode.env_index] > 0:
                    quota[episode.env_index] -= 1
                    played.append(episode)
        self.progress(len(played), episodes)
        return played

    def play_rows(self, policy: Policy, *, length: int) -> Batch:
        """The first `length` rows of every environment, the actions that answered them and what the policy keeps beside
        them, `[N, T, ...]`."""
        environment, rows = self._begin()
        kept: list[Batch] = []
        state: Any = None
        for done in range(length):
            self.progress(done + 1, length)
            time_step = to_time_step(rows, self.device)
            with torch.inference_mode():
                policy_step = policy(time_step, state, mode="eval")
            row = {**row_of(time_step), "action": policy_step.action, **policy_step.extras}
            kept.append({key: values.clone() for key, values in row.items()})  # environments may reuse their memory
            rows, state = environment.step(policy_step.action.cpu().numpy()), policy_step.state
        return {key: torch.stack([row[key] for row in kept], dim=1) for key in kept[0]}

    def record(self, policy: Policy, *, max_frames: int = 2000) -> Recording | None:
        """Render one episode, or one of each task after the other; None where the environment cannot render."""
        recordings = self.record_episodes(policy, episodes=1, max_frames=max_frames)
        if not recordings:
            return None
        frames = [frame for recording in recordings for frame in recording.frames]
        returns = [recording.episode_return for recording in recordings]
        return Recording(frames, recordings[0].fps, sum(returns) / len(returns))

    def record_episodes(
        self, policy: Policy, *, episodes: int, max_frames: int = 2000, task: int | None = None
    ) -> list[Recording]:
        """Render episodes in an environment of their own, each cut after `max_frames`; of each task so many, or of one
        alone. All frames have one size."""
        _refuse_none(episodes)
        environment = self.make_render_environment()
        recordings: list[Recording] = []
        try:
            for number in range(max(1, len(environment.spec.tasks))) if task is None else (task,):
                if isinstance(environment, TaskEnvironment):
                    environment.show_task(number)
                recordings += self._record(policy, environment, episodes, max_frames)
        finally:
            for sentence in environment.drain_events():
                if sentence not in self._reported:
                    self._reported.add(sentence)
                    self.report(sentence)
            environment.close()
        return _of_one_size(recordings)

    def _record(self, policy: Policy, environment: Environment, episodes: int, max_frames: int) -> list[Recording]:
        recordings: list[Recording] = []
        rows = environment.reset()
        state: Any = None
        for _ in range(episodes):
            frames = [environment.render()]
            total = 0.0
            while frames[-1] is not None and len(frames) < max_frames and not rows.is_last[0]:
                rows, state = self._advance(policy, environment, rows, state)
                total += float(rows.reward[0])
                frames.append(environment.render())
            shown = [frame for frame in frames if frame is not None]
            if not shown:
                return []
            recordings.append(Recording(shown, environment.spec.render_fps, total))
            while not rows.is_first[0] and len(recordings) < episodes:
                rows, state = self._advance(policy, environment, rows, state)
        return recordings

    def _advance(self, policy: Policy, environment: Environment, rows: EnvRows, state: Any) -> tuple[EnvRows, Any]:
        with torch.inference_mode():
            policy_step = policy(to_time_step(rows, self.device), state, mode="eval")
        return environment.step(policy_step.action.cpu().numpy()), policy_step.state

    @cached_property
    def environment(self) -> Environment:
        """The evaluation environments, made when first needed."""
        return self.make_environment()

    def _begin(self, episodes: int = 1) -> tuple[Environment, EnvRows]:
        environment = self.environment
        if episodes > environment.num_envs:
            if episodes not in self._wide:
                self._wide[episodes] = self.widen(environment, episodes)
            environment = self._wide[episodes]
        if environment.num_envs in self._starts:
            environment.set_state(self._starts[environment.num_envs][0])
        else:
            rows = environment.reset()
            self._starts[environment.num_envs] = (environment.get_state(), rows)
        return environment, self._starts[environment.num_envs][1]

    def close(self) -> None:
        if "environment" in vars(self):
            for environment in {self.environment, *self._wide.values()}:
                environment.close()
            del self.environment
        self._wide, self._starts = {}, {}


def _refuse_none(episodes: int) -> None:
    if episodes < 1:
        raise ConfigError(f"episodes is {episodes}: write a whole number of at least 1.")


def _of_one_size(recordings: list[Recording]) -> list[Recording]:
    """Frames of a smaller task get a black edge, right and below."""
    sizes = {frame.shape for recording in recordings for frame in recording.frames}
    if len(sizes) < 2:
        return recordings
    height, width = (max(size[axis] for size in sizes) for axis in (0, 1))

    def padded(frame: np.ndarray) -> np.ndarray:
        return np.pad(frame, ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)))

    return [replace(recording, frames=[padded(frame) for frame in recording.frames]) for recording in recordings]
