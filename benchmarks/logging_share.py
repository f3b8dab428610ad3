"""What logging costs: its share of the wall time of `rl-lab train ppo_cartpole`, by the run's own time split.

    python benchmarks/logging_share.py [--repeats 5] [--rows]

Each run is a process of its own, and the sinks take turns. metrics.jsonl is always written, so `none` is that file and
the lines on the terminal; the next two add TensorBoard's events and then metrics.csv. With `--rows` also the processor
time of one row in each writer, which a busy machine hardly changes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

SINKS = {
    "none": ["logging.tensorboard=false"],
    "tensorboard": ["logging.tensorboard=true"],
    "tensorboard + csv": ["logging.tensorboard=true", "logging.writers=[csv]"],
}
GOAL = 0.02
NAME_WIDTH = 18
ROWS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", action="store_true")
    arguments = parser.parse_args()
    shares: dict[str, list[float]] = {name: [] for name in SINKS}
    print(f"load {os.getloadavg()[0]:.1f}; goal: at most {GOAL:.0%}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            for name, words in SINKS.items():
                rows = train(f"{len(words)}-{name.split()[0]}-{repeat}", words, Path(folder))
                shares[name].append(logging_share(rows))
        for name, found in shares.items():
            print(f"{name:{NAME_WIDTH}} median {median(found):.2%}  ({min(found):.2%} to {max(found):.2%})")
        if arguments.rows:
            for name, seconds in seconds_per_row(rows[-1], Path(folder)).items():
                print(
                    f"{name:{NAME_WIDTH}} {1e6 * seconds:.0f} µs of processor time per row of {len(rows[-1])} numbers"
                )


def train(run_id: str, words: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "rl_lab", "train", "ppo_cartpole", "evaluation.video=false", *words]
    subprocess.run([*command, "--run-id", run_id], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    lines = (folder / "runs" / run_id / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def logging_share(rows: Sequence[dict[str, Any]]) -> float:
    """Of the time up to the last row. Each row holds the share since the row before it."""
    seconds, end = 0.0, 0.0
    for row in rows:
        begin, end = end, row["wall_s"]
        seconds += row.get("time/logging_fraction", 0.0) * (end - begin)
    return seconds / end


def seconds_per_row(row: dict[str, Any], folder: Path) -> dict[str, float]:
    from rl_lab.metrics.csv_writer import CsvWriter
    from rl_lab.metrics.tensorboard_writer import TensorBoardWriter
    from rl_lab.metrics.writers import JsonlWriter

    found = {}
    for writer in (JsonlWriter(folder / "metrics.jsonl"), CsvWriter(folder), TensorBoardWriter(folder)):
        writer.write(row)
        begin = time.thread_time()
        for _ in range(ROWS):
            writer.write(row)
        found[writer.name] = (time.thread_time() - begin) / ROWS
        writer.close()
    return found


if __name__ == "__main__":
    main()
