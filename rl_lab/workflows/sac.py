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
from rl_lab.kernels.soft_losses import critic_loss, decide, policy_loss, temperature_loss
from rl_lab.training.target_network import TargetNetwork
from rl_lab.types import Batch, ConfigError, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, Workflow, checked_share, named
from rl_lab.workflows.context import WorkflowContext


class Encoder(Protocol):
    def __call__(self, observation: Batch) -> Tensor:
        """`[B, *shape]` per key to features `[B, F]`."""


class Actor(Protocol):
    def __call__(self, features: Tensor, mask: Tensor | None = None) -> Any:
        """Features `[B, F]` to a distribution with sample and mode."""

    def decide(self, now: Tensor, later: Tensor, mask: Tensor | None, later_mask: Tensor | None) -> tuple[Any, Any]:
        """Policies of both rows of a transition for `Critic.expect`: the first with gradients, the second without."""


class Critic(Protocol):
    def __call__(self, features: Tensor, action: Tensor) -> Tensor:
        """Values `[2, B]` of the actions taken."""

    def expect(self, features: Tensor, policy: Any) -> tuple[Tensor, Tensor]:
        """E[min Q] under the policy and the policy's entropy, `[B]` each; gradients reach the policy only."""


class Temperature(Protocol):
    def __call__(self) -> Tensor:
        """A 0-dim tensor above 0."""

    def loss(self, entropy: Tensor, mask: Tensor | None = None) -> Tensor: ...


class SAC(Workflow):
    """Twin critics, a squashed Gaussian or categorical actor, one update per batch."""

    captured: ClassVar[tuple[str, ...]] = ("learn",)
    notes_priorities: ClassVar[bool] = True

    def __init__(
        self, *, discount: float = 0.99, n_step: int = 1, target_rate: float = 0.005, policy_every: int = 1
    ) -> None:
        for name, value in (("n_step", n_step), ("policy_every", policy_every)):
            if value < 1:
                raise ConfigError(f"algorithm.{name} is {value}: write a whole number of at least 1.")
        self.discount = checked_share("discount", discount)
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
            self.observation_normalizer.update(time_step.observation)  # each row once, when it is first seen
        features = self.encoder(self.observation_normalizer(time_step.observation))
        policy = self.actor(features, time_step.observation.get("action_mask"))
        return PolicyStep(policy.mode() if mode == "eval" else policy.sample())

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
        temperature = self.temperature().detach()

        # Critics: towards the reward and the soft value of where it led, judged by their slow copies.
        with self.context.runtime.autocast():
            features = self.encoder(now)
            policy, next_value = self.decide(features.detach(), now, later, temperature)
            target = torch.addcmul(outcome["reward"], outcome["discount"], next_value)  # [B]
            found = critic_loss(self.critic, features, batch["action"][:, 0], target, batch.get("weight"))
        metrics = {"loss/critic": found.loss.detach(), "controller/value_mean": target.mean()}
        metrics |= self.change("critic", found.loss, found.known)
        if "weight" in batch:
            metrics["priority"] = (found.values - target).abs().mean(dim=0)

        if with_policy:
            metrics |= self.improve(features.detach(), policy, now.get("action_mask"), temperature)
        self.slow_critic.move_towards(self.critic)  # type: ignore[arg-type]
        if self.slow_encoder is not None:
            self.slow_encoder.move_towards(self.encoder)  # type: ignore[arg-type]
        return metrics

    def decide(self, features: Tensor, now: Batch, later: Batch, temperature: Tensor) -> tuple[Any, Tensor]:
        """The policy in the rows now, with gradients, and V_slow(s') `[B]`, without."""
        with torch.no_grad():
            next_features = self.encoder(later)
        masks = now.get("action_mask"), later.get("action_mask")
        policy, next_policy = decide(self.actor, self.critic, features, next_features, *masks)
        with torch.no_grad():
            judged = next_features if self.slow_encoder is None else self.slow_encoder(later)
            value, entropy = self.slow_critic.module.expect(judged, next_policy)  # type: ignore[operator]
            return policy, torch.addcmul(value, temperature, entropy)

    def improve(self, features: Tensor, policy: Any, mask: Tensor | None, temperature: Tensor) -> Metrics:
        """The actor towards more soft value, the temperature towards the entropy asked for."""
        with self.context.runtime.autocast():
            found = policy_loss(self.critic, features, policy, temperature)
        metrics = {"loss/policy": found.loss.detach(), "controller/entropy": found.entropy}
        metrics |= {"controller/temperature": temperature, **self.change("actor", found.loss, found.known)}
        if "temperature" in self.optimizers:
            loss, known = temperature_loss(self.temperature, found.entropy, mask)
            metrics["loss/temperature"] = loss.detach()
            self.change("temperature", loss, known)
        return metrics

    def change(self, part: str, loss: Tensor, known: Any) -> Metrics:
        """Let a part learn from its loss, whose gradients may be known already."""
        optimizer = self.optimizers[part]
        return named(optimizer.apply(loss) if known is None else optimizer.apply_known(*known), part)

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
