"""Off-policy learners beside Stable-Baselines3, in turns in one process, so that a noisy machine hits both alike.

    pip install stable-baselines3
    python benchmarks/off_policy.py                      # DQN, three repeats, then SAC
    python benchmarks/off_policy.py --repeats 5 --settings default zoo --json figures.json

DQN on CartPole-v1, agent steps per second, with the same hyper-parameters on both sides:

    default    SB3's own: batches of 32, an update after every 4 agent steps, a network of 64x64, replay of 1,000,000
    zoo        those of SB3's zoo for CartPole: batches of 64, 128 updates after every 256 agent steps, 256x256, 100,000
    zoo-64     the same with the default network of 64x64

Both learn one-step targets without double and clip gradients at 10. SB3 moves its target network every so many agent
steps: 10,000 by default; 10 in its zoo, all of which lie between two bursts of updates, so that it moves once per
burst: every 128 updates here. SB3 is measured with one environment, as its defaults and its zoo say, and with as many
as ours.

SAC's updates are measured by off_policy_sac.py, which this calls: `--algorithms dqn` or `sac` runs one of the two.

Both sides learn in short chunks, one after the other; a figure is the median over the chunks. Both use one torch
thread. Seconds are those of the training loop; imports, construction and the steps before learning starts are left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from off_policy_sac import measure as measure_sac

from rl_lab.config.compose import compose
from rl_lab.experiment.build import build

NUM_ENVS = 8
LEARNING_STARTS = 1_024


@dataclass(frozen=True)
class Setting:
    """What both sides are told."""

    hidden_size: int
    batch_size: int
    capacity_rows: int
    learning_rate: float
    steps_per_burst: int
    updates_per_burst: int
    target_every_updates: int
    target_every_steps: int  # as SB3 counts
    exploration_steps: int = 8_000
    last_epsilon: float = 0.04


SETTINGS = {
    "default": Setting(64, 32, 1_000_000, 1e-4, 4, 1, 2_500, 10_000, last_epsilon=0.05),
    "zoo": Setting(256, 64, 100_000, 2.3e-3, 256, 128, 128, 10),
    "zoo-64": Setting(64, 64, 100_000, 2.3e-3, 256, 128, 128, 10),
}


@dataclass(frozen=True)
class Chunk:
    """What one side did while it had its turn."""

    what: str
    side: str
    seconds: float
    cpu_seconds: float  # of this process alone: what a busy machine does not stretch
    agent_steps: int
    updates: int


Side = Callable[[int, int], Iterator[Chunk]]
"""`side(chunks, steps_per_chunk)`: learns one chunk whenever it is asked for the next."""


def now() -> tuple[float, float]:
    """Wall clock and CPU time."""
    return time.perf_counter(), time.process_time()


def passed_since(start: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - start[0], time.process_time() - start[1]


# --- DQN ---------------------------------------------------------------------------------------


def ours_settings(setting: Setting) -> list[str]:
    """Overrides of the algorithm's own settings; a cycle collects at least one row of each environment."""
    return [
        "environment.id=CartPole-v1",
        f"environment.num_envs={NUM_ENVS}",
        "algorithm.double=false",
        "algorithm.n_step=1",
        f"algorithm.target_every={setting.target_every_updates}",
        "algorithm.target_rate=1.0",
        f"algorithm.epsilon='linear(1.0, {setting.last_epsilon}, over={setting.exploration_steps} agent_steps)'",
        f"optimizers.controller.learning_rate={setting.learning_rate}",
        "optimizers.controller.max_grad_norm=10.0",
        f"components.q_values.hidden_sizes=[{setting.hidden_size},{setting.hidden_size}]",
        f"buffers.replay.batch_size={setting.batch_size}",
        f"buffers.replay.capacity_rows={setting.capacity_rows}",
        f"buffers.replay.minimum_rows={LEARNING_STARTS}",
        f"training.phases.train.collect_steps={max(1, setting.steps_per_burst // NUM_ENVS)}",
        f"training.phases.train.updates_per_step={setting.updates_per_burst / setting.steps_per_burst}",
    ]


def ours_dqn(name: str, chunks: int, steps_per_chunk: int) -> Iterator[Chunk]:
    total = LEARNING_STARTS + chunks * steps_per_chunk
    duration = f"training.phases.train.duration_steps={total}"
    overrides = ["seed=1", "evaluation.final_episodes=0", *ours_settings(SETTINGS[name]), duration]
    config = compose("dqn", overrides)
    experiment = build(config, run=None, quiet=True)
    orchestrator, scheduler = experiment.orchestrator, experiment.orchestrator.scheduler
    orchestrator.workflow.enter_phase(scheduler.current())

    def learn(until_steps: int) -> None:
        """The loop of Orchestrator.run, one chunk of it."""
        while not scheduler.finished and scheduler.run_counts.agent_steps < until_steps:
            orchestrator._cycle(scheduler.current())
            phase_ended = scheduler.end_cycle()
            experiment.housekeeping.after_cycle(phase_ended=phase_ended)

    learn(LEARNING_STARTS)
    for index in range(chunks):
        before, start = scheduler.run_counts, now()
        learn(LEARNING_STARTS + (index + 1) * steps_per_chunk)
        steps, updates = (getattr(scheduler.run_counts, n) - getattr(before, n) for n in ("agent_steps", "updates"))
        yield Chunk(f"DQN {name}", f"rl-lab, {NUM_ENVS} envs", *passed_since(start), steps, updates)
    experiment.close()


def sb3_dqn(num_envs: int, name: str, chunks: int, steps_per_chunk: int) -> Iterator[Chunk]:
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_vec_env

    setting = SETTINGS[name]
    calls_per_burst = max(1, setting.steps_per_burst // num_envs)  # of a vector step
    model = DQN(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=num_envs, seed=1),
        batch_size=setting.batch_size,
        buffer_size=setting.capacity_rows,
        learning_rate=setting.learning_rate,
        gamma=0.99,
        train_freq=calls_per_burst,
        gradient_steps=setting.updates_per_burst * calls_per_burst * num_envs // setting.steps_per_burst,
        target_update_interval=setting.target_every_steps,
        exploration_fraction=setting.exploration_steps / (LEARNING_STARTS + chunks * steps_per_chunk),
        exploration_final_eps=setting.last_epsilon,
        learning_starts=LEARNING_STARTS - 1,
        policy_kwargs={"net_arch": [setting.hidden_size, setting.hidden_size]},
        device="cpu",
        seed=1,
    )
    model.learn(LEARNING_STARTS)
    for _ in range(chunks):
        steps, updates, start = model.num_timesteps, model._n_updates, now()
        model.learn(steps_per_chunk, reset_num_timesteps=False)
        times, side = passed_since(start), f"SB3, {num_envs} env{'s' if num_envs > 1 else ''}"
        counts = model.num_timesteps - steps, model._n_updates - updates
        yield Chunk(f"DQN {name}", side, *times, *counts)


# --- in turns ----------------------------------------------------------------------------------


def in_turns(sides: list[Side], *, chunks: int, steps_per_chunk: int) -> list[Chunk]:
    """One chunk of each side, then the next of each."""
    results: list[Chunk] = []
    for round_of_chunks in zip(*(side(chunks, steps_per_chunk) for side in sides), strict=True):
        for chunk in round_of_chunks:
            results.append(chunk)
            rate = chunk.agent_steps / chunk.seconds
            print(
                f"{chunk.what:<14} {chunk.side:<16} {chunk.seconds:6.2f} s ({chunk.cpu_seconds:6.2f} s of CPU)  "
                f"{chunk.agent_steps:>6,} steps  {chunk.updates:>5,} updates  {rate:>8,.0f} steps/s",
                flush=True,
            )
    return results


def summarise(results: list[Chunk]) -> list[dict[str, Any]]:
    """Per side: median rates, and how many times as fast the first side was in the same round."""
    table = []
    for what in dict.fromkeys(chunk.what for chunk in results):
        own = [chunk for chunk in results if chunk.what == what]
        by_side = {side: [chunk for chunk in own if chunk.side == side] for side in dict.fromkeys(c.side for c in own)}
        first = next(iter(by_side.values()))
        for side, chunks in by_side.items():
            pairs = list(zip(first, chunks, strict=True))
            table.append(
                {
                    "what": what,
                    "side": side,
                    "steps_per_second": statistics.median(c.agent_steps / c.seconds for c in chunks),
                    "updates_per_step": sum(c.updates for c in chunks) / sum(c.agent_steps for c in chunks),
                    "ratio": statistics.median(
                        a.agent_steps / a.seconds / (b.agent_steps / b.seconds) for a, b in pairs
                    ),
                    "cpu_ratio": statistics.median(
                        a.agent_steps / a.cpu_seconds / (b.agent_steps / b.cpu_seconds) for a, b in pairs
                    ),
                }
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="chunks per side")
    parser.add_argument("--steps", type=int, default=4_096, help="agent steps per chunk")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="what to measure with")
    parser.add_argument("--algorithms", nargs="+", choices=("dqn", "sac"), default=["dqn", "sac"])
    parser.add_argument("--json", type=Path, help="also write every chunk and the summary here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Chunk] = []
    for name in arguments.settings if "dqn" in arguments.algorithms else ():
        sides: list[Side] = [partial(ours_dqn, name), partial(sb3_dqn, 1, name), partial(sb3_dqn, NUM_ENVS, name)]
        results += in_turns(sides, chunks=arguments.repeats, steps_per_chunk=arguments.steps)
    table = summarise(results)
    print(f"\n{platform.processor() or platform.machine()}, torch {torch.__version__}, medians of {arguments.repeats}")
    for row in table:
        print(
            f"{row['what']:<14} {row['side']:<16} {row['steps_per_second']:>8,.0f} steps/s  "
            f"{row['updates_per_step']:.3f} updates/step  the first side is {row['ratio']:.2f} times as fast "
            f"({row['cpu_ratio']:.2f} by CPU time)"
        )
    sac: dict[str, float] = {}
    if "sac" in arguments.algorithms:
        sac, _ = measure_sac(chunks=10 * arguments.repeats, updates=20)
    if arguments.json:
        content = {"summary": table, "chunks": [asdict(chunk) for chunk in results], "sac": sac}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
