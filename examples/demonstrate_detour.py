"""Demonstrations of walking around a block, half of them left and half right, for `docs/imitation.md`.

    python examples/demonstrate_detour.py --output data/detour.npz
    rl-lab train diffusion_policy_detour buffers.demonstrations.path=data/detour.npz

The file has the plain layout of docs/datasets.md: one array per thing that `env.step` takes or returns.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import rl_lab.environments  # noqa: F401  (registers rl_lab/Detour-v0)


def demonstrations(episodes: int, *, seed: int = 0, **settings: Any) -> dict[str, np.ndarray]:
    """Steps of whole episodes in a row; every one ends well."""
    env = gym.make("rl_lab/Detour-v0", **settings)
    columns: dict[str, list[Any]] = {name: [] for name in NAMES}
    observation, _ = env.reset(seed=seed)
    while episodes:
        action = env.unwrapped.demonstrate()
        following, reward, terminated, truncated, _ = env.step(action)
        for name, value in zip(NAMES, (observation, following, action, reward, terminated, truncated), strict=True):
            columns[name].append(value)
        observation = following
        if terminated or truncated:
            observation, _ = env.reset()
            episodes -= 1
    arrays: dict[str, np.ndarray] = {}
    for name, values in columns.items():
        if isinstance(values[0], dict):  # several observation keys have an array each
            arrays |= {f"{name}.{key}": np.stack([value[key] for value in values]) for key in values[0]}
        else:
            arrays[name] = np.array(values)
    return arrays


NAMES = ("observations", "next_observations", "actions", "rewards", "terminations", "truncations")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("data/detour.npz"))
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shows", default="state", help="state, image or both")
    arguments = parser.parse_args()
    steps = demonstrations(arguments.episodes, seed=arguments.seed, shows=arguments.shows)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.output, **steps)  # type: ignore[arg-type]
    ends = steps["terminations"] | steps["truncations"]
    print(f"{arguments.output}: {len(ends)} steps, {int(ends.sum())} episodes, {steps['rewards'].sum():g} ended well")


if __name__ == "__main__":
    main()
