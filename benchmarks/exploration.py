"""Does Plan2Explore find a reward that Dreamer without it does not? Frames, sizes and updates are the same for all.

    python benchmarks/exploration.py [--modes plan2explore greedy epsilon] [--seeds 10 11 12] [--set key=value ...]

Prints of each run: the agent steps after which the first reward was seen, how many rewards were seen in all, how many
different observations (cells of the maze), the score of the task's policy at the end (10 episodes), and processor time.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

from rl_lab.config.compose import compose
from rl_lab.experiment.build import build
from rl_lab.types import Batch

EXPERIMENT = "plan2explore_maze"
SETTINGS = ["runtime.threads=1", "evaluation.every_steps=null", "evaluation.final_episodes=10"]


@dataclass
class Seen:
    """What the rows of a training showed."""

    agent_steps: int = 0
    first_reward: int | None = None
    rewards: int = 0
    cells: set[tuple[float, ...]] = field(default_factory=set)

    def look(self, row: Batch) -> None:
        self.agent_steps += int((~row["is_first"]).sum())
        self.rewards += int((row["reward"] > 0).sum())
        if self.rewards and self.first_reward is None:
            self.first_reward = self.agent_steps
        self.cells.update(tuple(place) for place in row["vector"].tolist())


def train(mode: str, seed: int, *words: str) -> tuple[Seen, float]:
    """What was seen, and the score of the task's policy."""
    config = compose(EXPERIMENT, [f"exploration={mode}", f"seed={seed}", *SETTINGS, *words])
    trained = build(config, run=None, quiet=True)
    seen, store = Seen(), trained.collector.buffers["replay"]
    add = store.add

    def looked_at(row: Batch) -> None:
        seen.look(row)
        add(row)

    store.add = looked_at  # type: ignore[method-assign]
    try:
        trained.orchestrator.run()
        assert trained.housekeeping.last_score is not None
        return seen, trained.housekeeping.last_score
    finally:
        trained.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["plan2explore", "greedy", "epsilon"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 11, 12])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of all runs")
    chosen = parser.parse_args()
    print("exploration    seed  first reward  rewards  cells  score  processor s")
    for seed in chosen.seeds:
        for mode in chosen.modes:
            begin = time.process_time()
            seen, score = train(mode, seed, *chosen.set)
            first = "never" if seen.first_reward is None else f"{seen.first_reward:,}"
            found = f"{first:>13} {seen.rewards:8} {len(seen.cells):6} {score:6.2f}"
            print(f"{mode:13} {seed:5} {found} {time.process_time() - begin:12.0f}", flush=True)


if __name__ == "__main__":
    main()
