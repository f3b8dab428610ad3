"""Debug mode: looks at every tensor of a run, and where one is not finite, names it and writes a crash bundle.

    collect_step   rows of the environment, actions          ┐ before each of them the state is copied, so that the
    update_*       batch, losses, gradients, parameters      ┘ bundle holds what it takes to do it again

A bundle is a checkpoint of its own (`crash/step_…` in the run): plain data with checksums, read without running code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.state import gather_state
from rl_lab.training.finite import OperationWatch, Place, first_bad
from rl_lab.types import Batch, CollectResult, LossOutput, Metrics, NonFiniteRow, Phase, PolicyStep, RunError, StateTree
from rl_lab.utils.tree import map_leaves
from rl_lab.workflows.base import Workflow

CRASH = "crash"  # the folder of a run with its bundles
CURE = "a smaller learning rate (`lr=...`) or `max_grad_norm`"
LEARNT = ("loss", "gradient", "parameter", "metric")
SECTIONS = ("components", "controllers", "optimizers", "workflow_custom", "phase_state", "rng")


class NonFiniteError(RunError):
    """A number is not finite; `place` says which, `bundle` where what led to it lies."""

    def __init__(self, place: Place, sentence: str = "", bundle: Path | None = None) -> None:
        super().__init__(sentence or str(place))
        self.place, self.bundle = place, bundle


class Watch:
    """Wraps the methods of one experiment's workflow and optimizers."""

    def __init__(
        self,
        targets: Mapping[str, Any],
        workflow: Workflow,
        scheduler: PhaseScheduler,
        *,
        config_text: str,
        directory: Path | None,
    ) -> None:
        """`targets` are the sections of a checkpoint; without a `directory` nothing is written."""
        self.targets, self.workflow, self.scheduler = targets, workflow, scheduler
        self.config_text, self.directory = config_text, directory
        parts = {**workflow.context.components, **workflow.context.controllers}
        self._modules = {
            f"{name}.{inner}".rstrip("."): module
            for name, part in parts.items()
            if isinstance(part, nn.Module)
            for inner, module in part.named_modules()
        }
        self._operations = OperationWatch(self._modules)
        self._attach()

    def _attach(self) -> None:
        workflow: Any = self.workflow
        for hook in workflow.hooks():
            setattr(workflow, hook, partial(self._update, hook, getattr(workflow, hook)))
        workflow.collect_step = partial(self._collect, workflow.collect_step)
        workflow.act = partial(self._act, workflow.act)
        workflow.gradient_step = partial(self._gradient_step, workflow.gradient_step)
        for optimizer in workflow.context.optimizers.values():
            optimizer.apply = partial(self._apply, optimizer.apply)
            optimizer._change_parameters = partial(self._change, optimizer, optimizer._change_parameters)

    # --- what is done, watched ---

    def _collect(self, collect_step: Callable[..., CollectResult], step: int, *, phase: Phase) -> CollectResult:
        before = self._copy(*SECTIONS, "collector")
        try:
            with self._operations.watching():
                return collect_step(step, phase=phase)
        except NonFiniteRow as fault:
            what = "reward" if fault.name == "reward" else "observation"
            name = (
                f"of environment {fault.env_index}"
                if what == "reward"
                else f"{fault.name} of environment {fault.env_index}"
            )
            place, note = Place(what, name, fault.index, fault.value), " Check it with `rl-lab envs check`."
            raise self._crash(place, before, kind="collect", during="collecting", note=note) from fault
        except NonFiniteError as error:
            raise self._crash(error.place, before, kind="collect", during="collecting") from error

    def _update(self, hook: str, update: Callable[..., Metrics], batch: Batch, *, phase: Phase) -> Metrics:
        before = {**self._copy(*SECTIONS), "batch": _copied(dict(batch))}
        try:
            self._refuse(first_bad("batch", batch))
            self._refuse(self._bad_parameter())
            with self._operations.watching():
                metrics = update(batch, phase=phase)
            self._refuse(self._bad_parameter())
            self._refuse(first_bad("metric", metrics))
        except NonFiniteError as error:
            raise self._crash(error.place, before, kind="update", during=hook) from error
        return metrics

    def _act(self, act: Callable[..., PolicyStep], *args: Any, **options: Any) -> PolicyStep:
        answer = act(*args, **options)
        self._refuse(first_bad("action", {"": answer.action, **answer.extras}))
        return answer

    def _gradient_step(
        self, gradient_step: Callable[..., Metrics], optimizer: Any, loss: LossOutput, *args: Any, **options: Any
    ) -> Metrics:
        self._refuse(first_bad("loss", {f"loss/{term}": value for term, value in loss.terms.items()}))
        return gradient_step(optimizer, loss, *args, **options)

    def _apply(self, apply: Callable[..., Metrics], loss: Tensor, *args: Any) -> Metrics:
        self._refuse(first_bad("loss", {"the loss": loss}))
        return apply(loss, *args)

    def _change(self, optimizer: Any, change: Callable[..., Metrics], everyone: Any, *joined: Any) -> Metrics:
        if optimizer.loss_scale is None:  # fp16 expects such gradients, and leaves the update out
            self._refuse(first_bad("gradient", list(zip(optimizer.rule.names, everyone, strict=True))))
        changed = change(everyone, *joined)
        self._refuse(first_bad("parameter", list(zip(optimizer.rule.names, optimizer.parameters, strict=True))))
        return changed

    # --- what is found ---

    def _bad_parameter(self) -> Place | None:
        return first_bad(
            "parameter", [(name, dict(part.named_parameters(recurse=False))) for name, part in self._modules.items()]
        )

    def _refuse(self, place: Place | None) -> None:
        if place is not None:
            raise NonFiniteError(self._operations.origin_of(place))

    def _copy(self, *sections: str) -> dict[str, StateTree]:
        return _copied(gather_state({name: self.targets[name] for name in sections}))

    def _crash(
        self, place: Place, before: dict[str, StateTree], *, kind: str, during: str, note: str = ""
    ) -> NonFiniteError:
        counts = self.scheduler.run_counts
        about = {"kind": kind, "during": during, "place": place.as_dict(), "config": self.config_text}
        path = None
        if self.directory is not None:
            store = CheckpointStore(self.directory)
            state = {**before, "about": about}
            path = store.save(state, agent_steps=counts.agent_steps, counts=counts.as_dict())
        origin = "" if place.origin is None else f" It comes from {place.origin}."
        if place.what in LEARNT:
            note += f" Where the formula is right, learning runs away: write {CURE}."
        again = "" if path is None else f" Do it again with `rl-lab debug replay {path}`."
        when = f"at {counts.agent_steps:,} agent steps, {counts.updates:,} updates, in {during}"
        return NonFiniteError(place, f"Not finite: {place} {when}.{origin}{note}{again}", path)


def _copied(tree: StateTree) -> StateTree:
    return map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, tree)
