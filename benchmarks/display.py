"""What the live display costs: the same training with and without it, alternately, on a pseudo-terminal.

    python benchmarks/display.py [--experiment ppo_cartpole] [--steps 60000] [--repeats 3] [--json figures.json]

frames/s    how often the panel was painted; the goal is at least 2
display     CPU time of the display's own thread over the time of the run, as the run's summary says it; at most 1 %
slower      median time of the training loop with the display over that without it: what all of it costs, waiting for
            Python's lock included. On a busy machine it is noise: compare it with the spread beside it
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import statistics
import subprocess
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rl_lab.config.compose import compose
from rl_lab.experiment.build import build


@dataclass(frozen=True)
class Measurement:
    is_live: bool
    seconds: float
    frames_per_second: float
    display: float  # fraction of the time


def train(experiment: str, steps: int, *, is_live: bool) -> Measurement:
    """One training without files; with the display, its terminal is read by another process."""
    last = f"training.phases.train.duration_steps={steps}"
    config = compose(experiment, [last, "evaluation.final_episodes=0", "logging.terminal=live"])
    master, slave = pty.openpty()
    with subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL) as reader, open(slave, "w") as terminal:
        with redirect_stdout(terminal):
            built = build(config, run=None, quiet=not is_live)
            built.display.start(built.probe)
            start = time.perf_counter()
            built.orchestrator.run()
            seconds = time.perf_counter() - start
            ticks, cost = built.display.frames, built.display.cost or 0.0
            built.close()
        reader.terminate()
    os.close(master)
    return Measurement(is_live, seconds, ticks / seconds, cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="ppo_cartpole")
    parser.add_argument("--steps", type=int, default=60_000, help="agent steps of each training")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train(arguments.experiment, min(arguments.steps, 4_000), is_live=True)  # imports and caches
    results = [
        train(arguments.experiment, arguments.steps, is_live=is_live)
        for repeat in range(arguments.repeats)
        for is_live in ((True, False) if repeat % 2 else (False, True))
    ]
    print("\n".join(report(arguments.experiment, results)))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in results], indent=2) + "\n")


def report(experiment: str, results: list[Measurement]) -> list[str]:
    live, quiet = ([each for each in results if each.is_live is is_live] for is_live in (True, False))
    ratio = statistics.median(each.seconds for each in live) / statistics.median(each.seconds for each in quiet)
    spread = max(each.seconds for each in quiet) / min(each.seconds for each in quiet) - 1.0
    return [
        f"live display, {experiment}, {len(live)} runs each:",
        f"  {min(each.frames_per_second for each in live):.1f} frames/s at least",
        f"  display {max(each.display for each in live):.2%} of the time at most",
        f"  slower by {ratio - 1.0:.1%}; runs without it differ by {spread:.1%}",
    ]


if __name__ == "__main__":
    main()
