"""REINFORCE (Williams 1992): the likelihood-ratio policy gradient on whole episodes.

    grad J = E[ sum_t grad log pi(a_t | o_t) * target_t ]

target_t is the return of the whole episode, the reward-to-go from t, or either minus a learnt baseline.

The expectation is over the current policy's own episodes: no episode runs across an update (buffers.episodes.
running_episodes says whether those under way are finished first or discarded).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rl_lab.components.networks.normalizers import ObservationNormalizer
from rl_lab.components.returns.returns import episode_return, lambda_return, mean, standardize
from rl_lab.training.schedules import Schedule, value_at
from rl_lab.types import Batch, ConfigError, LossOutput, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, Workflow, checked_fraction, checked_scales, named
from rl_lab.workflows.context import WorkflowContext


class Encoder(Protocol):
    def __call__(self, observation: Batch) -> Tensor:
        """`[B, T, *shape]` per key to features `[B, T, F]`."""


class Actor(Protocol):
    def __call__(self, features: Tensor, mask: Tensor | None = None) -> Any:
        """Features `[..., F]` to a distribution with sample, mode, log_prob and entropy."""


class Critic(Protocol):
    def __call__(self, features: Tensor) -> Tensor:
        """Features `[B, T, F]` to values `[B, T]`, the baseline."""


class Reinforce(Workflow):
    """One gradient step per batch of finished episodes; with `controllers.critic`, the critic is the baseline."""

    is_on_policy = True

    def __init__(
        self,
        *,
        discount: float = 0.99,
        returns: Literal["reward_to_go", "whole_episode"] = "reward_to_go",
        target: Literal["returns", "advantages"] = "advantages",
        standardize_targets: bool = True,
        loss_scales: Mapping[str, float | Schedule],
    ) -> None:
        self.discount = checked_fraction("discount", discount)
        self.returns = returns
        self.target = target
        self.standardize_targets = standardize_targets
        self.loss_scales = checked_scales(loss_scales, algorithm="REINFORCE", terms=("policy", "value", "entropy"))

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        normalizer = context.components.optional("observation_normalizer")  # none in older runs
        self.observation_normalizer = normalizer or ObservationNormalizer(observation={})
        self.encoder: Encoder = context.components.require("encoder", Encoder)
        self.critic_encoder: Encoder | None = context.components.optional("critic_encoder", Encoder)
        self.actor: Actor = context.controllers.require("actor", Actor)
        self.critic: Critic | None = context.controllers.optional("critic", Critic)
        self.optimizer = context.optimizers.require("controller")
        if self.target == "advantages" and self.critic is None:
            raise ConfigError(
                "algorithm.target is 'advantages', which needs a baseline: add controllers.critic "
                "or write `algorithm.target: returns`."
            )

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        features = self.encoder(self.observation_normalizer(time_step.observation))
        policy = self.actor(features, time_step.observation.get("action_mask"))
        return PolicyStep(policy.mode() if mode == "eval" else policy.sample())

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        scales = {name: value_at(scale, phase.progress) for name, scale in self.loss_scales.items()}
        if self.critic is None:
            scales.pop("value", None)
        rate = named(self.optimizer.prepare(phase.progress))
        with self.context.runtime.autocast():
            loss = self.loss(batch)
        taken = self.gradient_step(self.optimizer, loss, scales)
        self.observation_normalizer.update(batch, ~batch["is_last"])  # after learning: acted and learnt under the same
        self.context.collector.restart()  # what runs was begun by the old parameters
        return {**rate, **taken, "train/gradient_steps": 1}

    def loss(self, batch: Batch) -> LossOutput:
        """
        row      0 … T-2          T-1           episodes [B, T], shorter ones padded with is_last rows
        learn    where ~is_last   never         every episode ends by its own last row
        """
        valid = ~batch["is_last"][:, :-1]
        observation = self.observation_normalizer(batch)
        features = self.encoder(observation)
        mask = batch.get("action_mask")
        policy = self.actor(features[:, :-1], None if mask is None else mask[:, :-1])
        value = torch.zeros_like(batch["reward"])
        if self.critic is not None:
            value = self.critic(features if self.critic_encoder is None else self.critic_encoder(observation))
            value = value.float()  # autocast's bfloat16 would round the discount of the returns

        returns = self._returns(batch, value.detach())
        target = returns - value.detach()[:, :-1] if self.target == "advantages" else returns
        if self.standardize_targets:
            target = standardize(target, valid)
        entropy = mean(policy.entropy(), valid)
        terms = {"policy": -mean(policy.log_prob(batch["action"][:, :-1]) * target, valid), "entropy": -entropy}
        if self.critic is not None:
            terms["value"] = mean((value[:, :-1] - returns).square(), valid)
        return LossOutput(terms, {"controller/entropy": entropy.detach()})

    def _returns(self, batch: Batch, value: Tensor) -> Tensor:
        """`[B, T-1]`. With lambda 1 nothing is bootstrapped but a time limit, from the baseline's value."""
        if self.returns == "whole_episode":
            return episode_return(batch["reward"], batch["is_last"], discount=self.discount)
        flags = batch["is_last"], batch["is_terminal"]
        return lambda_return(batch["reward"], value, *flags, discount=self.discount, lambda_=1.0)
