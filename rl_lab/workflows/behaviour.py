"""A behaviour: an actor and a critic that learn in a model's dreams, and what is rewarded there."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_lab.training.target_network import TargetNetwork
from rl_lab.types import ConfigError, EnvSpec
from rl_lab.workflows.latent_states import Network


class Actor(Protocol):
    def __call__(self, features: Tensor, mask: Tensor | None = None) -> Any: ...
    def noise(self, *leading: int, device: torch.device) -> Tensor: ...
    def decide(self, features: Tensor, noise: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Behaviour:
    """`name` begins the names of its losses and metrics; the task's own has none."""

    actor: Actor
    critic: Network
    slow_critic: TargetNetwork
    return_scale: Any
    reward: Callable[[Tensor, Tensor], Tensor]  # features [N, H+1, F] and actions [N, H, ...] to rewards [N, H+1]
    reward_part: Any  # what `reward` asks; gradients may pass through it, not into it
    name: str = ""


def checked_policy_gradient(policy_gradient: str, spec: EnvSpec, optimizers: Collection[str]) -> str:
    """How actors learn, chosen by the actions if it is left open; gradients through the model need an
    optimiser each for model and controllers."""
    kind = spec.action.kind
    if policy_gradient == "auto":
        policy_gradient = "dynamics" if kind == "continuous" else "reinforce"
    if policy_gradient != "reinforce" and kind != "continuous":
        raise ConfigError(
            f"algorithm.policy_gradient is {policy_gradient}: that needs continuous actions, but those of "
            f"{spec.id} are {kind}. Write `policy_gradient: reinforce`, or auto."
        )
    if policy_gradient != "reinforce" and "" in optimizers:
        raise ConfigError(
            f"algorithm.policy_gradient is {policy_gradient}: that needs optimizers world_model, actor and "
            "critic instead of agent, as dreamer_v2 has them. Or write `policy_gradient: reinforce`."
        )
    return policy_gradient
