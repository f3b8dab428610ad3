"""Benchmarks count what they say they count."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up by name
    spec.loader.exec_module(module)
    return module


BENCHMARK = benchmark("ppo_cartpole")


def run(side: str, seed: int, seconds: float, steps: int, *, reached: bool, what: str = "time to 475") -> Any:
    return BENCHMARK.Measurement(what, side, seed, seconds, steps, reached, 0.06 if side == "rl-lab" else None)


RATES = [
    run("rl-lab", 20, 2.0, 20_000, reached=False, what="throughput"),
    run("sb3", 20, 5.0, 20_000, reached=False, what="throughput"),
]


def test_only_runs_that_reach_the_goal_have_a_time() -> None:
    timed = [
        run("rl-lab", 20, 1.0, 150_000, reached=False),
        run("rl-lab", 21, 2.0, 90_000, reached=True),
        run("rl-lab", 22, 4.0, 120_000, reached=True),
        *(run("sb3", seed, 15.0, 65_000, reached=True) for seed in (20, 21, 22)),
    ]
    side = BENCHMARK.summarise([*timed, *RATES], "rl-lab")
    assert (side.runs, side.reached, side.seconds) == (3, 2, 3.0)
    assert (side.fewest_steps, side.most_steps) == (90_000, 120_000)
    assert side.steps_per_second == pytest.approx(10_000)
    text = "\n".join(BENCHMARK.report([*timed, *RATES], (20, 21, 22)))
    assert (
        "3.00 (90,000 to 120,000 steps; 2 of 3 reached) | 15.00 (65,000 to 65,000 steps; 3 of 3 reached) | **5.0**"
        in text
    )
    assert "| 10,000 | 4,000 | **2.50** | ≥ 2.5 |" in text


def test_without_a_run_that_reaches_the_goal_there_is_no_ratio() -> None:
    timed = [run("rl-lab", 20, 1.0, 300_000, reached=False), run("sb3", 20, 15.0, 65_000, reached=True)]
    text = "\n".join(BENCHMARK.report([*timed, *RATES], (20,)))
    assert "| 0 of 1 reached | 15.00 (65,000 to 65,000 steps; 1 of 1 reached) | none: nothing to compare |" in text


def test_the_reported_seeds_are_not_those_that_settings_were_chosen_on() -> None:
    assert not set(BENCHMARK.SEEDS) & {*range(5), *range(100, 106)}
