"""Several networks of one shape that read the same rows, as one: the twin critics of SAC and their kin.

    weight_i  [E, out, in]      E networks side by side
    layer 1   all of them read the same input, so their weights are one tall matrix: one product for all
    layer 2+  each reads its own hidden rows: one batched product

Learning from float32 rows with relu or tanh, the whole ensemble is one autograd node, its backward written out as in
`fused.py`: few kernels for a GPU, little bookkeeping for a CPU. Frozen networks cost only the gradient of what they
read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from rl_lab.components.networks.mlp import ACTIVATIONS, choose
from rl_lab.kernels.workbench import Workbench, activate, slope
from rl_lab.types import ConfigError

FUSED_ACTIVATIONS = ("relu", "tanh")


class EnsembleMLP(nn.Module):
    """`size` networks with hidden layers and one bare linear layer at the end.

    Weights and biases start uniform within 1 / sqrt(inputs), as in the reference implementations of SAC.
    """

    def __init__(
        self, *, size: int, input_size: int, hidden_sizes: Sequence[int], output_size: int, activation: str = "relu"
    ) -> None:
        super().__init__()
        if isinstance(hidden_sizes, str) or not hidden_sizes or any(width < 1 for width in hidden_sizes):
            raise ConfigError(
                f"ensemble hidden_sizes is {hidden_sizes!r}; allowed is a list of at least one whole number from 1 on. "
                "Write, say, [256, 256]."
            )
        self.size, self.output_size = size, output_size
        self.activation_name = activation
        self.activation = choose(ACTIVATIONS, activation, place="ensemble activation")
        self._workbench: Workbench | None = None
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for before, after in pairwise([input_size, *hidden_sizes, output_size]):
            bound = 1.0 / math.sqrt(before)
            self.weights.append(nn.Parameter(torch.empty(size, after, before).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(size, 1, after).uniform_(-bound, bound)))

    def forward(self, *inputs: Tensor, frozen: bool = False) -> Tensor:
        """Inputs `[B, F]`, `[B, A]`, ... side by side, to `[E, B, output_size]`. Frozen: no gradient for the networks,
        only for what they read."""
        parameters = self.layers()
        if frozen:
            parameters = [parameter.detach() for parameter in parameters]
        if self.can_fuse(inputs[0]):
            return _Ensemble.apply(  # type: ignore[no-untyped-call]
                self.activation_name, len(inputs), *inputs, *parameters
            )
        hidden = torch.cat(inputs, dim=-1).expand(self.size, -1, -1)
        count = len(self.weights)
        for index in range(count):
            hidden = torch.matmul(hidden, parameters[index].transpose(1, 2)) + parameters[count + index]
            if index < count - 1:
                hidden = self.activation(hidden)
        return hidden

    def least(self, *inputs: Tensor) -> Tensor:
        """The least of the frozen networks' single values, `[B]`; gradients reach what they read."""
        if inputs[0].device.type == "cpu" and self.can_fuse(inputs[0]) and not torch.is_grad_enabled():
            rows = torch.cat(inputs, dim=1)
            return self.workbench(len(rows)).run(rows).amin(dim=0).squeeze(-1)
        return _pick_least(self(*inputs, frozen=True).float().squeeze(-1))

    def layers(self) -> list[Tensor]:
        """All weights, then all biases."""
        # From the dicts that hold them: walking a ParameterList costs as much as a small product.
        return [*self.weights._parameters.values(), *self.biases._parameters.values()]  # type: ignore[list-item]

    def workbench(self, num_rows: int) -> Workbench:
        """Room to run these networks on a CPU, the same one as long as nothing moves."""
        layers = self.layers()
        if self._workbench is None or not self._workbench.fits(layers, num_rows):
            self._workbench = Workbench(layers, num_rows, self.activation_name)
        return self._workbench

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_workbench": None}  # a copy makes its own

    def can_fuse(self, rows: Tensor) -> bool:
        """Whether one autograd node will do; other activations and precisions go layer by layer."""
        is_plain = rows.dtype is torch.float32 and not torch.is_autocast_enabled(rows.device.type)
        return is_plain and self.activation_name in FUSED_ACTIVATIONS


class _Ensemble(Function):
    @staticmethod
    def forward(ctx: Any, activation: str, num_inputs: int, *tensors: Tensor) -> Tensor:
        inputs, parameters = tensors[:num_inputs], tensors[num_inputs:]
        rows = inputs[0] if num_inputs == 1 else torch.cat(inputs, dim=1)
        output, hidden = run_layers(rows, parameters, activation)
        ctx.activation, ctx.widths = activation, [part.shape[1] for part in inputs]
        ctx.save_for_backward(rows, *hidden, *parameters[: len(parameters) // 2])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        num_inputs, count = len(ctx.widths), len(ctx.saved_tensors) // 2
        kept, weights = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        needed = ctx.needs_input_grad[2:]
        found, wide = run_layers_back(gradient, kept, weights, ctx.activation, needed[num_inputs:])
        for_inputs: list[Tensor | None] = [None] * num_inputs
        start = 0
        for index, width in enumerate(ctx.widths):
            if needed[index]:
                for_inputs[index] = wide.mm(weights[0].flatten(0, 1)[:, start : start + width])
            start += width
        return (None, None, *for_inputs, *found)


class _PickLeast(Function):
    """Values `[E, B]` to the least `[B]`; the gradient goes to the first of equals. torch's own would sort indices on a
    GPU to stay deterministic."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        least, network = values.min(dim=0)
        ctx.size = len(values)
        ctx.save_for_backward(network)
        return least

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (network,) = ctx.saved_tensors
        numbers = torch.arange(ctx.size, device=network.device).unsqueeze(1)
        return gradient * (network == numbers)


def _pick_least(values: Tensor) -> Tensor:
    return _PickLeast.apply(values)  # type: ignore[no-untyped-call, no-any-return]


def run_layers(rows: Tensor, parameters: Sequence[Tensor], activation: str) -> tuple[Tensor, list[Tensor]]:
    """Rows `[B, F]` to the output `[E, B, D]` and what each hidden layer gave, `[E, B, width]`.

    The first layer's memory is `[B, E, width]`: one product for all networks.
    """
    count = len(parameters) // 2
    weights, biases = parameters[:count], parameters[count:]
    # A bias with a row for every row of the product keeps CUDA from a path of four kernels.
    bias = biases[0].view(1, -1).expand(len(rows), -1)
    wide = torch.addmm(bias, rows, weights[0].flatten(0, 1).t())
    hidden = [wide.view(len(rows), len(weights[0]), -1).transpose(0, 1)]
    for weight, bias in zip(weights[1:], biases[1:], strict=True):
        activate(hidden[-1], activation)
        hidden.append(torch.baddbmm(bias, hidden[-1], weight.transpose(1, 2)))
    return hidden[-1], hidden[:-1]


def run_layers_back(
    gradient: Tensor, kept: Sequence[Tensor], weights: Sequence[Tensor], activation: str, needed: Sequence[bool]
) -> tuple[list[Tensor | None], Tensor]:
    """From the output's gradient `[E, B, D]`: those of all weights, then of all biases, where needed; and that of the
    first layer before its activation, `[B, E * width]`. `kept` are the rows read, then every hidden layer's."""
    count, (size, num_rows) = len(weights), gradient.shape[:2]
    found: list[Tensor | None] = [None] * (2 * count)
    for index in reversed(range(1, count)):
        if needed[index]:
            found[index] = torch.bmm(gradient.transpose(1, 2), kept[index])
        if needed[count + index]:
            found[count + index] = gradient.sum(dim=1, keepdim=True)
        if index > 1:
            gradient = torch.bmm(gradient, weights[index])
        else:
            room = gradient.new_empty(num_rows, size, weights[1].shape[2]).transpose(0, 1)
            gradient = torch.bmm(gradient, weights[index], out=room)
        gradient = slope(gradient, kept[index], activation)
    wide = gradient.transpose(0, 1).reshape(num_rows, -1)  # in place: its memory is the first layer's
    if needed[0]:
        found[0] = _tall_product(wide, kept[0]).view_as(weights[0])
    if needed[count]:
        found[count] = wide.sum(dim=0).view(size, 1, -1)
    return found, wide


def _tall_product(left: Tensor, right: Tensor) -> Tensor:
    """`[B, a]` and `[B, b]`, b much smaller, to `[a, b]`."""
    # the same either way; on a CPU the narrow matrix is faster on the left
    return left.t().mm(right) if left.is_cuda else right.t().mm(left).t().contiguous()
