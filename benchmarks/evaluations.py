"""What the evaluations during training cost by default: their share of the processor time of `ppo_cartpole`.

    python benchmarks/evaluations.py [--seeds 5]

Processor time of this process, one thread, so that a busy machine changes little. The last evaluation, which every run
has, is not counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median

import torch

from rl_lab import api
from rl_lab.orchestration.housekeeping import Housekeeping

SETTINGS = ["evaluation.video=false", "evaluation.final_episodes=1", "runtime.threads=1"]


def measure(seed: int, folder: str, *more: str) -> tuple[float, float]:
    """Seconds of processor time of a run, and of the evaluations on its way."""
    seconds: list[float] = []
    score = Housekeeping._score

    def timed(housekeeping: Housekeeping, episodes: int) -> float | None:
        begin = time.process_time()
        found = score(housekeeping, episodes)
        seconds.append(time.process_time() - begin)
        return found

    Housekeeping._score = timed  # type: ignore[method-assign]
    try:
        begin = time.process_time()
        api.train("ppo_cartpole", overrides=[*SETTINGS, *more], seed=seed, runs_dir=folder, quiet=True)
        return time.process_time() - begin, sum(seconds[:-1])
    finally:
        Housekeeping._score = score  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(0, folder, "training.phases.train.duration_steps=5000")  # imports and first uses
        shares = []
        for seed in range(seeds):
            whole, evaluations = measure(seed, folder)
            shares.append(evaluations / (whole - evaluations))
            print(f"seed {seed}: {whole:.2f} s, of which evaluations on the way {evaluations:.2f} s: +{shares[-1]:.1%}")
    print(f"median +{median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})")


if __name__ == "__main__":
    main()
