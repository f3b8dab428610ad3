"""Soft Q-learning for discrete actions (Haarnoja et al. 2017, arXiv:1702.08165), as a user of RL Lab would write it.

    pi(a | o) = softmax_a( Q(o, a) / temperature )                       how it explores
    V(o)      = temperature * log sum_a exp( Q_target(o, a) / temperature )
    target    = r' + discount * (1 - is_terminal') * V(o')
    L         = E[ huber( Q(o, a) - target ) ],   then Q_target moves towards Q

A prime marks what arrived with the next row.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.heads.distributions import Categorical
from rl_lab.components.heads.tables import allowed_values
from rl_lab.training.schedules import Schedule, value_at
from rl_lab.training.target_network import TargetNetwork
from rl_lab.types import Batch, CollectResult, ConfigError, LossOutput, Metrics, Phase, PolicyStep, Progress, TimeStep
from rl_lab.workflows.base import Mode, Workflow, checked_fraction, named
from rl_lab.workflows.context import WorkflowContext


class Encoder(Protocol):
    def __call__(self, observation: Batch) -> Tensor: ...  # [..., *shape] per key to features [..., F]


class QValues(Protocol):
    def __call__(self, features: Tensor) -> Tensor: ...  # [..., F] to one value per action [..., A]


class SoftQ(Workflow):
    """Samples actions by their values and learns those values from replay towards a slower copy of the network."""

    captured: ClassVar[tuple[str, ...]] = ("learn",)  # on a GPU: recorded as a CUDA graph, then replayed

    def __init__(
        self, *, discount: float = 0.99, temperature: float | Schedule = 0.1, target_rate: float = 0.01
    ) -> None:
        ends = (temperature.start, temperature.end) if isinstance(temperature, Schedule) else (temperature,)
        if any(end is not None and end <= 0 for end in ends):
            raise ConfigError("algorithm.temperature divides, so it may not be 0: write numbers above 0, such as 0.1.")
        self.discount = checked_fraction("discount", discount)
        self.temperature = temperature
        self.target_rate = target_rate
        self.acting_temperature = value_at(temperature, Progress())  # set anew by every collection, so never saved

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        encoder: Any = context.components.require("encoder", Encoder)
        q_values: Any = context.controllers.require("q_values", QValues)
        self.network = nn.Sequential(encoder, q_values)
        self.target = TargetNetwork(self.network, rate=self.target_rate)
        context.components.add("target", self.target)  # so that checkpoints hold it
        self.optimizer = context.optimizers.require("controller")
        self.observation_keys = tuple(context.spec.observation)

    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        temperature = 1.0 if mode == "eval" else self.acting_temperature  # the best action is the same at any
        policy = Categorical(
            self.network(time_step.observation) / temperature, time_step.observation.get("action_mask")
        )
        return PolicyStep(policy.mode() if mode == "eval" else policy.sample())

    def collect_step(self, step: int, *, phase: Phase) -> CollectResult:
        self.acting_temperature = value_at(self.temperature, phase.progress)
        return super().collect_step(step, phase=phase)

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """What Python decides, anew for every update. The computation itself is `learn`."""
        runtime = self.context.runtime
        prepared = named(self.optimizer.prepare(phase.progress))  # the learning rate of this point of the run
        temperature = value_at(self.temperature, phase.progress)
        numbers = runtime.numbers({"temperature": temperature})  # schedules: as tensors on the device
        keys = (*self.observation_keys, "action", "reward", "is_terminal")
        learnt = self.learn(runtime.to_device({key: batch[key] for key in keys}), numbers)
        return {**learnt, **prepared, "controller/temperature": temperature}

    def learn(self, batch: Batch, numbers: Batch) -> Batch:
        """Rows `[B, 2]` to new parameters: tensors in, tensors out, the same operations every time."""
        with self.context.runtime.autocast():
            loss = self.loss(batch, numbers["temperature"])
        metrics = self.gradient_step(self.optimizer, loss)
        self.target.move_towards(self.network)
        return metrics

    def loss(self, batch: Batch, temperature: Tensor) -> LossOutput:
        """
        row 0   o, action                  replay never begins at an is_last row, so every row 0 was acted on
        row 1   o', reward, is_terminal    what that action led to
        """
        now, later = ({key: batch[key][:, row] for key in self.observation_keys} for row in (0, 1))
        value = self.network(now).gather(-1, batch["action"][:, :1]).squeeze(-1)  # [B]
        next_values = allowed_values(self.target(later), later.get("action_mask"))  # [B, A]; target has no gradient
        soft_value = temperature * (next_values / temperature).logsumexp(-1)  # [B]
        target = batch["reward"][:, 1] + self.discount * ~batch["is_terminal"][:, 1] * soft_value
        return LossOutput({"value": F.huber_loss(value, target)}, {"controller/value_mean": value.detach().mean()})
