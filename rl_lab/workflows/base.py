"""One algorithm in one file: the small contract between an algorithm and everything around it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from torch import Tensor, nn

from rl_lab.training.schedules import Schedule
from rl_lab.types import (
    Batch,
    CollectResult,
    ConfigError,
    LossOutput,
    Metrics,
    Phase,
    PolicyStep,
    StateTree,
    TimeStep,
    did_you_mean,
)
from rl_lab.workflows.context import Policy, WorkflowContext

Mode = Literal["train", "eval"]
Scale = TypeVar("Scale")


class ActingController(Protocol):
    """A controller that can act by itself, such as the random one; phases may name it to collect."""

    def sample(self, batch_size: int, *, device: Any, mask: Tensor | None = None) -> Tensor: ...


class Workflow(ABC):
    """How one algorithm acts and learns.

    Numbers arrive in `__init__` (the `algorithm:` block, as keywords). Things arrive in `initialize`, by name.
    Every method named `update_*` is a hook that a phase may list under `workflow_hooks`.
    """

    compiled: ClassVar[tuple[str, ...]] = ()  # pure methods the runtime may compile
    captured: ClassVar[tuple[str, ...]] = ()  # `(batch, numbers, **choices) -> outputs`: what a CUDA graph may hold
    extra_bytes_per_row: int = 0  # what `act` keeps with each row of an environment: for the prediction of memory
    phase_options: ClassVar[tuple[str, ...]] = ()  # keys a phase may set under `options:`
    is_on_policy: ClassVar[bool] = False  # learns only from what its own policy did
    notes_priorities: ClassVar[bool] = False  # tells with every batch how much there was to learn from each start
    not_exportable: ClassVar[str] = ""  # why its policy cannot act from a file of its own; empty: it can
    sample_in_evaluations: bool = False  # mode "eval" draws its actions, too
    part_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # names for several components, for `load:` of a phase
    n_step: int | None = None  # an update learns from sequences of n_step + 1 rows; None: of any length

    context: WorkflowContext

    def initialize(self, context: WorkflowContext) -> None:
        """Take the things this algorithm works with; subclasses extend it with their `require` calls."""
        self.context = context

    @abstractmethod
    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        """Answer N environments. `state` is what the last answer returned, None at the very first."""

    def collect_step(self, step: int, *, phase: Phase) -> CollectResult:
        """Gather `phase.collect_steps` rows; `step` is the count of cycles so far."""
        return self.context.collector.collect(self.policy(phase.controller), phase=phase)

    def evaluate(self, *, episodes: int) -> Metrics:
        """Play `episodes` whole episodes deterministically in environments of their own."""
        return self.context.evaluator.evaluate(self.act, episodes=episodes)

    def policy(self, controller: str | None) -> Policy:
        """Who acts while collecting: this workflow, or a controller that a phase names."""
        if controller is None:
            return self.act
        acting: ActingController = self.context.controllers.require(controller, ActingController)

        def act_alone(time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
            self.count_in_statistics(time_step)
            extras = self.extras_of_others(time_step)
            if hasattr(acting, "answer"):  # it has a memory of its own
                return replace(acting.answer(time_step, state), extras=extras)
            mask = time_step.observation.get("action_mask")
            action = acting.sample(time_step.num_envs, device=time_step.reward.device, mask=mask)
            return PolicyStep(action, extras=extras)

        return act_alone

    def extras_of_others(self, time_step: TimeStep) -> Batch:
        """What rows keep, beside the action, of a controller that is not this workflow."""
        return {}

    def count_in_statistics(self, time_step: TimeStep) -> None:  # noqa: B027 (most have no statistics)
        """Learn statistics, such as a normaliser's, from rows that another controller collects."""

    def gradient_step(
        self, optimizer: Any, loss: LossOutput, scales: Mapping[str, float | Tensor] | None = None, *, name: str = ""
    ) -> Metrics:
        """Scale and sum the terms, take one step at the prepared learning rate, and name what happened: `loss/<term>`,
        the loss's own metrics, and what the optimizer reports (under `name`, where there are several)."""
        terms = {f"loss/{term}": value.detach() for term, value in loss.terms.items()}
        scales = scales or dict.fromkeys(loss.terms, 1.0)
        if loss.gradients is None:
            taken = optimizer.apply(loss.total(scales))
        else:
            taken = optimizer.apply(None, loss.gradients(scales))
        return {**terms, **loss.metrics, **named(taken, name)}

    def enter_phase(self, phase: Phase) -> None:
        """Freeze what the phase freezes and let everything else learn."""
        parts = {**self.context.components, **self.context.controllers}
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                part.requires_grad_(name not in phase.freeze)
        self.context.runtime.forget_captures()  # they hold what was frozen when they were recorded

    def check_phase(self, phase: Phase) -> None:
        """Refuse, before the first step, a phase this workflow cannot run."""
        where, own = f"Phase '{phase.name}'", type(self).__name__
        hooks = phase.workflow_hooks if phase.type != "eval_only" else ()
        refuse_unknown(hooks, self.hooks(), f"{where} lists the hook '{{}}', which {own} does not have.", "Its hooks")
        if phase.controller is not None and phase.workflow_hooks and phase.type == "online" and self.is_on_policy:
            raise ConfigError(
                f"{where} lets '{phase.controller}' act and {phase.workflow_hooks[0]} learn, but {own} learns only "
                "from its own actions: write `workflow_hooks: []` or leave `controller` out."
            )
        sets = f"{where} sets the option '{{}}', which {own} does not read."
        refuse_unknown(phase.options, self.phase_options, sets, "Its options")
        parts = (*self.context.components, *self.context.controllers)
        refuse_unknown(
            phase.freeze, parts, f"{where} freezes '{{}}', which is no component or controller.", "There are"
        )
        self.policy(phase.controller)

    def check_rows(self, num_rows: int, *, buffer: str) -> None:
        """Refuse a buffer whose sequences have another number of rows than an update learns from."""
        if self.n_step is not None and num_rows != self.n_step + 1:
            raise ConfigError(
                f"algorithm.n_step is {self.n_step}, so {type(self).__name__} learns from {self.n_step + 1} rows at a "
                f"time, but buffer '{buffer}' gives {num_rows}: write `buffers.{buffer}.n_step: ${{algorithm.n_step}}`."
            )

    @classmethod
    def hooks(cls) -> tuple[str, ...]:
        """Names of every update hook this workflow offers."""
        return tuple(name for name in dir(cls) if name == "update" or name.startswith("update_"))

    def get_state(self) -> StateTree:
        """Counters only: modules, optimisers and normalisers are saved by themselves."""
        return {}

    def set_state(self, state: StateTree) -> None:
        assert not state, f"{type(self).__name__} keeps no state of its own, yet the checkpoint has {list(state)}"


class WorldModelWorkflow(Workflow):
    """A workflow that learns a model of the environment; a controller in it may learn too, or plan."""

    @abstractmethod
    def update_world_model(self, batch: Batch, *, phase: Phase) -> Metrics: ...

    @abstractmethod
    def imagine(self, start: Batch, *, horizon: int) -> Batch:
        """What the model expects from states `[N, ...]` on: named tensors `[N, H+1, ...]`, actions `[N, H, ...]`."""


def refuse_unknown(names: Iterable[str], known: Collection[str], sentence: str, listing: str) -> None:
    """`sentence` says of a name, at its `{}`, that it is none of those known; `listing` introduces them."""
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"{sentence.replace('{}', name)}{hint} {listing}: {', '.join(known) or 'none'}.")


def checked_scales(scales: Mapping[str, Scale], *, algorithm: str, terms: tuple[str, ...]) -> dict[str, Scale]:
    """One scale per loss term; a misspelt or missing one is refused before the first step."""
    refuse_unknown(scales, terms, f"algorithm.loss_scales.{{}} is no loss of {algorithm}.", "Its terms are")
    for name in terms:
        if name not in scales:
            raise ConfigError(f"algorithm.loss_scales lacks '{name}': {algorithm}'s terms are {', '.join(terms)}.")
        scale = scales[name]
        if isinstance(scale, int | float) and not 0.0 <= scale < math.inf:
            raise ConfigError(
                f"algorithm.loss_scales.{name} is {scale}, and learning would run away from it: write a number from 0."
            )
    return dict(scales)


def checked_fraction(name: str, value: float) -> float:
    """A number from 0 to 1, such as a discount; anything else would diverge quietly."""
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"algorithm.{name} is {value}: write a number from 0 to 1.")
    return value


def checked_fractions(name: str, number: float | Schedule) -> float | Schedule:
    """A number from 0 to 1, or a schedule between two of them."""
    if isinstance(number, Schedule):
        checked_fraction(name, number.start)
        checked_fraction(name, number.start if number.end is None else number.end)
        return number
    return checked_fraction(name, number)


def named(taken: Metrics, optimizer: str = "") -> Metrics:
    """What an optimiser's step reports, under its name in the log; several optimisers are told apart by theirs."""
    prefix = f"train/{optimizer}_" if optimizer else "train/"
    return {f"{prefix}{name}": value for name, value in taken.items()}
