"""Rules that end a run before its phases do."""

from __future__ import annotations

from functools import partial
from typing import Any

from rl_lab.collection.evaluator import Evaluator
from rl_lab.orchestration.cadence import Cadence
from rl_lab.orchestration.housekeeping import EvaluationPlan
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.stopping import Stopping, StopRules
from rl_lab.types import Counts, Phase
from tests.doubles import CPU, Saves, always, counter, make_housekeeping


def reason(stopping: Stopping, counts: Counts | None = None, **values: Any) -> str | None:
    return stopping.reason(counts or Counts(), **{"wall_s": 0.0, "episode_return": None, "eval_return": None, **values})


def test_without_rules_nothing_stops() -> None:
    counts = Counts(env_frames=10**9, episodes=10**6)
    assert reason(Stopping(StopRules()), counts, wall_s=1e9, episode_return=1e9, eval_return=1e9) is None


def test_the_training_return_counts_only_over_a_full_window() -> None:
    stopping = Stopping(StopRules(episode_return=475.0))
    assert reason(stopping, Counts(episodes=99), episode_return=500.0) is None
    assert reason(stopping, Counts(episodes=100), episode_return=474.9) is None
    said = reason(stopping, Counts(episodes=100), episode_return=475.0)
    assert said == "mean return of the last 100 episodes reached 475.0"


def test_an_evaluation_that_is_good_enough_stops() -> None:
    stopping = Stopping(StopRules(eval_return=-110.0))
    assert reason(stopping, eval_return=-110.5) is None
    assert reason(stopping, eval_return=-110.0) == "evaluation return reached -110.0"


def test_the_budget_counts_frames() -> None:
    stopping = Stopping(StopRules(env_frames=4000))
    assert reason(stopping, Counts(env_frames=3999, agent_steps=5000)) is None
    assert reason(stopping, Counts(env_frames=4000)) == "the budget of 4,000 environment frames is spent"


def test_the_clock_can_stop_a_run() -> None:
    stopping = Stopping(StopRules(wall_minutes=1.5))
    assert reason(stopping, wall_s=89.9) is None
    assert reason(stopping, wall_s=90.0) == "the budget of 1.5 minutes is spent"


def test_a_plateau_is_so_many_evaluations_without_a_better_score() -> None:
    stopping = Stopping(StopRules(plateau_evaluations=2))
    for score in (1.0, 3.0, 3.0):  # equal is not better
        stopping.evaluated(score)
    assert reason(stopping) is None
    stopping.evaluated(2.0)
    assert reason(stopping) == "2 evaluations in a row brought no better score"


def test_the_plateau_survives_a_round_trip() -> None:
    stopping = Stopping(StopRules(plateau_evaluations=2))
    for score in (3.0, 2.0):
        stopping.evaluated(score)
    fresh = Stopping(stopping.rules)
    fresh.set_state(stopping.get_state())
    fresh.evaluated(2.5)
    assert reason(fresh) == "2 evaluations in a row brought no better score"


def test_episodes_that_an_evaluation_cut_count_for_the_best_and_for_the_stop_rules() -> None:
    """Counter's episodes last 5 steps; with a time-out of 4 none of them ends."""
    environment = counter(2)
    evaluator = Evaluator(lambda: environment, make_render_environment=lambda: environment, device=CPU, timeout_steps=4)
    saves = Saves()
    scheduler = PhaseScheduler([Phase("train", collect_steps=1, duration_cycles=9)])
    housekeeping = make_housekeeping(
        scheduler,
        save=saves,
        evaluate=partial(evaluator.evaluate, always(3)),
        evaluation=EvaluationPlan(Cadence(every_steps=1), episodes=4, final_episodes=4),
        stop=StopRules(eval_return=12.0),
    )
    scheduler.report(Counts(agent_steps=1))
    stopped = housekeeping.after_cycle(phase_ended=scheduler.end_cycle())
    assert stopped == "evaluation return reached 12.0"
    housekeeping.finish(stopped)
    assert (1, 12.0, True) in saves.calls
    evaluator.close()
