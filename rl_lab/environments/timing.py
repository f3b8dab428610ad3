"""How long an environment takes to step and to reset, and which way of running N of them that speaks for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import gymnasium as gym
import numpy as np

from rl_lab.environments.plain import to_text
from rl_lab.environments.recipe import Blueprint, Recipe, close
from rl_lab.environments.snapshot import layers
from rl_lab.environments.vector import SyncEnvironment
from rl_lab.types import EnvironmentFault

MESSAGE_S = 1.5e-4  # what a message to a worker and back costs the parent
ASYNC_WORTH = 0.6  # processes must promise at most this fraction of the time, or busy cores eat up what they win
PREFETCH_WORTH = 0.8
TIMING_STEPS, TIMING_S = 20, 0.1
SLOW_RESET_S = 0.05  # a faster one is not worth a process
USUAL_EPISODE_STEPS = 1000  # where no limit is set, or a longer one
ENVIRONMENTS_PER_CORE = 4  # each takes two processes; more of them would mostly wait for a core
COMPARED_STEPS = 5


@dataclass(frozen=True)
class Timing:
    """Seconds of one environment alone, and how long its episodes are."""

    step_s: float
    reset_s: float
    episode_steps: int


def alone(env: gym.Env, plan: Blueprint, *, max_restarts: int, seed: int = 0) -> SyncEnvironment:
    """One environment that exists already, as rows."""
    return SyncEnvironment(lambda: env, plan, seeds=[seed], max_restarts=max_restarts)


def measure(scratch: gym.Env, plan: Blueprint) -> Timing:
    """The median of a few steps after a warm-up, and a reset; a first reset that loads things is not the usual one.
    A failing environment counts as cheap, its errors come later."""
    single = alone(scratch, plan, max_restarts=1)
    action = np.zeros((1, *plan.spec.action.shape), plan.spec.action.dtype)
    limit = min(plan.spec.max_episode_steps or USUAL_EPISODE_STEPS, USUAL_EPISODE_STEPS)
    seconds: list[float] = []
    try:
        reset_s = _seconds(single.reset)
        begin = time.perf_counter()
        while len(seconds) < 2 or (len(seconds) < TIMING_STEPS and time.perf_counter() - begin < TIMING_S):
            start = time.perf_counter()
            is_over = single.step(action).is_last[0]
            seconds.append(time.perf_counter() - start)
            if is_over:
                limit = min(limit, len(seconds))
                break
        if reset_s > SLOW_RESET_S:
            reset_s = _seconds(single.reset)
    except EnvironmentFault:
        return Timing(0.0, 0.0, limit)
    return Timing(float(np.median(seconds[1:] or seconds)), reset_s, limit)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def is_worth_processes(seconds_per_step: float, num_envs: int, num_cores: int) -> bool:
    """Whether workers, one per core, would move all environments clearly sooner than this process alone."""
    return _seconds_async(seconds_per_step, num_envs, num_cores) < ASYNC_WORTH * seconds_per_step * num_envs


def _seconds_async(seconds_per_step: float, num_envs: int, num_cores: int) -> float:
    num_workers = min(num_envs, num_cores)
    return seconds_per_step * -(-num_envs // num_workers) + MESSAGE_S * num_workers


def prefetch_depth(timing: Timing, num_envs: int, num_cores: int) -> int:
    """How many episodes each environment should have begun ahead, so that resets keep up with playing; two where there
    are cores for them, since episodes are often shorter than their limit."""
    episode_s = max(timing.episode_steps * timing.step_s, MESSAGE_S)
    return max(1, min(max(2, math.ceil(timing.reset_s / episode_s)), num_cores // num_envs))


def is_worth_prefetching(timing: Timing, num_envs: int, num_cores: int) -> bool:
    """Whether episodes that begin ahead of time would save a fifth: the others wait for each one that resets."""
    if timing.reset_s < SLOW_RESET_S or num_cores == 1 or num_envs > ENVIRONMENTS_PER_CORE * num_cores:
        return False
    steps, step_s, reset_s = timing.episode_steps, timing.step_s, timing.reset_s
    play_s = min(step_s * num_envs, _seconds_async(step_s, num_envs, num_cores)) * steps
    waiting = play_s + num_envs * reset_s
    ahead = max(
        steps * (step_s * -(-num_envs // num_cores) + MESSAGE_S * num_envs),
        num_envs * (steps * step_s + reset_s) / num_cores,  # all cores at work
        reset_s / prefetch_depth(timing, num_envs, num_cores),
    )
    return ahead < PREFETCH_WORTH * waiting


def begins_anew(recipe: Recipe, plan: Blueprint, played: gym.Env) -> bool:
    """Whether `reset(seed=...)` leaves nothing of earlier episodes: an environment that has been played and a fresh
    one then show the same. Wrappers that remember episodes say so themselves."""
    if any(getattr(layer, "remembers_episodes", False) for layer in layers(played)):
        return False
    fresh = recipe.build()
    try:
        return _first_rows(played, plan) == _first_rows(fresh, plan)
    except EnvironmentFault:
        return False
    finally:
        close(fresh)


def _first_rows(env: gym.Env, plan: Blueprint) -> list[str]:
    single = alone(env, plan, max_restarts=0, seed=1)
    action = np.zeros((1, *plan.spec.action.shape), plan.spec.action.dtype)
    rows = [single.reset(), *(single.step(action) for _ in range(COMPARED_STEPS))]
    return [to_text(vars(row)) for row in rows]
