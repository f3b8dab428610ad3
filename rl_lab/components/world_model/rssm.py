"""The recurrent state-space model: a memory that is sure of itself (deter) and a guess beside it (stoch).

     row t            0         1         2                  "PlaNet" (Hafner et al. 2019, arXiv:1811.04551)
     previous action  (0)       a0        a1                 the answer to the row before; nothing where is_first
     embedding        e0        e1        e2                 what the encoder made of the row's observation
     deter            d0        d1        d2                 d_t = cell(d_t-1, s_t-1, a_t-1)
     stoch            s0        s1        s2                 s_t ~ posterior(d_t, e_t); in a dream s_t ~ prior(d_t)

is_first forgets state and action before the row is read. Whatever does not wait for the recurrence is computed for
all rows at once: the action's and the embedding's share of their layers before the loop, the priors after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.networks.mlp import ACTIVATIONS, choose
from rl_lab.components.world_model.latents import CategoricalLatent
from rl_lab.components.world_model.layers import (
    NORM_EPSILON,
    BlockLinear,
    Layer,
    RMSNorm,
    Stack,
    block_product,
    dense,
    make_norm,
)
from rl_lab.kernels.recurrence import Shape, Weights, dream, unroll
from rl_lab.types import ActionSpec, Batch, ConfigError

CONTEXT_KEYS = ("context_deter", "context_stoch")
State = Batch
"""`deter [..., D]` and `stoch [..., Z]`."""


class Actor(Protocol):
    def decide(self, features: Tensor, noise: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Decisions:
    """A policy for dreams: what `actor` decides with the noise of each step `[H, N, ...]`."""

    actor: Actor
    noise: Tensor

    def __call__(self, seen: Tensor, step: int) -> Tensor:
        return self.actor.decide(seen.detach(), self.noise[step])


class Latent(Protocol):
    size: int
    parameter_size: int

    def noise(self, *leading: int, device: torch.device) -> Tensor: ...
    def sample(self, parameters: Tensor, noise: Tensor | None) -> Tensor: ...
    def kl(self, ours: Tensor, theirs: Tensor) -> Tensor: ...
    def entropy(self, parameters: Tensor) -> Tensor: ...
    def pack(self, sample: Tensor) -> Tensor: ...
    def unpack(self, packed: Tensor) -> Tensor: ...


class BlockGRU(nn.Module):
    """The recurrence of DreamerV3: every input normed on its own, then a GRU whose matrices are block-diagonal.

    Blocks keep a wide memory cheap: D = 8192 in 8 blocks costs an eighth of the full matrix (danijar/dreamerv3,
    rssm.py `_core`). Each block sees its own part of the memory and the whole of the other inputs.
    """

    def __init__(
        self,
        *,
        deter: int,
        hidden: int,
        blocks: int,
        stoch_size: int,
        action_size: int,
        activation: str = "silu",
        norm: str = "rms",
    ) -> None:
        super().__init__()
        if blocks < 1 or deter % blocks:
            raise ConfigError(f"dynamics: blocks is {blocks}, which does not divide deter {deter}: write a divisor.")
        style = {"activation": activation, "norm": norm}
        self.deter, self.hidden, self.blocks = deter, hidden, blocks
        self.from_deter = Layer(deter, hidden, **style)
        self.from_stoch = Layer(stoch_size, hidden, **style)
        self.from_action = Layer(action_size, hidden, **style)
        self.mix = BlockLinear(deter + blocks * 3 * hidden, deter, blocks=blocks)
        self.mix_norm = make_norm(norm, deter)
        self.gates = BlockLinear(deter, 3 * deter, blocks=blocks)
        self.activation = choose(ACTIVATIONS, activation, place="dynamics activation")
        self.is_standard = activation == "silu" and norm == "rms"

    def read_action(self, action: Tensor) -> Tensor:
        """The action's part of the input `[..., hidden]`, which needs no state."""
        return self.from_action(action)

    def forward(self, deter: Tensor, stoch: Tensor, from_action: Tensor) -> Tensor:
        """The next deter `[N, D]`."""
        inputs = torch.cat((self.from_deter(deter), self.from_stoch(stoch), from_action), dim=-1)
        # All blocks see the same inputs, so their columns together are one full matrix: nothing is repeated.
        own, shared = self.mix.weight.split((self.deter // self.blocks, 3 * self.hidden), dim=1)
        mixed = block_product(deter, own) + inputs @ shared.transpose(0, 1).flatten(1) + self.mix.bias
        gates = self.gates(self.activation(self.mix_norm(mixed)))
        reset, candidate, update = gates.view(len(deter), self.blocks, 3, -1).unbind(dim=2)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate).flatten(1)
        update = torch.sigmoid(update - 1.0).flatten(1)  # -1: remembers at the start (danijar/dreamerv3, rssm.py)
        return deter + update * (candidate - deter)


class GRU(nn.Module):
    """DreamerV2's recurrence: one layer for latent and action, then a GRU, normed. The first release of V3 (2023) norms
    that layer as well. Without norms it also stands in for those of PlaNet and V1, whose cells differ in where they
    reset and in how they start to remember."""

    def __init__(
        self,
        *,
        deter: int,
        hidden: int,
        blocks: int,
        stoch_size: int,
        action_size: int,
        activation: str = "elu",
        norm: str = "none",
        input_norm: str = "none",
    ) -> None:
        super().__init__()
        if blocks != 1:
            raise ConfigError(f"dynamics: blocks is {blocks}, but recurrence gru has one block: write blocks: 1.")
        self.stoch_size = stoch_size
        self.input = Layer(stoch_size + action_size, hidden, activation=activation, norm=input_norm)
        self.gates = dense(hidden + deter, 3 * deter)
        self.gates_norm = make_norm(norm, 3 * deter)

    def read_action(self, action: Tensor) -> Tensor:
        """The action's share of the first layer `[..., hidden]`, before its activation."""
        return self.input.before(action, self.stoch_size, with_bias=True)

    def forward(self, deter: Tensor, stoch: Tensor, from_action: Tensor) -> Tensor:
        """The next deter `[N, D]`."""
        inputs = self.input.after(self.input.before(stoch, 0, with_bias=False) + from_action)
        gates = self.gates_norm(self.gates(torch.cat((inputs, deter.to(inputs.dtype)), dim=-1)))
        reset, candidate, update = gates.chunk(3, dim=-1)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        update = torch.sigmoid(update - 1.0)  # danijar/dreamerv2, common/nets.py `GRUCell`
        return deter + update * (candidate - deter)


CELLS: dict[str, type[BlockGRU] | type[GRU]] = {"block_gru": BlockGRU, "gru": GRU}


class RSSM(nn.Module):
    """`observe` while acting, `observe_sequence` while learning, `imagine` to dream."""

    context_keys = CONTEXT_KEYS  # what rows keep of the state after them, for whoever begins with the next row
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
        self.cell = choose(CELLS, recurrence, place="dynamics recurrence")(
            deter=deter,
            hidden=hidden,
            blocks=blocks,
            stoch_size=latent.size,
            action_size=sum(action.sizes),
            **recurrent_style,
        )
        self.prior_stack = Stack(deter, layers=prior_layers, units=hidden, **style)
        self.prior_output = dense(self.prior_stack.output_size, latent.parameter_size)
        self.posterior_layer = Layer(deter + input_size, hidden, **style)
        self.posterior_stack = Stack(hidden, layers=posterior_layers - 1, units=hidden, **style)
        self.posterior_output = dense(hidden, latent.parameter_size)
        self.output_size = deter + latent.size
        self.register_buffer("choice_ids", torch.arange(max(action.sizes)), persistent=False)

    # --- states ---

    def initial_state(self, batch_size: int, device: torch.device) -> State:
        """Nothing known: zeros."""
        return {
            "deter": torch.zeros(batch_size, self.deter, device=device),
            "stoch": torch.zeros(batch_size, self.latent.size, device=device),
        }

    def features(self, state: State) -> Tensor:
        """What heads read: `[..., output_size]`."""
        deter, stoch = state["deter"], state["stoch"]
        if deter.is_cuda and not torch.is_grad_enabled() and _lie_side_by_side(deter, stoch):
            return deter.as_strided((*deter.shape[:-1], self.output_size), deter.stride())  # a dream: nothing to copy
        return torch.cat((deter, stoch), dim=-1)

    def encode_action(self, action: Tensor) -> Tensor:
        """Actions as the model reads them `[..., sum(sizes)]`: one-hots side by side, or numbers pressed to [-1, 1]."""
        if self.action.kind == "continuous" and action.is_cuda and not torch.is_grad_enabled():
            from rl_lab.kernels.triton import heads as head_kernels

            low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32
            return head_kernels.press(action, low)
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
        keep = (~is_first).to(torch.float32).unsqueeze(-1)
        from_action = self.cell.read_action(self.encode_action(action) * keep)
        from_embedding = self.posterior_layer.before(embedding, self.deter, with_bias=True)
        deter, stoch, posterior = self._observe(
            state["deter"], state["stoch"], from_action, from_embedding, keep, noise
        )
        return {"deter": deter, "stoch": stoch}, posterior

    def observe_sequence(
        self, embedding: Tensor, action: Tensor, is_first: Tensor, state: State
    ) -> tuple[State, Tensor]:
        """Rows `[B, T, ...]` with their previous actions, from the state before row 0, to states and posteriors."""
        batch_size, length = is_first.shape
        noise = self.latent.noise(length, batch_size, device=embedding.device)
        keep = (~is_first).to(torch.float32).unsqueeze(-1)
        from_action = self.cell.read_action(self.encode_action(action) * keep)
        from_embedding = self.posterior_layer.before(embedding, self.deter, with_bias=True)
        deter, stoch = state["deter"], state["stoch"]
        if self._can_unroll_at_once():
            deters, stochs, posteriors = self._unroll(from_action, from_embedding, keep, noise, deter, stoch)
            return {"deter": deters, "stoch": stochs}, posteriors
        rows = zip(from_action.unbind(1), from_embedding.unbind(1), keep.unbind(1), noise.unbind(0), strict=True)
        outputs = []
        for row_action, row_embedding, row_keep, row_noise in rows:
            deter, stoch, posterior = self._observe(deter, stoch, row_action, row_embedding, row_keep, row_noise)
            outputs.append((deter, stoch, posterior))
        deters, stochs, posteriors = (torch.stack(part, dim=1) for part in zip(*outputs, strict=True))
        return {"deter": deters, "stoch": stochs}, posteriors

    def _observe(
        self,
        deter: Tensor,
        stoch: Tensor,
        from_action: Tensor,
        from_embedding: Tensor,
        keep: Tensor,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        deter = self.cell(deter * keep, stoch * keep, from_action)
        hidden = self.posterior_layer.before(deter, 0, with_bias=False) + from_embedding
        posterior = self.posterior_output(self.posterior_stack(self.posterior_layer.after(hidden)))
        return deter, self.latent.sample(posterior, noise), posterior

    def _can_unroll_at_once(self) -> bool:
        """Whether these are the parts that `unroll` knows: those of DreamerV3."""
        return (
            isinstance(self.cell, BlockGRU)
            and self.cell.is_standard
            and isinstance(self.latent, CategoricalLatent)
            and self.posterior_layer.is_one_node
            and len(self.posterior_stack.layers) == 0
        )

    def _unroll(
        self, from_action: Tensor, from_embedding: Tensor, keep: Tensor, noise: Tensor, deter: Tensor, stoch: Tensor
    ) -> tuple[Tensor, ...]:
        """The loop as one autograd node, with all its weight gradients formed at once."""
        latent = self.latent
        assert isinstance(latent, CategoricalLatent)
        outputs = unroll(
            self._weights(),
            from_action.transpose(0, 1),
            from_embedding.transpose(0, 1),
            keep.squeeze(-1).t().contiguous(),
            noise,
            deter,
            stoch,
            groups=latent.groups,
            unimix=latent.unimix,
            epsilon=NORM_EPSILON,
            low=from_embedding.dtype,
            one_kernel=self.one_kernel,
        )
        return tuple(output.transpose(0, 1) for output in outputs)

    def _weights(self) -> Weights:
        cell, posterior = self.cell, self.posterior_layer
        assert isinstance(cell, BlockGRU)
        return Weights(
            deter_in=cell.from_deter.linear.weight,
            deter_in_bias=cell.from_deter.linear.bias,
            deter_in_norm=_norm_weight(cell.from_deter.norm),
            stoch_in=cell.from_stoch.linear.weight,
            stoch_in_bias=cell.from_stoch.linear.bias,
            stoch_in_norm=_norm_weight(cell.from_stoch.norm),
            mix=cell.mix.weight,
            mix_bias=cell.mix.bias,
            mix_norm=_norm_weight(cell.mix_norm),
            gates=cell.gates.weight,
            gates_bias=cell.gates.bias,
            posterior=posterior.linear.weight[:, : self.deter],
            posterior_norm=_norm_weight(posterior.norm),
            output=self.posterior_output.weight,
            output_bias=self.posterior_output.bias,
        )

    def prior(self, deter: Tensor) -> Tensor:
        """What the model expects without looking: the latent's parameters `[..., P]`."""
        return self.prior_output(self.prior_stack(deter))

    # --- without observations ---

    def imagine_step(self, state: State, action: Tensor, noise: Tensor | None) -> State:
        """The state `[N, ...]` after an action, from the model alone; without noise, the likeliest."""
        deter = self.cell(state["deter"], state["stoch"], self.cell.read_action(self.encode_action(action)))
        return {"deter": deter, "stoch": self.latent.sample(self.prior(deter), noise)}

    def imagine(
        self, start: State, policy: Callable[[Tensor, int], Tensor], horizon: int, *, deterministic: bool = False
    ) -> tuple[State, Tensor]:
        """`horizon` steps from states `[N, ...]`: states `[N, H+1, ...]`, the first being `start`, and the actions
        `[N, H, ...]` that `policy(features, step)` gave in the first H of them."""
        count, device = start["deter"].shape[0], start["deter"].device
        noise = None if deterministic else self.latent.noise(horizon, count, device=device)
        if not torch.is_grad_enabled() and self._can_unroll_at_once():
            return self._dream(start, policy, horizon, noise)
        states, actions = [start], []
        for step in range(horizon):
            actions.append(policy(self.features(states[-1]), step))
            states.append(self.imagine_step(states[-1], actions[-1], None if noise is None else noise[step]))
        together = {key: torch.stack([state[key] for state in states], dim=1) for key in start}
        return together, torch.stack(actions, dim=1)

    def _dream(
        self, start: State, policy: Callable[[Tensor, int], Tensor], horizon: int, noise: Tensor | None
    ) -> tuple[State, Tensor]:
        """The loop above with weights cast once and few kernels, where no gradient is wanted."""
        latent, actions = self.latent, []
        assert isinstance(latent, CategoricalLatent)
        deter, stoch, device = start["deter"], start["stoch"], start["deter"].device.type
        weights = replace(self._weights(), output=self.prior_output.weight, output_bias=self.prior_output.bias)
        shape = Shape.of(
            weights,
            deter,
            stoch,
            length=1,
            groups=latent.groups,
            unimix=latent.unimix,
            epsilon=NORM_EPSILON,
            low=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else deter.dtype,
            one_kernel=self.one_kernel,
        )
        prior = list(self.prior_stack.layers)
        whole = whole_dream_for(shape, prior, policy, deter.device)
        if whole is not None and noise is not None:
            assert isinstance(policy, Decisions) and isinstance(self.cell, BlockGRU)
            layers = (self.cell.from_action, prior, policy.actor)
            states, chosen = whole.dream(weights, shape, *layers, start, policy.noise, noise)
        else:

            def decide(seen: Tensor, step: int) -> Tensor:
                actions.append(policy(seen, step))
                return self.cell.read_action(self.encode_action(actions[-1]))

            def expect(deter: Tensor) -> Tensor:
                return F.linear(self.prior_stack(deter), self.prior_output.weight)

            states = dream(weights, start, decide, expect, noise, shape=shape, horizon=horizon)
            chosen = torch.stack(actions)
        states = states.transpose(0, 1)
        together = {"deter": states[..., : self.deter], "stoch": states[..., self.deter :]}
        return together, chosen.transpose(0, 1)

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

        Without a context (rows collected by others) every row is learnt from and nothing is known before row 0.
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


def whole_dream_for(
    shape: Shape, prior: list[nn.Module], policy: Callable[[Tensor, int], Tensor], device: torch.device
) -> Any:
    """The kernel that dreams all steps at once, where there is a GPU and the networks are small enough; or None."""
    if device.type != "cuda" or not shape.one_kernel or not isinstance(policy, Decisions):
        return None
    from rl_lab.kernels.triton import dream as dream_kernel

    return dream_kernel if dream_kernel.fits(shape, prior, policy.actor) else None


def _lie_side_by_side(left: Tensor, right: Tensor) -> bool:
    """Whether `right` is what follows `left` along the last axis of one tensor."""
    return (
        left.dtype == right.dtype
        and left.stride() == right.stride()
        and left.stride(-1) == 1
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and left.storage_offset() + left.shape[-1] == right.storage_offset()
    )


def _norm_weight(norm: nn.Module) -> Tensor:
    assert isinstance(norm, RMSNorm)
    return norm.weight
