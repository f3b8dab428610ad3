"""Between cycles: evaluate, film dreams, log, check the stop rules, save; each when due.

Everything written to metrics.jsonl is reproducible to the bit but for `wall_s`, `time/` and `system/`: only
checkpoints may follow the clock, and saving one changes nothing that a run computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol

from rl_lab.metrics.logger import MetricLogger
from rl_lab.orchestration.cadence import Cadence, DueMarks
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.stopping import Stopping, StopRules
from rl_lab.types import CollectResult, Counts, Metrics, RunError, StateTree
from rl_lab.utils.timing import Stopwatch


@dataclass(frozen=True)
class EvaluationPlan:
    """How often, from when on, and how many episodes."""

    cadence: Cadence = field(default_factory=Cadence)
    warmup_steps: int = 0  # agent steps before the first evaluation
    episodes: int = 10
    final_episodes: int = 100  # after the last phase; 0: no final evaluation


@dataclass(frozen=True)
class FilmPlan:
    """How often a world model's dreams are filmed, and by whom."""

    cadence: Cadence = field(default_factory=Cadence)
    film: Callable[[Counts], object] = lambda counts: None


class SaveCheckpoint(Protocol):
    def __call__(self, *, counts: Counts, score: float | None, is_best: bool) -> object: ...


class Progress(Protocol):
    def update_progress(self, fraction: float, phase_name: str, phase_index: int, phase_count: int) -> None: ...


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
        self.best_score: float | None = None
        self.last_score: float | None = None
        self.evaluations_done = 0
        self._earlier_wall_s = 0.0  # of the processes before this one
        self.stop_reason: str | None = None  # the rule that ended the run before its phases did
        self.is_final = False  # the run is over, even where its phases are not
        self.is_ending = False  # in the last evaluation: nothing would be lost by leaving at once
        self._is_best_unsaved = False

    @property
    def counts(self) -> Counts:
        return self.scheduler.run_counts

    @property
    def wall_s(self) -> float:
        return self._earlier_wall_s + self.stopwatch.elapsed()

    # --- called by the loop ---

    def collected(self, result: CollectResult) -> None:
        self._latest.update(result.metrics)

    def updated(self, metrics: Metrics) -> None:
        self.logger.add(metrics)
        self._learnt.update(metrics)

    def after_cycle(self, *, phase_ended: bool) -> str | None:
        """Do what is due; a sentence when a stop rule ends the run."""
        counts, session_s = self.counts, self.stopwatch.elapsed()
        if counts.agent_steps >= self.evaluation.warmup_steps and self._marks["evaluation"].due(counts, session_s):
            self.evaluate_now()
        if self._marks["film"].due(counts, session_s):
            with self.stopwatch.section("evaluation"), self.stopwatch.section("film"):
                self._films.film(counts)
        is_log_due = self._marks["log"].due(counts, session_s)
        reason = self.stopping.reason(
            counts,
            wall_s=self.wall_s,
            episode_return=self._latest.get("collect/episode_return_mean"),
            eval_return=self._evaluated.get("eval/episode_return_mean"),
        )
        if is_log_due or self._evaluated or phase_ended or reason is not None:
            self.write_row()
        is_save_due = self._marks["checkpoint"].due(counts, session_s)
        if (is_save_due or self._is_best_unsaved) and reason is None:
            self.save()
        return reason

    def evaluate_now(self) -> None:
        """Evaluate and remember the best; it is saved at the end of the cycle, where a run can be continued."""
        score = self._score(self.evaluation.episodes)
        self.evaluations_done += 1
        if score is not None:
            self.stopping.evaluated(score)

    def _score(self, episodes: int) -> float | None:
        with self.stopwatch.section("evaluation"):
            self._evaluated = dict(self.evaluate(episodes=episodes))
        score = self._evaluated.get("eval/episode_return_mean")
        if score is not None:
            self.last_score = score
            if isfinite(score) and (self.best_score is None or score > self.best_score):
                self.best_score, self._is_best_unsaved = score, True
        return score

    def write_row(self) -> None:
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
            self.logger.write(self.counts, wall_s=self.wall_s, values=values)
        self._refuse_broken(self.logger.last_non_finite)

    def save(self) -> None:
        """Save a checkpoint now; only between cycles, and never of weights that an update has broken."""
        self._refuse_broken(name for name, value in self._learnt.items() if not isfinite(value))
        is_best, self._is_best_unsaved = self._is_best_unsaved, False
        with self.stopwatch.section("checkpoint"):
            self.save_checkpoint(counts=self.counts, score=self.last_score, is_best=is_best)
            self.on_save(self)

    def finish(self, reason: str | None) -> None:
        """The last evaluation, row and checkpoint; once per run, even when this part is interrupted and resumed."""
        if self.is_final:
            return
        self.stop_reason = reason
        if reason is not None:
            self.logger.message(f"Stopped: {reason}.", "info")
        if self.evaluation.final_episodes > 0:
            self.save()  # before the evaluation, which may be interrupted
            self.is_ending = True
            self._score(self.evaluation.final_episodes)
            self.is_ending = False
            self.write_row()
        self.is_final = True
        self.save()

    def _refuse_broken(self, non_finite: Iterable[str]) -> None:
        broken = [name for name in non_finite if name.startswith("loss/") or name.endswith("grad_norm")]
        if broken:
            raise RunError(
                f"{broken[0]} is not finite at {self.counts.agent_steps:,} agent steps, so learning stopped; the last "
                "checkpoint is from before. Try a smaller learning rate or `max_grad_norm` of its optimizer."
            )

    def get_state(self) -> StateTree:
        return {
            "marks": {name: marks.get_state() for name, marks in self._marks.items()},
            "latest": dict(self._latest),
            "evaluated": dict(self._evaluated),
            "best_score": self.best_score,
            "last_score": self.last_score,
            "evaluations_done": self.evaluations_done,
            "stopping": self.stopping.get_state(),
            "wall_s": self.wall_s,
            "is_final": self.is_final,
            "stop_reason": self.stop_reason,
        }

    def set_state(self, state: StateTree) -> None:
        for name, marks in state["marks"].items():
            self._marks[name].set_state(marks)
        self._latest, self._evaluated = dict(state["latest"]), dict(state["evaluated"])
        self.best_score, self.last_score = state["best_score"], state["last_score"]
        self.evaluations_done = state["evaluations_done"]
        self.stopping.set_state(state["stopping"])
        self._earlier_wall_s = state["wall_s"]
        self.is_final = state["is_final"]
        self.stop_reason = state.get("stop_reason")  # checkpoints of earlier versions do not know it
