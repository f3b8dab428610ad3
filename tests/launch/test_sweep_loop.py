"""The loop of a sweep with a pool that computes at once: what is tried depends on nothing but the plan."""

from __future__ import annotations

import json
import math
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rl_lab.launch.pool import Event
from rl_lab.launch.search import Trial, best_of, make_search, require_optuna
from rl_lab.launch.sweep import Sweep, Task, trial_from
from rl_lab.launch.sweep_plan import SweepPlan, read_plan
from rl_lab.types import ConfigError, MissingExtraError, RunError

RANGES = {"a": {"low": -4.0, "high": 4.0}, "b": {"low": 1, "high": 64, "log": True}}
EVALUATIONS = 9


class Killed(Exception):
    """The process of the sweep is gone."""


@dataclass(frozen=True)
class Result:
    state: str = "finished"
    score: float | None = None
    values: tuple[float, ...] = ()
    logged: tuple[str, ...] = ()
    message: str = ""
    seconds: float = 1.0
    task_seconds: float = 1.0


class Runs:
    """The runs of a sweep as they lie on a disk, with a count of how often each was trained."""

    def __init__(self) -> None:
        self.results: dict[tuple[int, int], Result] = {}
        self.trainings: list[tuple[int, int]] = []


class InstantPool:
    """Workers that finish in a random order. It is killed after so many events; what its runs hold stays."""

    def __init__(self, runs: Runs, jobs: int, chance: random.Random, kill_after: float = math.inf) -> None:
        self.runs, self.jobs, self.chance, self.kill_after = runs, jobs, chance, kill_after
        self._busy: dict[Any, Any] = {}  # task -> generator of its reports
        self._answers: dict[Any, bool] = {}

    @property
    def idle(self) -> int:
        return self.jobs - len(self._busy)

    def submit(self, task: Any) -> None:
        self._busy[task] = self._train(task)

    def answer(self, task: Any, value: bool) -> None:
        self._answers[task] = value

    def interrupt(self, number: int = 0) -> None: ...

    def events(self, timeout_s: float) -> Iterator[Event]:
        task = self.chance.choice(list(self._busy))
        self.kill_after -= 1
        if self.kill_after <= 0 and self.chance.random() < 0.5:
            raise Killed  # before anything of this event lies on the disk
        kind, value = next(self._busy[task])
        if kind == "done":
            del self._busy[task]
        if self.kill_after <= 0:
            raise Killed  # after the run has ended, before the sweep heard of it
        yield Event(kind, task, value)

    def _train(self, task: tuple[int, int, bool, tuple[Any, ...]]) -> Iterator[tuple[str, Any]]:
        number, seed, is_reporting, values = task
        if (number, seed) not in self.runs.results:
            a, b = values
            final = -((a - 1.0) ** 2) - math.log2(b) / 4 + seed / 100
            seen: list[float] = []
            is_pruned = False
            while len(seen) < EVALUATIONS and not is_pruned:
                seen.append(final - 1.0 / (1 + len(seen)))
                if is_reporting and len(seen) < EVALUATIONS:  # nothing is left to prune at the end
                    yield "report", list(seen)
                    is_pruned = self._answers.pop(task)
            self.runs.trainings.append((number, seed))
            self.runs.results[number, seed] = Result("pruned" if is_pruned else "finished", seen[-1], tuple(seen))
        yield "done", self.runs.results[number, seed]


def plan_of(**content: Any) -> SweepPlan:
    content = {"parameters": RANGES, "trials": 20, "seeds": 2, **content}
    return read_plan(content, place="s.yaml", default_name="s", default_jobs=2)


def sweep_with(plan: SweepPlan, pool: Any, journal: list[str]) -> Sweep:
    rows = [json.loads(line) for line in journal]
    return Sweep(
        plan=plan,
        pool=pool,
        payload=lambda task, is_reporting: (task.trial.number, task.seed, is_reporting, _values(task)),
        record=lambda row: journal.append(json.dumps(row)),
        show=lambda trials: None,
        recorded={row["number"]: row for row in rows},
    )


def _values(task: Task) -> tuple[Any, ...]:
    return tuple(task.trial.parameters.values())


def run_whole(plan: SweepPlan, *, jobs: int = 2, chance: int = 0) -> tuple[list[Trial], Runs]:
    runs = Runs()
    sweep = sweep_with(plan, InstantPool(runs, jobs, random.Random(chance)), [])
    assert sweep.run() is None
    return sweep.trials, runs


def facts(trials: list[Trial]) -> list[tuple[Any, ...]]:
    return [(trial.number, trial.parameters, trial.state, trial.score, trial.values) for trial in trials]


KINDS = [
    {"sampler": "random"},
    {"sampler": "grid", "trials": None, "parameters": {"a": [-1.0, 0.0, 1.0], "b": {"low": 1, "high": 9, "step": 2}}},
    {"sampler": "tpe"},
    {"sampler": "cmaes"},
    {"sampler": "tpe", "pruner": "median"},
    {"sampler": "random", "pruner": "hyperband"},
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values()))[:20])


@every_kind
def test_a_sweep_that_was_killed_at_any_instant_ends_like_one_that_was_not(kind: dict[str, Any]) -> None:
    plan = plan_of(**kind)
    whole, _ = run_whole(plan)
    for chance in range(2):
        dice, runs, journal, kills = random.Random(chance), Runs(), [], 0
        while True:
            sweep = sweep_with(plan, InstantPool(runs, 2, dice, kill_after=dice.randint(1, 30)), journal)
            try:
                sweep.run()
                break
            except Killed:
                kills += 1
                if journal and dice.random() < 0.5:
                    journal.pop()  # the kill came before its last line was on the disk
        assert facts(sweep.trials) == facts(whole)
        assert best_of(sweep.trials, plan) == best_of(whole, plan)
        assert len(runs.trainings) == len(set(runs.trainings)), "a finished run was trained again"
        assert kills >= 1


@every_kind
def test_the_trials_do_not_depend_on_who_finishes_first_or_on_the_number_of_workers(kind: dict[str, Any]) -> None:
    plan = plan_of(**kind)
    assert facts(run_whole(plan, jobs=1)[0]) == facts(run_whole(plan, jobs=4, chance=7)[0])


@every_kind
def test_a_lost_file_is_made_again_from_the_runs(kind: dict[str, Any]) -> None:
    plan = plan_of(**kind)
    whole, runs = run_whole(plan)
    trainings = len(runs.trainings)
    sweep = sweep_with(plan, InstantPool(runs, 2, random.Random(3)), [])
    sweep.run()
    assert facts(sweep.trials) == facts(whole)
    assert len(runs.trainings) == trainings


def test_bayesian_search_finds_more_than_chance() -> None:
    chance = best_of(run_whole(plan_of(sampler="random", trials=60))[0], plan_of()).score
    assert best_of(run_whole(plan_of(sampler="tpe", trials=60))[0], plan_of()).score > chance
    assert best_of(run_whole(plan_of(sampler="cmaes", trials=60))[0], plan_of()).score > chance


@pytest.mark.parametrize("seed", range(5))
def test_the_first_trials_of_tpe_spread_over_every_parameter(seed: int) -> None:
    """Each parameter takes every tenth of its range once: with seed 0, chance never took one of two choices."""
    ranges = {"a": {"low": 0.0, "high": 1.0}, "b": {"low": 1, "high": 100, "log": True}, "c": [0.9, 0.98]}
    search = make_search(plan_of(sampler="tpe", seed=seed, parameters=ranges))
    drawn = [search.ask(number) for number in range(10)]
    assert sorted(int(10 * each["a"]) for each in drawn) == list(range(10))
    assert sorted(each["c"] for each in drawn) == [0.9] * 5 + [0.98] * 5
    assert sum(each["b"] <= 10 for each in drawn) in (5, 6), "half of them below the middle, in logarithms"
    assert [each["a"] for each in drawn] != sorted(each["a"] for each in drawn)


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_a_pruner_stops_some_trials_early_and_never_the_best(pruner: str) -> None:
    trials, runs = run_whole(plan_of(sampler="random", pruner=pruner))
    pruned = [trial for trial in trials if trial.state == "pruned"]
    assert pruned and all(len(trial.values) < EVALUATIONS for trial in pruned)
    assert all((trial.number, 1) not in runs.results for trial in pruned), "its other seed was spared"
    unpruned = best_of(run_whole(plan_of(sampler="random"))[0], plan_of())
    assert best_of(trials, plan_of()).number == unpruned.number


def test_the_score_is_the_mean_over_the_seeds_and_the_direction_counts() -> None:
    trials, runs = run_whole(plan_of(sampler="random", trials=3, seeds=[4, 5]))
    first, second = (runs.results[0, seed].score for seed in (4, 5))
    assert trials[0].seed_scores == {4: first, 5: second} and trials[0].score == (first + second) / 2
    lowest = best_of(trials, plan_of(direction="minimize"))
    assert lowest.score == min(trial.score for trial in trials)


def test_another_seed_of_the_sweep_tries_other_parameters() -> None:
    drawn = [make_search(plan_of(sampler="random", seed=seed)).ask(0) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


class ScriptedPool(InstantPool):
    """A pool whose workers answer with what the test says, once per task."""

    def __init__(self, *answers: tuple[str, Any]) -> None:
        super().__init__(Runs(), 1, random.Random(0))
        self.answers = list(answers)

    def events(self, timeout_s: float) -> Iterator[Event]:
        kind, value = self.answers.pop(0)
        yield Event(kind, self._busy and self._busy.popitem()[0], value)


def scripted(*answers: tuple[str, Any], trials: int = 1) -> Sweep:
    plan = plan_of(sampler="random", trials=trials, seeds=1)
    return sweep_with(plan, ScriptedPool(*answers), [])


def test_a_worker_that_dies_is_tried_once_more() -> None:
    sweep = scripted(("died", -9), ("done", Result(score=2.0)))
    sweep.run()
    assert (sweep.trials[0].state, sweep.trials[0].score) == ("finished", 2.0)


def test_a_run_that_kills_its_worker_twice_has_failed_and_the_sweep_goes_on() -> None:
    sweep = scripted(("done", Result(score=1.0)), ("died", -9), ("died", -9), trials=2)
    sweep.run()
    assert [trial.state for trial in sweep.trials] == ["finished", "failed"]
    assert "the worker died 2 times (exit code -9)" in sweep.trials[1].message


def test_a_sweep_whose_first_trials_all_fail_stops_with_the_reason() -> None:
    failed = ("done", Result("failed", message="loss/value is not finite"))
    with pytest.raises(RunError, match="The first 3 trials failed.*loss/value is not finite"):
        scripted(failed, failed, failed, trials=9).run()


def test_a_metric_that_never_came_stops_the_sweep_with_the_nearest_name() -> None:
    result = Result(logged=("eval/episode_return_mean_x", "time/eta_s"))
    with pytest.raises(ConfigError, match="never logged eval/episode_return_mean, .*Did you mean"):
        scripted(("done", result)).run()


def test_another_run_in_a_trials_place_stops_the_sweep() -> None:
    with pytest.raises(RunError, match="Run s-0000-s0 is there already"):
        scripted(("done", Result("refused", message="Run s-0000-s0 is there already"))).run()


def test_a_signal_lets_the_runs_save_and_ends_the_loop() -> None:
    sweep = scripted(("done", Result("interrupted")))
    sweep._forward(signal.SIGTERM, None)
    sweep._forward(signal.SIGTERM, None)  # job queues send it twice
    assert sweep.run() == signal.SIGTERM and sweep.trials == []


def test_a_failed_trial_whose_runs_were_removed_is_tried_again() -> None:
    plan = plan_of(sampler="random", trials=2, seeds=1)
    failed = [{"number": n, "parameters": make_search(plan).ask(n), "state": "failed"} for n in (0, 1)]
    sweep = sweep_with(plan, ScriptedPool(("done", Result(score=3.0))), [json.dumps(row) for row in failed])
    sweep.is_retried = lambda trial: trial.number == 1
    sweep.run()
    assert [trial.state for trial in sweep.trials] == ["failed", "finished"]


def test_a_trial_on_record_that_had_not_ended_starts_with_no_scores() -> None:
    row = {"number": 1, "parameters": {"a": 1}, "state": "started", "seed_scores": {"0": 2.0}, "unknown": 1}
    assert trial_from(row) == Trial(1, {"a": 1})
    assert trial_from({**row, "state": "finished"}).seed_scores == {0: 2.0}


def test_cmaes_refuses_a_record_that_it_would_not_draw() -> None:
    search = make_search(plan_of(sampler="cmaes"))
    with pytest.raises(RunError, match="cannot go on: cmaes now draws .* Another version of optuna or cmaes"):
        search.ask(0, {"a": 0.0, "b": 1})


def test_without_optuna_the_error_names_the_extra_and_chance_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"needs optuna: `pip install 'rl-lab\[sweeps\]'`"):
        require_optuna(plan_of(sampler="tpe"))
    with pytest.raises(MissingExtraError, match="rl-lab"):
        make_search(plan_of(sampler="cmaes"))
    assert len(run_whole(plan_of(sampler="random"))[0]) == 20
    assert run_whole(plan_of(**KINDS[1]))[0][0].parameters == {"a": -1.0, "b": 1}
