"""Tabular value learning: Q-learning (Watkins 1989), SARSA and expected SARSA in one file.

value(s, a) <- value(s, a) + rate * (reward + discount * next - value(s, a))

next    q_learning       the best action's value in the next state
        sarsa            the value of the action that was taken there
        expected_sarsa   the mean value there under the policy that acts
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rl_lab.components.heads.tables import allowed_values, draw, epsilon_greedy
from rl_lab.training.schedules import Schedule, value_at
from rl_lab.types import Batch, CollectResult, Metrics, Phase, PolicyStep, Progress, TimeStep
from rl_lab.workflows.base import Mode, Workflow, checked_fraction, checked_fractions
from rl_lab.workflows.context import WorkflowContext


class Table(Protocol):
    def __call__(self, observation: Batch) -> Tensor:
        """Discrete observations `[...]` per key to the values of every action `[..., A]`."""

    def state(self, observation: Batch) -> Tensor:
        """The row of the table that each observation is, `[...]`."""

    def move(self, state: Tensor, action: Tensor, target: Tensor, *, valid: Tensor, rate: float) -> Tensor:
        """Move entries `[N]` towards their targets where valid; returns the errors `[N]` before the move."""

    values: Tensor  # [S, A]


class TabularQ(Workflow):
    """Acts epsilon-greedily on a table of values and learns from every transition once, in the order of time.

    Ties are broken at random while training; evaluation takes the best action, the first one of equals.
    """

    def __init__(
        self,
        *,
        target: Literal["q_learning", "sarsa", "expected_sarsa"] = "q_learning",
        discount: float = 0.99,
        learning_rate: float | Schedule = 0.1,
        epsilon: float | Schedule = 0.1,
    ) -> None:
        self.target = target
        self.discount = checked_fraction("discount", discount)
        self.learning_rate = checked_fractions("learning_rate", learning_rate)
        self.epsilon = checked_fractions("epsilon", epsilon)
        self._acting_epsilon = value_at(self.epsilon, Progress())  # set anew by every collection, so never saved

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        self.table: Table = context.components.require("table", Table)

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        values = self.table(time_step.observation)
        mask = time_step.observation.get("action_mask")
        if mode == "eval":
            return PolicyStep(allowed_values(values, mask).argmax(-1))
        return PolicyStep(draw(epsilon_greedy(values, self._acting_epsilon, mask)))

    def collect_step(self, step: int, *, phase: Phase) -> CollectResult:
        self._acting_epsilon = value_at(self.epsilon, phase.progress)
        return super().collect_step(step, phase=phase)

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Time step by time step, all environments at once, so that what one transition taught is known to the next.

        row t       s0   s1   …   sT-1   sT         rows [N, T+1]; row T is pending and has no action yet
        action      a0   a1       aT-1   -
        target of t      reward[t+1] + discount * next(s[t+1]), no next where is_terminal[t+1]
        learn       where ~is_last[t]               a time limit is no terminal: it keeps its next value

        Within one time step all targets are read before any entry moves; entries named twice: see ValueTable.move.
        """
        rate, epsilon = value_at(self.learning_rate, phase.progress), value_at(self.epsilon, phase.progress)
        state, mask = self.table.state(batch), batch.get("action_mask")
        valid = ~batch["is_last"][:, :-1]
        discount = self.discount * (~batch["is_terminal"]).to(batch["reward"].dtype)  # [N, T+1]
        squared_error, last = torch.zeros_like(batch["reward"][:, 0]), valid.shape[1]
        for t in range(last):
            following = self._next_value(
                self.table.values[state[:, t + 1]],
                None if mask is None else mask[:, t + 1],
                batch["action"][:, t + 1] if t + 1 < last else None,
                epsilon,
            )
            target = batch["reward"][:, t + 1] + discount[:, t + 1] * following
            error = self.table.move(
                state[:, t],
                batch["action"][:, t],
                target,
                valid=valid[:, t],
                rate=0.0 if "table" in phase.freeze else rate,
            )
            squared_error += error.square()
        return {
            "loss/value": squared_error.sum() / valid.sum().clamp(min=1),
            "train/learning_rate": rate,
            "controller/epsilon": epsilon,
            "controller/value_mean": self.table.values[state[:, :-1]].amax(-1).mean(),
        }

    def _next_value(self, values: Tensor, mask: Tensor | None, action: Tensor | None, epsilon: float) -> Tensor:
        """What the next state is worth, `[N]` from `[N, A]`. For SARSA the pending row, which has no action yet,
        counts with its mean over the policy: the same on average, and nothing has to be drawn or held back."""
        if self.target == "q_learning":
            return allowed_values(values, mask).amax(-1)
        if self.target == "sarsa" and action is not None:
            return values.gather(1, action.unsqueeze(1)).squeeze(1)
        return (epsilon_greedy(values, epsilon, mask) * values).sum(-1)
