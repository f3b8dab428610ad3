"""SAC beside Stable-Baselines3 on data of HalfCheetah's shape: 17 numbers seen, 6 actions, batch 256, layers of 256.

    pip install stable-baselines3
    python benchmarks/off_policy_sac.py
    python benchmarks/off_policy_sac.py --chunks 20 --json figures.json

Whole updates on a CPU, one torch thread, sampling from a replay of 100,000 rows included. Both take turns in short
chunks, so that a noisy machine hits both; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sac_update import ACTIONS, BATCH, OBSERVED, PHASE, make_sac

from rl_lab.buffers.replay import ReplayBuffer

ROWS = 100_000


def ours() -> Callable[[], Any]:
    """One update of ours, its batch drawn from a full replay."""
    sac = make_sac("cpu")
    replay = ReplayBuffer(num_envs=1, capacity_rows=ROWS, batch_size=BATCH, seed=0)
    random = torch.Generator().manual_seed(0)
    no = torch.zeros(1, dtype=torch.bool)
    for _ in range(ROWS):
        replay.add(
            {
                "vector": torch.randn(1, OBSERVED, generator=random),
                "action": torch.rand(1, ACTIONS, generator=random) * 2.0 - 1.0,
                "reward": torch.randn(1, generator=random),
                "is_first": no,
                "is_last": no,
                "is_terminal": no,
            }
        )

    def update() -> None:
        batch = replay.sample()
        sac.update_controller(batch, phase=PHASE)
        replay.learned(batch)

    return update


def sb3() -> Callable[[], Any]:
    """One update of Stable-Baselines3's SAC on a replay filled with numbers of the same kind."""
    import gymnasium
    from stable_baselines3 import SAC
    from stable_baselines3.common.logger import Logger

    class Shapes(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (OBSERVED,), np.float32)
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)

    model = SAC("MlpPolicy", Shapes(), batch_size=BATCH, buffer_size=ROWS, device="cpu", seed=0)
    model.set_logger(Logger(folder=None, output_formats=[]))
    replay, random = model.replay_buffer, np.random.default_rng(0)
    assert replay is not None
    shape = (ROWS, 1)
    replay.observations[:] = random.standard_normal((*shape, OBSERVED), dtype=np.float32)
    replay.next_observations[:] = random.standard_normal((*shape, OBSERVED), dtype=np.float32)
    replay.actions[:] = random.uniform(-1.0, 1.0, (*shape, ACTIONS))
    replay.rewards[:] = random.standard_normal(shape, dtype=np.float32)
    replay.full = True

    return lambda: model.train(gradient_steps=1, batch_size=BATCH)


def measure(*, chunks: int, updates: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Medians and their ratio, and every turn's updates per second."""
    torch.set_num_threads(1)
    sides = {"ours": ours(), "sb3": sb3()}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for update in sides.values():
        for _ in range(20):
            update()
    for _ in range(chunks):
        for side, update in sides.items():
            start = time.perf_counter()
            for _ in range(updates):
                update()
            rates[side].append(updates / (time.perf_counter() - start))
    middle = {side: statistics.median(values) for side, values in rates.items()}
    pairs = [mine / theirs for mine, theirs in zip(rates["ours"], rates["sb3"], strict=True)]
    figures = {
        "updates_per_second_ours": middle["ours"],
        "updates_per_second_sb3": middle["sb3"],
        "ratio": middle["ours"] / middle["sb3"],
        "ratio_of_neighbouring_turns": statistics.median(pairs),
    }
    print(f"SAC, {platform.machine()}, torch {torch.__version__}, one thread, {chunks} turns each")
    for name, value in figures.items():
        print(f"{name:<30} {value:,.2f}")
    return figures, rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=20, help="turns of each side")
    parser.add_argument("--updates", type=int, default=20, help="updates per turn")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    figures, rates = measure(chunks=arguments.chunks, updates=arguments.updates)
    if arguments.json:
        arguments.json.write_text(json.dumps({"summary": figures, "rates": rates}, indent=1) + "\n")


if __name__ == "__main__":
    main()
