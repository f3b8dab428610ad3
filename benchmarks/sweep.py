"""What a sweep costs beside its trials:

    python benchmarks/sweep.py [--trials 64] [--jobs 2] [--seconds 1.0] [--json figures.json]

A random search over PPO's learning rate on CartPole-v1. First a few trials are run in this process to choose how many
agent steps train for `--seconds` of processor time, which on an idle machine is wall time; then the sweep runs. Printed
are shares of the wall clock times workers:

1. outside training: starting processes, importing torch, checks before the first trial, waiting in between, and of each
   trial composing its config, its run directory, index and report. Training is what the runs themselves count
   (`wall_s` in status.json: the loop with its evaluations);
2. outside the workers' tasks: without what belongs to each trial;
3. outside training as it would be on an idle machine, from processor times, which other work on the machine hardly
   changes: (start + trials / jobs * around) / (start + trials / jobs * (around + training)). `start` is everything
   but the trials themselves, as if nothing of it ran in parallel.

For comparison the same number of trials at the speed of `rl-lab train` in a process of its own, from two of them. All
of it takes about 70 seconds on two idle cores.
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
from pathlib import Path
from typing import Any

import yaml

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a worker has one thread
COMMAND = [sys.executable, "-m", "rl_lab"]
WORDS = [
    "environment.num_envs=8",
    "evaluation.final_episodes=10",
    "evaluation.video=false",
    "logging.tensorboard=false",
]
STEPS = "training.phases.train.duration_steps"
RATE = "optimizers.controller.learning_rate"
RATES = (0.001, 0.002, 0.003)
PROBE_STEPS = 8000
GOAL = 0.25


@dataclass(frozen=True)
class Warm:
    """One trial in a process that has done some: processor time of its training, and around it."""

    training_cpu_s: float
    around_cpu_s: float


@dataclass(frozen=True)
class Figures:
    """What one sweep took, in seconds; `tasks_s` and `training_s` are sums over all trials."""

    trials: int
    jobs: int
    wall_s: float
    tasks_s: float
    training_s: float
    own_process_s: float  # one `rl-lab train`
    warm: Warm
    start_cpu_s: float  # of a sweep with one worker, without its trials
    load: float  # runnable processes on the machine, one-minute mean

    def outside_tasks(self) -> float:
        return 1.0 - self.tasks_s / (self.wall_s * self.jobs)

    def outside_training(self) -> float:
        return 1.0 - self.training_s / (self.wall_s * self.jobs)

    def outside_training_if_idle(self) -> float:
        rounds = self.trials / self.jobs
        outside = self.start_cpu_s + rounds * self.warm.around_cpu_s
        return outside / (outside + rounds * self.warm.training_cpu_s)

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
        probe = warm_trial(PROBE_STEPS)
        steps = max(1, int(PROBE_STEPS * arguments.seconds / probe.training_cpu_s))
        figures = measure(steps, arguments.trials, arguments.jobs)
    print(report(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(figures), indent=2) + "\n")


def warm_trial(steps: int) -> Warm:
    """The last of three trials in this process; the first two import and fill caches."""
    from rl_lab.experiment.trial import work
    from rl_lab.experiment.trial_tasks import TrialRun
    from rl_lab.orchestration.orchestrator import Orchestrator

    run, training = Orchestrator.run, 0.0

    def timed(orchestrator: Orchestrator) -> Any:
        nonlocal training
        begin = time.process_time()
        outcome = run(orchestrator)
        training = time.process_time() - begin
        return outcome

    Orchestrator.run = timed  # type: ignore[method-assign]
    for number in range(3):
        words = (*WORDS, f"{STEPS}={steps}", f"{RATE}={RATES[number]}", "seed=0")
        task = TrialRun(
            run_id=f"warm-{steps}-{number}",
            experiment="ppo_cartpole",
            overrides=words,
            runs_dir=Path("warm"),
            config_dir=None,
            tag="sweep:warm",
            metric="eval/episode_return_mean",
            score="last",
            direction="maximize",
            is_reporting=False,
        )
        begin = time.process_time()
        work(task, lambda values: False)
        whole = time.process_time() - begin
    Orchestrator.run = run  # type: ignore[method-assign]
    return Warm(training, whole - training)


def measure(steps: int, trials: int, jobs: int) -> Figures:
    load, warm = os.getloadavg()[0], warm_trial(steps)
    cpu_s = children_cpu_s()
    run_sweep("one", steps, trials=1, jobs=1)
    start_cpu_s = children_cpu_s() - cpu_s - warm.training_cpu_s - warm.around_cpu_s
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
        own_process_s=statistics.mean(own_process(steps, index) for index in range(2)),
        load=load,
        warm=warm,
        start_cpu_s=start_cpu_s,
    )


def children_cpu_s() -> float:
    """Of every process that has ended, a sweep's workers included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


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
    idle, warm = figures.outside_training_if_idle(), figures.warm
    return "\n".join(
        [
            f"{figures.trials} trials of {mean:.2f} s on {figures.jobs} workers: {figures.wall_s:.1f} s "
            f"(load {figures.load:.1f} before it)",
            f"1. outside training, as timed:          {figures.outside_training():7.1%}  (goal: at most {GOAL:.0%})",
            f"2. outside the workers' tasks, as timed:{figures.outside_tasks():7.1%}",
            f"3. outside training, on an idle machine:{idle:7.1%}  (goal: at most {GOAL:.0%})",
            f"   processor time: start {figures.start_cpu_s:.2f} s, each trial {warm.training_cpu_s:.2f} s of training "
            f"and {warm.around_cpu_s:.3f} s around it",
            f"`rl-lab train` in processes of their own would take {figures.own_processes_s():.1f} s: "
            f"{figures.own_processes_s() / figures.wall_s:.2f} times as long",
        ]
    )


if __name__ == "__main__":
    main()
