"""How long a user waits, and what safety costs:

    python benchmarks/startup.py [--repeats 5] [--json figures.json]

1. `rl-lab --help`, from the call to its end.
2. `rl-lab train`, from the call to the first log row of a run that logs after one environment step and one gradient
   step: an upper bound of the time to the first environment step.
3. One checkpoint of the default run, and its share of the wall clock at the default cadence.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rl_lab.runs.metrics_file import read_metrics

COMMAND = [sys.executable, "-m", "rl_lab"]
ONE_STEP = [
    "training.phases.train.collect_steps=1",
    "training.phases.train.duration_steps=null",
    "training.phases.train.duration_cycles=1",
    "algorithm.epochs=1",
    "evaluation.final_episodes=0",
    "evaluation.video=false",
]
SAVE_EVERY_UPDATE = [
    "training.phases.train.duration_steps=null",
    "training.phases.train.duration_cycles=50",
    "training.checkpoint.every_updates=1",
    "evaluation.final_episodes=0",
    "evaluation.video=false",
]
DEFAULT_MINUTES = 2.0  # training.checkpoint.every_minutes


def help_seconds() -> float:
    start = time.perf_counter()
    subprocess.run([*COMMAND, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def first_step_seconds(runs_dir: Path, run_id: str) -> float:
    """Until the first row stands in metrics.jsonl."""
    metrics = runs_dir / run_id / "metrics.jsonl"
    words = ["train", "ppo_cartpole", *ONE_STEP, "--run-id", run_id, "--runs-dir", str(runs_dir), "-q"]
    start = time.perf_counter()
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.DEVNULL)
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        time.sleep(0.005)
    seconds = time.perf_counter() - start
    if process.wait() != 0:
        raise SystemExit(f"rl-lab {' '.join(words)} failed")
    return seconds


def checkpoint_seconds(runs_dir: Path) -> float:
    """The mean cost of one save of the default run, from the run's own time split."""
    words = ["train", "ppo_cartpole", *SAVE_EVERY_UPDATE, "--run-id", "saves", "--runs-dir", str(runs_dir), "-q"]
    subprocess.run([*COMMAND, *words], check=True, stdout=subprocess.DEVNULL)
    rows = read_metrics(runs_dir / "saves" / "metrics.jsonl")
    walls = [row["wall_s"] for row in rows]
    spent = [
        row["time/checkpoint_fraction"] * (wall - before)
        for row, wall, before in zip(rows[1:], walls[1:], walls, strict=False)
        if "time/checkpoint_fraction" in row
    ]
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs_dir = Path(folder)
        saving = checkpoint_seconds(runs_dir)
        figures = {
            "help_s": statistics.median(help_seconds() for _ in range(arguments.repeats)),
            "first_step_s": statistics.median(
                first_step_seconds(runs_dir, f"start{i}") for i in range(arguments.repeats)
            ),
            "checkpoint_s": saving,
            "checkpoint_share": saving / (60.0 * DEFAULT_MINUTES),
        }
    print(f"rl-lab --help                      {figures['help_s']:.2f} s")
    print(f"rl-lab train to the first step     {figures['first_step_s']:.2f} s (with the first gradient step)")
    print(f"one checkpoint                     {1000 * figures['checkpoint_s']:.1f} ms")
    print(f"share at the default cadence       {figures['checkpoint_share']:.3%}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
