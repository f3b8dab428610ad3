"""TD-MPC2: learn latents that predict rewards and values, plan in them a few steps ahead, and let values tell the rest.

"TD-MPC2: Scalable, Robust World Models for Continuous Control" (Hansen et al. 2024, arXiv:2310.16828)

learning    z0 = h(o0), z_t+1 = d(z_t, a_t)           L = consistency + reward + value (+ continue), equation 3
            q_t = r_t+1 + discount * Q_slow(h(o_t+1), p(h(o_t+1)))
            L_policy = -Q(z, p(z)) / scale - entropy                                             equation 4
acting      MPPI: plans of H actions, some of them the policy's, scored by their rewards and the value at their end
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from rl_lab.components.heads.distributions import LOG_TWO_PI
from rl_lab.training.schedules import Schedule
from rl_lab.training.target_network import TargetNetwork, frozen
from rl_lab.types import Batch, ConfigError, LossOutput
from rl_lab.workflows.base import checked_fraction, checked_scales
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.implicit_models import ImplicitModelWorkflow

TERMS = {"world_model": ("consistency", "reward", "value", "continue"), "actor": ("policy", "entropy")}


class TDMPC2(ImplicitModelWorkflow):
    """An implicit world model with an ensemble of critics, a policy that follows them, and a planner that uses all."""

    paper_name = "TD-MPC2"

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
        if self.discount_by_length:
            self.discount = discount_of(context.spec.max_episode_steps)
        super().initialize(context)
        self.value_scale = context.components.require("value_scale")
        assert isinstance(self.critic, nn.Module)
        self.slow_critic = TargetNetwork(self.critic, rate=self.target_rate)
        context.components.add("slow_critic", self.slow_critic)

    def discount_of_task(self, max_episode_steps: int | None) -> float:
        return discount_of(max_episode_steps) if self.discount_by_length else self.discount

    # --- learning ---

    def learn(self, batch: Batch, numbers: Batch, *, steps: tuple[str, ...]) -> Batch:
        outputs = super().learn(batch, numbers, steps=steps)
        if "world_model" in steps:
            self.slow_critic.move_towards(self.critic)  # type: ignore[arg-type]
        return outputs

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
            task = rows["task"][:, 1:] if "task" in rows else None
            target = self.td_target(seen, reward, rows["is_terminal"][:, 1:], task)
        before, after = latents[:, :-1], latents[:, 1:]
        values = self.critic(before, action, drop=True)  # [E, B, H]
        terms = {
            "consistency": self.weigh(self.inconsistency(before, action, after, seen), valid),
            "reward": self.weigh(self.reward_head(before, action).loss(reward), valid),
            "value": self.weigh(values.loss(target.expand(len(values.logits), -1, -1)).mean(dim=0), valid),
        }
        terms |= self.continue_term(rows, after, valid)
        return LossOutput(terms, {"controller/value_mean": target.mean()})

    def td_target(self, latent: Tensor, reward: Tensor, is_terminal: Tensor, task: Tensor | None = None) -> Tensor:
        """r + discount * Q_slow(z', p(z')) `[B, H]`, the least of two critics; nothing follows a terminal row."""
        value = self.slow_critic.module.value(latent, self.policy_action(latent, task), of_two="least")  # type: ignore[operator]
        return reward + self.discount_at(task) * (~is_terminal) * value

    def policy_loss(self, latents: Tensor, valid: Tensor, task: Tensor | None = None) -> LossOutput:
        """Equation 4: towards actions of more value, and some entropy. No gradient reaches the critics."""
        assert isinstance(self.critic, nn.Module)
        valid = torch.cat((valid, valid[:, -1:]), dim=1)  # the last latent follows the last action
        policy = self.actor(latents)
        noise = torch.randn_like(policy.base.mean)
        with frozen(self.critic):
            value = self.critic.value(
                latents, self.masked(policy.draw(noise), task), of_two="mean", drop=True
            )  # [B, H+1]
        self.value_scale.update(value[:, 0])
        # The density before tanh, times the number of actions: nicklashansen/tdmpc2, common/world_model.py `pi`.
        log_density = self.masked(-0.5 * (noise.square() + LOG_TWO_PI) - policy.base.log_std, task).sum(dim=-1)
        count = self.masked(torch.ones_like(noise), task).sum(dim=-1)
        entropy = -log_density * count
        terms = {"policy": -self.weigh(value / self.value_scale.scale(), valid), "entropy": -self.weigh(entropy, valid)}
        metrics = {
            "controller/entropy": (entropy.detach() / count).mean(),
            "controller/return_scale": self.value_scale.scale(),
        }
        return LossOutput(terms, metrics)


def discount_of(max_episode_steps: int | None) -> float:
    """From the length of an episode: 0.95 for short ones, 0.99 for 500 agent steps, at most 0.995 (appendix H)."""
    if max_episode_steps is None:
        return 0.995
    fraction = max_episode_steps / 5.0
    return min(max((fraction - 1.0) / fraction, 0.95), 0.995)
