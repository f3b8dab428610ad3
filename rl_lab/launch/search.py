"""Which parameters a trial gets, and whether it is worth going on with.

Both are functions of the sweep's seed, the trial's number and the results of the trials it may know
(`SweepPlan.known_before`): every draw is seeded anew from (seed, number), and results are told in the order of numbers,
never in that of their arrival. So nothing of a sampler has to be saved.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_lab.launch.sweep_plan import Parameter, SweepPlan
from rl_lab.types import MissingExtraError, RunError

STARTUP_TRIALS = {"tpe": 10, "cmaes": 1}  # before the sampler has something to learn from
PRUNER_STARTUP_TRIALS = 4  # trials that are never pruned: a median of fewer says little

WAITING, RUNNING = "waiting", "running"
FINISHED, PRUNED, FAILED = "finished", "pruned", "failed"
ENDED = (FINISHED, PRUNED, FAILED)


@dataclass
class Trial:
    """One set of parameters and what became of it."""

    number: int
    parameters: dict[str, Any]
    state: str = WAITING  # then running; then finished, pruned or failed
    score: float | None = None
    seed_scores: dict[int, float] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)  # of the metric in the first seed's run, oldest first
    rungs: dict[str, float] = field(default_factory=dict)  # what the pruner remembers of it
    message: str = ""
    seconds: float = 0.0  # of training, all seeds together
    task_seconds: float = 0.0  # that workers spent on it, in this process or the one that recorded it

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


def best_of(trials: Sequence[Trial], plan: SweepPlan) -> Trial | None:
    """The finished trial with the best score; of equals the first."""
    sign = 1.0 if plan.direction == "maximize" else -1.0
    scores = {
        trial.number: sign * trial.score for trial in trials if trial.state == FINISHED and trial.score is not None
    }
    return max((trial for trial in trials if trial.number in scores), key=lambda t: scores[t.number], default=None)


def require_optuna(plan: SweepPlan) -> Any:
    try:
        import optuna

        if plan.sampler == "cmaes":
            import cmaes  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"sampler {plan.sampler} with pruner {plan.pruner} needs {error.name}: `pip install 'rl-lab[sweeps]'`. "
            "The samplers grid and random without a pruner need nothing more."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def make_search(plan: SweepPlan) -> Search:
    return OptunaSearch(plan) if plan.sampler in STARTUP_TRIALS else Search(plan)


class Search:
    """Grid and random search. Asked for trial 0, 1, 2, and so on, each once; between two questions told of ended trials
    in order."""

    def __init__(self, plan: SweepPlan) -> None:
        self.plan = plan
        self._points = plan.grid_points() if plan.sampler == "grid" else []

    def ask(self, number: int, recorded: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The parameters of a trial; those on record where an earlier process has drawn them."""
        if recorded is not None:
            return dict(recorded)
        if self._points:
            return self._points[number]
        generator = random.Random(f"{self.plan.seed}-{number}")
        return {parameter.key: parameter.at(generator.random()) for parameter in self.plan.parameters}

    def tell(self, trial: Trial) -> None:
        """The result of an ended trial; neither grid nor chance learns from it."""


class OptunaSearch(Search):
    """TPE and CMA-ES. CMA-ES keeps its state with its trials, as pickled bytes, which do not belong into a file that
    somebody else may have written: after a restart it is asked for its earlier trials again."""

    def __init__(self, plan: SweepPlan) -> None:
        super().__init__(plan)
        self._optuna = require_optuna(plan)
        self._study = make_study(self._optuna, plan)
        self._space = {parameter.key: distribution(self._optuna, parameter) for parameter in plan.parameters}
        self._asked: list[Any] = []

    def ask(self, number: int, recorded: Mapping[str, Any] | None = None) -> dict[str, Any]:
        assert number == len(self._asked), "trials are asked for in the order of their numbers"
        if self.plan.sampler == "tpe":
            wanted = recorded or (self._spread(number) if number < STARTUP_TRIALS["tpe"] else None)
            if wanted is not None:
                self._study.enqueue_trial({each.key: _inner(each, wanted[each.key]) for each in self.plan.parameters})
        self._study.sampler = self._sampler(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = self._study.ask(self._space)
        self._asked.append(trial)
        drawn = {each.key: _outer(each, trial.params[each.key]) for each in self.plan.parameters}
        if recorded is not None and drawn != dict(recorded):
            raise RunError(
                f"Sweep {self.plan.name} cannot go on: {self.plan.sampler} now draws {drawn} for trial {number}, where "
                f"it drew {dict(recorded)}. Another version of optuna or cmaes, or an earlier trial that was removed, "
                "explains this: begin a new sweep with another --name."
            )
        return drawn

    def _spread(self, number: int) -> dict[str, Any]:
        """A Latin hypercube: in the first ten trials each parameter takes every tenth of its range once. By chance
        alone one of two choices may not come at all."""
        count, drawn = STARTUP_TRIALS["tpe"], {}
        for parameter in self.plan.parameters:
            generator = random.Random(f"{self.plan.seed}-{parameter.key}")
            order = generator.sample(range(count), count)
            within = [generator.random() for _ in range(count)]
            drawn[parameter.key] = parameter.at((order[number] + within[number]) / count)
        return drawn

    def tell(self, trial: Trial) -> None:
        asked, state = self._asked[trial.number], self._optuna.trial.TrialState
        for step, value in enumerate(trial.values, start=1):
            asked.report(value, step)
        if trial.state == FINISHED:
            self._study.tell(asked, trial.score)
        else:
            is_pruned = trial.state == PRUNED and trial.values
            self._study.tell(asked, state=state.PRUNED if is_pruned else state.FAIL)

    def _sampler(self, number: int) -> Any:
        samplers, startup = self._optuna.samplers, STARTUP_TRIALS[self.plan.sampler]
        seed = random.Random(f"{self.plan.seed}-{number}").getrandbits(31)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # both options are marked as experimental
            if self.plan.sampler == "tpe":
                return samplers.TPESampler(seed=seed, n_startup_trials=startup, multivariate=True, constant_liar=True)
            return samplers.CmaEsSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)


class Pruning:
    """Optuna's pruner for one trial beside those it may know; `report` says whether to stop here."""

    def __init__(self, plan: SweepPlan, number: int, known: Sequence[Trial]) -> None:
        optuna = require_optuna(plan)
        state = optuna.trial.TrialState
        self._study = make_study(optuna, plan)
        states = {FINISHED: state.COMPLETE, PRUNED: state.PRUNED, FAILED: state.FAIL}
        for trial in known:
            self._add(optuna, states[trial.state], trial)
        for unknown in range(len(known), number):  # keeps the numbers right: hyperband's brackets go by them
            self._add(optuna, state.FAIL, Trial(unknown, {}))
        self._trial = self._study.ask()
        self._number = number
        self.values: list[float] = []

    def _add(self, optuna: Any, state: Any, trial: Trial) -> None:
        is_complete = state == optuna.trial.TrialState.COMPLETE
        self._study.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=trial.score if is_complete else None,
                intermediate_values=dict(enumerate(trial.values, start=1)),
                system_attrs=dict(trial.rungs),
            )
        )

    def report(self, value: float) -> bool:
        self.values.append(value)
        self._trial.report(value, len(self.values))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(self._trial.should_prune())

    def rungs(self) -> dict[str, float]:
        attributes = self._study.trials[self._number].system_attrs
        return {name: value for name, value in attributes.items() if "rung" in name}


def make_study(optuna: Any, plan: SweepPlan) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hyperband is marked as experimental
        pruners = {
            "none": optuna.pruners.NopPruner,
            "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=PRUNER_STARTUP_TRIALS),
            "hyperband": optuna.pruners.HyperbandPruner,
        }
        # The name decides hyperband's brackets; a random sampler, as `Pruning` asks for no parameters at all.
        sampler, pruner = optuna.samplers.RandomSampler(seed=0), pruners[plan.pruner]()
        return optuna.create_study(study_name=plan.name, direction=plan.direction, sampler=sampler, pruner=pruner)


def distribution(optuna: Any, parameter: Parameter) -> Any:
    """A parameter in Optuna's words; choices by their index, as they may be lists."""
    kinds = optuna.distributions
    if parameter.is_choice:
        return kinds.CategoricalDistribution(list(range(len(parameter.choices))))
    low, high, step = parameter.low, parameter.high, parameter.step
    if parameter.is_whole:
        return kinds.IntDistribution(int(low), int(high), log=parameter.log, step=int(step or 1))
    return kinds.FloatDistribution(low, high, log=parameter.log, step=step)


def _inner(parameter: Parameter, value: Any) -> Any:
    return parameter.choices.index(value) if parameter.is_choice else value


def _outer(parameter: Parameter, value: Any) -> Any:
    return parameter.choices[value] if parameter.is_choice else value
