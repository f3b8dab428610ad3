"""Deep Q-learning (Mnih et al. 2015, doi:10.1038/nature14236) and what Rainbow (Hessel et al. 2018,
arXiv:1710.02298) adds to it, each by a switch of its own:

    double         algorithm.double              the online network chooses the next action, the target one values it
    n-step         algorithm.n_step              n rewards, then the value of the row after them
    dueling        components.q_values.dueling   state value and advantages apart
    distributional q_values=categorical          the distribution of returns (C51); q_values=quantile: its quantiles
    prioritised    replay=prioritized            surprising transitions more often, with weights that undo the bias
    noisy          components.q_values.noisy     learnt noise in the weights explores (write algorithm.epsilon: 0.0)

One update, for a batch of transitions (s, a, r_1 … r_n, s_n) from replay:

    target = r_1 + discount * r_2 + … + discount^n * Q_target(s_n, argmax_a Q(s_n, a))
    L      = E[ weight * error(Q(s, a), target) ],   then Q_target follows Q
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from rl_lab.components.heads.q_values import of_action
from rl_lab.components.heads.tables import allowed_values
from rl_lab.components.networks.noisy import without_noise
from rl_lab.components.networks.normalizers import ObservationNormalizer
from rl_lab.components.returns.transitions import transition_and_following
from rl_lab.kernels.door import fast_path, precomputed_gradients
from rl_lab.training.schedules import Schedule, value_at
from rl_lab.training.target_network import TargetNetwork
from rl_lab.types import Batch, CollectResult, ConfigError, LossOutput, Metrics, Phase, PolicyStep, Progress, TimeStep
from rl_lab.workflows.base import Mode, Workflow, checked_fraction, checked_fractions, named
from rl_lab.workflows.context import WorkflowContext


class Encoder(Protocol):
    def __call__(self, observation: Batch) -> Tensor:
        """`[..., *shape]` per key to features `[..., F]`."""


class Head(Protocol):
    def __call__(self, features: Tensor) -> Tensor:
        """Features `[..., F]` to what is known about every action, `[..., A]` or `[..., A, K]`."""

    def values(self, output: Tensor) -> Tensor:
        """That output to expected returns `[..., A]`."""

    def loss(
        self, predicted: Tensor, following: Tensor, *, reward: Tensor, discount: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean loss of `predicted` against `reward + discount * following`, the outputs of one action each, and how
        wrong each was `[B]`."""

    def metrics(self, following: Tensor, *, reward: Tensor, discount: Tensor) -> Metrics:
        """What is worth logging about these targets."""


class DQN(Workflow):
    """Acts epsilon-greedily on its values and learns them from replay towards a slower copy of itself."""

    compiled: ClassVar[tuple[str, ...]] = ("loss",)
    captured: ClassVar[tuple[str, ...]] = ("learn",)
    notes_priorities: ClassVar[bool] = True

    def __init__(
        self,
        *,
        discount: float = 0.99,
        n_step: int = 1,
        double: bool = True,
        epsilon: float | Schedule = 0.05,
        target_every: int = 500,
        target_rate: float = 1.0,
        reward_clip: float | None = None,
    ) -> None:
        if n_step < 1:
            raise ConfigError(f"algorithm.n_step is {n_step}: write a whole number of at least 1.")
        if reward_clip is not None and not reward_clip > 0:
            raise ConfigError(f"algorithm.reward_clip is {reward_clip:g}: write a number above 0, or null for none.")
        self.discount = checked_fraction("discount", discount)
        self.n_step = n_step
        self.double = double
        self.epsilon = checked_fractions("epsilon", epsilon)
        self.target_every, self.target_rate = target_every, target_rate
        self.reward_clip = reward_clip
        self._acting_epsilon = value_at(self.epsilon, Progress())  # set anew by every collection, so never saved

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        encoder: Any = context.components.require("encoder", Encoder)
        head: Any = context.components.require("q_values", Head)
        self.head: Head = head
        normalizer = context.components.optional("observation_normalizer")  # none in older runs
        self.observation_normalizer = normalizer or ObservationNormalizer(observation={})
        self.network = nn.Sequential(encoder, head)
        self.target = TargetNetwork(self.network, rate=self.target_rate, every=self.target_every)
        context.components.add("target", self.target)
        self.optimizer = context.optimizers.require("controller")
        self.observation_keys = tuple(context.spec.observation)
        self.row_keys = (*self.observation_keys, "action", "reward", "is_last", "is_terminal", "weight")

    # --- acting ---

    @fast_path("rl_lab.kernels.cpu_losses:DQN_ACT")
    def act(self, time_step: TimeStep, state: Any, *, mode: Mode) -> PolicyStep:
        mask = time_step.observation.get("action_mask")
        if mode == "train":
            self.count_in_statistics(time_step)
        observation = self.observation_normalizer(time_step.observation)
        if mode == "eval":
            with without_noise(self.network):
                values = self.head.values(self.network(observation))
            return PolicyStep(allowed_values(values, mask).argmax(-1))
        values = self.head.values(self.network(observation))
        best = allowed_values(values, mask).argmax(-1)
        anything = allowed_values(torch.rand_like(values), mask).argmax(-1)  # the largest of equal chances
        explores = torch.rand(len(best), device=best.device) < self._acting_epsilon
        return PolicyStep(torch.where(explores, anything, best))

    def count_in_statistics(self, time_step: TimeStep) -> None:
        """Each row counts once in the normaliser's statistics, when it is first seen, whoever acts."""
        self.observation_normalizer.update(time_step.observation)

    def collect_step(self, step: int, *, phase: Phase) -> CollectResult:
        self._acting_epsilon = value_at(self.epsilon, phase.progress)
        return super().collect_step(step, phase=phase)

    # --- learning ---

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """One gradient step on rows `[B, n+1]` from replay; notes each transition's `priority` in the batch."""
        self.check_rows(batch["reward"].shape[1], buffer=phase.buffer)
        prepared = named(self.optimizer.prepare(phase.progress))
        runtime, rows_kept = self.context.runtime, batch
        if runtime.device.type != "cpu":
            rows_kept = runtime.to_device({key: batch[key] for key in self.row_keys if key in batch})
        learnt = self.learn(rows_kept, {})
        self.target.follow(self.network)
        batch["priority"] = learnt.pop("priority")
        return {**learnt, **prepared, "controller/epsilon": value_at(self.epsilon, phase.progress)}

    def learn(self, batch: Batch, numbers: Batch) -> Batch:
        """The whole of an update that a CUDA graph may repeat: everything but the target network's turn."""
        with self.context.runtime.autocast(), precomputed_gradients():
            loss = self.loss(batch)
        return {**self.gradient_step(self.optimizer, loss), **loss.aux}

    @fast_path("rl_lab.kernels.cpu_losses:DQN_LOSS")
    def loss(self, batch: Batch) -> LossOutput:
        transition, following = self.transitions(batch)
        now = self.observation_normalizer({key: batch[key][:, 0] for key in self.observation_keys})
        output = self.network(now).float()

        # The target: the online network (double) or the target network itself chooses, the target network values it.
        next_output = self.target(following).float()  # its parameters want no gradient, so it leaves no graph
        with torch.no_grad():
            chooser = self.network(following).float() if self.double else next_output
            next_action = allowed_values(self.head.values(chooser), following.get("action_mask")).argmax(-1)

        following_output = of_action(next_output, next_action)
        target = {"reward": transition["reward"], "discount": transition["discount"]}
        weight = batch.get("weight")  # prioritised replay gives one
        predicted = of_action(output, batch["action"][:, 0])
        loss, priority = self.head.loss(predicted, following_output, **target, weight=weight)
        metrics = {"controller/value_mean": self.head.values(output.detach()).mean()}
        metrics |= self.head.metrics(following_output, **target)
        return LossOutput({"value": loss}, metrics, {"priority": priority})

    def transitions(self, batch: Batch) -> tuple[Batch, Batch]:
        """Reward and discount of each transition, and the normalised observation `[B, ...]` it led to.

        row t      0        1        …    n
        n = 1      s, a     r, s'                    replay starts nowhere an episode ends, so row 1 always follows
        n > 1      s, a     r_1      …    r_n, s_n   or less, where the episode ends before
        """
        if self.reward_clip is not None:
            batch = {**batch, "reward": batch["reward"].clamp(-self.reward_clip, self.reward_clip)}
        transition, following = transition_and_following(batch, self.discount, self.observation_keys)
        return transition, self.observation_normalizer(following)
