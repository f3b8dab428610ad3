"""Benchmarks count what they say they count."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rl_lab.config.compose import compose
from rl_lab.runs.compare import compare_runs
from rl_lab.runs.index import RunIndex
from rl_lab.runs.run_directory import RunDirectory


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up by name
    spec.loader.exec_module(module)
    return module


BENCHMARK = benchmark("ppo_cartpole")


def run(side: str, seed: int, seconds: float, steps: int, *, reached: bool, what: str = "time to 475") -> Any:
    waiting = 0.06 if side == "rl-lab" else None
    return BENCHMARK.Measurement(what, side, seed, seconds, steps, reached, seconds, waiting)


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
    assert "| 10,000 | 4,000 | **2.50** (2.50 by CPU time) | ≥ 2.5 |" in text


def test_without_a_run_that_reaches_the_goal_there_is_no_ratio() -> None:
    timed = [run("rl-lab", 20, 1.0, 300_000, reached=False), run("sb3", 20, 15.0, 65_000, reached=True)]
    text = "\n".join(BENCHMARK.report([*timed, *RATES], (20,)))
    assert "| 0 of 1 reached | 15.00 (65,000 to 65,000 steps; 1 of 1 reached) | none: nothing to compare |" in text


def test_the_reported_seeds_are_not_those_that_settings_were_chosen_on() -> None:
    assert not set(BENCHMARK.SEEDS) & {*range(5), *range(100, 106)}


def test_the_runs_of_the_research_day_are_runs(tmp_path: Path) -> None:
    day = benchmark("research_day")
    for number in range(10):
        run = day.make_run(tmp_path, number, discount=0.9 + number // 5 / 100, environment="CartPole-v1")
        day.write_rows(run, 30, seed=number, best=300.0)
    rows = RunIndex(tmp_path).find(where=["algorithm=ppo", "algorithm.discount<0.905"], sort="eval/return")
    assert len(rows) == 2 and rows[0]["eval/episode_return_mean"] > 200.0
    found = compare_runs([RunDirectory.open(path) for path in sorted(tmp_path.iterdir()) if path.is_dir()])
    assert [len(group.members) for group in found.groups] == [5, 5]
    cost = day.Cost(0.4, 0.3)
    text = day.report(day.Figures(10, cost, cost, cost, 20, 30, cost, 0.5))
    assert "| list 10 runs by a filter, sorted | 0.40 | 0.30 | at most 0.5 s |" in text


def test_environments_are_compared_in_turns_by_the_median_of_the_ratios() -> None:
    """A clock that advances by what each side costs: ours 2 seconds a step, the bare one 1."""
    environments = benchmark("environments")
    now, order = [0.0], []

    def side(name: str, cost: float) -> Any:
        def advance(count: int) -> None:
            order.append(name)
            now[0] += cost * count

        return advance

    figure = environments.compare(
        "x", side("ours", 2.0), side("bare", 1.0), goal=0.9, rounds=3, seconds=4.0, clock=lambda: now[0]
    )
    assert (figure.ours, figure.bare, figure.ratio) == (0.5, 1.0, 0.5)
    assert order[-6:] == ["bare", "ours", "ours", "bare", "bare", "ours"]
    assert environments.scaled(figure, 8).bare == 8.0 and environments.scaled(figure, 8).ratio == 0.5
    assert dataclasses.replace(figure, others=0.25).line() == "| x | 0 | 1 | 0.50 | ≥ 0.9 | 25% |"


def test_the_tdmpc_benchmark_times_updates_and_plans() -> None:
    module = benchmark("tdmpc_update")
    small = ["controllers.planner.candidates=32", "controllers.planner.best=4", "controllers.planner.iterations=1"]
    figures = module.measure("cpu", "1m", 1, 4, *small)
    for name in ("eager update", "eager plan, 1", "eager plan, 16"):
        assert figures[name].keys() == {"first_s", "synced_ms", "pipelined_ms"}
        assert all(value > 0 for value in figures[name].values())


def row_of(places: list[list[float]], reward: list[float], is_first: list[bool]) -> dict[str, torch.Tensor]:
    return {"vector": torch.tensor(places), "reward": torch.tensor(reward), "is_first": torch.tensor(is_first)}


def test_exploration_counts_agent_steps_until_the_first_reward_and_the_cells_it_saw() -> None:
    seen = benchmark("exploration").Seen()
    seen.look(row_of([[1.0, 0.0], [1.0, 0.0]], [0.0, 0.0], [True, True]))
    assert (seen.agent_steps, seen.first_reward) == (0, None)
    seen.look(row_of([[0.0, 1.0], [1.0, 0.0]], [0.0, 0.0], [False, False]))
    seen.look(row_of([[1.0, 0.0], [1.0, 1.0]], [0.0, 1.0], [True, False]))
    seen.look(row_of([[0.0, 1.0], [1.0, 0.0]], [1.0, 0.0], [False, True]))
    assert (seen.agent_steps, seen.first_reward, seen.rewards) == (4, 3, 2)
    assert seen.cells == {(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)}


def test_a_part_of_the_gpu_benchmarks_shows_its_figures_beside_their_goals(tmp_path: Path) -> None:
    gpu = benchmark("gpu")
    figures = "import json, sys; open(sys.argv[2], 'w').write(json.dumps({'plan': {'ms': 2.5}}))"
    goals = [
        gpu.Goal("plan, ms", gpu.read("plan", "ms"), at_most=3.0),
        gpu.Goal("x", gpu.read("plan", "ms"), at_least=3),
    ]
    first, met, missed = gpu.Part(["-c", figures], goals).run("plans", tmp_path, 60.0)
    assert first.startswith("plans") and first.endswith("s   ok")
    assert met.split() == ["plan,", "ms", "2.5", "<=", "3", "yes"] and missed.split() == ["x", "2.5", ">=", "3", "NO"]


def test_a_part_of_the_gpu_benchmarks_that_fails_or_hangs_is_said_to(tmp_path: Path) -> None:
    gpu = benchmark("gpu")
    failed, said = gpu.Part(["-c", "print('why'); raise SystemExit(3)"], []).run("a", tmp_path, 60.0)
    assert "FAILED with exit code 3" in failed and said.strip() == "why"
    (hung,) = gpu.Part(["-c", "import time; time.sleep(60)"], []).run("b", tmp_path, 0.2)
    assert "OUTLASTED 0.2 s" in hung


LEARNING = benchmark("learning")


@pytest.mark.parametrize("name", LEARNING.trainings())
def test_every_learning_run_is_an_experiment_of_as_many_frames_as_its_goal_names(name: str) -> None:
    training = LEARNING.trainings()[name]
    experiment, *words = training.words.split()
    config = compose(experiment, words)
    steps = sum(phase.get("duration_steps") or 0 for phase in config["training"]["phases"])
    frames = steps * (4 if "atari" in experiment else config["environment"]["action_repeat"])
    assert training.env_frames <= frames <= 1.35 * training.env_frames


def test_learning_runs_are_begun_continued_and_reported_beside_their_goals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "random_cartpole total_timesteps=400 logging.every_steps=100 evaluation.final_episodes=2"
    monkeypatch.setattr(LEARNING, "trainings", lambda: {"short": LEARNING.Training(words, 20.0, 400, "chance")})
    assert "not begun" in LEARNING.report(["short"], tmp_path)[1]
    LEARNING.run_all(["short"], tmp_path, seed=3, minutes=1.0)
    line = LEARNING.report(["short"], tmp_path)[1]
    assert "finished" in line and "–" not in line and line.endswith("20.0 at 400 (chance)")
    assert LEARNING.command("short", LEARNING.trainings()["short"], tmp_path, 3)[3:] == [
        "resume",
        str(tmp_path / "short"),
    ]
    log = (tmp_path / "short.log").read_text()
    LEARNING.run_all(["short"], tmp_path, seed=3, minutes=1.0)  # done: nothing is started
    assert (tmp_path / "short.log").read_text() == log


def test_a_learning_run_that_is_not_done_in_time_saves_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "lambda *_: exit(open('saved', 'w').close())"
    waits = f"import signal, time; signal.signal(signal.SIGTERM, {asked}); time.sleep(60)"
    monkeypatch.setattr(LEARNING, "command", lambda *_: [sys.executable, "-c", waits])
    monkeypatch.chdir(tmp_path)
    LEARNING.run_all([next(iter(LEARNING.trainings()))], tmp_path, seed=0, minutes=0.01)
    assert (tmp_path / "saved").exists()


def test_ctrl_c_lets_every_learning_run_save_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[int] = []

    class Process:
        def wait(self, seconds: float) -> int:
            if not sent:
                raise KeyboardInterrupt
            return 0

        def send_signal(self, number: int) -> None:
            sent.append(number)

    monkeypatch.setattr(LEARNING.subprocess, "Popen", lambda *_, **__: Process())
    LEARNING.run_all(list(LEARNING.trainings())[:2], tmp_path, seed=0, minutes=1.0)
    assert sent == [signal.SIGTERM] * 2 and "the same command goes on" in capsys.readouterr().out


def test_training_returns_are_those_of_the_last_tenth_of_the_frames() -> None:
    rows = [
        {"episodes": count, "env_frames": 1000 * count, "collect/episode_return_mean": sum(range(count)) / count}
        for count in range(1, 21)
    ]
    assert LEARNING.returns_before(rows) == pytest.approx((18 + 19) / 2)  # episodes 18 and 19, of frames 18k to 20k
    assert LEARNING.returns_before([]) is None


@pytest.mark.slow
def test_the_figures_of_diffusion_policy_have_the_names_that_the_goals_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--channels 8 16 --plans 1 --updates 1 --turns 1 --fast-paths all --json"
    monkeypatch.setattr(sys, "argv", ["diffusion_policy.py", *words.split(), str(tmp_path / "figures.json")])
    benchmark("diffusion_policy").main()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert all(goal.read(figures) > 0.0 for goal in benchmark("gpu").diffusion())
    assert figures["beside"] in ("diffusers", "our schedules")


GPU = "pytest.mark" + ".gpu"  # this file has no such test


def test_the_parts_of_the_gpu_benchmarks_hold_every_test_that_needs_a_gpu() -> None:
    files = {str(file) for file in Path(__file__).parent.rglob("test_*.py") if GPU in file.read_text()}
    named = [word for part in benchmark("gpu").parts().values() for word in part.command if word.endswith(".py")]
    assert len(files) >= 5 and files <= {*named}
    assert str(Path(__file__)) not in named


@pytest.mark.slow
def test_the_gpu_benchmarks_run_tests_from_anywhere_and_without_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = tmp_path / "test_toy.py"
    toy.write_text(f"import rl_lab, pytest\n\n@{GPU}\ndef test_one():\n    assert rl_lab is None\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-config\nknown_to_a_plugin = 3\n")
    monkeypatch.chdir(tmp_path)
    failed, *said = benchmark("gpu").tests(toy).run("toy", tmp_path, 60.0)
    assert "FAILED with exit code 1" in failed and "1 failed" in said[-1]
