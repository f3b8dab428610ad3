"""TD-MPC2: learn latents that predict rewards and values, plan in them a few steps ahead, and let values tell the rest.

"TD-MPC2: Scalable, Robust World Models for Continuous Control" (Hansen et al. 2024, arXiv:2310.16828)

learning    z0 = h(o0), z_t+1 = d(z_t, a_t)           L = consistency + reward + value (+ continue), equation 3
            q_t = r_t+1 + discount * Q_slow(h(o_t+1), p(h(o_t+1)))
            L_policy = -Q(z, p(z)) / scale - entropy                                             equation 4
acting      MPPI: plans of H actions, some of them the policy's, scored by their rewards and the value at their end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.heads.distributions import LOG_TWO_PI
from rl_lab.components.planners.plan import Plan, Search
from rl_lab.training.schedules import Schedule, value_at
from rl_lab.training.target_network import TargetNetwork, frozen
from rl_lab.types import Batch, ConfigError, LossOutput, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.base import Mode, WorldModelWorkflow, checked_fraction, checked_scales, named
from rl_lab.workflows.context import WorkflowContext

TERMS = {"world_model": ("consistency", "reward", "value", "continue"), "actor": ("policy", "entropy")}


class Network(Protocol):
    def __call__(self, *inputs: Any) -> Any: ...


class Critic(Protocol):
    def __call__(self, latent: Tensor, action: Tensor, *, drop: bool = False) -> Any:
        """Predictions of `[E, ...]`, one per critic."""

    value: Callable[..., Tensor]
    """`value(latent, action, of_two="least" or "mean")`: `[...]`, of two critics drawn at random."""


class Planner(Protocol):
    horizon: int
    plan: Callable[[Search], Plan]


class TDMPC2(WorldModelWorkflow):
    """An implicit world model with an ensemble of critics, a policy that follows them, and a planner that uses all."""

    captured: ClassVar[tuple[str, ...]] = ("learn", "respond")
    not_exportable = "it plans anew at every step, with draws of its own, and has no network that acts alone"
    part_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "world_model": ("encoder", "dynamics", "reward_head", "continue_head")
    }

    def __init__(
        self,
        *,
        horizon: int = 3,
        discount: float | Literal["auto"] = "auto",
        rho: float = 0.5,
        target_rate: float = 0.01,
        policy_plans: int = 24,
        loss_scales: Mapping[str, float | Schedule],
    ) -> None:
        if horizon < 1 or policy_plans < 0:
            raise ConfigError(
                f"algorithm.horizon is {horizon} and policy_plans is {policy_plans}: write whole numbers from 1 and "
                "from 0, such as 3 and 24."
            )
        self.n_step = self.horizon = horizon
        self.discount = 0.0 if isinstance(discount, str) else checked_fraction("discount", discount)
        self.discount_by_length = discount == "auto"
        self.rho = checked_fraction("rho", rho)
        self.target_rate, self.policy_plans = target_rate, policy_plans
        self.loss_scales = checked_scales(loss_scales, algorithm="TD-MPC2", terms=sum(TERMS.values(), ()))

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        if context.spec.action.kind != "continuous":
            raise ConfigError(
                f"TD-MPC2 plans with continuous actions, but those of {context.spec.id} are "
                f"{context.spec.action.kind}: write `algorithm=dreamer`, which takes any."
            )
        self.encoder: Network = context.components.require("encoder", Network)
        self.augmentation = context.components.optional("augmentation")
        self.dynamics: Network = context.components.require("dynamics", Network)
        self.reward_head: Network = context.components.require("reward_head", Network)
        self.continue_head: Network | None = context.components.optional("continue_head", Network)
        self.value_scale = context.components.require("value_scale")
        self.actor: Network = context.controllers.require("actor", Network)
        self.critic: Critic = context.controllers.require("critic", Critic)
        self.planner: Planner | None = context.controllers.optional("planner", Planner)
        candidates = getattr(self.planner, "candidates", self.policy_plans)
        if self.policy_plans > candidates:
            raise ConfigError(
                f"algorithm.policy_plans is {self.policy_plans}, but the planner tries {candidates} plans: write at "
                f"most {candidates}, or raise controllers.planner.candidates."
            )
        self.optimizers = {name: context.optimizers.require(name) for name in TERMS}
        assert isinstance(self.critic, nn.Module)
        self.slow_critic = TargetNetwork(self.critic, rate=self.target_rate)
        context.components.add("slow_critic", self.slow_critic)
        if self.continue_head is None:
            self.loss_scales = {name: scale for name, scale in self.loss_scales.items() if name != "continue"}
        self.row_keys = (*context.spec.observation, "action", "reward", "is_last", "is_terminal")
        if self.discount_by_length:
            self.discount = discount_of(context.spec.max_episode_steps)
        (self.action_size,) = context.spec.action.shape

    # --- acting ---

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        """`state` is the mean of the last plan; is_first forgets it."""
        rows = dict(time_step.observation)
        if self.planner is not None:
            shape = (time_step.num_envs, self.planner.horizon, self.action_size)
            plan = torch.zeros(shape, device=time_step.reward.device) if state is None else state["plan"]
            rows["previous plan"] = plan.masked_fill(time_step.is_first[:, None, None], 0.0)
        answer = self.respond(rows, {}, mode=mode)
        return PolicyStep(answer.pop("action"), answer or None)

    @torch.no_grad()
    def respond(self, rows: Batch, numbers: Batch, *, mode: Mode) -> Batch:
        """To observations `[N, ...]`, the action `[N, A]` and the plan it begins."""
        with self.context.runtime.autocast():
            latent = self.encoder(rows).float()
            if self.planner is None:
                policy = self.actor(latent)
                return {"action": policy.mode() if mode == "eval" else policy.sample()}
            plan = self.search(latent, rows["previous plan"], explore=mode == "train")
        return {"action": plan.action, "plan": plan.mean}

    def search(self, latent: Tensor, previous: Tensor, *, explore: bool) -> Plan:
        """The planner's plans from latents `[N, Z]`, some of its candidates being the policy's."""
        assert self.planner is not None

        def score(plans: Tensor) -> Tensor:
            return self.value_of_plans(latent, plans)

        proposals = self.proposed_plans(latent, self.planner.horizon) if self.policy_plans else None
        return self.planner.plan(
            Search(score, len(latent), self.action_size, latent.device, previous, proposals, explore)
        )

    def proposed_plans(self, latent: Tensor, horizon: int) -> Tensor:
        """`policy_plans` plans `[N, P, H, A]` in which the policy acts in latents of its own making."""
        latent = latent.unsqueeze(1).expand(-1, self.policy_plans, -1)  # [N, P, Z]
        actions = []
        for step in range(horizon):
            actions.append(self.actor(latent).sample())
            latent = self.dynamics(latent, actions[-1]) if step < horizon - 1 else latent
        return torch.stack(actions, dim=2)

    def value_of_plans(self, latent: Tensor, plans: Tensor) -> Tensor:
        """What plans `[N, C, H, A]` promise `[N, C]`: discounted rewards and, for what follows, the policy's value.

        Once the episode has likely ended, nothing more counts.
        """
        latent = latent.unsqueeze(1).expand(-1, plans.shape[1], -1)  # [N, C, Z]
        total = torch.zeros(plans.shape[:2], device=plans.device)
        weight = torch.ones_like(total)
        for action in plans.unbind(dim=2):
            total = total + weight * self.reward_head(latent, action).mean()
            latent = self.dynamics(latent, action)
            weight = weight * self.discount
            if self.continue_head is not None:
                weight = weight * (self.continue_head(latent) >= 0.0)
        action = self.actor(latent).sample()
        return total + weight * self.critic.value(latent, action, of_two="mean")

    # --- learning ---

    def update(self, batch: Batch, *, phase: Phase) -> Metrics:
        """World model and critics, then the policy in the latents that they just passed through."""
        return self.learn_from(batch, phase, "world_model", "actor")

    def update_world_model(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Only the world model and the critics."""
        return self.learn_from(batch, phase, "world_model")

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Only the policy."""
        return self.learn_from(batch, phase, "actor")

    def learn_from(self, batch: Batch, phase: Phase, *optimizers: str) -> Metrics:
        self.check_rows(batch["reward"].shape[1], buffer=phase.buffer)
        rows = self.context.runtime.to_device({key: batch[key] for key in self.row_keys})
        scales = {name: value_at(scale, phase.progress) for name, scale in self.loss_scales.items()}
        metrics: Metrics = {}
        for name, optimizer in self.optimizers.items():
            metrics |= named(optimizer.prepare(phase.progress), name)
        return metrics | self.learn(rows, self.context.runtime.numbers(scales), steps=optimizers)

    def learn(self, batch: Batch, numbers: Batch, *, steps: tuple[str, ...]) -> Batch:
        """Rows `[B, H+1]` to new parameters of the world model, of the actor, or of both."""
        outputs: Batch = {}
        with self.context.runtime.autocast(), torch.set_grad_enabled("world_model" in steps):
            rows = batch if self.augmentation is None else batch | self.shifted(batch)
            valid = (~rows["is_last"][:, :-1]).cumprod(dim=1)  # [B, H]: whether this step is still the episode's
            latents = self.rollout(rows)
            model_loss = self.model_loss(rows, latents, valid) if "world_model" in steps else None
        if model_loss is not None:
            scales = {term: numbers[term] for term in model_loss.terms}
            outputs |= self.gradient_step(self.optimizers["world_model"], model_loss, scales, name="world_model")
        if "actor" in steps:
            with self.context.runtime.autocast():
                policy_loss = self.policy_loss(latents.detach(), valid)
            scales = {term: numbers[term] for term in policy_loss.terms}
            outputs |= self.gradient_step(self.optimizers["actor"], policy_loss, scales, name="actor")
        if model_loss is not None:
            self.slow_critic.move_towards(self.critic)  # type: ignore[arg-type]
        return outputs

    def rollout(self, rows: Batch) -> Tensor:
        """Latents `[B, H+1, Z]` that see row 0 and then nothing but the actions taken."""
        latents = [self.encoder({key: rows[key][:, 0] for key in self.context.spec.observation})]
        for action in rows["action"][:, :-1].unbind(dim=1):
            latents.append(self.dynamics(latents[-1], action))
        return torch.stack(latents, dim=1)

    def model_loss(self, rows: Batch, latents: Tensor, valid: Tensor) -> LossOutput:
        """Equation 3; later steps of a rollout weigh less, by `rho`.

        row t         0       1       2       3 = H
        latent        z0      z1      z2      z3        z0 = h(o0), then z_t+1 = d(z_t, a_t)
        seen          .       h(o1)   h(o2)   h(o3)     what z1 to z3 should have been; no gradient
        action        a0      a1      a2      .
        reward        .       r1      r2      r3        what a0 to a2 earned: predicted from z0 to z2
        valid         1       1       0       .         is_last at row 1: a1 was never taken
        """
        action, reward = rows["action"][:, :-1], rows["reward"][:, 1:]
        with torch.no_grad():
            seen = self.encoder({key: rows[key][:, 1:] for key in self.context.spec.observation})
            target = self.td_target(seen, reward, rows["is_terminal"][:, 1:])
        before, after = latents[:, :-1], latents[:, 1:]
        values = self.critic(before, action, drop=True)  # [E, B, H]
        terms = {
            "consistency": self.weigh((after.float() - seen.float()).square().mean(dim=-1), valid),
            "reward": self.weigh(self.reward_head(before, action).loss(reward), valid),
            "value": self.weigh(values.loss(target.expand(len(values.logits), -1, -1)).mean(dim=0), valid),
        }
        if self.continue_head is not None:
            continues = (~rows["is_terminal"][:, 1:]).float()
            errors = F.binary_cross_entropy_with_logits(self.continue_head(after).float(), continues, reduction="none")
            terms["continue"] = (errors * valid).sum() / valid.sum().clamp(min=1)
        return LossOutput(terms, {"controller/value_mean": target.mean()})

    def td_target(self, latent: Tensor, reward: Tensor, is_terminal: Tensor) -> Tensor:
        """r + discount * Q_slow(z', p(z')) `[B, H]`, the least of two critics; nothing follows a terminal row."""
        value = self.slow_critic.module.value(latent, self.actor(latent).sample(), of_two="least")  # type: ignore[operator]
        return reward + self.discount * (~is_terminal) * value

    def weigh(self, errors: Tensor, valid: Tensor) -> Tensor:
        """Errors `[B, H]`: at each step the mean over the rows that are valid, later steps by powers of `rho`."""
        per_step = (errors * valid).sum(dim=0) / valid.sum(dim=0).clamp(min=1)
        return (per_step * self.powers(len(per_step), errors.device)).mean()

    def powers(self, count: int, device: torch.device) -> Tensor:
        return self.rho ** torch.arange(count, device=device)

    def policy_loss(self, latents: Tensor, valid: Tensor) -> LossOutput:
        """Equation 4: towards actions of more value, and some entropy. No gradient reaches the critics."""
        assert isinstance(self.critic, nn.Module)
        valid = torch.cat((valid, valid[:, -1:]), dim=1)  # the last latent follows the last action
        policy = self.actor(latents)
        noise = torch.randn_like(policy.base.mean)
        with frozen(self.critic):
            value = self.critic.value(latents, policy.draw(noise), of_two="mean", drop=True)  # [B, H+1]
        self.value_scale.update(value[:, 0])
        # The density before tanh, times the number of actions: nicklashansen/tdmpc2, common/world_model.py `pi`.
        log_density = (-0.5 * (noise.square() + LOG_TWO_PI) - policy.base.log_std).sum(dim=-1)
        entropy = -log_density * self.action_size
        terms = {"policy": -self.weigh(value / self.value_scale.scale(), valid), "entropy": -self.weigh(entropy, valid)}
        metrics = {
            "controller/entropy": entropy.detach().mean() / self.action_size,
            "controller/return_scale": self.value_scale.scale(),
        }
        return LossOutput(terms, metrics)

    def shifted(self, rows: Batch) -> Batch:
        """The observations `[B, T, ...]` of learning: images a few pixels aside, each row by an amount of its own."""
        count = rows["reward"].shape[:2]
        flat = {key: rows[key].flatten(0, 1) for key in self.context.spec.observation}
        return {key: values.unflatten(0, count) for key, values in self.augmentation(flat).items()}  # type: ignore[misc]

    # --- imagining, for people ---

    @torch.inference_mode()
    def imagine(self, start: Batch, *, horizon: int) -> Batch:
        """From observations `[N, ...]`, what the model expects while the policy acts: `latent`, `value` `[N, H+1]`,
        `reward` `[N, H+1]` (0 at first) and `action` `[N, H, A]`."""
        latents, actions, rewards = [self.encoder(start)], [], []
        for _ in range(horizon):
            actions.append(self.actor(latents[-1]).mode())
            rewards.append(self.reward_head(latents[-1], actions[-1]).mean())
            latents.append(self.dynamics(latents[-1], actions[-1]))
        latent = torch.stack(latents, dim=1)
        value = self.critic.value(latent, self.actor(latent).mode(), of_two="mean")
        reward = torch.stack([torch.zeros_like(rewards[0]), *rewards], dim=1)
        return {"latent": latent, "value": value, "reward": reward, "action": torch.stack(actions, dim=1)}


def discount_of(max_episode_steps: int | None) -> float:
    """From the length of an episode: 0.95 for short ones, 0.99 for 500 agent steps, at most 0.995 (appendix H)."""
    if max_episode_steps is None:
        return 0.995
    fraction = max_episode_steps / 5.0
    return min(max((fraction - 1.0) / fraction, 0.95), 0.995)
