"""GAIL (Ho and Ermon 2016, arXiv:1606.03476): PPO, and a hook of one's own that teaches a discriminator.

    L_D = -E_demonstrations[ log D(o, a) ] - E_policy[ log(1 - D(o, a)) ]     update_discriminator
    r   = -log(1 - D(o, a))                                                   what update_controller then learns from

The environment's own reward is never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.buffers.offline import open_dataset
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, EnvSpec, LossOutput, Metrics, Phase
from rl_lab.workflows.base import named
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.ppo import PPO


class Demonstrations(nn.Module):
    """What somebody did who knows how: rows of a dataset, without those that ended an episode."""

    def __init__(self, *, observation: Mapping[str, ArraySpec], action: ActionSpec, dataset: str) -> None:
        super().__init__()
        source = open_dataset(dataset, EnvSpec("demonstrations", dict(observation), action))
        blocks = list(source.blocks())
        was_acted_on = ~np.concatenate([block["is_last"] for block in blocks])
        self.keys = (*observation, "action")
        for key in self.keys:
            rows = np.concatenate([block[key] for block in blocks])[was_acted_on]
            self.register_buffer(key, torch.as_tensor(rows), persistent=False)  # not in checkpoints: the dataset has it

    def sample(self, count: int) -> Batch:
        rows = {key: self.get_buffer(key) for key in self.keys}
        chosen = torch.randint(len(rows["action"]), (count,), device=rows["action"].device)
        return {key: values[chosen] for key, values in rows.items()}


class Discriminator(nn.Module):
    """Features and an action to the log-odds that a demonstrator took it."""

    def __init__(self, *, input_size: int, action: ActionSpec, units: int = 64) -> None:
        super().__init__()
        self.action = action
        hidden = (nn.Linear(input_size + sum(action.sizes), units), nn.Tanh(), nn.Linear(units, units), nn.Tanh())
        self.network = nn.Sequential(*hidden, nn.Linear(units, 1))

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        """`[..., F]` and actions to `[...]`."""
        if self.action.kind == "discrete":
            action = F.one_hot(action, self.action.sizes[0]).float()
        return self.network(torch.cat((features, action), dim=-1)).squeeze(-1)


class GAIL(PPO):
    """PPO, rewarded for what the discriminator takes for a demonstration."""

    def __init__(self, *, discriminator_steps: int = 2, **ppo: Any) -> None:
        super().__init__(**ppo)
        if discriminator_steps < 1:
            raise ConfigError(
                f"algorithm.discriminator_steps is {discriminator_steps}: write a whole number from 1 on."
            )
        self.discriminator_steps = discriminator_steps

    def initialize(self, context: WorkflowContext) -> None:
        super().initialize(context)
        if context.spec.action.kind == "multi_discrete":
            raise ConfigError("This GAIL knows one choice or numbers as actions: encode others in Discriminator.")
        self.demonstrations: Demonstrations = context.components.require("demonstrations", Demonstrations)
        self.discriminator: Discriminator = context.components.require("discriminator")
        self.discriminator_optimizer = context.optimizers.require("discriminator")

    def update_discriminator(self, batch: Batch, *, phase: Phase) -> Metrics:
        """The hook: listed before update_controller, it leaves its reward in the batch for that one."""
        valid = ~batch["is_last"][:, :-1]  # no action moved anything on an episode's last row
        if not bool(valid.any()):
            return {}  # nothing was decided, so nothing can be told apart; update_controller skips such a batch, too
        metrics = named(self.discriminator_optimizer.prepare(phase.progress), "discriminator")
        ours = {key: batch[key][:, :-1][valid] for key in self.demonstrations.keys}
        for _ in range(self.discriminator_steps):
            loss = self.discriminator_loss(ours, self.demonstrations.sample(len(ours["action"])))
            metrics |= self.gradient_step(self.discriminator_optimizer, loss, name="discriminator")
        batch["reward"] = torch.zeros_like(batch["reward"])
        with torch.no_grad():  # it arrives with the next row, as every reward does
            batch["reward"][:, 1:][valid] = F.softplus(self.log_odds(ours))  # -log(1 - D)
        return metrics

    def discriminator_loss(self, ours: Batch, theirs: Batch) -> LossOutput:
        log_odds = {"ours": self.log_odds(ours), "theirs": self.log_odds(theirs)}
        loss = F.softplus(log_odds["ours"]).mean() + F.softplus(-log_odds["theirs"]).mean()
        correct = ((log_odds["ours"] < 0).float().mean() + (log_odds["theirs"] > 0).float().mean()) / 2
        return LossOutput({"discriminator": loss}, {"train/discriminator_accuracy": correct.detach()})

    def log_odds(self, rows: Batch) -> Tensor:
        """log D - log(1 - D) of rows `[M, ...]`; the encoder is PPO's and learns nothing here."""
        features = self.encoder(self.observation_normalizer(rows)).detach()
        return self.discriminator(features, rows["action"])
