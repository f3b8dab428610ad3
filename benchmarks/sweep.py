"""What a sweep costs beside its trials:

    python benchmarks/sweep.py [--trials 64] [--jobs 2] [--seconds 1.0] [--json figures.json]

A random search over PPO's learning rate on CartPole-v1. First one trial is timed to choose how many agent steps take
`--seconds`; then the sweep runs. Two shares of the wall clock times workers are printed:

1. outside the workers' tasks: starting processes, importing torch, checks before the first trial, waiting in between;
2. outside training: also composing the config, making the run directory, and report and curve of each run, which
   `rl-lab train` does as well. Training is what the runs themselves count (`wall_s` in status.json).

For comparison the same number of trials at the speed of `rl-lab train` in a process of its own, from three of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

COMMAND = [sys.executable, "-m", "rl_lab"]
WORDS = [
    "environment.num_envs=8",
    "evaluation.final_episodes=10",
    "evaluation.video=false",
    "logging.tensorboard=false",
]
STEPS = "training.phases.train.duration_steps"
RATE = "optimizers.controller.learning_rate"
PROBE_STEPS = 8000


@dataclass(frozen=True)
class Figures:
    """What one sweep took, in seconds; `tasks_s` and `training_s` are sums over all trials."""

    trials: int
    jobs: int
    wall_s: float
    tasks_s: float
    training_s: float
    own_process_s: float  # median of one `rl-lab train`
    load: float  # runnable processes on the machine, one-minute mean

    def outside_tasks(self) -> float:
        return 1.0 - self.tasks_s / (self.wall_s * self.jobs)

    def outside_training(self) -> float:
        return 1.0 - self.training_s / (self.wall_s * self.jobs)

    def own_processes_s(self) -> float:
        return self.own_process_s * self.trials / self.jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        steps = max(1, int(PROBE_STEPS * arguments.seconds / probe()))
        figures = measure(steps, arguments.trials, arguments.jobs)
    print(report(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(figures), indent=2) + "\n")


def probe() -> float:
    """Seconds of training for PROBE_STEPS in a warm worker: the last of three trials."""
    run_sweep("probe", PROBE_STEPS, trials=3, jobs=1)
    return training_seconds("probe-0002-s0")


def measure(steps: int, trials: int, jobs: int) -> Figures:
    load = os.getloadavg()[0]
    wall_s = run_sweep("sweep", steps, trials=trials, jobs=jobs)
    runs = [f"sweep-{number:04d}-s0" for number in range(trials)]
    rows = [json.loads(line) for line in Path("runs/sweeps/sweep/trials.jsonl").read_text().splitlines()]
    tasks = {row["number"]: row["task_seconds"] for row in rows if row.get("state") == "finished"}
    assert len(tasks) == trials, "a trial failed"
    return Figures(
        trials=trials,
        jobs=jobs,
        wall_s=wall_s,
        tasks_s=sum(tasks.values()),
        training_s=sum(training_seconds(run) for run in runs),
        own_process_s=statistics.median(own_process(steps, index) for index in range(3)),
        load=load,
    )


def run_sweep(name: str, steps: int, *, trials: int, jobs: int) -> float:
    content = {
        "experiment": "ppo_cartpole",
        "overrides": [*WORDS, f"{STEPS}={steps}"],
        "sampler": "random",
        "trials": trials,
        "jobs": jobs,
        "parameters": {RATE: {"low": 1.0e-4, "high": 1.0e-2, "log": True}},
    }
    Path(f"{name}.yaml").write_text(yaml.safe_dump(content))
    start = time.perf_counter()
    subprocess.run([*COMMAND, "sweep", f"{name}.yaml", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def training_seconds(run_id: str) -> float:
    return float(json.loads(Path(f"runs/{run_id}/status.json").read_text())["wall_s"])


def own_process(steps: int, index: int) -> float:
    words = ["train", "ppo_cartpole", *WORDS, f"{STEPS}={steps}", f"{RATE}=0.001", "--run-id", f"own-{index}", "-q"]
    start = time.perf_counter()
    subprocess.run([*COMMAND, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def report(figures: Figures) -> str:
    mean = figures.training_s / figures.trials
    return "\n".join(
        [
            f"{figures.trials} trials of {mean:.2f} s on {figures.jobs} workers: {figures.wall_s:.1f} s "
            f"(load {figures.load:.1f} before it)",
            f"outside the workers' tasks: {figures.outside_tasks():.1%} (goal: at most 25 %)",
            f"outside training: {figures.outside_training():.1%}",
            f"`rl-lab train` in processes of their own would take {figures.own_processes_s():.1f} s: "
            f"{figures.own_processes_s() / figures.wall_s:.2f} times as long",
        ]
    )


if __name__ == "__main__":
    main()
