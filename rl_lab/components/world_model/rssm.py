"""The recurrent state-space model, a deterministic memory (deter) and a stochastic latent (stoch), and its loss.

     row t            0         1         2                  "PlaNet" (Hafner et al. 2019, arXiv:1811.04551)
     previous action  (0)       a0        a1                 the answer to the row before; zeros where is_first
     embedding        e0        e1        e2                 what the encoder made of the row's observation
     deter            d0        d1        d2                 d_t = cell(d_t-1, s_t-1, a_t-1)
     stoch            s0        s1        s2                 s_t ~ posterior(d_t, e_t); in a dream s_t ~ prior(d_t)

is_first resets state and action before the row is read. Nobody else names the parts of a state: it is a dictionary of
tensors with the same leading axes, which may be sliced, stacked, flattened and repeated like any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rl_lab.components.heads.distributions import FORBIDDEN_LOGIT
from rl_lab.components.networks.layers import ACTIVATIONS, choose
from rl_lab.components.world_model.layers import BlockLinear, Layer, Stack, dense, make_norm
from rl_lab.kernels.door import fast_path
from rl_lab.types import ActionSpec, Batch, ConfigError, LossOutput

CONTEXT_KEYS = ("context_deter", "context_stoch")
State = Batch
"""`deter [..., D]` and `stoch [..., Z]`."""
Head = Callable[[Tensor], Any]
"""Features `[..., F]` to a prediction with `loss(target)`, `[...]`."""


class Actor(Protocol):
    def decide(self, features: Tensor, noise: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Decisions:
    """A policy for dreams: what `actor` decides with the noise of each step `[H, N, ...]`."""

    actor: Actor
    noise: Tensor

    def __call__(self, features: Tensor, step: int) -> Tensor:
        return self.actor.decide(features.detach(), self.noise[step])

    def obeyed(self) -> Batch:
        """What the decisions of all steps obeyed, `[N, H, ...]`."""
        return {}


@dataclass(frozen=True)
class MaskedDecisions(Decisions):
    """The same among the actions that `mask_head` expects to be allowed; `masks` are those of the steps so far.

    Noise that low never wins: what is left is a draw among the others. The masks are kept, since a head that is asked
    again, about all steps at once, may round to another answer.
    """

    mask_head: Callable[[Tensor], Any]
    masks: list[Tensor] = field(default_factory=list)

    def __call__(self, features: Tensor, step: int) -> Tensor:
        features = features.detach()
        self.masks.append(self.mask_head(features).mask())
        return self.actor.decide(features, self.noise[step].masked_fill(~self.masks[-1], FORBIDDEN_LOGIT))

    def obeyed(self) -> Batch:
        return {"action_mask": torch.stack(self.masks, dim=1)}


def unroll(dynamics: Any, actor: Any, start: Batch, horizon: int, mask_head: Any | None) -> tuple[Batch, Batch]:
    """An actor in a model from states `[N, ...]` on: states `[N, H+1, ...]`, and `action` `[N, H, ...]`, where some are
    forbidden together with the `action_mask` that the head expects."""
    some_part = next(iter(start.values()))
    noise = actor.noise(horizon, len(some_part), device=some_part.device)
    policy = Decisions(actor, noise) if mask_head is None else MaskedDecisions(actor, noise, mask_head)
    states, action = dynamics.imagine(start, policy, horizon)
    return states, {"action": action, **policy.obeyed()}


class Latent(Protocol):
    size: int
    parameter_size: int

    def noise(self, *leading: int, device: torch.device) -> Tensor: ...
    def sample(self, parameters: Tensor, noise: Tensor | None) -> Tensor: ...
    def kl(self, ours: Tensor, theirs: Tensor) -> Tensor: ...
    def entropy(self, parameters: Tensor) -> Tensor: ...
    def pack(self, sample: Tensor) -> Tensor: ...
    def unpack(self, packed: Tensor) -> Tensor: ...


class Decoder(Protocol):
    loss: Callable[[Tensor, Batch], Tensor]


@dataclass(frozen=True)
class CellSizes:
    """Of a recurrence: its memory, the layers before it, blocks of its matrices, and what it reads."""

    deter: int
    hidden: int
    blocks: int
    stoch: int
    action: int


class BlockGRU(nn.Module):
    """The recurrence of DreamerV3: every input normed on its own, then a GRU whose matrices are block-diagonal.

    Blocks keep a wide memory cheap: D = 8192 in 8 blocks costs an eighth of the full matrix (danijar/dreamerv3,
    rssm.py `_core`). Each block sees its own part of the memory and the whole of the other inputs.
    """

    def __init__(self, sizes: CellSizes, *, activation: str = "silu", norm: str = "rms") -> None:
        super().__init__()
        self.hidden, self.blocks = hidden, blocks = sizes.hidden, sizes.blocks
        deter, style = sizes.deter, {"activation": activation, "norm": norm}
        if blocks < 1 or deter % blocks:
            raise ConfigError(f"dynamics: blocks is {blocks}, which does not divide deter {deter}: write a divisor.")
        self.from_deter = Layer(deter, hidden, **style)
        self.from_stoch = Layer(sizes.stoch, hidden, **style)
        self.from_action = Layer(sizes.action, hidden, **style)
        self.mix = BlockLinear(deter + blocks * 3 * hidden, deter, blocks=blocks)
        self.mix_norm = make_norm(norm, deter)
        self.gates = BlockLinear(deter, 3 * deter, blocks=blocks)
        self.activation = choose(ACTIVATIONS, activation, place="dynamics activation")

    def forward(self, deter: Tensor, stoch: Tensor, action: Tensor) -> Tensor:
        """The next deter `[N, D]`."""
        inputs = torch.cat((self.from_deter(deter), self.from_stoch(stoch), self.from_action(action)), dim=-1)
        own = deter.unflatten(-1, (self.blocks, -1))  # [N, G, D/G]
        everyone = inputs.unsqueeze(1).expand(-1, self.blocks, -1)  # [N, G, 3 hidden]
        mixed = self.mix(torch.cat((own, everyone), dim=-1).flatten(1))
        gates = self.gates(self.activation(self.mix_norm(mixed)))
        reset, candidate, update = gates.unflatten(-1, (self.blocks, 3, -1)).unbind(dim=2)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate).flatten(1)
        update = torch.sigmoid(update - 1.0).flatten(1)  # -1: remembers at the start (danijar/dreamerv3, rssm.py)
        return deter + update * (candidate - deter)


class GRU(nn.Module):
    """DreamerV2's recurrence: one layer for latent and action, then a GRU, normed. The first release of V3 (2023) norms
    that layer as well. Without norms it also stands in for those of PlaNet and V1, whose cells differ in where they
    reset and in how they start to remember."""

    def __init__(
        self, sizes: CellSizes, *, activation: str = "elu", norm: str = "none", input_norm: str = "none"
    ) -> None:
        super().__init__()
        if sizes.blocks != 1:
            raise ConfigError(f"dynamics: blocks is {sizes.blocks}, but recurrence gru has one block: write blocks: 1.")
        self.input = Layer(sizes.stoch + sizes.action, sizes.hidden, activation=activation, norm=input_norm)
        self.gates = dense(sizes.hidden + sizes.deter, 3 * sizes.deter)
        self.gates_norm = make_norm(norm, 3 * sizes.deter)

    def forward(self, deter: Tensor, stoch: Tensor, action: Tensor) -> Tensor:
        """The next deter `[N, D]`."""
        inputs = self.input(torch.cat((stoch, action), dim=-1))
        gates = self.gates_norm(self.gates(torch.cat((inputs, deter.to(inputs.dtype)), dim=-1)))
        reset, candidate, update = gates.chunk(3, dim=-1)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        update = torch.sigmoid(update - 1.0)  # danijar/dreamerv2, common/nets.py `GRUCell`
        return deter + update * (candidate - deter)


CELLS: dict[str, type[BlockGRU] | type[GRU]] = {"block_gru": BlockGRU, "gru": GRU}


class RSSM(nn.Module):
    """`observe` while acting, `observe_sequence` while learning, `imagine` to dream."""

    state_keys = ("deter", "stoch")
    context_keys = CONTEXT_KEYS  # what rows keep of the state after them, for sequences that begin with the next row
    choice_ids: Tensor

    def __init__(
        self,
        *,
        input_size: int,
        action: ActionSpec,
        latent: Latent,
        recurrence: str = "block_gru",
        deter: int = 2048,
        hidden: int = 256,
        blocks: int = 8,
        prior_layers: int = 2,
        posterior_layers: int = 1,
        activation: str = "silu",
        norm: str = "rms",
        recurrence_norm: str | None = None,
        one_kernel: bool = True,
    ) -> None:
        super().__init__()
        if posterior_layers < 1:
            raise ConfigError(f"dynamics: posterior_layers is {posterior_layers}; write a whole number from 1 on.")
        if deter < 1 or hidden < 1:
            raise ConfigError(f"dynamics: deter is {deter} and hidden is {hidden}; write whole numbers from 1 on.")
        style = {"activation": activation, "norm": norm}
        recurrent_style = {"activation": activation, "norm": norm if recurrence_norm is None else recurrence_norm}
        if recurrence == "gru":
            recurrent_style["input_norm"] = norm
        self.action = action
        self.one_kernel = one_kernel
        self.deter = deter
        self.latent = latent
        sizes = CellSizes(deter, hidden, blocks, latent.size, sum(action.sizes))
        self.cell = choose(CELLS, recurrence, place="dynamics recurrence")(sizes, **recurrent_style)
        self.prior_stack = Stack(deter, layers=prior_layers, units=hidden, **style)
        self.prior_output = dense(self.prior_stack.output_size, latent.parameter_size)
        self.posterior_layer = Layer(deter + input_size, hidden, **style)
        self.posterior_stack = Stack(hidden, layers=posterior_layers - 1, units=hidden, **style)
        self.posterior_output = dense(hidden, latent.parameter_size)
        self.output_size = deter + latent.size
        self.register_buffer("choice_ids", torch.arange(max(action.sizes)), persistent=False)

    # --- states ---

    def initial_state(self, batch_size: int, device: torch.device) -> State:
        """Zeros."""
        sizes = (self.deter, self.latent.size)
        return {k: torch.zeros(batch_size, size, device=device) for k, size in zip(self.state_keys, sizes, strict=True)}

    @fast_path("rl_lab.kernels.gpu:FEATURES")
    def features(self, state: State) -> Tensor:
        """What heads read: `[..., output_size]`."""
        return torch.cat((state["deter"], state["stoch"]), dim=-1)

    def prior(self, state: State) -> Tensor:
        """The latent's parameters `[..., P]` from the memory alone, without the observation."""
        return self.prior_output(self.prior_stack(state["deter"]))

    def encode_action(self, action: Tensor) -> Tensor:
        """What the model reads `[..., sum(sizes)]`: one-hots side by side, or numbers scaled into [-1, 1]."""
        if self.action.kind == "continuous":
            return action / action.detach().abs().clamp(min=1.0)
        choices = action.unsqueeze(-1) if self.action.kind == "discrete" else action
        return torch.cat(
            [
                (choices[..., index, None] == self.choice_ids[:size]).to(torch.float32)
                for index, size in enumerate(self.action.sizes)
            ],
            dim=-1,
        )

    # --- with observations ---

    def observe(
        self, embedding: Tensor, action: Tensor, state: State, is_first: Tensor, *, deterministic: bool = False
    ) -> tuple[State, Tensor]:
        """One row: embedding `[N, E]` and the previous action `[N, ...]` to the state after it and its posterior."""
        noise = None if deterministic else self.latent.noise(len(embedding), device=embedding.device)
        return self._observe(embedding, self.encode_action(action), state, is_first, noise)

    @fast_path("rl_lab.kernels.gpu:OBSERVE_SEQUENCE")
    def observe_sequence(
        self, embedding: Tensor, action: Tensor, is_first: Tensor, state: State
    ) -> tuple[State, Tensor]:
        """Rows `[B, T, ...]` with their previous actions, from the state before row 0, to states and posteriors."""
        batch_size, length = is_first.shape
        noise, action = self.latent.noise(length, batch_size, device=embedding.device), self.encode_action(action)
        states, posteriors = [], []
        for t in range(length):
            state, posterior = self._observe(embedding[:, t], action[:, t], state, is_first[:, t], noise[t])
            states.append(state)
            posteriors.append(posterior)
        return _stack(states), torch.stack(posteriors, dim=1)

    def _observe(
        self, embedding: Tensor, action: Tensor, state: State, is_first: Tensor, noise: Tensor | None
    ) -> tuple[State, Tensor]:
        """One row with its encoded action."""
        # Filled, not multiplied by 0: what was NaN before an episode does not outlive its end.
        is_first = is_first.unsqueeze(-1)
        deter, stoch, action = (each.masked_fill(is_first, 0.0) for each in (state["deter"], state["stoch"], action))
        deter = self.cell(deter, stoch, action)
        hidden = self.posterior_layer(torch.cat((deter, embedding), dim=-1))
        posterior = self.posterior_output(self.posterior_stack(hidden))
        return {"deter": deter, "stoch": self.latent.sample(posterior, noise)}, posterior

    # --- without observations ---

    def imagine_step(self, state: State, action: Tensor, noise: Tensor | None) -> State:
        """The state `[N, ...]` after an action, from the model alone; without noise, the likeliest."""
        after = {"deter": self.cell(state["deter"], state["stoch"], self.encode_action(action))}
        return {**after, "stoch": self.latent.sample(self.prior(after), noise)}

    @fast_path("rl_lab.kernels.gpu:IMAGINE")
    def imagine(
        self, start: State, policy: Callable[[Tensor, int], Tensor], horizon: int, *, deterministic: bool = False
    ) -> tuple[State, Tensor]:
        """`horizon` steps from states `[N, ...]`: states `[N, H+1, ...]`, the first being `start`, and the actions
        `[N, H, ...]` that `policy(features, step)` gave in the first H of them."""
        count, device = start["deter"].shape[0], start["deter"].device
        noise = None if deterministic else self.latent.noise(horizon, count, device=device)
        states, actions = [start], []
        for step in range(horizon):
            actions.append(policy(self.features(states[-1]), step))
            states.append(self.imagine_step(states[-1], actions[-1], None if noise is None else noise[step]))
        return _stack(states), torch.stack(actions, dim=1)

    # --- what a replay row keeps ---

    def pack(self, state: State) -> Batch:
        """A state as rows keep it: half-precision memory (it lies in -1 to 1) and the packed latent."""
        packed = (state["deter"].to(torch.float16), self.latent.pack(state["stoch"]))
        return dict(zip(CONTEXT_KEYS, packed, strict=True))

    def unpack(self, row: Batch) -> State:
        """The state that `pack` made a row of."""
        deter, stoch = (row[key] for key in CONTEXT_KEYS)
        return {"deter": deter.to(torch.float32), "stoch": self.latent.unpack(stoch)}

    def begin(self, batch: Batch) -> tuple[Batch, State]:
        """The rows of a batch to learn from, with their `previous_action`, and the state before the first of them.

        row t            0                 1      ...    T       row 0 is there to begin with
        previous action                    a0            aT-1
        state before                       context of row 0

        Without a context (rows of a dataset) every row is learnt from, and the state before row 0 is blank.
        """
        action = batch["action"]
        if CONTEXT_KEYS[0] in batch:
            before = self.unpack({key: batch[key][:, 0] for key in CONTEXT_KEYS})
            rows = {key: values[:, 1:] for key, values in batch.items() if key not in CONTEXT_KEYS}
            return {**rows, "previous_action": action[:, :-1]}, before
        previous = torch.cat((torch.zeros_like(action[:, :1]), action[:, :-1]), dim=1)
        return {**batch, "previous_action": previous}, self.initial_state(len(action), action.device)

    def renew(self, batch: Batch, state: State) -> Batch:
        """The contexts of a batch `[B, T+1]` after its rows 1..T were seen anew; nothing where it had none."""
        if CONTEXT_KEYS[0] not in batch:
            return {}
        fresh = self.pack({key: value.detach() for key, value in state.items()})
        return {key: torch.cat((batch[key][:, :1], fresh[key]), dim=1) for key in CONTEXT_KEYS}


def _stack(states: Sequence[State]) -> State:
    """States `[N, ...]` of successive steps as one `[N, T, ...]`."""
    return {key: torch.stack([state[key] for state in states], dim=1) for key in states[0]}


def world_model_loss(
    rows: Batch,
    state: Batch,
    posterior: Tensor,
    *,
    dynamics: RSSM,
    decoder: Decoder,
    reward_head: Head,
    continue_head: Head | None = None,
    action_mask_head: Head | None = None,
    discount: float = 1.0,
    free_nats: float,
    are_free_on_average: bool = False,
) -> LossOutput:
    """Predict what was observed, and keep posterior and prior close to each other.

    Rows, states and posteriors `[B, T, ...]` of `observe_sequence`; equation 3 of PlaNet (arXiv:1811.04551), whose one
    divergence is two here, as in equations 3 to 5 of DreamerV3. A head that is None has no term.
    `aux` has every row's losses `[B, T]`.
    """
    features = dynamics.features(state)  # [B, T, F]
    prior = dynamics.prior(state)
    latent = dynamics.latent
    # Two divergences of the same value: one teaches the prior, the other the posterior. Below `free_nats` none.
    towards_posterior = latent.kl(posterior.detach(), prior)
    towards_prior = latent.kl(posterior, prior.detach())
    losses = {"reconstruction": decoder.loss(features, rows), "reward": reward_head(features).loss(rows["reward"])}
    if continue_head is not None:
        continues = (~rows["is_terminal"]).to(torch.float32) * discount
        losses["continue"] = continue_head(features).loss(continues)
    if action_mask_head is not None:
        losses["action_mask"] = action_mask_head(features).loss(rows["action_mask"])
    divergences = {"dynamics": towards_posterior, "representation": towards_prior}
    if not are_free_on_average:  # V3
        divergences = {name: divergence.clamp(min=free_nats) for name, divergence in divergences.items()}
    losses |= divergences
    terms = {name: loss.mean() for name, loss in losses.items()}
    if are_free_on_average:  # V1 and V2
        terms |= {name: terms[name].clamp(min=free_nats) for name in divergences}
    with torch.no_grad():
        metrics = {
            "train/model_kl": towards_posterior.mean(),
            "train/prior_entropy": latent.entropy(prior).mean(),
            "train/posterior_entropy": latent.entropy(posterior).mean(),
        }
    return LossOutput(terms, metrics, {name: loss.detach() for name, loss in losses.items()})
