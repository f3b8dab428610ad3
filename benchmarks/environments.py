"""Our environments beside the bare simulator, in turn, in one process.

    python benchmarks/environments.py                       # everything that is installed
    python benchmarks/environments.py single --only Pong    # one part, some ids
    python benchmarks/environments.py --rounds 9 --seconds 1.0 --json figures.json

single   one environment through our vector interface (rows, seeds per episode, restarts, action log) beside
         `gymnasium.make(id, disable_env_checker=True)` and a loop of step and reset
native   64 CartPoles beside `gymnasium.make_vec`, 8 Pongs beside ALE's own AtariVectorEnv
async    8 environments in worker processes beside the same 8 in this process
resets   one environment with a slow reset, prefetched beside not (a toy: 0.4 s of episode, 2 s of reset)

Rounds of both sides alternate, so that a busy machine hits both; the ratio is the median over rounds. `--cpu` counts
the seconds of this process instead of those on the wall (single and native only). "others" is how much of the machine's
time other programs took meanwhile: near 0 %, or the figures of threads and processes say little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil

from rl_lab.environments import make_environment
from rl_lab.environments.lookup import find
from rl_lab.types import MissingExtraError

Advance = Callable[[int], None]
"""Takes so many steps."""
FAST = 5_000  # steps per second above which a single environment is no matter of the interface
SINGLE = (
    ("dmc/walker_walk", {}),
    ("dmc/walker_walk", {"observation": "pixels"}),
    ("rl_lab/CarRacing-v3", {}),
    ("HalfCheetah-v5", {}),
    ("LunarLander-v3", {}),
    ("MiniGrid-DoorKey-5x5-v0", {}),
    ("atari/pong", {}),
    ("rl_lab/Crafter-v1", {}),
    ("vizdoom/basic", {}),
    ("rl_lab/Retro-v0", {}),
    ("memory_maze/9x9", {}),
    ("CartPole-v1", {}),
)


@dataclass(frozen=True)
class Figure:
    """Steps per second of both sides (the median round), their ratio, the goal, and how much of the machine's time
    other programs took meanwhile."""

    what: str
    ours: float
    bare: float
    ratio: float
    goal: float | None
    others: float = 0.0

    def line(self) -> str:
        goal = "" if self.goal is None else f"≥ {self.goal:g}"
        return f"| {self.what} | {self.ours:,.0f} | {self.bare:,.0f} | {self.ratio:.2f} | {goal} | {self.others:.0%} |"


def compare(
    what: str,
    ours: Advance,
    bare: Advance,
    *,
    goal: float | None,
    rounds: int,
    seconds: float,
    clock: Callable[[], float],
) -> Figure:
    """Rounds in turn, each of about `seconds`; who begins alternates, too."""
    ours(2), bare(2)
    count = 1
    while (spent := _seconds(bare, count, clock)) < seconds / 4:
        count *= 2
    count = max(1, round(count * seconds / spent))
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    before, began = other_seconds(), time.perf_counter()
    for number in range(rounds):
        sides = [("ours", ours), ("bare", bare)]
        for name, advance in sides if number % 2 else reversed(sides):
            rates[name].append(count / _seconds(advance, count, clock))
    ratio = statistics.median(mine / theirs for mine, theirs in zip(rates["ours"], rates["bare"], strict=True))
    others = (other_seconds() - before) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    return Figure(
        what, statistics.median(rates["ours"]), statistics.median(rates["bare"]), ratio, goal, max(0.0, others)
    )


def _seconds(advance: Advance, count: int, clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    advance(count)
    return clock() - start


def scaled(figure: Figure, num_envs: int) -> Figure:
    """Rounds counted calls; a call steps N environments."""
    return replace(figure, ours=figure.ours * num_envs, bare=figure.bare * num_envs)


def other_seconds() -> float:
    """Processor seconds that other programs than this one and its workers have spent so far."""
    times = psutil.cpu_times()
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    mine = [process.cpu_times() for process in family]
    return sum(times) - times.guest - times.idle - times.iowait - sum(own.user + own.system for own in mine)


# --- both sides ---


def our_loop(environment: Any) -> Advance:
    """Random actions drawn beforehand, as both sides have them."""
    generator = np.random.default_rng(0)
    spec, num_envs = environment.spec.action, environment.num_envs
    if spec.kind == "continuous":
        actions = generator.uniform(-1, 1, (100, num_envs, *spec.shape)).astype(np.float32)
    else:
        actions = generator.integers(spec.sizes[0], size=(100, num_envs))
    environment.reset()

    def advance(count: int) -> None:
        for i in range(count):
            environment.step(actions[i % 100])

    return advance


def bare_loop(env: gym.Env) -> Advance:
    """What everybody writes; a reset takes the place of a step, as a row does with us."""
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(100)]
    env.reset(seed=0)
    is_over = False

    def advance(count: int) -> None:
        nonlocal is_over
        for i in range(count):
            if is_over:
                env.reset()
                is_over = False
            else:
                *_, terminated, truncated, _ = env.step(actions[i % 100])
                is_over = terminated or truncated

    return advance


def vector_loop(env: gym.vector.VectorEnv) -> Advance:
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(100)]
    env.reset(seed=0)

    def advance(count: int) -> None:
        for i in range(count):
            env.step(actions[i % 100])

    return advance


# --- the parts ---


def single(timed: Callable[..., Figure], only: str) -> Iterator[Figure]:
    for env_id, kwargs in SINGLE:
        name = " ".join([env_id, *map(str, kwargs.values())])
        if only.lower() not in name.lower():
            continue
        try:
            environment = make_environment(id=env_id, kwargs=kwargs, vectorization="sync")
        except (MissingExtraError, ValueError) as error:
            print(f"left out: {name}: {str(error).splitlines()[0]}")
            continue
        bare = gym.make(find(env_id), disable_env_checker=True, **kwargs)
        figure = timed(f"1 x {name}", our_loop(environment), bare_loop(bare), goal=0.9)
        environment.close(), bare.close()
        yield figure if figure.bare < FAST else replace(figure, goal=None)


def native(timed: Callable[..., Figure], only: str) -> Iterator[Figure]:
    if only.lower() in "cartpole":
        ours = make_environment(id="CartPole-v1", num_envs=64, vectorization="native")
        theirs = gym.make_vec("CartPole-v1", num_envs=64, vectorization_mode="vector_entry_point")
        yield scaled(timed("64 x CartPole-v1, native", our_loop(ours), vector_loop(theirs), goal=0.8), 64)
    if only.lower() in "atari/pong":
        try:
            ours = make_environment(id="atari/pong", num_envs=8, vectorization="native")
        except (MissingExtraError, ValueError) as error:
            print(f"left out: atari/pong: {error}")
            return
        import ale_py

        theirs = ale_py.AtariVectorEnv("pong", 8, reward_clipping=False)
        yield scaled(timed("8 x atari/pong, native", our_loop(ours), vector_loop(theirs), goal=0.95), 8)


def processes(timed: Callable[..., Figure], only: str) -> Iterator[Figure]:
    cases = {
        "dmc/walker_walk pixels": {"id": "dmc/walker_walk", "kwargs": {"observation": "pixels"}},
        "CarRacing 64 x 64": {"id": "rl_lab/CarRacing-v3", "wrappers": [{"id": "resize", "height": 64, "width": 64}]},
    }
    for name, settings in cases.items():
        if only.lower() in name.lower():
            ways = [make_environment(**settings, num_envs=8, vectorization=way) for way in ("async", "sync")]
            yield scaled(timed(f"8 x {name}, async beside sync", *map(our_loop, ways), goal=1.6), 8)
            for environment in ways:
                environment.close()


def resets(timed: Callable[..., Figure], only: str) -> Iterator[Figure]:
    """Whole episodes: 200 steps of 2 ms and a reset of 2 s, once the spare processes are busy."""
    del timed
    if only.lower() not in "slow reset":
        return
    settings: dict[str, Any] = {"id": "rl_lab/Faulty-v0", "num_envs": 1}
    settings["kwargs"] = {"slow_s": 0.002, "slow_reset_s": 2.0, "length": 200}
    rates = []
    for prefetch in ("auto", False):
        environment = make_environment(**settings, prefetch_resets=prefetch)
        advance = our_loop(environment)
        advance(201)
        rates.append(4 * 200 / _seconds(advance, 4 * 201))
        environment.close()
    yield Figure("1 x toy with 2 s resets, prefetched beside not", *rates, rates[0] / rates[1], None)


PARTS = {"single": single, "native": native, "async": processes, "resets": resets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--only", default="", help="text in the name")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each round and side")
    parser.add_argument("--cpu", action="store_true", help="seconds of this process alone: where others are busy, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    timed = partial(compare, rounds=arguments.rounds, seconds=arguments.seconds, clock=clock)
    load = os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f} before it began\n")
    print("| environments | ours, steps/s | bare, steps/s | ratio | goal | others |\n|---|---|---|---|---|---|")
    figures = []
    for name in arguments.parts or [name for name in PARTS if not arguments.cpu or name in ("single", "native")]:
        for figure in PARTS[name](timed, arguments.only):
            figures.append(figure)
            print(figure.line(), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2))


if __name__ == "__main__":
    main()
