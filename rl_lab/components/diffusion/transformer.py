"""A transformer over the actions of a plan that looks at the observations by cross-attention.

The time-series denoiser of "Diffusion Policy" (Chi et al. 2023, arXiv:2303.04137, section 3.1):

    memory      level | o_t-1 | o_t              the noise level and the newest observations, a token each
    plan        a_t-1 | a_t | a_t+1 | ...        each action sees those before it, and observations up to its own time
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_lab.components.diffusion.embedding import LevelEmbedding, action_size
from rl_lab.types import ActionSpec, ConfigError

INITIAL_STD = 0.02  # of every weight, as in GPT-2, which the method's transformer starts like


class DenoisingTransformer(nn.Module):
    """Predicts the noise in plans of actions, from how noisy they are and the newest observations' features."""

    hidden_from_plan: Tensor
    hidden_from_memory: Tensor

    def __init__(
        self,
        *,
        action: ActionSpec,
        prediction_steps: int = 16,
        input_size: int,
        observation_steps: int = 2,
        layers: int = 8,
        heads: int = 4,
        units: int = 256,
        dropout: float = 0.01,
    ) -> None:
        super().__init__()
        if layers < 1 or heads < 1 or units % (2 * heads):
            raise ConfigError(
                f"transformer: layers is {layers}, heads is {heads} and units is {units}; write at least 1 layer and 1 "
                "head, and units that twice the heads divide, such as 8, 4 and 256."
            )
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"transformer: dropout is {dropout}; write a number from 0 to below 1, such as 0.01.")
        self.from_action = nn.Linear(action_size(action), units)
        self.from_observation = nn.Linear(input_size, units)
        self.level = LevelEmbedding(units, has_layers=False)  # those of the memory follow
        self.plan_place = nn.Parameter(torch.zeros(1, prediction_steps, units))
        self.memory_place = nn.Parameter(torch.zeros(1, 1 + observation_steps, units))
        self.memory = nn.Sequential(nn.Linear(units, 4 * units), nn.Mish(), nn.Linear(4 * units, units))
        layer = nn.TransformerDecoderLayer(
            units, heads, 4 * units, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.decoder = nn.TransformerDecoder(layer, layers, norm=nn.LayerNorm(units))
        self.output = nn.Linear(units, action_size(action))
        self.apply(_initialize)
        for place in (self.plan_place, self.memory_place):
            nn.init.normal_(place, std=INITIAL_STD)
        plan, seen = torch.arange(prediction_steps), torch.arange(observation_steps)
        hidden = seen > plan.unsqueeze(1)  # the level has no time: every action sees it
        hidden = torch.cat((torch.zeros(prediction_steps, 1, dtype=torch.bool), hidden), dim=1)
        self.register_buffer("hidden_from_plan", plan > plan.unsqueeze(1), persistent=False)
        self.register_buffer("hidden_from_memory", hidden, persistent=False)

    def forward(self, plan: Tensor, level: Tensor, features: Tensor) -> Tensor:
        """Plans `[B, T, A]`, their levels `[B]` and features `[B, observation_steps, F]` to noise `[B, T, A]`."""
        tokens = torch.cat((self.level(level).unsqueeze(1), self.from_observation(features)), dim=1)
        memory = self.memory(tokens + self.memory_place)
        hidden = self.decoder(
            self.from_action(plan) + self.plan_place,
            memory,
            tgt_mask=self.hidden_from_plan,
            memory_mask=self.hidden_from_memory,
            tgt_is_causal=True,  # else torch looks at the mask, and waits for it
        )
        return self.output(hidden)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=INITIAL_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.MultiheadAttention):
        nn.init.normal_(module.in_proj_weight, std=INITIAL_STD)
        nn.init.zeros_(module.in_proj_bias)
