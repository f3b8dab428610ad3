"""How long questions about many runs take, as the commands a user types, the start of Python included:

    python benchmarks/research_day.py [--runs 10000] [--compared 20] [--rows 10000] [--repeats 5] [--json figures.json]

1. `rl-lab list` with a filter and an order, in a folder of 10,000 runs whose index is filled; also by a setting, and
   the rebuild of the whole index.
2. `rl-lab compare` of 20 runs with 10,000 rows of 60 metrics each: four groups of five seeds.

The runs are written by this program: the files of a run, with numbers of its own in each. Beside the wall clock the
processor time is printed, which says more on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import numpy as np
import yaml

COMMAND = [sys.executable, "-m", "rl_lab"]
ALGORITHMS, ENVIRONMENTS = ("PPO", "DQN", "SAC"), ("CartPole-v1", "Acrobot-v1", "dmc/walker_walk")
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
METRICS = 60  # of a row, as many as a world model logs


@dataclass(frozen=True)
class Cost:
    """Seconds of one command: on the wall clock, and of a processor."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Figures:
    """Medians over repetitions."""

    runs: int
    listed: Cost
    listed_by_setting: Cost
    rebuilt: Cost
    compared: int
    rows: int
    comparison: Cost
    load: float  # runnable processes on the machine before it, one-minute mean


@cache
def config_text(seed: int, discount: float) -> str:
    """About as many settings as a real config has."""
    blocks = {f"part_{block}": {f"setting_{index}": index / 7 for index in range(12)} for block in range(8)}
    phases = [{"name": "train", "collect_steps": 32, "duration_steps": 100_000}]
    known = {"seed": seed, "algorithm": {"discount": discount}, "training": {"phases": phases}}
    return yaml.safe_dump({"experiment": {"name": "made"}, **known, "components": blocks})


def make_run(folder: Path, number: int, *, discount: float, environment: str) -> Path:
    run = folder / f"{BEGIN + timedelta(seconds=number):%Y%m%d-%H%M%S}-made-s{number % 5}-{number % 65536:04x}"
    run.mkdir()
    created = (BEGIN + timedelta(seconds=number)).isoformat()
    manifest = {
        "config_schema_version": 3,
        "checkpoint_schema_version": 2,
        "name": "made",
        "algorithm": ALGORITHMS[number % len(ALGORITHMS)],
        "environment_id": environment,
        "seed": number % 5,
        "config_hash": f"{number:064x}",
        "created": created,
        "git": {"commit": f"{number % 40:040x}", "branch": "main", "dirty": False},
    }
    score = float(number * 7919 % 10007)
    status = {"state": "finished", "message": "", "time": created, "wall_s": 60.0, "best_score": score}
    status |= {"final_score": score, "counts": {"agent_steps": 100_000, "env_frames": 100_000}}
    (run / "config.yaml").write_text(config_text(number % 5, discount))
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "status.json").write_text(json.dumps(status))
    (run / "tags.json").write_text(json.dumps({"tags": [f"batch-{number % 20}"], "notes": ""}))
    return run


def write_rows(run: Path, rows: int, *, seed: int, best: float) -> None:
    """A curve that rises to `best`, evaluated every hundredth row, beside many other numbers."""
    generator = np.random.default_rng(seed)
    noise = generator.normal(size=rows)
    others = generator.random(METRICS)
    with open(run / "metrics.jsonl", "w", encoding="utf-8") as file:
        for index in range(1, rows + 1):
            value = best * (1.0 - np.exp(-4.0 * index / rows)) + 20.0 * noise[index - 1]
            row = {"env_frames": index * 1000, "agent_steps": index * 500, "wall_s": index / 10.0}
            row |= {f"loss/term_{place}": float(other) * index for place, other in enumerate(others)}
            row["collect/episode_return_mean"] = float(value)
            if index % 100 == 0 or index == rows:
                row["eval/episode_return_mean"] = float(value) + 5.0
            file.write(json.dumps(row) + "\n")


def cost(folder: Path, words: list[str], repeats: int = 1) -> Cost:
    costs = []
    for _ in range(repeats):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([*COMMAND, *words, "--runs-dir", str(folder)], check=True, stdout=subprocess.DEVNULL)
        wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append((wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return Cost(*(statistics.median(each) for each in zip(*costs, strict=True)))


def measure(folder: Path, arguments: argparse.Namespace) -> Figures:
    many, few, load = folder / "many", folder / "few", os.getloadavg()[0]
    many.mkdir()
    few.mkdir()
    for number in range(arguments.runs):
        environment = ENVIRONMENTS[number // len(ALGORITHMS) % len(ENVIRONMENTS)]
        write_rows(
            make_run(many, number, discount=0.9 + number % 10 / 100, environment=environment), 3, seed=0, best=9.0
        )
    for number in range(arguments.compared):
        run = make_run(few, number, discount=0.9 + number // 5 / 100, environment="CartPole-v1")
        write_rows(run, arguments.rows, seed=number, best=300.0 + 50.0 * (number // 5))
    rebuilt = cost(many, ["list", "--rebuild", "--limit", "1"])
    question = ["list", "--where", "algorithm=ppo", "--where", "env~Cart", "--sort", "eval/return", "--limit", "20"]
    setting = ["list", "--where", "algorithm.discount>=0.95", "--sort", "algorithm.discount", "--limit", "20"]
    compared = ["compare", "--where", "env~Cart", "--metrics", "eval/return", "--output", str(folder / "compare.png")]
    return Figures(
        runs=arguments.runs,
        listed=cost(many, question, arguments.repeats),
        listed_by_setting=cost(many, setting, arguments.repeats),
        rebuilt=rebuilt,
        compared=arguments.compared,
        rows=arguments.rows,
        comparison=cost(few, compared, arguments.repeats),
        load=load,
    )


def report(figures: Figures) -> str:
    lines = [
        (f"list {figures.runs:,} runs by a filter, sorted", figures.listed, "at most 0.5 s"),
        ("the same by a setting", figures.listed_by_setting, "-"),
        ("rebuild of the index", figures.rebuilt, "-"),
        (f"compare {figures.compared} runs of {figures.rows:,} rows", figures.comparison, "at most 5 s"),
    ]
    rows = [f"| {what} | {each.wall_s:.2f} | {each.cpu_s:.2f} | {goal} |" for what, each, goal in lines]
    head = ["| command | wall s | CPU s | goal |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, "", f"load before it: {figures.load:.1f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--compared", type=int, default=20)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), arguments)
    print(report(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(figures), indent=2) + "\n")


if __name__ == "__main__":
    main()
