"""What workflows share that act from the state of a recurrent state-space model: the state and the rows that keep it.

This is no algorithm: how to act from a state, and what to minimise, each workflow says itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from rl_lab.components.planners.plan import Plan
from rl_lab.training.schedules import Schedule, value_at
from rl_lab.types import Batch, ConfigError, LossOutput, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, WorldModelWorkflow, named
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.latent_planning import Planner, search_plans

SEEN, BEFORE = "seen ", "before "  # mark, in one dictionary, what a row shows and the state that it follows


class Network(Protocol):
    def __call__(self, inputs: Any) -> Any:
        """The encoder: observations to embeddings `[..., E]`. Heads: features `[..., F]` to a prediction with
        `mean()` and `loss(target)`, `[...]` each."""


class Dynamics(Protocol):
    """A state is a dictionary of tensors `[N, ...]` with `state_keys`; nobody but the model knows what they mean."""

    latent: Any
    state_keys: tuple[str, ...]
    initial_state: Callable[[int, torch.device], Batch]
    encode_action: Callable[[Tensor], Tensor]
    observe: Callable[..., tuple[Batch, Tensor]]
    observe_sequence: Callable[[Tensor, Tensor, Tensor, Batch], tuple[Batch, Tensor]]
    prior: Callable[[Batch], Tensor]
    imagine: Callable[[Batch, Callable[[Tensor, int], Tensor], int], tuple[Batch, Tensor]]
    features: Callable[[Batch], Tensor]
    context_keys: tuple[str, ...]
    pack: Callable[[Batch], Batch]
    begin: Callable[[Batch], tuple[Batch, Batch]]
    renew: Callable[[Batch, Batch], Batch]


class Decoder(Protocol):
    loss: Callable[[Tensor, Batch], Tensor]
    reconstruct: Callable[[Tensor], Batch]


class LatentStateWorkflow(WorldModelWorkflow):
    """Acts from a model's state, keeps that state in every row, and learns from sequences that begin with one."""

    notes_priorities: ClassVar[bool] = True  # the model's loss of each sequence
    part_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "world_model": ("encoder", "dynamics", "decoder", "reward_head", "continue_head", "action_mask_head")
    }
    exploration_noise: float
    loss_scales: Mapping[str, float | Schedule]
    optimizers: Mapping[str, Any]  # by the name their metrics carry; "": the only one
    learn: Callable[..., Batch]  # `(batch, numbers, **choices)`: new parameters, and back come metrics and contexts

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        self.encoder: Network = context.components.require("encoder", Network)
        self.dynamics: Dynamics = context.components.require("dynamics", Dynamics)
        self.decoder: Decoder = context.components.require("decoder", Decoder)
        self.reward_head: Network = context.components.require("reward_head", Network)
        self.planner: Planner | None = context.controllers.optional("planner", Planner)
        if self.planner is not None and context.spec.action.kind != "continuous":
            raise ConfigError(
                f"controllers.planner plans with continuous actions, but those of {context.spec.id} are "
                f"{context.spec.action.kind}: write `planner=none`."
            )
        if self.planner is not None:
            self.not_exportable = "it plans anew at every step, with draws of its own"  # type: ignore[misc]
        self.model_parts: dict[str, Any] = {
            "dynamics": self.dynamics,
            "decoder": self.decoder,
            "reward_head": self.reward_head,
        }
        self.row_keys = (*context.spec.observation, "action", "reward", "is_first", "is_last", "is_terminal")
        kept = self.dynamics.pack(self.dynamics.initial_state(1, context.runtime.device))
        self.extra_bytes_per_row = sum(value.nbytes for value in kept.values())
        if self.exploration_noise and context.spec.action.kind != "continuous":
            raise ConfigError(
                f"algorithm.exploration_noise is {self.exploration_noise}, but noise suits continuous actions alone "
                f"and those of {context.spec.id} are {context.spec.action.kind}: write 0.0."
            )

    # --- the state between two actions: the model's, and the action that followed it ---

    def blank_state(self, time_step: TimeStep) -> Batch:
        spec, count, device = self.context.spec.action, time_step.num_envs, time_step.reward.device
        action = torch.zeros(count, *spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        plan = {} if self.planner is None else {"plan": action.new_zeros(count, self.planner.horizon, *spec.shape)}
        return {**self.dynamics.initial_state(count, device), **plan, "action": action}

    def model_state(self, state: Batch) -> Batch:
        """Of a policy's state, the model's part."""
        return {key: state[key] for key in self.dynamics.state_keys}

    def observe(self, observation: Batch, is_first: Tensor, before: Batch, *, deterministic: bool) -> Batch:
        """The model's state after a row, drawn or the likeliest; is_first forgets what was before."""
        embedding = self.encoder(observation)
        after, _ = self.dynamics.observe(embedding, before["action"], before, is_first, deterministic=deterministic)
        return after

    # --- planning, if something does ---

    def search(self, batch: Batch, *, mode: Mode) -> Plan:
        """Plans from states `[N, ...]` and, if it is among them, the plan before."""
        return search_plans(self, batch, mode=mode)

    def planned_return(self, features: Tensor) -> Tensor:
        """The returns `[N*C]` of plans that lead through features `[N*C, H, F]`: the sum of their rewards."""
        return self.reward_head(features).mean().sum(dim=1)

    def explore(self, action: Tensor, *, mode: Mode) -> Tensor:
        """Continuous actions with `exploration_noise` while collecting; otherwise as they are."""
        if mode == "eval" or not self.exploration_noise:
            return action
        return torch.add(action, torch.randn_like(action), alpha=self.exploration_noise).clamp(-1.0, 1.0)

    def answer(self, action: Tensor, state: Batch, *, mode: Mode) -> PolicyStep:
        """The action, and the state that the next answer and, while training, the row keep."""
        extras = self.dynamics.pack(state) if mode == "train" else {}
        return PolicyStep(action, {**state, "action": action}, extras)

    def extras_of_others(self, time_step: TimeStep) -> Batch:
        """A blank context, so that all rows have one; learning fills it in."""
        return self.dynamics.pack(self.blank_state(time_step))

    # --- learning from rows with contexts ---

    def observe_rows(self, rows: Batch, before: Batch) -> tuple[Batch, Tensor]:
        """The states and posteriors of rows `[B, T]` that `dynamics.begin` made, from the state before them; the rows
        get their `embedding`, which some losses compare states with."""
        rows["embedding"] = self.encoder(rows)
        return self.dynamics.observe_sequence(rows["embedding"], rows["previous_action"], rows["is_first"], before)

    def priority(self, loss: LossOutput, numbers: Batch) -> Tensor:
        """How much there was to learn from each sequence `[B]`: the mean of its rows' model losses, scaled."""
        scales = torch.stack([numbers[name] for name in loss.aux])
        of_sequences = torch.stack(list(loss.aux.values())).mean(dim=-1)  # [terms, B]
        return (scales.unsqueeze(-1) * of_sequences).sum(dim=0)  # no product that autocast would round

    def learn_from(self, batch: Batch, phase: Phase, **choices: bool) -> Metrics:
        """`learn` with what the phase says now; the batch gets the fresher contexts."""
        context = [key for key in self.dynamics.context_keys if key in batch]
        rows = self.context.runtime.to_device({key: batch[key] for key in (*self.row_keys, *context)})
        scales = {name: value_at(scale, phase.progress) for name, scale in self.loss_scales.items()}
        rates = [named(optimizer.prepare(phase.progress), name) for name, optimizer in self.optimizers.items()]
        outputs = self.learn(rows, self.context.runtime.numbers(scales), **choices)
        # The buffer writes the fresher states back, and draws by priority if it is told to.
        batch |= {key: outputs.pop(key) for key in (*context, "priority") if key in outputs}
        return {**outputs, **{name: rate for each in rates for name, rate in each.items()}}


def marked(mark: str, rows: Batch) -> Batch:
    return {f"{mark}{key}": value for key, value in rows.items()}


def those_marked(mark: str, rows: Batch) -> Batch:
    return {key.removeprefix(mark): value for key, value in rows.items() if key.startswith(mark)}
