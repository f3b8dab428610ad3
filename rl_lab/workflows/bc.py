"""Behaviour cloning: the likeliest action in each demonstrated state (Pomerleau 1989; the mixture of Gaussians as in
"What Matters in Learning from Offline Human Demonstrations", Mandlekar et al. 2021, arXiv:2108.03298).

    L = -E[ log p(a | o) ]
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from torch import Tensor

from rl_lab.types import Batch, ConfigError, LossOutput, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, Workflow, named
from rl_lab.workflows.context import WorkflowContext


class Encoder(Protocol):
    def __call__(self, observation: Batch) -> Tensor:
        """`[B, *shape]` per key to features `[B, F]`."""


class Actor(Protocol):
    def __call__(self, features: Tensor, mask: Tensor | None = None) -> Any:
        """Features `[B, F]` to a distribution with sample, mode, log_prob and entropy."""


class BehaviorCloning(Workflow):
    """One network that answers each observation by itself."""

    captured: ClassVar[tuple[str, ...]] = ("learn",)

    def __init__(self, *, sample_in_evaluations: bool = False) -> None:
        self.sample_in_evaluations = sample_in_evaluations

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        self.normalizer = context.components.require("normalizer")
        self.encoder: Encoder = context.components.require("encoder", Encoder)
        self.augmentation = context.components.optional("augmentation")
        self.actor: Actor = context.controllers.require("actor", Actor)
        self.optimizer = context.optimizers.require("controller")
        self.keys = tuple(context.spec.observation)

    def check_rows(self, num_rows: int, *, buffer: str) -> None:
        if num_rows != 1:
            raise ConfigError(
                f"Behaviour cloning learns from one row at a time, but buffer '{buffer}' gives {num_rows}: use a "
                "rl_lab.buffers.demonstrations.DemonstrationBuffer with `prediction_steps: 1`."
            )

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        policy = self.policy_of(time_step.observation)
        is_greedy = mode == "eval" and not self.sample_in_evaluations
        if is_greedy:
            action = policy.mode()
        else:  # of a mixture: one of its ways, without the noise around it
            action = policy.draw_mean() if mode == "eval" and hasattr(policy, "draw_mean") else policy.sample()
        return PolicyStep(self.normalizer.restore_action(action))

    def policy_of(self, observation: Batch) -> Any:
        """The distribution of scaled actions in what is observed."""
        return self.actor(self.encoder(self.normalizer(observation)), observation.get("action_mask"))

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """One gradient step."""
        rate = named(self.optimizer.prepare(phase.progress))
        return {**rate, **self.learn(self.context.runtime.to_device(batch), {})}

    def learn(self, batch: Batch, numbers: Batch) -> Batch:
        """Demonstrated steps `[B, 1]` to new weights."""
        self.normalizer.learn(batch)
        with self.context.runtime.autocast():
            loss = self.loss(batch)
        return self.gradient_step(self.optimizer, loss)

    def loss(self, batch: Batch) -> LossOutput:
        """How unlikely the demonstrated actions are, in nats."""
        observation = {key: batch[key][:, 0] for key in self.keys}
        policy = self.policy_of(observation if self.augmentation is None else self.augmentation(observation))
        likelihood = policy.log_prob(self.normalizer.scale_action(batch["action"][:, 0]))
        return LossOutput({"cloning": -likelihood.mean()}, {"controller/entropy": policy.entropy().detach().mean()})
