"""The temporal-difference loss of plain Q networks together with its gradient, for training on CPUs.

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

from rl_lab.components.heads.q_values import QValues
from rl_lab.components.networks.encoders import ObservationEncoder
from rl_lab.components.returns.transitions import n_step_transitions
from rl_lab.kernels import fused
from rl_lab.kernels.fused import GradientRoom, Known, Stack
from rl_lab.kernels.workbench import slope as slope_before
from rl_lab.types import Batch

MOST_PRODUCTS = 2 * fused.MOST_PRODUCTS  # of one matrix product in numpy; its BLAS wakes threads for more
MOST_NUMBERS = 2**13  # of one array that numpy activates; torch, whose calls cost more each, is faster beyond

_NOTHING = np.float32(0.0)


class ValueLoss(NamedTuple):
    """The mean loss, how wrong each transition was `[B]`, the mean of all values, and what the loss wants changed."""

    loss: float
    priority: Tensor
    value_mean: float
    known: Known


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
        self._room: GradientRoom | None = None
        self._first_of_row = np.arange(0)  # [B]: where each row's values begin when all are one after the other

    def loss(
        self, batch: Batch, *, discount: float, reward_clip: float | None = None, double: bool = False
    ) -> ValueLoss | None:
        """Of rows `[B, n+1]` to the target after n rewards; None where it takes torch, layer by layer.

        The next action is the target network's own choice, or the learning network's if `double`.
        """
        if self.key is None or not (torch.is_grad_enabled() and fused.is_plain(batch[self.key])):
            return None
        learning, slow = _stacks(self.head), _stacks(self.slow_head)
        if learning is None or slow is None:
            return None
        rows = self._transitions(batch, discount, reward_clip)
        arrays_of, slow_arrays_of = ([stack.arrays() for stack in stacks] for stacks in (learning, slow))
        activation = learning[0].activation
        next_values = _values(_through(rows.next_features, slow_arrays_of, activation))
        chooser = _values(_through(rows.next_features, arrays_of, activation)) if double else next_values
        if rows.next_mask is not None:
            chooser = np.where(rows.next_mask, chooser, np.float32(-np.inf))
        first_of_row = self._firsts(*chooser.shape)
        target = next_values.take(first_of_row + chooser.argmax(1))
        target *= rows.discount
        target += rows.reward

        hidden_of = _through(rows.features, arrays_of, activation)
        values, taken = _values(hidden_of), first_of_row + rows.action
        error = values.take(taken) - target
        slope, limit, share = error, self.head.huber_threshold, np.float32(1.0 / len(error))
        if limit is not None:
            slope = np.minimum(np.maximum(error, np.float32(-limit)), np.float32(limit))
        rest = error - np.float32(0.5) * slope
        slope = slope * (share if "weight" not in batch else batch["weight"].numpy() * share)
        values_slope = np.zeros(values.shape, np.float32)
        values_slope.reshape(-1)[taken] = slope
        room = self._room_for(learning)
        _go_back(arrays_of, activation, hidden_of, values_slope, room.arrays)
        value_mean = float(np.add.reduce(values, axis=None)) / values.size
        priority = torch.from_numpy(np.abs(error))
        return ValueLoss(float(slope @ rest), priority, value_mean, room.known)

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

    def _firsts(self, num_rows: int, num_actions: int) -> np.ndarray:
        if len(self._first_of_row) != num_rows:
            self._first_of_row = np.arange(0, num_rows * num_actions, num_actions)
        return self._first_of_row

    def _room_for(self, stacks: list[Stack]) -> GradientRoom:
        layers = [layer for stack in stacks for layer in stack.layers]
        if self._room is None or not self._room.fits(layers):
            self._room = GradientRoom(layers)
        return self._room


def _stacks(head: QValues) -> list[Stack] | None:
    networks = [head.advantage] if head.value is None else [head.advantage, head.value]
    stacks = [stack for network in networks if (stack := network.stack()) is not None]
    return stacks if len(stacks) == len(networks) else None


def _through(rows: np.ndarray, arrays_of: Sequence[list[np.ndarray]], activation: str) -> list[list[np.ndarray]]:
    """For each stack's arrays: the rows `[B, F]`, then what every layer makes of them."""
    hidden_of = []
    for arrays in arrays_of:
        last, hidden = len(arrays) - 2, [rows]
        for i in range(0, last + 2, 2):
            hidden.append(_layer(hidden[-1], arrays[i], arrays[i + 1], activation if i < last else ""))  # a bare end
        hidden_of.append(hidden)
    return hidden_of


def _layer(before: np.ndarray, weight: np.ndarray, bias: np.ndarray, activation: str) -> np.ndarray:
    """Rows `[B, in]` by a weight `[in, out]`, plus the bias, activated."""
    is_small = len(before) * weight.size <= MOST_PRODUCTS and len(before) * len(bias) <= MOST_NUMBERS
    if is_small:
        after = before @ weight
        after += bias
    else:
        sums = torch.addmm(*map(torch.from_numpy, (bias, before, weight)))
        after = (sums.relu_() if activation == "relu" else sums).numpy()
    if activation == "tanh":
        np.tanh(after, out=after)  # faster than torch's at any size
    elif activation == "relu" and is_small:
        np.maximum(after, _NOTHING, out=after)
    return after


def _values(hidden_of: list[list[np.ndarray]]) -> np.ndarray:
    """Values `[B, A]` from the outputs of the one stack, or of the two."""
    advantage = hidden_of[0][-1]
    if len(hidden_of) == 1:
        return advantage
    return hidden_of[1][-1] + advantage - advantage.mean(1, keepdims=True)


def _go_back(
    arrays_of: Sequence[list[np.ndarray]],
    activation: str,
    hidden_of: list[list[np.ndarray]],
    values_slope: np.ndarray,
    gradients: list[np.ndarray | None],
) -> None:
    """From the slopes of the values `[B, A]` to the gradients: one place for each layer's tensor, None where none."""
    slopes = [values_slope]
    if len(arrays_of) == 2:
        slopes = [values_slope - values_slope.mean(1, keepdims=True), values_slope.sum(1, keepdims=True)]
    every, first = np.ones(len(values_slope), np.float32), 0
    for arrays, hidden, slope in zip(arrays_of, hidden_of, slopes, strict=True):
        for i in reversed(range(0, len(arrays), 2)):
            for_weight, for_bias, before = gradients[first + i], gradients[first + i + 1], hidden[i // 2]
            if for_weight is not None:
                _product(slope.T, before, out=for_weight)
            if for_bias is not None:
                np.matmul(every, slope, out=for_bias)
            if i > 0:
                slope = _product(slope, arrays[i].T)
                _slope_before(slope, before, activation)
        first += len(arrays)


def _slope_before(slope: np.ndarray, outputs: np.ndarray, activation: str) -> None:
    """In place: the slopes of what was activated, from those of the outputs."""
    if slope.size > MOST_NUMBERS:
        slope_before(torch.from_numpy(slope), torch.from_numpy(outputs), activation)
    elif activation == "tanh":
        slope *= np.float32(1.0) - outputs * outputs
    else:
        slope *= outputs > _NOTHING


def _product(left: np.ndarray, right: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The matrix product; large ones are torch's, which keeps to its number of threads."""
    if len(left) * right.size <= MOST_PRODUCTS:
        return np.matmul(left, right, out=out)
    room = None if out is None else torch.from_numpy(out)
    return torch.mm(torch.from_numpy(left), torch.from_numpy(right), out=room).numpy()
