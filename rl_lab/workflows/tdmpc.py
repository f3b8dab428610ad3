"""TD-MPC: learn latents that tell rewards, values and each other, and plan in them further and further ahead.

"Temporal Difference Learning for Model Predictive Control" (Hansen et al. 2022, arXiv:2203.04955)

learning    z0 = h(o0), z_t+1 = d(z_t, a_t)                                                   algorithm 2
            L = sum_t rho^t (c1 |R(z_t, a_t) - r_t|^2 + c2 |Q(z_t, a_t) - q_t|^2 + c3 |z_t+1 - h_slow(o_t+1)|^2)
            q_t = r_t + discount * min Q_slow(h(o_t+1), p(h(o_t+1)))
            L_policy = -sum_t rho^t min Q(z_t, p(z_t))
replay      by priority: the error of a rollout's values when it was last learnt from
acting      MPPI over a horizon that grows, with noise that shrinks, while the model becomes trustworthy
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_lab.training.schedules import Schedule, value_at
from rl_lab.training.target_network import TargetNetwork, frozen
from rl_lab.types import Batch, CollectResult, ConfigError, LossOutput, Metrics, Phase, Progress
from rl_lab.workflows.base import Mode, checked_fraction, checked_scales
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.implicit_models import ImplicitModelWorkflow

TERMS = ("consistency", "reward", "value", "continue", "policy")


class TDMPC(ImplicitModelWorkflow):
    """TOLD with two critics, a policy that follows them, and a planner that uses all."""

    paper_name = "TD-MPC"
    plan_value = "least"
    notes_priorities: ClassVar[bool] = True

    def __init__(
        self,
        *,
        horizon: int = 5,
        discount: float = 0.99,
        rho: float = 0.5,
        target_rate: float = 0.01,
        target_every: int = 2,
        policy_plans: int = 25,
        plan_horizon: float | Schedule = 5.0,
        plan_std: float | Schedule = 0.05,
        loss_scales: Mapping[str, float | Schedule],
    ) -> None:
        if horizon < 1 or policy_plans < 0:
            raise ConfigError(
                f"algorithm.horizon is {horizon} and policy_plans is {policy_plans}: write whole numbers from 1 and "
                "from 0, such as 5 and 25."
            )
        self.n_step = self.horizon = horizon
        self.discount, self.rho = checked_fraction("discount", discount), checked_fraction("rho", rho)
        self.target_rate, self.target_every, self.policy_plans = target_rate, target_every, policy_plans
        self.plan_horizon, self.plan_std = plan_horizon, plan_std
        for name, value, least in (("plan_horizon", plan_horizon, 1.0), ("plan_std", plan_std, 0.0)):
            ends = (value.start, value.end) if isinstance(value, Schedule) else (value,)
            if any(end is not None and end < least for end in ends):
                raise ConfigError(f"algorithm.{name} is {value}: write a number or a schedule from {least:g} on.")
        self.loss_scales = checked_scales(loss_scales, algorithm="TD-MPC", terms=TERMS)
        self._collecting = self.planned_at(Progress())  # set anew by every collection, so never saved

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        assert isinstance(self.encoder, nn.Module) and isinstance(self.critic, nn.Module)
        slow = {"rate": self.target_rate, "every": self.target_every}
        self.slow_encoder, self.slow_critic = (TargetNetwork(part, **slow) for part in (self.encoder, self.critic))  # type: ignore[arg-type]
        context.components.add("slow_encoder", self.slow_encoder)
        context.components.add("slow_critic", self.slow_critic)
        self.row_keys = (*self.row_keys, "weight")

    # --- acting: how far, and how widely, plans are searched for ---

    def planned_at(self, progress: Progress) -> tuple[int, float]:
        """The horizon of plans and the least std of their actions."""
        return int(value_at(self.plan_horizon, progress)), value_at(self.plan_std, progress)

    def collect_step(self, step: int, *, phase: Phase) -> CollectResult:
        self._collecting = self.planned_at(phase.progress)
        return super().collect_step(step, phase=phase)

    def search_settings(self, mode: Mode) -> tuple[Batch, dict[str, Any]]:
        """Evaluations plan as far, and draw as narrowly, as training does in the end."""
        horizon, std = self._collecting if mode == "train" else (last(self.plan_horizon), last(self.plan_std))
        assert self.planner is not None
        return self.context.runtime.numbers({"minimum_std": std}), {"horizon": min(int(horizon), self.planner.horizon)}

    # --- learning ---

    def learn_from(self, batch: Batch, phase: Phase, *optimizers: str) -> Metrics:
        metrics = super().learn_from(batch, phase, *optimizers)
        if "world_model" in optimizers:
            self.slow_encoder.follow(self.encoder)  # type: ignore[arg-type]
            self.slow_critic.follow(self.critic)  # type: ignore[arg-type]
        horizon, std = self.planned_at(phase.progress)
        return metrics | {"controller/plan_horizon": horizon, "controller/plan_std": std}

    def model_loss(self, rows: Batch, latents: Tensor, valid: Tensor) -> LossOutput:
        """Algorithm 2; rows as in TD-MPC2's. Replay by priority gives each rollout a weight.

        Not the paper's: nothing follows a terminal row; it knows no terminations.
        """
        action, reward = rows["action"][:, :-1], rows["reward"][:, 1:]
        with torch.no_grad():
            following = {key: rows[key][:, 1:] for key in self.context.spec.observation}
            target = self.td_target(self.encoder(following), reward, rows["is_terminal"][:, 1:], rows.get("task"))
            seen = self.slow_encoder(following)
        before, after = latents[:, :-1], latents[:, 1:]
        values = self.critic(before, action).mean()  # [2, B, H]
        weight = rows["weight"].unsqueeze(1) if "weight" in rows else 1.0
        errors = {
            "consistency": self.inconsistency(before, action, after, seen),
            "reward": (self.reward_head(before, action).mean() - reward).square(),
            "value": (values - target).square().sum(dim=0),
        }
        terms = {name: self.weigh(weight * error, valid) for name, error in errors.items()}
        powers = self.powers(target.shape[1], target.device)
        priority = ((values.detach() - target).abs().sum(dim=0) * valid * powers).sum(dim=1)
        terms |= self.continue_term(rows, after, valid)
        return LossOutput(terms, {"controller/value_mean": target.mean()}, {"priority": priority})

    def td_target(self, latent: Tensor, reward: Tensor, is_terminal: Tensor, task: Tensor | None = None) -> Tensor:
        """r + discount * min Q_slow(z', p(z')) `[B, H]`; nothing follows a terminal row."""
        action = self.policy_action(latent, None if task is None else task[:, 1:])
        value = self.slow_critic.module.value(latent, action, of_two="least")  # type: ignore[operator]
        return reward + self.discount * (~is_terminal) * value

    def policy_loss(self, latents: Tensor, valid: Tensor, task: Tensor | None = None) -> LossOutput:
        """Towards actions of more value; no gradient reaches the critics.

        A sum over steps where the model's losses are means (nicklashansen/tdmpc, tdmpc.py `update_pi`): so the norm at
        which gradients are cut is reached H + 1 times as soon.
        """
        assert isinstance(self.critic, nn.Module)
        valid = torch.cat((valid, valid[:, -1:]), dim=1)  # the last latent follows the last action
        with frozen(self.critic):
            value = self.critic.value(latents, self.policy_action(latents, task), of_two="least")  # [B, H+1]
        return LossOutput({"policy": -self.weigh(value, valid) * value.shape[1]})


def last(number: float | Schedule) -> float:
    """Where a schedule ends."""
    if isinstance(number, Schedule):
        return number.start if number.end is None else number.end
    return number
