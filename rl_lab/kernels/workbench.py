"""An ensemble's networks there and back one after the other, for learning on a CPU.

A layer of 256 for a batch of 256 is 256 kB to read, to multiply with and to write: one network's layer fits into a
core's cache, both networks' layers do not, and neither does memory that is fresh every time. So each network goes its
whole way before the next one starts, in room that is used again: a fifth less time than layer by layer for all.

What is computed here is overwritten by the next call: take what you need before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_lab.kernels.fused import GradientRoom, Known

_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_relu_backward = torch.ops.aten.threshold_backward.grad_input


@dataclass(frozen=True)
class _Network:
    """One of the networks: views of its parameters, and room for what its hidden layers give, `[B, width]` each."""

    weights: list[Tensor]
    transposed: list[Tensor]
    biases: list[Tensor]
    hidden: list[Tensor]


class Workbench:
    """Made for some parameters (all weights `[E, out, in]`, then all biases `[E, 1, out]`) and a number of rows."""

    def __init__(self, parameters: Sequence[Tensor], num_rows: int, activation: str) -> None:
        self.num_rows, self.activation = num_rows, activation
        self.parameters = list(parameters)
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        count = len(parameters) // 2
        weights, biases = ([part.detach() for part in parts] for parts in (parameters[:count], parameters[count:]))
        widths = [weight.shape[1] for weight in weights[:-1]]
        self._networks = []
        for index in range(len(weights[0])):
            own = [weight[index] for weight in weights]
            room = [weights[0].new_empty(num_rows, width) for width in widths]
            self._networks.append(_Network(own, [each.t() for each in own], [bias[index, 0] for bias in biases], room))
        self._back = [weights[0].new_empty(num_rows, width) for width in widths]
        self._room = GradientRoom(parameters)

    def fits(self, parameters: Sequence[Tensor], num_rows: int) -> bool:
        """Whether it still lies on these parameters: moving them to other memory makes another one necessary."""
        return self.num_rows == num_rows and self._addresses == [parameter.data_ptr() for parameter in parameters]

    def run(self, rows: Tensor) -> Tensor:
        """Rows `[B, F]` to `[E, B, D]`."""
        width = self._networks[0].weights[-1].shape[0]
        output = rows.new_empty(len(self._networks), self.num_rows, width)
        for network, last in zip(self._networks, output.unbind(), strict=True):
            reached = rows
            layers = zip(network.biases, network.transposed, [*network.hidden, last], strict=True)
            for bias, weight, room in layers:
                reached = torch.addmm(bias, reached, weight, out=room)
                if reached is not last:
                    activate(reached, self.activation)
        return output

    def run_back(self, rows: Tensor, gradient: Tensor) -> Known:
        """From the output's gradient `[E, B, D]` to those of the parameters that learn."""
        if not self._room.fits(self.parameters):
            self._room = GradientRoom(self.parameters)
        found = self._room.places
        count = len(found) // 2
        parts = [None if each is None else each.unbind() for each in found]
        for index, network in reversed(list(enumerate(self._networks))):
            back = gradient[index]
            for layer in reversed(range(count)):
                for_weight, for_bias = parts[layer], parts[count + layer]
                if for_weight is not None:
                    if layer > 0:
                        torch.mm(back.t(), network.hidden[layer - 1], out=for_weight[index])
                    else:  # the same product; few columns are faster on the left
                        for_weight[index].copy_(rows.t().mm(back).t())
                if for_bias is not None:
                    torch.sum(back, 0, keepdim=True, out=for_bias[index])
                if layer > 0:
                    back = torch.mm(back, network.weights[layer], out=self._back[layer - 1])
                    slope(back, network.hidden[layer - 1], self.activation)
        return self._room.known

    def least_slopes(self, which: Tensor, columns: tuple[int, int]) -> Tensor:
        """How each row's single value from network `which [B]` changes with these columns of what was read:
        `[B, columns]`. Each row goes back through that one network."""
        slopes = self._back[0].new_empty(self.num_rows, columns[1] - columns[0])
        for index, network in enumerate(self._networks):
            chosen = (which == index).nonzero().squeeze(1)
            back = network.weights[-1].expand(len(chosen), -1).contiguous()
            for layer in reversed(range(1, len(network.weights))):
                if layer < len(network.weights) - 1:
                    back = torch.mm(back, network.weights[layer])
                slope(back, network.hidden[layer - 1].index_select(0, chosen), self.activation)
            first = network.transposed[0][columns[0] : columns[1]]
            slopes.index_copy_(0, chosen, first.mm(back.t()).t())
        return slopes


def activate(hidden: Tensor, activation: str) -> None:
    """In place: relu or tanh."""
    hidden.relu_() if activation == "relu" else hidden.tanh_()


def slope(gradient: Tensor, outputs: Tensor, activation: str) -> Tensor:
    """In place: the gradient before the activation. Fresh memory would cost a CPU more than the arithmetic."""
    if activation == "relu":
        return _relu_backward(gradient, outputs, 0, grad_input=gradient)
    return _tanh_backward(gradient, outputs, grad_input=gradient)
