"""Recurrent memories: what a policy carries from row to row, forgotten where a new episode begins.

A state is one tensor `[B, S]`, so that it can lie in a row like anything else. `step` serves acting, `unroll`
serves learning, and both give the same numbers:

     row t           0        1        2        3
     is_first        0        0        1        0
     state in        s        s1       s2       s3       the state BEFORE the row
     state used      s        s1       0        s3       is_first forgets before the row is read
     output          o0       o1       o2       o3
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from rl_lab.kernels.door import fast_path
from rl_lab.types import ConfigError


class _Memory(nn.Module, ABC):
    """The parts both memories share: two projections, the reset rule, one loop over time."""

    gates: int  # hidden-sized blocks of each projection
    state_parts: int  # hidden-sized tensors packed in one state

    def __init__(self, *, input_size: int, hidden_size: int = 64) -> None:
        super().__init__()
        if hidden_size < 1:
            raise ConfigError(f"memory: hidden_size is {hidden_size}; allowed is a whole number from 1 on.")
        self.hidden_size = hidden_size
        self.output_size = hidden_size
        self.state_size = hidden_size * self.state_parts
        self.from_input = nn.Linear(input_size, self.gates * hidden_size)
        self.from_state = nn.Linear(hidden_size, self.gates * hidden_size)
        for layer in (self.from_input, self.from_state):
            for block in layer.weight.chunk(self.gates):  # each gate on its own: a stacked matrix is not square
                nn.init.orthogonal_(block)
            nn.init.zeros_(layer.bias)

    def initial_state(self, batch_size: int, device: torch.device | str = "cpu") -> Tensor:
        """Nothing remembered: zeros `[B, S]`."""
        return torch.zeros(batch_size, self.state_size, device=device)

    def step(self, features: Tensor, state: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]:
        """One row: features `[N, F]`, state `[N, S]`, is_first `[N]` to output `[N, D]` and state `[N, S]`."""
        state = self._next(self.from_input(features).to(state.dtype), forget(state, is_first))
        return state[:, : self.hidden_size], state

    def unroll(self, features: Tensor, state: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]:
        """Rows `[B, T, F]` from the state `[B, S]` before row 0, to outputs `[B, T, D]` and the last state."""
        projected = self.from_input(features).to(state.dtype)  # one matrix product for all rows
        outputs = []
        for projection, is_new in zip(projected.unbind(dim=1), is_first.unbind(dim=1), strict=True):
            state = self._next(projection, forget(state, is_new))
            outputs.append(state[:, : self.hidden_size])
        return torch.stack(outputs, dim=1), state

    @abstractmethod
    def _next(self, projection: Tensor, state: Tensor) -> Tensor:
        """The state `[B, S]` after one row, from its part of the gates and the state before it."""


def forget(state: Tensor, is_first: Tensor) -> Tensor:
    """Zeros where a new episode begins; also in place of NaN, which a product with 0 would keep."""
    return torch.where(is_first.unsqueeze(-1), 0.0, state)


class GRUMemory(_Memory):
    """Gated recurrent unit (2014). S = hidden_size."""

    gates, state_parts = 3, 1

    unroll = fast_path("rl_lab.kernels.gru:UNROLL")(_Memory.unroll)

    def _next(self, projection: Tensor, state: Tensor) -> Tensor:
        size = self.hidden_size
        input_gates, input_candidate = projection.split((2 * size, size), dim=1)
        state_gates, state_candidate = self.from_state(state).to(state.dtype).split((2 * size, size), dim=1)
        reset, keep = torch.sigmoid(input_gates + state_gates).chunk(2, dim=1)
        candidate = torch.tanh(torch.addcmul(input_candidate, reset, state_candidate))
        return torch.lerp(candidate, state, keep)


class LSTMMemory(_Memory):
    """Long short-term memory (1997) with a forget gate that starts open. S = 2 * hidden_size: output, then cell."""

    gates, state_parts = 4, 2

    def __init__(self, *, input_size: int, hidden_size: int = 64) -> None:
        super().__init__(input_size=input_size, hidden_size=hidden_size)
        with torch.no_grad():
            self.from_input.bias[hidden_size : 2 * hidden_size] = 1.0  # remember at first, learn to forget later

    def _next(self, projection: Tensor, state: Tensor) -> Tensor:
        size = self.hidden_size
        output, cell = state.split(size, dim=1)
        total = projection + self.from_state(output).to(state.dtype)
        gates, candidate = total.split((3 * size, size), dim=1)
        write, keep, show = torch.sigmoid(gates).chunk(3, dim=1)
        cell = torch.addcmul(keep * cell, write, torch.tanh(candidate))
        return torch.cat((show * torch.tanh(cell), cell), dim=1)
