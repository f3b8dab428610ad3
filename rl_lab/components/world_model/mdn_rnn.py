"""M of "World Models" (Ha and Schmidhuber 2018, arXiv:1803.10122): an LSTM that predicts a mixture of normals.

     row t            0         1         2
     latent           z0        z1        z2           what V makes of the row's image
     action           a0        a1        a2           our answer to it
     hidden           h0 = 0    h1        h2           h_t = LSTM(h_t-1, z_t-1, a_t-1); 0 where is_first
     predicted        .         z1        z2           of h_t: z_t, the reward that came with it, whether it ends

A state is the latent and the LSTM's memory, both of its parts; the mixture has `gaussians` normals for every latent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.heads.distributions import LOG_TWO_PI
from rl_lab.components.world_model.conv_vae import draw_latent
from rl_lab.types import ActionSpec, Batch, ConfigError, LossOutput

PARTS = ("latent", "hidden", "cell")
DREAM_ENDS = ("likely", "drawn", "expected")
LEAST_LOG_STD = -7.0  # a normal of no width would give an endless likelihood to a latent that never changes


@dataclass(frozen=True)
class Mixture:
    """For every latent a mixture of normals: log weights, means and log stds, `[..., Z, K]` each."""

    log_weight: Tensor
    mean: Tensor
    log_std: Tensor

    def log_likelihood(self, latent: Tensor) -> Tensor:
        """Of latents `[..., Z]`, nats `[..., Z]`: log sum_k weight_k N(latent; mean_k, std_k)."""
        distance = (latent.unsqueeze(-1) - self.mean) * torch.exp(-self.log_std)
        log_normal = -0.5 * (distance.square() + LOG_TWO_PI) - self.log_std
        return torch.logsumexp(self.log_weight + log_normal, dim=-1)

    def sample(self, temperature: Tensor | float = 1.0) -> Tensor:
        """Latents `[..., Z]`. Log weights are divided by the temperature, variances multiplied by it: above 1 the next
        latent is harder to predict; towards 0 it is the mean of the likeliest normal."""
        noise = -torch.empty_like(self.log_weight).exponential_().log()  # Gumbel: the largest sum is a draw
        chosen = (self.log_weight / temperature + noise).argmax(dim=-1, keepdim=True)
        mean, std = self._of(chosen, self.mean), self._of(chosen, self.log_std).exp()
        root = torch.sqrt(temperature) if isinstance(temperature, Tensor) else temperature**0.5
        return mean + std * root * torch.randn_like(mean)

    def mode(self) -> Tensor:
        """The mean of the likeliest normal, `[..., Z]`."""
        return self._of(self.log_weight.argmax(dim=-1, keepdim=True), self.mean)

    def _of(self, chosen: Tensor, values: Tensor) -> Tensor:
        return values.gather(-1, chosen).squeeze(-1)


@dataclass(frozen=True)
class Number:
    """A prediction of one number `[...]`, as films show it."""

    value: Tensor

    def mean(self) -> Tensor:
        return self.value


class MDNRNN(nn.Module):
    """The recurrent network: states `[N, ...]` of `latent`, `hidden` and `cell`, and what they predict.

    controller_sees   parts of a state that a controller gets: [latent, hidden] as for CarRacing in the paper, [latent,
                      hidden, cell] as for Doom, [latent] for a controller without a memory
    end_weight        how much more a row at which an episode ended counts in learning when they do: 10 in the paper's
                      Doom
    dream_ends        likely: a dream is over once the end is learnt to be likelier than not, that is from a probability
                      of 1 / (1 + end_weight) on, as in the paper; drawn: with the probability of the end, so that a
                      risk that is never likely ends dreams as often as episodes; expected: never, what comes later
                      counts by the probability of getting there, with less noise
    """

    choice_ids: Tensor

    def __init__(
        self,
        *,
        input_size: int,
        action: ActionSpec,
        hidden: int = 256,
        gaussians: int = 5,
        controller_sees: Sequence[str] = ("latent", "hidden"),
        dream_ends: str = "likely",
        end_weight: float = 1.0,
    ) -> None:
        super().__init__()
        if not controller_sees or len({*controller_sees} & {*PARTS}) != len(controller_sees):
            raise ConfigError(
                f"components.memory.controller_sees is {list(controller_sees)}: write one or more of "
                f"{', '.join(PARTS)}, each once."
            )
        if hidden < 1 or gaussians < 1:
            raise ConfigError(
                f"components.memory: hidden is {hidden} and gaussians is {gaussians}: write whole numbers from 1, such "
                "as 256 and 5."
            )
        if dream_ends not in DREAM_ENDS:
            raise ConfigError(f"components.memory.dream_ends is {dream_ends!r}: write one of {', '.join(DREAM_ENDS)}.")
        if end_weight <= 0.0:
            raise ConfigError(f"components.memory.end_weight is {end_weight}: write a number above 0, such as 10.")
        self.dream_ends, self.end_weight = dream_ends, end_weight
        self.action, self.latents, self.hidden, self.gaussians = action, input_size // 2, hidden, gaussians
        self.controller_sees = tuple(controller_sees)
        self.output_size = sum(self.state_sizes()[part] for part in controller_sees)
        self.recurrence = nn.LSTMCell(self.latents + sum(action.sizes), hidden)
        self.mixture_output = nn.Linear(hidden, 3 * gaussians * self.latents)
        self.outcome_output = nn.Linear(hidden, 2)  # the reward, and the logit of the end
        self.register_buffer("choice_ids", torch.arange(max(action.sizes)), persistent=False)

    # --- states ---

    def initial_state(self, count: int, device: torch.device) -> Batch:
        return {name: torch.zeros(count, size, device=device) for name, size in self.state_sizes().items()}

    def state_sizes(self) -> dict[str, int]:
        return dict(zip(PARTS, (self.latents, self.hidden, self.hidden), strict=True))

    def features(self, state: Batch) -> Tensor:
        """All of a state, `[..., Z + 2 H]`: what it looks like and what it is worth can be read from it."""
        return torch.cat([state[part] for part in PARTS], dim=-1)

    def controller_inputs(self, features: Tensor) -> Tensor:
        """What a controller sees of a state's features, `[..., output_size]`."""
        sizes = self.state_sizes()
        parts = dict(zip(sizes, features.split(tuple(sizes.values()), dim=-1), strict=True))
        return torch.cat([parts[part] for part in self.controller_sees], dim=-1)

    def advance(self, state: Batch, action: Tensor) -> tuple[Tensor, Tensor]:
        """The LSTM's memory `[N, H]`, both parts, after a state and the action that answered it."""
        seen = torch.cat((state["latent"], self.encode_action(action)), dim=-1)
        return self.recurrence(seen, (state["hidden"], state["cell"]))

    def encode_action(self, action: Tensor) -> Tensor:
        """One-hots side by side, or numbers, `[..., sum(sizes)]`."""
        if self.action.kind == "continuous":
            return action.clamp(-1.0, 1.0)
        choices = action.unsqueeze(-1) if self.action.kind == "discrete" else action
        parts = [choices[..., i, None] == self.choice_ids[:size] for i, size in enumerate(self.action.sizes)]
        return torch.cat(parts, dim=-1).to(torch.float32)

    # --- with observations ---

    def observe(
        self, embedding: Tensor, action: Tensor, state: Batch, is_first: Tensor, *, deterministic: bool = False
    ) -> tuple[Batch, Tensor]:
        """One row: the normal of its latent `[N, 2 Z]` and the previous action to the state after it."""
        memory = [part.masked_fill(is_first.unsqueeze(-1), 0.0) for part in self.advance(state, action)]
        latent = draw_latent(embedding, deterministic=deterministic)
        return {"latent": latent, "hidden": memory[0], "cell": memory[1]}, embedding

    def hidden_of_rows(self, latent: Tensor, action: Tensor, is_first: Tensor) -> Tensor:
        """Latents and actions `[B, T, ...]` to the memory before each row, `[B, T, H]`; 0 before row 0."""
        state = self.initial_state(len(latent), latent.device)
        hidden = [state["hidden"]]
        for t in range(1, latent.shape[1]):
            memory = self.advance({**state, "latent": latent[:, t - 1]}, action[:, t - 1])
            is_new = is_first[:, t, None]
            state = {"hidden": memory[0].masked_fill(is_new, 0.0), "cell": memory[1].masked_fill(is_new, 0.0)}
            hidden.append(state["hidden"])
        return torch.stack(hidden, dim=1)

    def begin(self, batch: Batch) -> tuple[Batch, Batch]:
        """Rows `[B, T]` with their `previous_action`, and the state before the first of them."""
        action = batch["action"]
        previous = torch.cat((torch.zeros_like(action[:, :1]), action[:, :-1]), dim=1)
        return {**batch, "previous_action": previous}, self.initial_state(len(action), action.device)

    # --- what the memory predicts ---

    def mixture(self, hidden: Tensor) -> Mixture:
        """Of the latent `[..., Z]` that comes with this memory."""
        output = self.mixture_output(hidden).float().view(*hidden.shape[:-1], self.latents, 3, self.gaussians)
        weight, mean, log_std = output.unbind(dim=-2)
        return Mixture(torch.log_softmax(weight, dim=-1), mean, log_std.clamp(min=LEAST_LOG_STD))

    def outcome(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The reward `[...]` that comes with this memory, and the logit of nothing coming after it, as ends of
        `end_weight` taught it."""
        reward, end = self.outcome_output(hidden).float().unbind(dim=-1)
        return reward, end

    def reward(self, features: Tensor) -> Number:
        return Number(self.outcome(self._hidden(features))[0])

    def continue_probability(self, features: Tensor) -> Number:
        return Number(torch.sigmoid(math.log(self.end_weight) - self.outcome(self._hidden(features))[1]))

    def survival(self, features: Tensor) -> Tensor:
        """How much of a dream goes on after a state, `[...]` from 0 to 1, as `dream_ends` says."""
        probability = self.continue_probability(features).value
        if self.dream_ends == "expected":
            return probability
        likely = self.end_weight / (1.0 + self.end_weight)
        return (probability >= (torch.rand_like(probability) if self.dream_ends == "drawn" else likely)).float()

    def _hidden(self, features: Tensor) -> Tensor:
        return features[..., self.latents : self.latents + self.hidden]

    # --- without observations ---

    def dream_step(self, state: Batch, action: Tensor, temperature: Tensor | float | None) -> Batch:
        """The state `[N, ...]` after an action, from the model alone; without a temperature the likeliest."""
        hidden, cell = self.advance(state, action)
        mixture = self.mixture(hidden)
        latent = mixture.mode() if temperature is None else mixture.sample(temperature)
        return {"latent": latent, "hidden": hidden, "cell": cell}

    def imagine(
        self, start: Batch, policy: Callable[[Tensor, int], Tensor], horizon: int, *, deterministic: bool = False
    ) -> tuple[Batch, Tensor]:
        """`horizon` steps from states `[N, ...]`: states `[N, H+1, ...]`, the first being `start`, and the actions
        `[N, H, ...]` that `policy(features, step)` gave."""
        states, actions = [{part: start[part] for part in PARTS}], []
        for step in range(horizon):
            actions.append(policy(self.features(states[-1]), step))
            states.append(self.dream_step(states[-1], actions[-1], None if deterministic else 1.0))
        return _stack(states), torch.stack(actions, dim=1)


def _stack(states: Sequence[Batch]) -> Batch:
    return {key: torch.stack([state[key] for state in states], dim=1) for key in states[0]}


def mdn_rnn_loss(memory: MDNRNN, rows: Batch, latent: Tensor) -> LossOutput:
    """Of rows `[B, T]` with latents `[B, T, Z]`: how badly each row was foreseen from those before it.

    row t       0     1     2     3     4        a row counts that follows another one of its episode
    is_first    1     0     0     1     0
    counts      .     1     1     0     1
    """
    counts = (~rows["is_first"][:, 1:]).to(torch.float32)
    hidden = memory.hidden_of_rows(latent, rows["action"], rows["is_first"])[:, 1:]
    reward, end = memory.outcome(hidden)
    is_terminal = rows["is_terminal"][:, 1:].to(torch.float32)
    errors = {
        "latent": -memory.mixture(hidden).log_likelihood(latent[:, 1:]).mean(dim=-1),
        "reward": (reward - rows["reward"][:, 1:]).square(),
        "end": F.binary_cross_entropy_with_logits(end, is_terminal, reduction="none")
        * (1.0 + (memory.end_weight - 1.0) * is_terminal),
    }
    total = counts.sum().clamp(min=1.0)
    return LossOutput({name: (error * counts).sum() / total for name, error in errors.items()})


class DreamStarts(nn.Module):
    """Latents of first rows, as normals `[capacity, 2 Z]`: where dreams begin. New ones replace the oldest."""

    normals: Tensor
    count: Tensor

    def __init__(self, *, capacity: int, input_size: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.register_buffer("normals", torch.zeros(capacity + 1, input_size))  # the last one takes what is no start
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def keep(self, normal: Tensor, is_first: Tensor) -> None:
        """Of rows `[B, T]` with normals `[B, T, 2 Z]`, those where an episode begins; nothing is read back."""
        is_first, normal = is_first.flatten(), normal.detach().flatten(0, 1)
        place = (self.count + is_first.cumsum(dim=0) - 1) % self.capacity
        self.normals[torch.where(is_first, place, self.capacity)] = normal
        self.count += is_first.sum()

    def draw(self, count: int) -> Tensor:
        """`[count, Z]`; one that was never kept is a draw of N(0, 1), the prior of V."""
        there = self.count.clamp(min=1, max=self.capacity)
        place = (torch.rand(count, device=there.device) * there).to(torch.int64).clamp(max=self.capacity - 1)
        return draw_latent(self.normals[place])
