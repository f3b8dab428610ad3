"""What several tests of this folder do: act at random, play, compare."""

from __future__ import annotations

import numpy as np

from rl_lab.environments.base import Environment
from rl_lab.types import EnvRows


def random_actions(environment: Environment, generator: np.random.Generator) -> np.ndarray:
    spec, num_envs = environment.spec.action, environment.num_envs
    if spec.kind == "continuous":
        return generator.uniform(-1.5, 1.5, (num_envs, *spec.shape)).astype(np.float32)
    if spec.kind == "discrete":
        return generator.integers(spec.sizes[0], size=num_envs)
    return generator.integers(spec.sizes, size=(num_envs, len(spec.sizes)))


def play(environment: Environment, *, steps: int, seed: int) -> list[EnvRows]:
    generator = np.random.default_rng(seed)
    return [environment.reset()] + [environment.step(random_actions(environment, generator)) for _ in range(steps)]


def as_tree(rows: list[EnvRows]) -> list[dict]:
    return [vars(row) for row in rows]
