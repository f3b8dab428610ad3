"""Values kept one by one: no network, no gradient, only a table of states and actions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_lab.components.networks.observations import selected_observation
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError

MAX_ENTRIES = 50_000_000  # 200 MB of float32; a larger table would be visited too rarely to learn anything
INSTEAD = "Learn with a network instead, for example `rl-lab train ID:ppo`."


class ValueTable(nn.Module):
    """One value per state and action, `[S, A]`, kept in a buffer so that checkpoints hold it.

    Several discrete observation keys, or one with several elements, are read as the digits of one number: with 32, 11
    and 2 values there are 704 states. `keys` picks some of them; by default all are used.
    """

    values: Tensor  # [S, A]
    places: Tensor  # what each digit counts

    def __init__(
        self,
        *,
        observation: Mapping[str, ArraySpec],
        action: ActionSpec,
        initial_value: float = 0.0,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        specs = selected_observation(observation, keys, place="components.table.keys")
        for key, spec in specs.items():
            if not spec.is_discrete:
                discrete = [name for name, other in observation.items() if other.is_discrete]
                hint = f" Or name only discrete ones: components.table.keys=[{','.join(discrete)}]." if discrete else ""
                raise ConfigError(
                    f"components.table: a table needs discrete observations, and '{key}' is {spec.dtype} of shape "
                    f"{spec.shape}. {INSTEAD}{hint}"
                )
        if action.kind != "discrete":
            raise ConfigError(
                f"components.table: a table needs one discrete action, and this environment's is {action.kind} with "
                f"sizes {action.sizes}. {INSTEAD}"
            )
        if not math.isfinite(initial_value):
            raise ConfigError(f"components.table.initial_value is {initial_value}: write a finite number.")
        self.keys = tuple(specs)
        self.axes = tuple(len(spec.shape) for spec in specs.values())
        counts = [count for spec in specs.values() for count in spec.num_values]
        num_states, num_actions = math.prod(counts), action.sizes[0]
        if num_states * num_actions > MAX_ENTRIES:
            raise ConfigError(
                f"components.table would have {num_states} states times {num_actions} actions, more than "
                f"{MAX_ENTRIES} entries. Name fewer observations in components.table.keys. {INSTEAD}"
            )
        places = [math.prod(counts[digit + 1 :]) for digit in range(len(counts))]
        self.register_buffer("places", torch.tensor(places, dtype=torch.int64), persistent=False)
        self.register_buffer("values", torch.full((num_states, num_actions), float(initial_value)))

    def state(self, observation: Batch) -> Tensor:
        """Which row of the table each observation is, `[...]`."""
        if len(self.keys) == 1 and self.axes == (0,):
            return observation[self.keys[0]]
        digits = [
            observation[key].unsqueeze(-1) if axes == 0 else observation[key].flatten(-axes)
            for key, axes in zip(self.keys, self.axes, strict=True)
        ]
        return (torch.cat(digits, dim=-1) * self.places).sum(-1)

    def forward(self, observation: Batch) -> Tensor:
        """Observations with any leading axes to the values of every action, `[..., A]`."""
        return self.values[self.state(observation)]

    def move(self, state: Tensor, action: Tensor, target: Tensor, *, valid: Tensor, rate: float) -> Tensor:
        """Move the entries `[N]` towards their targets where valid; the errors `[N]` before the move, else zero.

        An entry named k times moves as if its targets came one after the other, in the order of the rows:

            value <- (1 - rate)^k value + sum_i rate (1 - rate)^(number of targets after i) target_i

        Adding the plain steps instead would move it by k * rate, beyond its targets as soon as that exceeds 1.
        """
        entry = state * self.values.shape[1] + action
        later = (entry.unsqueeze(0) == entry.unsqueeze(1)) & valid.unsqueeze(0)  # [N, N]: column names row's entry
        weight = rate * (1.0 - rate) ** later.triu(diagonal=1).sum(1)
        flat = self.values.view(-1)
        error = torch.where(valid, target - flat[entry], 0.0)
        flat.index_add_(0, entry, weight * error)
        return error


def allowed_values(values: Tensor, mask: Tensor | None) -> Tensor:
    """Values `[..., A]` with those of forbidden actions at minus infinity."""
    return values if mask is None else values.masked_fill(~mask, -math.inf)


def epsilon_greedy(values: Tensor, epsilon: float, mask: Tensor | None = None) -> Tensor:
    """Probabilities `[..., A]`: the best allowed action, ties shared evenly, and with `epsilon` any allowed one."""
    allowed = allowed_values(values, mask)
    best = (allowed == allowed.amax(-1, keepdim=True)).to(values.dtype)
    usable = torch.ones_like(values) if mask is None else mask.to(values.dtype)
    greedy, uniform = best / best.sum(-1, keepdim=True), usable / usable.sum(-1, keepdim=True)
    return (1.0 - epsilon) * greedy + epsilon * uniform


def draw(probabilities: Tensor) -> Tensor:
    """One index per row of `[N, A]`."""
    return torch.multinomial(probabilities, 1).squeeze(1)
