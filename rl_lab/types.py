"""The words every layer shares: what an environment says, what a policy answers, what a hook reports.

Nothing here knows an algorithm, an environment library, a file or a device. See docs/time_steps.md
for the one data convention that all of these follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:  # only names in annotations: commands that train nothing start without torch
    from collections.abc import Callable, Sequence

    import numpy as np
    from torch import Tensor

Batch = dict[str, "Tensor"]
"""Flat named tensors, batch-major: `[N, ...]` live, `[B, T, ...]` from a buffer."""

Metrics = dict[str, Any]
"""Metric name -> detached scalar Tensor or plain number. Tensors stay on their device until written."""

StateTree = Any
"""Nested dict / list / tuple of tensors, numpy arrays, numbers, strings, booleans and None."""

ROW_KEYS = ("reward", "is_first", "is_last", "is_terminal", "action")
"""Names every row has; an observation may not use them."""

MODEL_KEYS = ("previous_action", "embedding")
"""What world models add to the rows they learn from; an observation of that name is renamed."""


class RLLabError(Exception):
    """An error a user can act on. The command line prints its message without a traceback."""


class ConfigError(RLLabError, ValueError):
    """A setting is wrong: the message names the place, the value, what is allowed and what to write."""


class MissingDatasetError(ConfigError):
    """A dataset that a config names is not there; the message says how to collect it."""


class RunError(RLLabError, RuntimeError):
    """A run on disk cannot be read, written or continued."""


class EnvironmentFault(RLLabError, RuntimeError):
    """An environment broke its contract while a run was under way."""


class NonFiniteRow(EnvironmentFault):
    """An environment sent a number that is not finite: which (`reward`, or a key of its observation), and where."""

    def __init__(self, message: str, *, name: str, env_index: int, index: tuple[int, ...], value: str) -> None:
        super().__init__(message)
        self.name, self.env_index, self.index, self.value = name, env_index, index, value


class MissingExtraError(RLLabError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


def did_you_mean(word: str, known: Any) -> str:
    """` Did you mean 'x'?` for the nearest known spelling, or an empty string."""
    close = get_close_matches(word, [str(name) for name in known], n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


# --- what an environment is --------------------------------------------------------------------


@dataclass(frozen=True)
class ArraySpec:
    """One observation key. dtype decides its meaning: uint8 with three axes is an image (H, W, C),
    int64 is a discrete value in [0, num_values), float32 is a vector."""

    shape: tuple[int, ...]
    dtype: str
    low: tuple[float, ...] | None = None  # per flattened element, only where finite bounds exist
    high: tuple[float, ...] | None = None
    num_values: tuple[int, ...] = ()  # int64 only: the count of values of each flattened element

    @property
    def is_image(self) -> bool:
        return self.dtype == "uint8" and len(self.shape) == 3

    @property
    def is_discrete(self) -> bool:
        return self.dtype == "int64"


@dataclass(frozen=True)
class ActionSpec:
    """What a policy answers with.

    discrete        int64   [N]      sizes = (number of actions,)
    multi_discrete  int64   [N, K]   sizes = one count per sub-action
    continuous      float32 [N, A]   sizes = (A,); policies act in [-1, 1], the environment rescales
    """

    kind: Literal["discrete", "multi_discrete", "continuous"]
    sizes: tuple[int, ...]
    low: tuple[float, ...] = ()  # the environment's own bounds, for display and for rescaling
    high: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one action."""
        if self.kind == "discrete":
            return ()
        return (len(self.sizes),) if self.kind == "multi_discrete" else (self.sizes[0],)

    @property
    def dtype(self) -> str:
        return "float32" if self.kind == "continuous" else "int64"


@dataclass(frozen=True)
class TaskSpec:
    """One of several tasks of an environment, in the order of their numbers."""

    name: str
    action_size: int  # of the environment's action numbers, those it takes: the first so many
    max_episode_steps: int | None = None  # agent steps


@dataclass(frozen=True)
class EnvSpec:
    """Everything an algorithm or a person may ask about an environment before the first reset."""

    id: str
    observation: dict[str, ArraySpec]  # "action_mask" is among them when the environment masks actions
    action: ActionSpec
    max_episode_steps: int | None = None  # agent steps
    solved_return: float | None = None
    frames_per_step: int = 1  # raw simulator frames one agent step advances (action repeat)
    render_fps: int = 30
    description: str = ""
    outcomes: tuple[str, ...] = ()  # numbers beside the return that an episode ends with: success, game_score
    tasks: tuple[TaskSpec, ...] = ()  # where there are several, whose number is the observation `task`

    @property
    def has_action_mask(self) -> bool:
        return "action_mask" in self.observation


# --- one moment of N environments --------------------------------------------------------------


@dataclass(frozen=True)
class EnvRows:
    """What N environments say at one moment, as numpy arrays with leading axis N (see DESIGN of rows)."""

    observation: dict[str, np.ndarray]
    reward: np.ndarray  # float32 [N], arrived with this observation; 0 where is_first
    is_first: np.ndarray  # bool [N]
    is_last: np.ndarray  # bool [N]
    is_terminal: np.ndarray  # bool [N]
    outcome: dict[str, np.ndarray] = field(default_factory=dict)  # float32 [N] each, read where is_last; NaN: none

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> EnvRows:
        """The same rows with `function` applied to every array."""
        observation = {key: function(values) for key, values in self.observation.items()}
        outcome = {key: function(values) for key, values in self.outcome.items()}
        names = ("reward", "is_first", "is_last", "is_terminal")
        arrays: dict[str, Any] = {name: function(getattr(self, name)) for name in names}
        return EnvRows(observation, **arrays, outcome=outcome)


@dataclass(frozen=True)
class TimeStep:
    """The same moment as tensors on the policy's device; `observation` holds the spec's keys."""

    observation: Batch
    reward: Tensor
    is_first: Tensor
    is_last: Tensor
    is_terminal: Tensor

    @property
    def num_envs(self) -> int:
        return self.reward.shape[0]


@dataclass(frozen=True)
class PolicyStep:
    """A policy's answer: the action, its next recurrent state, and what it wants kept in the row."""

    action: Tensor
    state: Any = None
    extras: Batch = field(default_factory=dict)


# --- what hooks report -------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """Named counters; "step" never stands alone. Adding two Counts adds every field."""

    env_frames: int = 0  # raw simulator frames, action repeats included
    agent_steps: int = 0  # decisions the policy took (resets are not decisions)
    episodes: int = 0  # finished episodes
    updates: int = 0  # batches taken through every update hook of a phase

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.env_frames + other.env_frames,
            self.agent_steps + other.agent_steps,
            self.episodes + other.episodes,
            self.updates + other.updates,
        )

    def as_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Episode:
    """One finished episode, or what there was of it when it was cut."""

    env_index: int
    episode_return: float
    length: int  # agent steps
    is_terminal: bool  # False: a time limit ended it
    is_cut: bool = False  # by an evaluation's time-out: the environment would have gone on
    outcome: dict[str, float] = field(default_factory=dict)  # what the environment says of it, see EnvSpec.outcomes


@dataclass(frozen=True)
class CollectResult:
    """What one collection reports: only what really happened is counted."""

    counts: Counts
    metrics: Metrics = field(default_factory=dict)
    episodes: tuple[Episode, ...] = ()


@dataclass(frozen=True)
class Gradients:
    """Parameters and their gradients; `joined` is the memory of them all, where they lie in one piece."""

    parameters: Sequence[Tensor]
    values: Sequence[Tensor]
    joined: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """Named loss terms (names = `loss_scales` keys = `loss/<name>` in logs), metrics, and by-products."""

    terms: dict[str, Tensor]
    metrics: Metrics = field(default_factory=dict)
    aux: Batch = field(default_factory=dict)
    gradients: Callable[[Mapping[str, float | Tensor]], Gradients] | None = None
    """Of a scale per term, the gradients of the scaled sum, where a fast path knows them: the terms have no graph."""

    def total(self, scales: Mapping[str, float | Tensor]) -> Tensor:
        """The scaled sum; a term without a scale, or a scale without a term, is our own mistake. Scales are numbers, or
        0-dim tensors where a CUDA graph reads them."""
        assert self.terms.keys() == scales.keys(), f"loss terms {sorted(self.terms)} != scales {sorted(scales)}"
        total: Tensor | None = None
        for name, term in self.terms.items():
            scale = scales[name]
            if not isinstance(scale, int | float):
                total = term * scale if total is None else total.addcmul(term, scale)
            elif total is None and scale != 0.0:
                total = term if scale == 1.0 else term * scale
            elif total is not None and scale != 0.0:
                total = total.add(term, alpha=scale)  # product and sum in one node
        return next(iter(self.terms.values())) * 0.0 if total is None else total


# --- phases ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """Where a run stands when a hook is called."""

    fraction: float = 0.0  # of the current phase, 0 to 1
    run: Counts = field(default_factory=Counts)
    phase: Counts = field(default_factory=Counts)
    cycles: int = 0  # collect-and-update rounds of the current phase


class ScheduledNumber(Protocol):
    """A number that changes over a run, such as `linear(0.4, 1.0)` (rl_lab.training.schedules)."""

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float | None: ...

    def __call__(self, progress: Progress) -> float: ...


@dataclass(frozen=True)
class Phase:
    """One stretch of a curriculum. Durations name their unit; exactly one of them ends the phase."""

    name: str
    type: Literal["online", "offline", "eval_only"] = "online"
    buffer: str = "rollout"
    controller: str | None = None  # who acts while collecting; None: the workflow's own policy
    workflow_hooks: tuple[str, ...] = ("update_controller",)
    collect_steps: int = 0  # rows taken from each environment per cycle (online)
    updates_per_step: float | None = None  # update passes per agent step; None: one pass per cycle
    duration_steps: int | None = None  # agent steps
    duration_updates: int | None = None
    duration_cycles: int | None = None
    freeze: tuple[str, ...] = ()  # components and controllers that do not learn in this phase
    set: Mapping[str, Any] = field(default_factory=dict)  # settings of the config that hold while this phase runs
    load: Mapping[str, Any] | None = None  # parts of another run that it begins with: from, parts, checkpoint
    options: dict[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
