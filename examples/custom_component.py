"""A component of your own in a config of ours: PPO whose value is the mean of several critics.

    python examples/custom_component.py [key=value ...]

Any class will do whose constructor takes the keys of its block and which has the methods its workflow calls; see
docs/add_a_component.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import rl_lab
from rl_lab.components.heads.actor_critic import Critic


class EnsembleCritic(nn.Module):
    """The mean of `members` critics, which start apart and so err apart."""

    def __init__(
        self, *, input_size: int, hidden_sizes: Sequence[int] = (), activation: str = "tanh", members: int = 3
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            Critic(input_size=input_size, hidden_sizes=hidden_sizes, activation=activation) for _ in range(members)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Features `[..., F]` to values `[...]`."""
        return torch.stack([member(features) for member in self.members]).mean(dim=0)


# The same as YAML: `plugins: [custom_component]`, and under `controllers.critic` a `_target_` and `members`.
OVERRIDES = [
    "plugins=[custom_component]",  # this very file; a config may only use packages that are named here
    "controllers.critic._target_=custom_component.EnsembleCritic",
    "+controllers.critic.members=3",  # + adds a key that the block did not have
]


def main(overrides: Sequence[str] = ()) -> rl_lab.Run:
    return rl_lab.train("ppo_cartpole", overrides=[*OVERRIDES, *overrides])


if __name__ == "__main__":
    main(sys.argv[1:])
