"""When to stop before the phases end: a budget, a score that is good enough, or no progress any more."""

from __future__ import annotations

from dataclasses import dataclass

from rl_lab.types import Counts, StateTree

EPISODE_WINDOW = 100  # episodes in collect/episode_return_mean
PRUNED = "pruned"  # begins the reason for which a sweep ended a run early


@dataclass(frozen=True)
class StopRules:
    """Every rule is off while it is None."""

    episode_return: float | None = None  # mean training return over the last 100 episodes
    eval_return: float | None = None  # mean return of an evaluation
    env_frames: int | None = None
    wall_minutes: float | None = None  # this rule alone is not reproducible
    plateau_evaluations: int | None = None  # evaluations in a row without a better score


class Stopping:
    """Compares the latest numbers with the rules; the answer is a sentence or None."""

    def __init__(self, rules: StopRules) -> None:
        self.rules = rules
        self._best_eval: float | None = None
        self._evaluations_since_best = 0

    def evaluated(self, eval_return: float) -> None:
        if self._best_eval is None or eval_return > self._best_eval:
            self._best_eval, self._evaluations_since_best = eval_return, 0
        else:
            self._evaluations_since_best += 1

    def reason(
        self, counts: Counts, *, wall_s: float, episode_return: float | None, eval_return: float | None
    ) -> str | None:
        rules = self.rules
        if rules.episode_return is not None and episode_return is not None and counts.episodes >= EPISODE_WINDOW:
            if episode_return >= rules.episode_return:
                return f"mean return of the last {EPISODE_WINDOW} episodes reached {episode_return:.1f}"
        if rules.eval_return is not None and eval_return is not None and eval_return >= rules.eval_return:
            return f"evaluation return reached {eval_return:.1f}"
        if rules.env_frames is not None and counts.env_frames >= rules.env_frames:
            return f"the budget of {rules.env_frames:,} environment frames is spent"
        if rules.wall_minutes is not None and wall_s >= 60.0 * rules.wall_minutes:
            return f"the budget of {rules.wall_minutes:g} minutes is spent"
        if rules.plateau_evaluations is not None and self._evaluations_since_best >= rules.plateau_evaluations:
            return f"{self._evaluations_since_best} evaluations in a row brought no better score"
        return None

    def get_state(self) -> StateTree:
        return {"best_eval": self._best_eval, "evaluations_since_best": self._evaluations_since_best}

    def set_state(self, state: StateTree) -> None:
        self._best_eval, self._evaluations_since_best = state["best_eval"], state["evaluations_since_best"]
