"""The temporal-difference loss of plain Q networks with its gradient, as one autograd node, for training on CPUs.

With e_b = Q(s_b, a_b) - target_b and c_b = e_b cut to the Huber threshold (uncut: half the squared error everywhere),

    L             = mean( w_b c_b (e_b - c_b / 2) ),   w_b: the weight that prioritised replay gives, or 1
    dL/dQ(s_b, k) = w_b c_b / B   where k = a_b, else 0

    dueling         Q = V + A - mean_k A:   dL/dV = sum_k dL/dQ_k,   dL/dA_k = dL/dQ_k - mean_k dL/dQ_k

A 2x64 network on a batch of 64 rows computes for 60 microseconds there and back; layer by layer, torch's calls and
autograd's bookkeeping take four times as long again. `q_values.QValues` says the same for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import Function

from rl_lab.components import fused
from rl_lab.components.encoders import ObservationEncoder
from rl_lab.components.fused import Stack
from rl_lab.components.q_values import QValues
from rl_lab.components.transitions import n_step_transitions
from rl_lab.types import Batch

MOST_PRODUCTS = 2 * fused.MOST_PRODUCTS  # of one matrix product in numpy; its BLAS wakes threads for more

_NOTHING = np.float32(0.0)


class ValueLoss(NamedTuple):
    """The mean loss, how wrong each transition was `[B]`, and the mean of all values."""

    loss: Tensor
    priority: Tensor
    value_mean: float


class Transitions(NamedTuple):
    """From `features [B, F]` by `action [B]` to `reward + discount * value(next_features)`; `next_mask [B, A]`."""

    features: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    next_features: np.ndarray
    next_mask: np.ndarray | None


class PlainValues:
    """Expected returns straight from one observed vector, and the slower copy that judges what comes next."""

    def __init__(self, encoder: Any, head: Any, slow_head: Any) -> None:
        is_plain = isinstance(encoder, ObservationEncoder) and not encoder.has_layers and type(head) is QValues
        self.key: str | None = encoder.plain_key if is_plain else None
        self.head, self.slow_head = head, slow_head

    def stacks(self, batch: Batch) -> tuple[list[Stack], list[Stack]] | None:
        """The layers of both, where the one node can stand for learning from this batch."""
        if self.key is None or len(batch["reward"]) < fused.FEWEST_ROWS or not fused.can_fuse(batch[self.key]):
            return None
        learning, slow = _stacks(self.head), _stacks(self.slow_head)
        return None if learning is None or slow is None else (learning, slow)

    def loss(
        self, batch: Batch, *, discount: float, reward_clip: float | None = None, double: bool = False
    ) -> ValueLoss | None:
        """Of rows `[B, n+1]` to the target after n rewards; None where it takes torch, layer by layer.

        The next action is the target network's own choice, or the learning network's if `double`.
        """
        stacks = self.stacks(batch)
        if stacks is None:
            return None
        assert self.key is not None
        learning, slow = stacks
        rows = self._transitions(batch, discount, reward_clip)
        every = np.arange(len(rows.action))
        next_values = _values(_through(rows.next_features, slow))
        chooser = _values(_through(rows.next_features, learning)) if double else next_values
        if rows.next_mask is not None:
            chooser = np.where(rows.next_mask, chooser, np.float32(-np.inf))
        target = next_values[every, chooser.argmax(1)]
        target *= rows.discount
        target += rows.reward

        hidden_of = _through(rows.features, learning)
        values, taken = _values(hidden_of), (every, rows.action)
        error = values[taken] - target
        slope, limit, share = error, self.head.huber_threshold, 1.0 / len(every)
        if limit is not None:
            slope = np.minimum(np.maximum(error, np.float32(-limit)), np.float32(limit))
        rest = error - np.float32(0.5) * slope
        slope = slope * (np.float32(share) if "weight" not in batch else batch["weight"].numpy() * np.float32(share))
        values_slope = np.zeros(values.shape, np.float32)
        values_slope[taken] = slope
        gradients = _gradients(learning, hidden_of, values_slope)
        named = gradients[0][0] if gradients else batch[self.key]  # a phase may have frozen everything
        loss = _KnownGradients.apply(named, float(slope @ rest), gradients)  # type: ignore[no-untyped-call]
        return ValueLoss(loss, torch.from_numpy(np.abs(error)), float(np.add.reduce(values, axis=None)) / values.size)

    def _transitions(self, batch: Batch, discount: float, reward_clip: float | None) -> Transitions:
        assert self.key is not None
        observed, action, mask = batch[self.key].numpy(), batch["action"].numpy(), batch.get("action_mask")
        masks = None if mask is None else mask.numpy()
        if reward_clip is not None:
            batch = {**batch, "reward": batch["reward"].clamp(-reward_clip, reward_clip)}
        if action.shape[1] == 2:  # one reward: row 1 always follows
            reward, going_on = batch["reward"].numpy()[:, 1], ~batch["is_terminal"].numpy()[:, 1]
            factor = going_on * np.float32(discount)
            place: tuple[Any, Any] = (slice(None), 1)
        else:
            found = n_step_transitions(batch, discount)
            reward, factor = found["reward"].numpy(), found["discount"].numpy()
            place = (np.arange(len(action)), found["next_row"].numpy())
        next_mask = None if masks is None else masks[place]
        return Transitions(observed[:, 0], action[:, 0], reward, factor, observed[place], next_mask)


class _KnownGradients(Function):
    """A loss whose gradients are there already: what is left for the way back is a factor.

    It stands for all parameters but names only one of them to autograd (`fused.add_to_gradients`); an Optimizer takes
    its `known_gradients` without asking autograd at all.
    """

    @staticmethod
    def forward(ctx: Any, one_of_them: Tensor, loss: float, gradients: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.known_gradients = gradients
        return torch.scalar_tensor(loss)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        fused.add_to_gradients(ctx.known_gradients, factor)
        return None, None, None


def _stacks(head: QValues) -> list[Stack] | None:
    networks = [head.advantage] if head.value is None else [head.advantage, head.value]
    stacks = [stack for network in networks if (stack := network.stack()) is not None]
    return stacks if len(stacks) == len(networks) else None


def _through(rows: np.ndarray, stacks: Sequence[Stack]) -> list[list[np.ndarray]]:
    """For each stack: the rows `[B, F]`, then what every layer makes of them."""
    hidden_of = []
    for stack in stacks:
        arrays, last, hidden = stack.arrays(), len(stack.layers) - 2, [rows]
        for i in range(0, last + 2, 2):
            after = _product(hidden[-1], arrays[i])
            after += arrays[i + 1]
            if i < last:  # heads end with a bare layer
                if stack.activation == "tanh":
                    np.tanh(after, out=after)
                else:
                    np.maximum(after, _NOTHING, out=after)
            hidden.append(after)
        hidden_of.append(hidden)
    return hidden_of


def _values(hidden_of: list[list[np.ndarray]]) -> np.ndarray:
    """Values `[B, A]` from the outputs of the one stack, or of the two."""
    advantage = hidden_of[0][-1]
    if len(hidden_of) == 1:
        return advantage
    return hidden_of[1][-1] + advantage - advantage.mean(1, keepdims=True)


def _gradients(
    stacks: Sequence[Stack], hidden_of: list[list[np.ndarray]], values_slope: np.ndarray
) -> list[tuple[Tensor, Tensor]]:
    """Every parameter that learns with its gradient, from the slopes of the values `[B, A]`."""
    slopes = [values_slope]
    if len(stacks) == 2:
        slopes = [values_slope - values_slope.mean(1, keepdims=True), values_slope.sum(1, keepdims=True)]
    found: list[tuple[Tensor, Tensor]] = []
    every = np.ones(len(values_slope), np.float32)
    for stack, hidden, slope in zip(stacks, hidden_of, slopes, strict=True):
        arrays = stack.arrays()
        for i in reversed(range(0, len(stack.layers), 2)):
            weight, bias, before = stack.layers[i], stack.layers[i + 1], hidden[i // 2]
            if weight.requires_grad:
                found.append((weight, torch.from_numpy(_product(slope.T, before))))
            if bias.requires_grad:
                found.append((bias, torch.from_numpy(every @ slope)))
            if i > 0:
                slope = _product(slope, arrays[i].T)
                if stack.activation == "tanh":
                    slope *= np.float32(1.0) - before * before
                else:
                    slope *= before > _NOTHING
    return found


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The matrix product; large ones are torch's, which keeps to its number of threads."""
    if left.shape[0] * right.size <= MOST_PRODUCTS:
        return left @ right
    return torch.mm(torch.from_numpy(left), torch.from_numpy(right)).numpy()
