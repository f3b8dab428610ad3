"""One-step actor-critic (Sutton and Barto 2018, section 13.5), written as a user of RL Lab would write it.

    delta = r' + discount * (1 - is_terminal') * V(o') - V(o)        how much better than expected
    L     = -E[ log pi(a | o) * delta ] + c_v E[ delta^2 ] - c_e E[H]

A prime marks what arrived with the next row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from rl_lab.components.returns.returns import mean, standardize
from rl_lab.training.schedules import Schedule, value_at
from rl_lab.types import Batch, LossOutput, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, Workflow
from rl_lab.workflows.context import WorkflowContext


class Encoder(Protocol):
    def __call__(self, observation: Batch) -> Tensor: ...  # [..., *shape] per key to features [..., F]


class Actor(Protocol):
    def __call__(self, features: Tensor, mask: Tensor | None = None) -> Any: ...  # to a distribution


class Critic(Protocol):
    def __call__(self, features: Tensor) -> Tensor: ...  # [..., F] to values [...]


class ActorCritic(Workflow):
    """One gradient step per rollout, on one-step temporal differences."""

    def __init__(self, *, discount: float = 0.99, loss_scales: Mapping[str, float | Schedule]) -> None:
        self.discount = discount
        self.loss_scales = dict(loss_scales)

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        self.encoder: Encoder = context.components.require("encoder", Encoder)
        self.actor: Actor = context.controllers.require("actor", Actor)
        self.critic: Critic = context.controllers.require("critic", Critic)
        self.optimizer = context.optimizers.require("controller")

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        policy = self.actor(self.encoder(time_step.observation), time_step.observation.get("action_mask"))
        return PolicyStep(policy.mode() if mode == "eval" else policy.sample())

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        scales = {name: value_at(scale, phase.progress) for name, scale in self.loss_scales.items()}
        self.optimizer.prepare(phase.progress)  # the learning rate of this point of the run
        return self.gradient_step(self.optimizer, self.loss(batch), scales)

    def loss(self, batch: Batch) -> LossOutput:
        """
        row t     o[:, :-1], action[:, :-1], is_last[:, :-1]       an is_last row was not acted on: not valid
        row t+1   o[:, 1:],  reward[:, 1:],  is_terminal[:, 1:]    the rewards and values that action led to
        """
        valid = ~batch["is_last"][:, :-1]
        features = self.encoder(batch)  # [B, T+1, F]
        value = self.critic(features)  # [B, T+1]
        alive = (~batch["is_terminal"][:, 1:]).float()
        delta = batch["reward"][:, 1:] + self.discount * alive * value[:, 1:].detach() - value[:, :-1]  # [B, T]

        mask = batch.get("action_mask")
        policy = self.actor(features[:, :-1], None if mask is None else mask[:, :-1])
        advantage = standardize(delta.detach(), valid)
        entropy = mean(policy.entropy(), valid)
        policy_loss = -mean(policy.log_prob(batch["action"][:, :-1]) * advantage, valid)
        terms = {"policy": policy_loss, "value": mean(delta.square(), valid), "entropy": -entropy}
        return LossOutput(terms, {"controller/entropy": entropy.detach()})
