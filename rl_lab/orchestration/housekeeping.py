"""Between cycles: evaluate, film dreams, log, check the stop rules, save; each when due.

Everything written to metrics.jsonl is reproducible to the bit but for `wall_s`, `time/` and `system/`: only
checkpoints may follow the clock, and saving one changes nothing that a run computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Protocol

from rl_lab.metrics.logger import MetricLogger
from rl_lab.orchestration.cadence import Cadence, DueMarks
from rl_lab.orchestration.callbacks import Callbacks
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.stopping import PRUNED, Stopping, StopRules
from rl_lab.types import CollectResult, Counts, Metrics, RunError, StateTree
from rl_lab.utils.seeding import untouched_randomness
from rl_lab.utils.timing import Stopwatch

OF_THE_WHOLE = ("wall_s", "continuations", "best_of_ends")  # what going on after an end does not undo


@dataclass(frozen=True)
class EvaluationPlan:
    """How often, from when on, and how many episodes."""

    cadence: Cadence = field(default_factory=Cadence)
    warmup_steps: int = 0  # agent steps before the first evaluation
    episodes: int = 10
    final_episodes: int = 100  # after the last phase; 0: no final evaluation
    video_every: int | None = None  # evaluations per video of one; None: none
    record: Callable[[Counts], object] = lambda counts: None  # makes that video


@dataclass(frozen=True)
class FilmPlan:
    """How often a world model's dreams are filmed, and by whom."""

    cadence: Cadence = field(default_factory=Cadence)
    film: Callable[[Counts], object] = lambda counts: None


class SaveCheckpoint(Protocol):
    def __call__(self, *, counts: Counts, score: float | None, is_best: bool) -> object: ...


class Progress(Protocol):
    def update_progress(self, fraction: float, phase_name: str, phase_index: int, phase_count: int) -> None: ...


Prune = Callable[[dict[str, Any]], str | None]
"""Asked about every row but the last: why a sweep ends the run here, or None."""


def go_on(row: dict[str, Any]) -> None:
    """The answer where no sweep asks."""


@dataclass(kw_only=True, eq=False)
class Housekeeping:
    """Everything around the loop that is not learning."""

    scheduler: PhaseScheduler
    logger: MetricLogger
    evaluate: Callable[..., Metrics]
    save_checkpoint: SaveCheckpoint
    usage: Callable[[float], Metrics]
    display: Progress
    stopwatch: Stopwatch
    log_cadence: Cadence
    checkpoint_cadence: Cadence
    evaluation: EvaluationPlan
    stop_rules: StopRules
    films: FilmPlan | None = None
    on_save: Callable[[Housekeeping], None] = lambda housekeeping: None
    prune: Prune = go_on
    callbacks: Callbacks = field(default_factory=Callbacks)
    run_id: str = "RUN"  # as a user names it

    def __post_init__(self) -> None:
        self.stopping = Stopping(self.stop_rules)
        self._films = self.films or FilmPlan()
        self._marks = {
            "log": DueMarks(self.log_cadence),
            "checkpoint": DueMarks(self.checkpoint_cadence),
            "evaluation": DueMarks(self.evaluation.cadence),
            "film": DueMarks(self._films.cadence),
        }
        self._latest: Metrics = {}  # newest statistics of finished episodes
        self._evaluated: Metrics = {}  # evaluation results not yet written
        self._learnt: Metrics = {}  # newest value of each metric of an update
        self._episodes_before = 0  # of the run, when its environment last changed
        self._best_score: float | None = None
        self._best_of_ends: float | None = None  # of ends that were undone; that checkpoint stays until one beats it
        self.last_score: float | None = None
        self.evaluations_done = 0
        self._earlier_wall_s = 0.0  # of the processes before this one
        self.stop_reason: str | None = None  # the rule that ended the run before its phases did
        self.is_final = False  # the run is over, even where its phases are not
        self.is_ending = False  # in the last evaluation: nothing would be lost by leaving at once
        self._is_best_unsaved = False
        self.continuations = 0  # how often the run has been given other durations or stop rules
        self._before_end: StateTree = None  # what a longer run has where this one ended
        self._is_row_due = False  # the row at which the run ended is still to be written

    @property
    def counts(self) -> Counts:
        return self.scheduler.run_counts

    @property
    def wall_s(self) -> float:
        return self._earlier_wall_s + self.stopwatch.elapsed()

    @property
    def newest_of_episodes(self) -> Metrics:
        """Statistics of the latest episodes, for whoever looks between two rows."""
        return self._latest.copy()

    # --- called by the loop ---

    def collected(self, result: CollectResult) -> None:
        self._latest.update(result.metrics)
        self.callbacks.episodes(result.episodes)

    def environment_changed(self) -> None:
        """Returns of episodes so far say nothing about those to come."""
        self._latest, self._episodes_before = {}, self.counts.episodes

    def updated(self, metrics: Metrics) -> None:
        self.logger.add(metrics)
        self._learnt.update(metrics)

    def after_cycle(self, *, phase_ended: bool) -> str | None:
        """Do what is due; a sentence when a stop rule ends the run."""
        counts, session_s = self.counts, self.stopwatch.elapsed()
        is_noted = self.scheduler.ended_in_mid_cycle
        if is_noted:  # a longer run does nothing here: it goes on with the passes of this cycle
            self._note_end(is_row_due=False)
        if counts.agent_steps >= self.evaluation.warmup_steps and self._marks["evaluation"].due(counts, session_s):
            self.evaluate_now()
        if self._marks["film"].due(counts, session_s):
            self._deliver_rows()
            with self.stopwatch.section("evaluation"), self.stopwatch.section("film"), untouched_randomness():
                self._films.film(counts)
        is_log_due, is_save_due = (self._marks[name].due(counts, session_s) for name in ("log", "checkpoint"))
        reason = self.stopping.reason(
            replace(counts, episodes=counts.episodes - self._episodes_before),
            wall_s=self.wall_s,
            episode_return=self._latest.get("collect/episode_return_mean"),
            eval_return=self._evaluated.get("eval/episode_return_mean"),
        )
        reason = reason or self.callbacks.stop_reason
        if not is_noted and (self.scheduler.finished or reason is not None):
            is_noted = True
            self._note_end(is_row_due=is_log_due or bool(self._evaluated))
        if is_log_due or self._evaluated or phase_ended or reason is not None:
            row = self.write_row()
            if reason is None and not self.scheduler.finished and (why := self.prune(row)) is not None:
                reason = f"{PRUNED}: {why}"
        if (is_save_due or self._is_best_unsaved) and reason is None:
            self.save()
        reason = reason or self.callbacks.stop_reason
        if reason is not None and not is_noted:  # a callback or a pruner has seen the row, or the checkpoint
            self._note_end(is_row_due=False)
        return reason

    def evaluate_now(self) -> None:
        """Evaluate and remember the best; it is saved at the end of the cycle, where a run can be continued."""
        score = self._score(self.evaluation.episodes)
        self.evaluations_done += 1
        if score is not None:
            self.stopping.evaluated(score)
        if self.evaluation.video_every and self.evaluations_done % self.evaluation.video_every == 0:
            with self.stopwatch.section("evaluation"), untouched_randomness():
                self.evaluation.record(self.counts)

    def _score(self, episodes: int) -> float | None:
        self._deliver_rows()
        with self.stopwatch.section("evaluation"), untouched_randomness():  # training goes on as if nobody had looked
            self._evaluated = dict(self.evaluate(episodes=episodes))
        self.callbacks.evaluation(self.counts.as_dict(), self._evaluated)
        score = self._evaluated.get("eval/episode_return_mean")
        if score is not None:
            self.last_score = score
            if isfinite(score) and (self._best_score is None or score > self._best_score):
                self._best_score = score
                self._is_best_unsaved = self._best_of_ends is None or score > self._best_of_ends
        return score

    @property
    def best_score(self) -> float | None:
        """Of the checkpoint that is called best."""
        return max((score for score in (self._best_score, self._best_of_ends) if score is not None), default=None)

    @property
    def is_pruned(self) -> bool:
        return self.stop_reason is not None and self.stop_reason.startswith(PRUNED)

    def write_row(self) -> dict[str, Any]:
        phases, is_over = self.scheduler.phases, self.scheduler.finished
        index = len(phases) - 1 if is_over else self.scheduler.index
        fraction = 1.0 if is_over else self.scheduler.fraction()
        with self.stopwatch.section("logging"):
            values: Metrics = {
                **self._latest,
                **self._evaluated,
                "train/phase_index": index,
                "train/phase_fraction": fraction,
                **self.usage(self.scheduler.run_fraction()),
            }
            self._evaluated = {}
            self.display.update_progress(fraction, phases[index].name, index, len(phases))
            row = self.logger.write(self.counts, wall_s=self.wall_s, values=values)
        self._refuse_broken(self.logger.last_non_finite)
        self.callbacks.row(row)
        return row

    def _deliver_rows(self) -> None:
        with self.stopwatch.section("logging"):
            self.logger.deliver()

    def save(self) -> None:
        """Save a checkpoint now; only between cycles, and never of weights that an update has broken."""
        self._refuse_broken(name for name, value in self._learnt.items() if not isfinite(value))
        is_best, self._is_best_unsaved = self._is_best_unsaved, False
        self._deliver_rows()
        with self.stopwatch.section("checkpoint"):
            path = self.save_checkpoint(counts=self.counts, score=self.last_score, is_best=is_best)
            self.on_save(self)
        self.callbacks.checkpoint(self.counts.as_dict(), path=path, score=self.last_score, is_best=is_best)

    def finish(self, reason: str | None) -> None:
        """The last evaluation, row and checkpoint; once per run, even when this part is interrupted and resumed."""
        if self.is_final:
            return
        self.stop_reason = reason
        if reason is not None:
            self.logger.message(f"Stopped: {reason}.", "info")
        if self.evaluation.final_episodes > 0 and not self.is_pruned:
            self.save()  # before the evaluation, which may be interrupted
            self.is_ending = True
            with untouched_randomness():  # of a run that goes on from here, which has no evaluation here
                self._score(self.evaluation.final_episodes)
            self.is_ending = False
            self.write_row()
        self.is_final = True
        self.save()
        if self.callbacks.error is not None:
            raise self.callbacks.error

    # --- a run that has ended and goes on after all ---

    def _note_end(self, *, is_row_due: bool) -> None:
        """Keep what a longer run would have here, before anything is written that only the end writes."""
        self._before_end = None
        kept = {name: value for name, value in self.get_state().items() if name not in OF_THE_WHOLE}
        self._before_end = {**kept, "is_row_due": is_row_due}
        self.logger.mark()

    @property
    def is_over(self) -> bool:
        return self.scheduler.finished or self.stop_reason is not None or self.is_final

    def reopen(self, continuations: int) -> None:
        """Undo the end, which a longer run does not have here, and save that; only then do the rows of the end go."""
        assert self._before_end is not None, "a run without an end cannot be continued after it"
        best_score = self.best_score
        self.set_state({**self._before_end, "wall_s": self._earlier_wall_s})
        self._best_of_ends = best_score
        self.continuations = continuations
        self.scheduler.reopen()
        with self.logger.at_mark():
            self.save()

    def catch_up(self) -> None:
        """Write the row that was due where the run ended, with the progress of the longer run."""
        if self._is_row_due:
            self._is_row_due = False
            self.write_row()

    def _refuse_broken(self, non_finite: Iterable[str]) -> None:
        broken = [name for name in non_finite if name.startswith("loss/") or name.endswith("grad_norm")]
        if broken:
            raise RunError(
                f"{broken[0]} is not finite at {self.counts.agent_steps:,} agent steps, so learning stopped; the last "
                "checkpoint is from before. Try a smaller learning rate or `max_grad_norm` of its optimizer. Where it "
                f"comes from says `rl-lab debug find {self.run_id}`."
            )

    def get_state(self) -> StateTree:
        return {
            "marks": {name: marks.get_state() for name, marks in self._marks.items()},
            "latest": dict(self._latest),
            "episodes_before": self._episodes_before,
            "evaluated": dict(self._evaluated),
            "best_score": self._best_score,
            "best_of_ends": self._best_of_ends,
            "last_score": self.last_score,
            "evaluations_done": self.evaluations_done,
            "stopping": self.stopping.get_state(),
            "wall_s": self.wall_s,
            "is_final": self.is_final,
            "stop_reason": self.stop_reason,
            "continuations": self.continuations,
            "before_end": self._before_end,
            "is_row_due": self._is_row_due,
            "is_best_unsaved": self._is_best_unsaved,
        }

    def set_state(self, state: StateTree) -> None:
        for name, marks in state["marks"].items():
            self._marks[name].set_state(marks)
        self._latest, self._evaluated = dict(state["latest"]), dict(state["evaluated"])
        self._episodes_before = state.get("episodes_before", 0)
        self._best_score, self.last_score = state["best_score"], state["last_score"]
        self._best_of_ends = state.get("best_of_ends")
        self.evaluations_done = state["evaluations_done"]
        self.stopping.set_state(state["stopping"])
        self._earlier_wall_s = state["wall_s"]
        self.is_final = state["is_final"]
        self.stop_reason = state.get("stop_reason")  # checkpoints of earlier versions do not know it
        self.continuations = state.get("continuations", 0)
        self._before_end, self._is_row_due = state.get("before_end"), state.get("is_row_due", False)
        self._is_best_unsaved = state.get("is_best_unsaved", False)
