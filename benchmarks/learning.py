"""Learning runs that want a GPU, side by side and in portions: each begun or continued, its scores beside its goal.

    python benchmarks/learning.py --minutes 9
    python benchmarks/learning.py --minutes 30 --only tdmpc2_cup_catch tdmpc2_finger_spin --seed 3
    python benchmarks/learning.py --minutes 0

When the minutes are over every run saves itself and ends; the same command goes on with all that are not done, bit for
bit. `--minutes 0` only looks. A run is RUNS/NAME, what it printed RUNS/NAME.log. On an NVIDIA GPU `--mps` lets the
processes share it at the same time instead of in turns.

training     mean return of the training episodes that ended in the tenth of the frames before
evaluated    mean return of the newest evaluation
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAVING_S = 60.0  # seconds in which a run that was asked to end does so


@dataclass(frozen=True)
class Training:
    """Words after `rl-lab train`, and the mean return `goal` at so many `env_frames`, with its source."""

    words: str
    goal: float
    env_frames: int
    source: str


def tdmpc2(task: str, goal: float, source: str, *words: str) -> Training:
    """50,000 agent steps of two frames, of which 2,500 are random."""
    task = f"tdmpc2 environment=dmc/{task} environment.num_envs=1 environment.vectorization=sync"
    length = "environment.action_repeat=2 training.phases.train.duration_steps=47500 evaluation.every_steps=12500"
    return Training(" ".join((task, length, "components.continue_head=null", *words)), goal, 100_000, source)


def trainings() -> dict[str, Training]:
    published = "published at 100k frames, less a deviation"
    shifted = "components.augmentation={_target_:rl_lab.components.networks.augmentation.RandomShift,pixels:3}"
    pixels = ("environment.kwargs.observation=pixels", "environment.wrappers=[{id:frame_stack,count:3}]", shifted)
    crafter = (
        "dreamer_v3 task=crafter size=12m runtime.precision=bf16 environment.num_envs=4 "
        "environment.vectorization=async environment.prefetch_resets=true "
        "buffers.replay.storage=gpu buffers.replay.capacity_rows=210000 "
        "total_timesteps=200000 evaluation.every_steps=null"
    )
    return {
        "tdmpc2_cheetah_run": tdmpc2("cheetah_run", 519.1 - 68.4, published),
        "tdmpc2_finger_spin": tdmpc2("finger_spin", 947.5 - 27.9, published),
        "tdmpc2_cup_catch": tdmpc2("ball_in_cup_catch", 981.2 - 5.7, published),
        "tdmpc2_walker_walk": tdmpc2("walker_walk", 900.0, "961.9 published at 100k frames"),
        "tdmpc2_finger_spin_pixels": tdmpc2("finger_spin", 980.8 - 4.2, published, *pixels),
        "tdmpc_walker_walk": Training(
            "tdmpc environment=dmc/walker_walk environment.action_repeat=2 environment.vectorization=sync "
            "training.phases.train.duration_steps=45000 evaluation.every_steps=12500",
            963.5 - 6.0,
            100_000,
            published,
        ),
        "dreamer_crafter": Training(crafter, 5.0, 200_000, "the goal"),
        "dreamer_boxing": Training(
            "dreamer_v3_atari100k environment=atari/boxing buffers.replay.storage=gpu evaluation.every_steps=25000",
            71.9 - 11.4,
            300_000,
            "published at 300k frames, less a deviation",
        ),
    }


# --- running ---


def command(name: str, training: Training, folder: Path, seed: int) -> list[str]:
    """Begins the run, or continues it."""
    if (folder / name).exists():
        words = ["resume", str(folder / name)]
    else:
        words = ["train", *training.words.split(), f"seed={seed}", f"runs.directory={folder}", f"runs.id={name}"]
        words += ["evaluation.video=false", "training.checkpoint.every_minutes=10"]
    return [sys.executable, "-m", "rl_lab", *words]


def state_of(run: Path) -> str:
    status = run / "status.json"
    return str(json.loads(status.read_text())["state"]) if status.exists() else "not begun"


def run_all(names: Sequence[str], folder: Path, *, seed: int, minutes: float) -> None:
    """Those that are not done, for so many minutes."""
    end = time.monotonic() + 60.0 * minutes
    processes = {}
    for name in names:
        if state_of(folder / name) != "finished":
            with (folder / f"{name}.log").open("a") as log:
                processes[name] = subprocess.Popen(
                    command(name, trainings()[name], folder, seed), stdout=log, stderr=subprocess.STDOUT
                )
    try:
        for process in processes.values():
            wait(process, end - time.monotonic())
    except KeyboardInterrupt:
        print("\ninterrupted: all runs save themselves; the same command goes on with them")
    for process in processes.values():
        process.send_signal(signal.SIGTERM)  # saves
    for name, process in processes.items():
        if not wait(process, SAVING_S):
            process.kill()
            print(f"{name} did not save within {SAVING_S:g} s and was killed: it goes on from its last checkpoint.")


def wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it ended by then."""
    try:
        process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return False
    return True


@contextmanager
def shared_gpu(folder: Path) -> Iterator[None]:
    """NVIDIA's Multi-Process Service, where it is installed."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        raise SystemExit("--mps: nvidia-cuda-mps-control is not installed here; leave the option out.")
    for place in ("PIPE", "LOG"):
        os.environ[f"CUDA_MPS_{place}_DIRECTORY"] = str(folder / f"mps_{place.lower()}")
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False)


# --- looking ---


def report(names: Sequence[str], folder: Path) -> list[str]:
    lines = [f"{'run':<26}{'state':<13}{'env frames':>11}{'steps/s':>9}{'training':>10}{'evaluated':>11}   goal"]
    for name in names:
        training, metrics = trainings()[name], folder / name / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        goal = f"{training.goal:.1f} at {training.env_frames:,} ({training.source})"
        newest = rows[-1] if rows else {}
        lines.append(
            f"{name:<26}{state_of(folder / name):<13}{newest.get('env_frames', 0):>11,}"
            f"{newest.get('time/agent_steps_per_second', 0.0):>9.1f}"
            f"{shown(returns_before(rows)):>10}{shown(newest_value(rows, 'eval/episode_return_mean')):>11}   {goal}"
        )
    return lines


def newest_value(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    return next((row[key] for row in reversed(rows) if row.get(key) is not None), None)


def returns_before(rows: Sequence[dict[str, Any]]) -> float | None:
    """Training returns of the last tenth of the frames. A row tells the mean of the last 100 episodes, or of all there
    were: what those before its window returned is taken off."""
    seen = {row["episodes"]: row for row in rows if row.get("collect/episode_return_mean") is not None}
    if not seen:
        return None
    last = max(seen)
    begin = 0.9 * seen[last]["env_frames"]
    before = max((count for count, row in seen.items() if row["env_frames"] <= begin), default=0)
    total = {count: min(count, 100) * row["collect/episode_return_mean"] for count, row in seen.items()}
    if last > 100 or before in (0, last):
        return float(seen[last]["collect/episode_return_mean"])
    return float((total[last] - total[before]) / (last - before))


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(trainings()), metavar="RUN", help=", ".join(trainings()))
    parser.add_argument("--minutes", type=float, required=True, help="minutes until all runs save themselves and end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("learning_runs"), help="folder of the runs")
    parser.add_argument("--mps", action="store_true", help="let the processes share the GPU (NVIDIA's MPS)")
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    names = given.only or list(trainings())
    if given.minutes > 0 and given.mps:
        with shared_gpu(given.runs.resolve()):
            run_all(names, given.runs, seed=given.seed, minutes=given.minutes)
    elif given.minutes > 0:
        run_all(names, given.runs, seed=given.seed, minutes=given.minutes)
    print("\n".join(report(names, given.runs)))


if __name__ == "__main__":
    main()
