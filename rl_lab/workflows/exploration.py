"""Who acts while a world model's workflow collects, and Plan2Explore (Sekar et al. 2020, arXiv:2005.05960).

    exploration=greedy          the task's policy, as it draws its actions
    exploration=epsilon         the same, but for a fraction of actions drawn uniformly
    exploration=random          only those
    exploration=plan2explore    a second actor, which seeks what the model does not know yet:

    ensemble    w_k(f, a), K one-step predictions of the next embedding    L = sum_k |w_k - e'|^2 / 2, on replayed rows
    reward      mean over the embedding of Var_k w_k(f, a), scaled         what an action of a dream earns
    behaviour   actor, critic, slow critic and scale of returns            learn of it as the task's do of theirs

Nothing of this reaches the world model or the task's policy but the rows that were found.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.training.target_network import TargetNetwork
from rl_lab.types import Batch, ConfigError, LossOutput
from rl_lab.workflows.behaviour import Actor, Behaviour
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.latent_states import Dynamics, Network

EXPLORATION = (
    "disagreement",
    "explorer_policy",
    "explorer_entropy",
    "explorer_value",
)  # its losses, for its own optimiser


class Explorer(Protocol):
    def __call__(self, features: Tensor, mask: Tensor | None = None) -> Any: ...  # to a distribution


class Disagreement(Protocol):
    def __call__(self, features: Tensor, action: Tensor) -> Tensor: ...  # [N, H, F], [N, H, A] to rewards [N, H]
    def loss(
        self, features: Tensor, action: Tensor, embedding: Tensor, is_last: Tensor
    ) -> Tensor: ...  # of rows [B, T]


class Plan2Explore:
    """The ensemble, and the behaviour that its disagreement rewards."""

    def __init__(self, context: WorkflowContext, dynamics: Dynamics, slow_critic: TargetNetwork) -> None:
        self.runtime, self.dynamics = context.runtime, dynamics
        self.disagreement: Any = context.components.require("disagreement", Disagreement)
        self.reward_scale = context.components.require("disagreement_scale")
        self.critic: Any = context.controllers.require("explorer_critic", Network)
        self.slow_critic = TargetNetwork(self.critic, rate=slow_critic.rate, every=slow_critic.every)
        context.components.add("slow_explorer_critic", self.slow_critic)
        self.behaviour = Behaviour(
            actor=context.controllers.require("explorer", Actor),
            critic=self.critic,
            slow_critic=self.slow_critic,
            return_scale=context.components.require("explorer_return_scale"),
            reward=self.reward,
            reward_part=self.disagreement,
            name="explorer_",
        )

    def reward(self, features: Tensor, action: Tensor) -> Tensor:
        """What each action `[N, H]` of a dream earns: how far predictions of what follows it are apart, in ranges of
        recent dreams, since a critic cannot tell variances of 0.001 apart. It arrives with the next step `[N, H+1]`."""
        disagreement = self.disagreement(features[:, :-1], self.dynamics.encode_action(action))
        self.reward_scale.update(disagreement)
        return F.pad(disagreement / self.reward_scale.scale(), (1, 0))

    def ensemble_loss(self, rows: Batch, state: Batch) -> LossOutput:
        """How well the ensemble predicts replayed rows `[B, T, ...]`."""
        with self.runtime.autocast():
            features, action = self.dynamics.features(state), self.dynamics.encode_action(rows["action"])
            loss = self.disagreement.loss(features, action, rows["embedding"], rows["is_last"])
        return LossOutput({"disagreement": loss}, {"controller/disagreement_scale": self.reward_scale.scale()})

    def follow(self, pace: TargetNetwork) -> None:
        """The slow critic follows at the pace of the task's, which a phase may change."""
        self.slow_critic.rate, self.slow_critic.every = pace.rate, pace.every
        self.slow_critic.follow(self.critic)


def explorer_of(context: WorkflowContext, fraction: float) -> Any:
    """The controller that may act while collecting; none with `exploration=greedy`."""
    explorer = context.controllers.optional("explorer", Explorer)
    if explorer is None and fraction:
        raise ConfigError(
            f"algorithm.explorer_fraction is {fraction}, but there is no controllers.explorer: write `exploration=` "
            "epsilon, random or plan2explore."
        )
    return explorer


def mixed(theirs: Tensor, ours: Tensor, fraction: float) -> Tensor:
    """Of two actions `[N, ...]` per environment, theirs with a probability of `fraction`."""
    is_theirs = torch.rand(ours.shape[0], *[1] * (ours.dim() - 1), device=ours.device) < fraction
    return torch.where(is_theirs, theirs, ours)
