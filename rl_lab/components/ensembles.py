"""Several networks of one shape that read the same rows, as one: the twin critics of SAC and their kin.

    weight_i  [E, out, in]      E networks side by side
    layer 1   all of them read the same input, so their weights are one tall matrix: one product for all
    layer 2+  each reads its own hidden rows: a batched product where a device does it in one go (CUDA), a product per
              network where it does not (a CPU would only copy more)

Learning from float32 rows with relu or tanh, the whole ensemble is one autograd node, its backward written out as in
`fused.py`: few kernels for a GPU, little bookkeeping for a CPU. Frozen networks cost only the gradient of what they
read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from rl_lab.components.networks import ACTIVATIONS, choose
from rl_lab.types import ConfigError

FUSED_ACTIVATIONS = ("relu", "tanh")

_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_relu_backward = torch.ops.aten.threshold_backward.grad_input


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
        if self.can_fuse(inputs[0]) and not inputs[0].is_cuda:
            return _Least.apply(self.activation_name, len(inputs), *inputs, *self.layers())  # type: ignore[no-untyped-call]
        return _pick_least(self(*inputs, frozen=True).float().squeeze(-1))

    def layers(self) -> list[Tensor]:
        """All weights, then all biases."""
        # From the dicts that hold them: walking a ParameterList costs as much as a small product.
        return [*self.weights._parameters.values(), *self.biases._parameters.values()]  # type: ignore[list-item]

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


class _Least(Function):
    """On a CPU, `least` as one node: each row goes back through the one network that was least, half the work."""

    @staticmethod
    def forward(ctx: Any, activation: str, num_inputs: int, *tensors: Tensor) -> Tensor:
        inputs, parameters = tensors[:num_inputs], tensors[num_inputs:]
        output, hidden = run_layers(torch.cat(inputs, dim=1), parameters, activation)
        least, network = output.squeeze(-1).min(dim=0)
        ctx.activation, ctx.widths = activation, [part.shape[1] for part in inputs]
        ctx.save_for_backward(network, *hidden, *parameters[: len(parameters) // 2])
        return least

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        count = len(ctx.saved_tensors) // 2
        network, hidden, weights = ctx.saved_tensors[0], ctx.saved_tensors[1:count], ctx.saved_tensors[count:]
        needed = ctx.needs_input_grad[2 : 2 + len(ctx.widths)]
        ends = list(accumulate(ctx.widths))
        places = [
            (end - width, end) if is_needed else None
            for end, width, is_needed in zip(ends, ctx.widths, needed, strict=True)
        ]
        found = [None if place is None else gradient.new_empty(len(gradient), place[1] - place[0]) for place in places]
        for index in range(len(weights[0])):
            chosen = (network == index).nonzero().squeeze(1)
            back = gradient.index_select(0, chosen).unsqueeze(1)
            for layer in reversed(range(1, count)):
                reached = hidden[layer - 1][index].index_select(0, chosen)
                back = _slope(back.mm(weights[layer][index]), reached, ctx.activation)
            for place, each in zip(places, found, strict=True):
                if place is not None and each is not None:
                    each.index_copy_(0, chosen, back.mm(weights[0][index][:, place[0] : place[1]]))
        return (None, None, *found, *[None] * (2 * count))


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
        _activate(hidden[-1], activation)
        hidden.append(_by_network(hidden[-1], weight, bias))
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
            found[index] = _product(gradient.transpose(1, 2), kept[index])
        if needed[count + index]:
            found[count + index] = gradient.sum(dim=1, keepdim=True)
        room = gradient.new_empty(num_rows, size, weights[1].shape[2]).transpose(0, 1) if index == 1 else None
        gradient = _slope(_product(gradient, weights[index], out=room), kept[index], activation)
    wide = gradient.transpose(0, 1).reshape(num_rows, -1)  # in place: its memory is the first layer's
    if needed[0]:
        found[0] = _tall_product(wide, kept[0]).view_as(weights[0])
    if needed[count]:
        found[count] = wide.sum(dim=0).view(size, 1, -1)
    return found, wide


def _by_network(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`[E, B, in]` to `[E, B, out]`."""
    if hidden.is_cuda:
        return torch.baddbmm(bias, hidden, weight.transpose(1, 2))
    output = hidden.new_empty(hidden.shape[0], hidden.shape[1], weight.shape[1])
    apart = zip(output.unbind(), hidden.unbind(), weight.unbind(), bias.unbind(), strict=True)
    for each, rows, matrix, start in apart:
        torch.addmm(start, rows, matrix.t(), out=each)
    return output


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """`[E, a, b]` times `[E, b, c]`; into `out` where it is given."""
    if left.is_cuda:
        return torch.bmm(left, right) if out is None else torch.bmm(left, right, out=out)
    if out is None:
        out = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    for each, first, second in zip(out.unbind(), left.unbind(), right.unbind(), strict=True):
        torch.mm(first, second, out=each)
    return out


def _tall_product(left: Tensor, right: Tensor) -> Tensor:
    """`[B, a]` and `[B, b]`, b much smaller, to `[a, b]`."""
    # the same either way; on a CPU the narrow matrix is faster on the left
    return left.t().mm(right) if left.is_cuda else right.t().mm(left).t().contiguous()


def _activate(hidden: Tensor, activation: str) -> None:
    hidden.relu_() if activation == "relu" else hidden.tanh_()


def _slope(gradient: Tensor, outputs: Tensor, activation: str) -> Tensor:
    """In place: the gradient before the activation. Fresh memory would cost a CPU more than the arithmetic."""
    if activation == "relu":
        return _relu_backward(gradient, outputs, 0, grad_input=gradient)
    return _tanh_backward(gradient, outputs, grad_input=gradient)
