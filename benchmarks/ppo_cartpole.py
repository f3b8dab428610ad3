"""PPO on CartPole-v1 beside Stable-Baselines3, alternately in one process, so that a noisy machine hits both.

    pip install stable-baselines3
    python benchmarks/ppo_cartpole.py                    # both comparisons, three repeats each
    python benchmarks/ppo_cartpole.py --repeats 5 --json figures.json

1. Time until the mean return of the last 100 training episodes reaches 475: our default experiment against SB3 with
   its zoo hyper-parameters (8 environments, n_steps 32, batch 256, 20 epochs, discount 0.98, lambda 0.8,
   learning rate 1e-3 -> 0, clip range 0.2 -> 0, over 100,000 steps).
2. Agent steps per second with SB3's own hyper-parameters on both sides.

Seconds are those of the training loop, without imports and construction. Both sides use one torch thread, which is
the faster choice at this size for both.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rl_lab.config.compose import compose
from rl_lab.experiment.build import build

GOAL, ZOO_STEPS = 475.0, 100_000
ZOO_OVERRIDES = [
    "environment.num_envs=8",
    "algorithm.discount=0.98",
    "algorithm.gae_lambda=0.8",
    "algorithm.epochs=20",
    "algorithm.minibatch_size=256",
    "algorithm.clip_range='linear(0.2, 0)'",
    "optimizers.controller.learning_rate='linear(1e-3, 0)'",
    "training.phases.train.collect_steps=32",
]


@dataclass(frozen=True)
class Measurement:
    what: str
    side: str
    seed: int
    seconds: float
    agent_steps: int
    reached: bool
    overhead: float | None = None  # share of our wall time that is neither environment nor network


def ours(what: str, seed: int, overrides: list[str]) -> Measurement:
    config = compose("ppo_cartpole", [f"seed={seed}", "evaluation.final_episodes=0", *overrides])
    experiment = build(config, run=None, quiet=True)
    start = time.perf_counter()
    outcome = experiment.orchestrator.run()
    seconds = time.perf_counter() - start
    split = experiment.time_split.whole()
    learning = sum(split[f"time/{name}_fraction"] for name in ("environment", "policy", "update"))
    experiment.close()
    steps = experiment.housekeeping.counts.agent_steps
    return Measurement(what, "rl-lab", seed, seconds, steps, outcome == "stopped", 1.0 - learning)


def sb3(what: str, seed: int, *, steps: int, goal: float | None) -> Measurement:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class StopAtGoal(BaseCallback):
        reached = False

        def _on_rollout_end(self) -> None:
            episodes = self.model.ep_info_buffer
            if goal is not None and episodes is not None and len(episodes) == 100:
                self.reached = statistics.fmean(episode["r"] for episode in episodes) >= goal

        def _on_step(self) -> bool:
            return not self.reached

    def linear(start: float) -> Any:
        return lambda remaining: remaining * start

    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=8, seed=seed),
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        ent_coef=0.0,
        learning_rate=linear(1e-3),
        clip_range=linear(0.2),
        seed=seed,
        device="cpu",
    )
    callback = StopAtGoal()
    start = time.perf_counter()
    model.learn(steps, callback=callback)
    return Measurement(what, "sb3", seed, time.perf_counter() - start, model.num_timesteps, callback.reached)


def measure(repeats: int, throughput_steps: int) -> list[Measurement]:
    results: list[Measurement] = []

    def note(result: Measurement) -> None:
        results.append(result)
        rate = result.agent_steps / result.seconds
        print(f"{result.what:<12} {result.side:<7} seed {result.seed}  {result.seconds:7.2f} s  "
              f"{result.agent_steps:>8,} steps  {rate:>9,.0f} steps/s", flush=True)  # fmt: skip

    ours("warm-up", 99, ["training.phases.train.duration_steps=4000"])
    for seed in range(repeats):
        note(ours("time to 475", seed, [f"training.stop.episode_return={GOAL}"]))
        note(sb3("time to 475", seed, steps=ZOO_STEPS, goal=GOAL))
    for seed in range(repeats):
        note(ours("throughput", seed, [*ZOO_OVERRIDES, f"training.phases.train.duration_steps={throughput_steps}"]))
        note(sb3("throughput", seed, steps=throughput_steps, goal=None))
    return results


def summarise(results: list[Measurement]) -> dict[str, float]:
    def chosen(what: str, side: str) -> list[Measurement]:
        return [result for result in results if (result.what, result.side) == (what, side)]

    goal, rate = "time to 475", "throughput"
    seconds = {side: statistics.median(r.seconds for r in chosen(goal, side)) for side in ("rl-lab", "sb3")}
    rates = {
        side: statistics.median(r.agent_steps / r.seconds for r in chosen(rate, side)) for side in ("rl-lab", "sb3")
    }
    overheads = [r.overhead for r in chosen(goal, "rl-lab") if r.overhead is not None]
    figures = {
        "time_to_475_s_ours": seconds["rl-lab"],
        "time_to_475_s_sb3": seconds["sb3"],
        "time_to_475_ratio": seconds["sb3"] / seconds["rl-lab"],
        "steps_per_second_ours": rates["rl-lab"],
        "steps_per_second_sb3": rates["sb3"],
        "throughput_ratio": rates["rl-lab"] / rates["sb3"],
        "framework_overhead": statistics.median(overheads),
        "reached_ours": float(all(r.reached for r in chosen(goal, "rl-lab"))),
        "reached_sb3": float(all(r.reached for r in chosen(goal, "sb3"))),
    }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="seeds per side and comparison")
    parser.add_argument("--throughput-steps", type=int, default=25_000, help="agent steps of the second comparison")
    parser.add_argument("--json", type=Path, help="also write every measurement and the summary here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(arguments.repeats, arguments.throughput_steps)
    figures = summarise(results)
    print(f"\n{platform.processor() or platform.machine()}, torch {torch.__version__}, medians of {arguments.repeats}")
    for name, ours_key, sb3_key, ratio_key, unit in (
        ("time to 475", "time_to_475_s_ours", "time_to_475_s_sb3", "time_to_475_ratio", "s"),
        ("throughput", "steps_per_second_ours", "steps_per_second_sb3", "throughput_ratio", "steps/s"),
    ):
        print(f"{name:<12} ours {figures[ours_key]:,.2f} {unit}, SB3 {figures[sb3_key]:,.2f} {unit}: ", end="")
        print(f"{figures[ratio_key]:.2f} times as fast")
    print(f"framework overhead in our run: {figures['framework_overhead']:.1%}")
    if arguments.json:
        content = {"summary": figures, "measurements": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
