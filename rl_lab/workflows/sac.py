"""Soft Actor-Critic with a learnt temperature (Haarnoja et al. 2018, arXiv:1812.05905); for discrete actions with exact
expectations (Christodoulou 2019, arXiv:1910.07207). States or pixels.

With V(s) = E_a[ min_i Q_i(s, a) ] + temperature * H(policy(s)) and slow copies of the critics for the targets:

    J_Q      = sum_i E[ 1/2 (Q_i(s, a) - (r + discount * V_slow(s')))^2 ]
    J_policy = -E[ V(s) ]
    J_temp   = E[ temperature * (H(policy(s)) - target entropy) ]

An image encoder is shared and learns from J_Q alone (Kostrikov et al. 2020, arXiv:2004.13649).
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from rl_lab.components.returns.transitions import transition_and_following
from rl_lab.kernels.door import fast_path, precomputed_gradients
from rl_lab.training.target_network import TargetNetwork, frozen
from rl_lab.types import Batch, ConfigError, LossOutput, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, Workflow, checked_fraction, named
from rl_lab.workflows.context import WorkflowContext


class Encoder(Protocol):
    def __call__(self, observation: Batch) -> Tensor:
        """`[B, *shape]` per key to features `[B, F]`."""


class Actor(Protocol):
    def __call__(self, features: Tensor, mask: Tensor | None = None) -> Any:
        """Features `[B, F]` to a distribution with sample and mode."""

    def noise(self, features: Tensor) -> Tensor:
        """For one draw per row."""


class Critic(Protocol):
    def __call__(self, features: Tensor, action: Tensor) -> Tensor:
        """Values `[E, B]` of the actions taken."""

    def expect(self, features: Tensor, policy: Any, noise: Tensor, *, is_target: bool = False) -> tuple[Tensor, Tensor]:
        """E[min Q] under the policy and the policy's entropy, `[B]` each."""


class Temperature(Protocol):
    def __call__(self) -> Tensor:
        """A 0-dim tensor above 0."""

    def loss(self, entropy: Tensor, mask: Tensor | None = None) -> Tensor: ...


class SAC(Workflow):
    """Two critics or more, a squashed Gaussian or categorical actor, one update per batch."""

    captured: ClassVar[tuple[str, ...]] = ("learn",)
    notes_priorities: ClassVar[bool] = True

    def __init__(
        self, *, discount: float = 0.99, n_step: int = 1, target_rate: float = 0.005, policy_every: int = 1
    ) -> None:
        for name, value in (("n_step", n_step), ("policy_every", policy_every)):
            if value < 1:
                raise ConfigError(f"algorithm.{name} is {value}: write a whole number of at least 1.")
        self.discount = checked_fraction("discount", discount)
        self.n_step = n_step
        self.target_rate = target_rate
        self.policy_every = policy_every

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        self.observation_normalizer = context.components.require("observation_normalizer")
        self.encoder: Encoder = context.components.require("encoder", Encoder)
        self.augmentation = context.components.optional("augmentation")
        self.temperature: Temperature = context.components.require("temperature", Temperature)
        self.actor: Actor = context.controllers.require("actor", Actor)
        self.critic: Critic = context.controllers.require("critic", Critic)
        self.optimizers = {name: context.optimizers.require(name) for name in ("critic", "actor")}
        if context.optimizers.optional("temperature") is not None:  # none: a constant temperature
            self.optimizers["temperature"] = context.optimizers["temperature"]
        assert isinstance(self.critic, nn.Module) and isinstance(self.encoder, nn.Module)
        self.slow_critic = TargetNetwork(self.critic, rate=self.target_rate)
        context.components.add("slow_critic", self.slow_critic)
        self.slow_encoder: TargetNetwork | None = None
        if any(True for _ in self.encoder.parameters()):  # a plain vector is its own features
            self.slow_encoder = TargetNetwork(self.encoder, rate=self.target_rate)
            context.components.add("slow_encoder", self.slow_encoder)
        self.row_keys = (*context.spec.observation, "action", "reward", "is_last", "is_terminal")

    # --- acting ---

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        if mode == "train":
            self.count_in_statistics(time_step)
        features = self.encoder(self.observation_normalizer(time_step.observation))
        policy = self.actor(features, time_step.observation.get("action_mask"))
        return PolicyStep(policy.mode() if mode == "eval" else policy.sample())

    def count_in_statistics(self, time_step: TimeStep) -> None:
        """Each row counts once in the normaliser's statistics, when it is first seen, whoever acts."""
        self.observation_normalizer.update(time_step.observation)

    # --- learning ---

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """One gradient step of the critics and, every `policy_every` updates, of the actor and the temperature."""
        self.check_rows(batch["reward"].shape[1], buffer=phase.buffer)
        with_policy = phase.progress.run.updates % self.policy_every == 0
        metrics: Metrics = {}
        for name, optimizer in self.optimizers.items():
            metrics |= named(optimizer.prepare(phase.progress), name)
        kept = (*self.row_keys, *(("weight",) if "weight" in batch else ()))
        rows = self.context.runtime.to_device({key: batch[key] for key in kept})
        learnt = self.learn(rows, {}, with_policy=with_policy)
        if "weight" in batch:
            batch["priority"] = learnt.pop("priority")
        return metrics | learnt

    def learn(self, batch: Batch, numbers: Batch, *, with_policy: bool) -> Batch:
        """Rows `[B, n+1]` to new parameters: critics, then actor and temperature, then the slow copies."""
        now, later, outcome = self.transition(batch)
        temperature, mask = self.temperature().detach(), now.get("action_mask")
        with self.context.runtime.autocast(), precomputed_gradients():
            features = self.encoder(now)
            noise = self.actor.noise(features)
            target = outcome["reward"] + outcome["discount"] * self.soft_value(later, temperature)  # [B]
            loss = self.critic_loss(features, batch["action"][:, 0], target, batch.get("weight"))
        metrics = self.gradient_step(self.optimizers["critic"], loss, name="critic")
        metrics["controller/value_mean"] = target.mean()
        if "weight" in batch:
            metrics["priority"] = (loss.aux["values"] - target).abs().mean(dim=0)
        if with_policy:
            metrics |= self.improve_policy(features.detach(), noise, temperature, mask)
        self.slow_critic.move_towards(self.critic)  # type: ignore[arg-type]
        if self.slow_encoder is not None:
            self.slow_encoder.move_towards(self.encoder)  # type: ignore[arg-type]
        return metrics

    @fast_path("rl_lab.kernels.cpu_losses:SAC_SOFT_VALUE")
    @torch.no_grad()
    def soft_value(self, observation: Batch, temperature: Tensor) -> Tensor:
        """V_slow(s') `[B]`: the policy's actions, valued by the slow critics."""
        features = self.encoder(observation)
        policy, noise = self.actor(features, observation.get("action_mask")), self.actor.noise(features)
        valued = features if self.slow_encoder is None else self.slow_encoder(observation)
        value, entropy = self.slow_critic.module.expect(valued, policy, noise, is_target=True)  # type: ignore[operator]
        return value + temperature * entropy

    def improve_policy(self, features: Tensor, noise: Tensor, temperature: Tensor, mask: Tensor | None) -> Metrics:
        """The actor towards more soft value, the temperature towards the entropy asked for."""
        with self.context.runtime.autocast(), precomputed_gradients():
            loss = self.policy_loss(features, noise, temperature, mask)
        metrics = self.gradient_step(self.optimizers["actor"], loss, name="actor")
        metrics["controller/temperature"] = temperature
        if "temperature" in self.optimizers:
            with precomputed_gradients():
                loss = self.temperature_loss(loss.metrics["controller/entropy"], mask)
            taken = self.gradient_step(self.optimizers["temperature"], loss)
            metrics["loss/temperature"] = taken["loss/temperature"]
        return metrics

    @fast_path("rl_lab.kernels.cpu_losses:SAC_CRITIC_LOSS")
    def critic_loss(self, features: Tensor, action: Tensor, target: Tensor, weight: Tensor | None = None) -> LossOutput:
        """J_Q as a mean over the critics, with their values `[E, B]`; target and weight are `[B]`."""
        values = self.critic(features, action).float()
        error = (values - target).square()
        loss = (error if weight is None else error * weight).mean()
        return LossOutput({"critic": loss}, aux={"values": values.detach()})

    @fast_path("rl_lab.kernels.cpu_losses:SAC_POLICY_LOSS")
    def policy_loss(
        self, features: Tensor, noise: Tensor, temperature: Tensor, mask: Tensor | None = None
    ) -> LossOutput:
        """J_policy, and the policy's mean entropy. No gradient reaches the critics."""
        assert isinstance(self.critic, nn.Module)
        with frozen(self.critic):
            value, entropy = self.critic.expect(features, self.actor(features, mask), noise)
            loss = -(value + temperature * entropy).mean()
        return LossOutput({"policy": loss}, {"controller/entropy": entropy.detach().mean()})

    @fast_path("rl_lab.kernels.cpu_losses:SAC_TEMPERATURE_LOSS")
    def temperature_loss(self, entropy: Tensor, mask: Tensor | None = None) -> LossOutput:
        """J_temp for the policy's mean entropy."""
        return LossOutput({"temperature": self.temperature.loss(entropy, mask)})

    def transition(self, batch: Batch) -> tuple[Batch, Batch, Batch]:
        """What was seen, what was seen n agent steps later, and `reward` and `discount [B]` in between.

        row t       0          1 … n                 replay never begins at an episode's last row
        used        obs, a     r, obs, is_terminal
        """
        keys = tuple(self.context.spec.observation)
        outcome, later = transition_and_following(batch, self.discount, keys)
        return self.seen({key: batch[key][:, 0] for key in keys}), self.seen(later), outcome

    def seen(self, observation: Batch) -> Batch:
        """Observations as the networks see them while learning: shifted at random, then normalised."""
        shifted = observation if self.augmentation is None else self.augmentation(observation)
        return self.observation_normalizer(shifted)
