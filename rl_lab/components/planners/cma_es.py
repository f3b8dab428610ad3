"""CMA-ES: parameters of a policy drawn from a normal whose mean, size and shape follow the draws that earned the most.

The `cma` library evolves. Its state leaves as plain arrays and numbers and comes back into a strategy made anew: a
checkpoint holds no pickle. Its draws come from torch's generator, which a checkpoint holds as well.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.types import ConfigError, MissingExtraError, StateTree

PLAIN = (bool, int, float, str, type(None), np.bool_, np.integer, np.floating, np.ndarray)
NO_STATE = {
    *("timer", "logger", "more_to_write", "opts", "inopts", "inputargs", "_es_opts"),  # clocks, files and settings
    *("ary", "pop", "pop_sorted", "_tell2_args", "all_best", "all_stoppings"),  # the last generation, for its reports
    *("mean0", "x0", "sp", "sp0", "const", "callbackstop"),  # as a new strategy has them
}


class CMAES:
    """`ask` for a population of parameters, try each, and `tell` what each earned."""

    def __init__(self, *, population: int = 64, initial_std: float = 0.1) -> None:
        if population < 4 or initial_std <= 0.0:
            raise ConfigError(
                f"controllers.evolution.population is {population} and initial_std is {initial_std}: write a whole "
                "number from 4 and a number above 0, such as 64 and 0.1."
            )
        try:
            import cma
        except ImportError as error:
            raise MissingExtraError(
                "CMA-ES needs the package cma: install the extra with `pip install 'rl-lab[evolution]'`."
            ) from error
        self._library = cma
        self.population, self.initial_std = population, initial_std
        self.generations = 0
        self._strategy: Any = None
        self._draws: list[np.ndarray] = []  # of the population that is being tried
        self._repeated: list[np.ndarray] = []  # draws to take before new ones
        self._before: dict[str, Any] = {}  # the strategy's values when it was asked for it

    def begin(self, mean: Tensor) -> None:
        """Draw around these parameters `[n]`, at least 2."""
        options = {"popsize": self.population, "randn": self._randn, "verbose": -9}
        options |= {
            "seed": float("nan"),
            "CMA_mirrors": 0,
        }  # nan: numpy's generator is left alone; 0: none, however few
        start = mean.detach().cpu().double().numpy()
        self._strategy = self._library.CMAEvolutionStrategy(start, self.initial_std, options)

    @property
    def has_begun(self) -> bool:
        return self._strategy is not None

    def ask(self) -> Tensor:
        """Parameters to try, `[population, n]`."""
        self._before, self._draws = _values_of(self._strategy), []
        return torch.from_numpy(np.stack(self._strategy.ask()))

    def tell(self, parameters: Tensor, returns: Tensor) -> None:
        """What the parameters `[population, n]` of the last `ask` earned, `[population]`."""
        losses = (-returns).double().cpu().tolist()  # the library minimises
        self._strategy.tell(list(parameters.cpu().numpy()), losses)
        self._before, self._draws = {}, []
        self.generations += 1

    def mean(self) -> Tensor:
        """The parameters `[n]` around which the next population lies."""
        return torch.from_numpy(np.array(self._strategy.mean))

    def std(self) -> float:
        """How far a parameter of the next population lies from the mean, on average over parameters."""
        return float(np.mean(self._strategy.stds))

    def get_state(self) -> StateTree:
        """The strategy as the last `tell` left it, and the draws of a population asked for since: asked again with the
        same draws, it is the same strategy, its notes about that population included."""
        if self._strategy is None:
            return {"generations": self.generations, "start": None, "strategy": None, "draws": []}
        start = torch.from_numpy(np.array(self._strategy.x0))
        values = self._before or _values_of(self._strategy)
        draws = [torch.from_numpy(each) for each in self._draws]
        return {"generations": self.generations, "start": start, "strategy": values, "draws": draws}

    def set_state(self, state: StateTree) -> None:
        self.generations, self._strategy = state["generations"], None
        if state["start"] is None:
            return
        self.begin(state["start"])
        self._before, self._draws = {}, []
        _restore(self._strategy, state["strategy"])
        self._strategy.timer = self._library.utilities.utils.ElapsedWCTime()  # which the first `ask` had made
        if state["draws"]:
            self._repeated = [each.numpy() for each in state["draws"]]
            self.ask()

    def _randn(self, *shape: int) -> np.ndarray:
        """Normal draws from the generator that a run seeds and saves."""
        drawn = self._repeated.pop(0) if self._repeated else torch.randn(shape, dtype=torch.float64).numpy()
        self._draws.append(drawn)
        return drawn.copy()


def _values_of(owner: Any, place: str = "", seen: dict[int, str] | None = None) -> dict[str, Any]:
    """Plain values among the attributes of an object of the library, and of the objects of the library it holds.

    The strategy and its sampler hold the same covariance and eigenvectors, n x n each: an array is saved where it is
    met first, and named there where it is met again.
    """
    values: dict[str, Any] = {}
    seen = {} if seen is None else seen
    for name, value in sorted(vars(owner).items()):
        if name in NO_STATE:
            continue
        if isinstance(value, np.ndarray) and id(value) in seen:
            values[name] = {"same": seen[id(value)]}
        elif _is_plain(value):
            values[name] = _saved(value)
            if isinstance(value, np.ndarray):
                seen[id(value)] = f"{place}{name}"
        elif type(value).__module__.startswith("cma."):
            values[name] = {"attributes": _values_of(value, f"{place}{name}.", seen)}
    return values


def _restore(strategy: Any, values: dict[str, Any], owner: Any = None) -> None:
    """The same values into objects made anew; which there are, and of which classes, these know by themselves."""
    owner = strategy if owner is None else owner
    for name, value in values.items():
        if isinstance(value, dict) and "attributes" in value:
            _restore(strategy, value["attributes"], getattr(owner, name))
        elif isinstance(value, dict) and "same" in value:
            setattr(owner, name, attrgetter(value["same"])(strategy))
        else:
            setattr(owner, name, _read(value))


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(each) for each in value)
    return isinstance(value, PLAIN)


def _saved(value: Any) -> Any:
    """As checkpoints hold it: arrays are tensors, and numbers of numpy keep their kind as arrays without axes."""
    if type(value) in (list, tuple):
        return {"list" if type(value) is list else "tuple": [_saved(each) for each in value]}
    if isinstance(value, np.generic):
        return {"number": torch.from_numpy(np.array(value))}
    if isinstance(value, np.ndarray):
        by_columns = value.ndim > 1 and not value.flags.c_contiguous  # matrix products round by the order in memory
        kept = value.T if by_columns else value
        return {"columns" if by_columns else "array": torch.from_numpy(np.array(kept, order="C"))}
    return value


def _read(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind in ("list", "tuple"):
        read = [_read(each) for each in inner]
        return read if kind == "list" else tuple(read)
    array = np.array(inner.numpy(), order="C")
    if kind == "columns":
        return array.T
    return array[()] if kind == "number" else array
