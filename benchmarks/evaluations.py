"""What the evaluations during training cost by default: their share of the processor time of `ppo_cartpole`.

    python benchmarks/evaluations.py [--seeds 5]

Processor time of this process, one thread, so that a busy machine changes little. The last evaluation, which every run
has, is not counted. Once over the learning alone, once over all that `rl-lab train ppo_cartpole` does after imports,
the last evaluation, video, curve and report too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median

import torch

from rl_lab import api
from rl_lab.orchestration.housekeeping import Housekeeping

ALONE = ("evaluation.video=false", "evaluation.final_episodes=1")  # the least of all that is not learning


def measure(seed: int, folder: str, *words: str) -> tuple[float, list[float]]:
    """Seconds of processor time of a run, and of each of the evaluations on its way."""
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
        api.train("ppo_cartpole", overrides=["runtime.threads=1", *words], seed=seed, runs_dir=folder, quiet=True)
        return time.process_time() - begin, seconds[:-1]
    finally:
        Housekeeping._score = score  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(0, folder, "training.phases.train.duration_steps=5000")  # imports and first uses
        for name, words in (("learning", ALONE), ("whole run", ())):
            shares = []
            for seed in range(seeds):
                seconds, evaluations = measure(seed, folder, *words)
                own = sum(evaluations)
                shares.append(own / (seconds - own))
                count = f"{len(evaluations)} evaluations on the way"
                print(f"{name}, seed {seed}: {seconds:.2f} s, of which {count} {own:.2f} s: +{shares[-1]:.1%}")
            print(f"{name}: median +{median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})")


if __name__ == "__main__":
    main()
