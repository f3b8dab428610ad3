"""What happens between cycles: rows, evaluations, checkpoints and stop rules, each when due and in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rl_lab.orchestration.cadence import Cadence
from rl_lab.orchestration.housekeeping import EvaluationPlan, FilmPlan, Housekeeping
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.stopping import StopRules
from rl_lab.types import CollectResult, Counts, Metrics, Phase, RunError
from tests.doubles import Clock, MemoryWriter, Saves, make_housekeeping


def scheduler_of(cycles: int = 100) -> PhaseScheduler:
    return PhaseScheduler([Phase("train", collect_steps=1, duration_cycles=cycles)])


def scores(*values: float) -> Callable[..., Metrics]:
    """An evaluation that gives these scores, one after the other."""
    remaining: Iterator[float] = iter(values)
    return lambda episodes: {"eval/episode_return_mean": next(remaining), "eval/episodes": episodes}


def cycle(housekeeping: Housekeeping, *, steps: int = 10, metrics: Metrics | None = None) -> str | None:
    """One cycle as the Orchestrator reports it."""
    scheduler = housekeeping.scheduler
    scheduler.report(Counts(env_frames=steps, agent_steps=steps))
    housekeeping.collected(CollectResult(Counts(), {"collect/episode_return_mean": float(scheduler.cycles)}))
    housekeeping.updated(metrics if metrics is not None else {"loss/policy": torch.tensor(0.5)})
    scheduler.pass_done()
    return housekeeping.after_cycle(phase_ended=scheduler.end_cycle())


# --- rows --------------------------------------------------------------------------------------


def test_a_row_holds_the_mean_since_the_last_row_and_the_newest_episode_statistics() -> None:
    writer = MemoryWriter()
    housekeeping = make_housekeeping(scheduler_of(), writer=writer, log=Cadence(every_updates=2))
    for loss in (1.0, 3.0):
        cycle(housekeeping, metrics={"loss/policy": torch.tensor(loss)})
    (row,) = writer.rows
    assert row["loss/policy"] == 2.0
    assert row["collect/episode_return_mean"] == 1.0
    assert (row["agent_steps"], row["updates"]) == (20, 2)
    assert row["train/phase_fraction"] == 0.02


def test_an_evaluation_is_in_the_row_of_its_own_cycle_and_in_no_later_one() -> None:
    writer = MemoryWriter()
    housekeeping = make_housekeeping(
        scheduler_of(),
        writer=writer,
        log=Cadence(),  # no row of its own: the evaluation brings one
        evaluate=scores(7.0),
        evaluation=EvaluationPlan(Cadence(every_steps=20), episodes=3),
    )
    for _ in range(3):
        cycle(housekeeping)
    (row,) = writer.rows
    assert (row["agent_steps"], row["eval/episode_return_mean"], row["eval/episodes"]) == (20, 7.0, 3)


def test_films_are_made_on_their_own_cadence_and_not_again_after_a_resume() -> None:
    filmed: list[int] = []
    plan = FilmPlan(Cadence(every_steps=20), lambda counts: filmed.append(counts.agent_steps))
    housekeeping = make_housekeeping(scheduler_of(), films=plan)
    for _ in range(5):
        cycle(housekeeping)
    assert filmed == [20, 40]
    again = make_housekeeping(housekeeping.scheduler, films=plan)
    again.set_state(housekeeping.get_state())
    cycle(again)
    assert filmed == [20, 40, 60]
    cycle(again)
    assert filmed == [20, 40, 60]


def test_no_evaluation_before_the_warmup() -> None:
    plan = EvaluationPlan(Cadence(every_steps=10), warmup_steps=35)
    housekeeping = make_housekeeping(scheduler_of(), evaluate=scores(1.0, 2.0), evaluation=plan)
    done = []
    for _ in range(5):
        cycle(housekeeping)
        done.append(housekeeping.evaluations_done)
    assert done == [0, 0, 0, 1, 2]


def test_the_end_of_a_phase_always_writes_a_row() -> None:
    writer = MemoryWriter()
    housekeeping = make_housekeeping(scheduler_of(cycles=2), writer=writer, log=Cadence(every_updates=1000))
    cycle(housekeeping)
    assert writer.rows == []
    cycle(housekeeping)
    assert [row["train/phase_fraction"] for row in writer.rows] == [1.0]


def test_rows_follow_evaluation_and_come_before_the_checkpoint() -> None:
    """A checkpoint that knows a row which was not written yet would lose it on resume."""
    events: list[str] = []
    writer = MemoryWriter()
    writer.write = lambda row: events.append("row")  # type: ignore[method-assign]
    housekeeping = make_housekeeping(
        scheduler_of(),
        writer=writer,
        save=Saves(lambda: events.append("save")),
        evaluate=lambda episodes: events.append("evaluate") or {},  # type: ignore[func-returns-value]
        evaluation=EvaluationPlan(Cadence(every_steps=10)),
        checkpoint=Cadence(every_updates=1),
    )
    cycle(housekeeping)
    assert events == ["evaluate", "row", "save"]


@pytest.mark.parametrize("name", ["loss/value", "train/grad_norm"])
def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(name: str) -> None:
    saves = Saves()
    housekeeping = make_housekeeping(scheduler_of(), save=saves, checkpoint=Cadence(every_updates=1))
    cycle(housekeeping)
    with pytest.raises(RunError, match=rf"{name} is not finite at 20 agent steps.*smaller learning rate"):
        cycle(housekeeping, metrics={name: torch.tensor(float("nan"))})
    assert [steps for steps, _, _ in saves.calls] == [10]


def test_broken_weights_are_not_saved_even_where_no_row_is_due() -> None:
    saves = Saves()
    housekeeping = make_housekeeping(
        scheduler_of(), save=saves, log=Cadence(every_updates=1000), checkpoint=Cadence(every_updates=1)
    )
    cycle(housekeeping)
    with pytest.raises(RunError, match="loss/policy is not finite at 20 agent steps"):
        cycle(housekeeping, metrics={"loss/policy": torch.tensor(float("inf"))})
    assert [steps for steps, _, _ in saves.calls] == [10]


def test_other_metrics_may_be_not_finite() -> None:
    writer = MemoryWriter()
    housekeeping = make_housekeeping(scheduler_of(), writer=writer)
    cycle(housekeeping, metrics={"train/explained_variance": float("-inf")})
    assert writer.rows[0]["train/explained_variance"] == float("-inf")


# --- checkpoints -------------------------------------------------------------------------------


def test_the_best_is_flagged_once_and_saved_at_the_end_of_its_cycle() -> None:
    saves = Saves()
    housekeeping = make_housekeeping(
        scheduler_of(),
        save=saves,
        evaluate=scores(1.0, 5.0, 5.0, 2.0),
        evaluation=EvaluationPlan(Cadence(every_steps=10)),
    )
    for _ in range(4):
        cycle(housekeeping)
    assert saves.calls == [(10, 1.0, True), (20, 5.0, True)]
    assert (housekeeping.best_score, housekeeping.last_score) == (5.0, 2.0)


def test_a_later_checkpoint_is_not_called_best_again() -> None:
    saves = Saves()
    housekeeping = make_housekeeping(
        scheduler_of(),
        save=saves,
        evaluate=scores(5.0),
        evaluation=EvaluationPlan(Cadence(every_steps=20)),
        checkpoint=Cadence(every_updates=1),
    )
    for _ in range(3):
        cycle(housekeeping)
    assert saves.calls == [(10, None, False), (20, 5.0, True), (30, 5.0, False)]


def test_checkpoints_by_the_clock_change_no_row() -> None:
    def run(minutes: float | None) -> tuple[list[Any], int]:
        writer, clock, saves = MemoryWriter(), Clock(), Saves()
        housekeeping = make_housekeeping(
            scheduler_of(cycles=12),
            writer=writer,
            clock=clock,
            save=saves,
            log=Cadence(every_updates=5),
            evaluate=scores(*range(10)),
            evaluation=EvaluationPlan(Cadence(every_steps=40), final_episodes=2),
            checkpoint=Cadence(every_minutes=minutes),
        )
        saves.state = housekeeping.logger.get_state  # as a real save does
        for index in range(12):
            clock.now_s += 60.0
            cycle(housekeeping, metrics={"loss/policy": torch.tensor(float(index))})
        housekeeping.finish(None)
        return [{key: row[key] for key in row if key != "wall_s"} for row in writer.rows], len(saves.calls)

    without, few = run(None)
    with_clock, many = run(2.0)
    assert without == with_clock
    assert many > few


# --- the end -----------------------------------------------------------------------------------


def test_finish_evaluates_writes_and_saves_once() -> None:
    writer, saves = MemoryWriter(), Saves()
    housekeeping = make_housekeeping(
        scheduler_of(cycles=1),
        writer=writer,
        save=saves,
        evaluate=scores(3.0),
        evaluation=EvaluationPlan(final_episodes=50),
    )
    cycle(housekeeping)
    housekeeping.finish(None)
    housekeeping.finish(None)
    assert [row.get("eval/episodes") for row in writer.rows] == [None, 50]
    assert saves.calls == [(10, None, False), (10, 3.0, True)]


def test_what_was_learnt_is_saved_before_the_final_evaluation() -> None:
    """Whoever interrupts that evaluation loses nothing: the resumed run evaluates, for the same reason to stop."""
    events: list[str] = []

    def evaluate(episodes: int) -> Metrics:
        events.append("evaluate")
        raise KeyboardInterrupt

    saves = Saves()
    first = make_housekeeping(
        scheduler_of(), save=saves, evaluate=evaluate, evaluation=EvaluationPlan(), stop=StopRules(env_frames=10)
    )
    saves.state = lambda: events.append("save") or first.get_state()  # type: ignore[func-returns-value]
    with pytest.raises(KeyboardInterrupt):
        first.finish(cycle(first))
    assert events == ["save", "evaluate"]
    resumed = make_housekeeping(first.scheduler, evaluate=scores(3.0), evaluation=EvaluationPlan())
    resumed.set_state(saves.states[-1])
    assert resumed.stop_reason == "the budget of 10 environment frames is spent" and not resumed.is_final
    resumed.finish(resumed.stop_reason)
    assert resumed.last_score == 3.0


def test_finish_is_not_repeated_after_a_resume() -> None:
    saves = Saves()
    first = make_housekeeping(scheduler_of(cycles=1), save=saves)
    saves.state = first.get_state
    cycle(first)
    first.finish(None)
    resumed = make_housekeeping(scheduler_of(cycles=1), save=saves, evaluation=EvaluationPlan(final_episodes=5))
    resumed.set_state(saves.states[-1])
    assert resumed.is_final
    resumed.finish(None)
    assert len(saves.calls) == 1


def test_without_a_final_evaluation_the_run_still_ends_with_a_checkpoint() -> None:
    saves = Saves()
    housekeeping = make_housekeeping(scheduler_of(cycles=1), save=saves)
    cycle(housekeeping)
    housekeeping.finish(None)
    assert saves.calls == [(10, None, False)]


def test_a_stop_rule_leaves_the_last_save_to_finish_and_says_why() -> None:
    writer, saves = MemoryWriter(), Saves()
    housekeeping = make_housekeeping(
        scheduler_of(),
        writer=writer,
        save=saves,
        log=Cadence(every_updates=1000),
        checkpoint=Cadence(every_updates=1),
        stop=StopRules(env_frames=20),
    )
    assert cycle(housekeeping) is None
    reason = cycle(housekeeping)
    assert reason == "the budget of 20 environment frames is spent"
    housekeeping.finish(reason)
    assert writer.messages == ["Stopped: the budget of 20 environment frames is spent."]
    assert [steps for steps, _, _ in saves.calls] == [10, 20]
    assert [row["agent_steps"] for row in writer.rows] == [20], "what was learnt since the last row is written"


def test_the_state_carries_scores_marks_and_wall_clock_over() -> None:
    clock = Clock()
    first = make_housekeeping(
        scheduler_of(), clock=clock, evaluate=scores(4.0, 2.0), evaluation=EvaluationPlan(Cadence(every_steps=10))
    )
    clock.now_s = 30.0
    cycle(first)
    cycle(first)
    second_clock = Clock()
    second = make_housekeeping(first.scheduler, clock=second_clock, evaluation=first.evaluation)
    second.set_state(first.get_state())
    second_clock.now_s = 5.0
    assert second.wall_s == 35.0
    assert (second.best_score, second.last_score, second.evaluations_done) == (4.0, 2.0, 2)
    assert second.get_state()["marks"] == first.get_state()["marks"]
    second.after_cycle(phase_ended=False)
    assert second.evaluations_done == 2, "what was due before the save is not due again"
