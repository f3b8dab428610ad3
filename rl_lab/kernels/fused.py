"""Small networks that read the same features, as one autograd node, for training on CPUs.

A 2x64 network on a minibatch of 256 rows computes for about 100 microseconds; torch.tanh and autograd's bookkeeping,
layer by layer, take twice as long again. Here all layers of all networks are one node, its backward written out:

    forward    h_0 = x,   h_i = f(h_{i-1} W_i' + b_i);   the last layer may have no f
    backward   g_i = dL/dh_i * f'(h_i),   dW_i = g_i' h_{i-1},   db_i = sum g_i,   dL/dh_{i-1} = g_i W_i

Both activations know their slope from their own output, so nothing but the h_i is kept.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

ACTIVATIONS = ("tanh", "relu")
FEWEST_ROWS = 64  # below that, calling Python from the backward pass costs more than it saves
MOST_PRODUCTS = 2**17  # of one matrix product in numpy; its BLAS would wake threads for more than twice as many

_tanh_backward = torch.ops.aten.tanh_backward.default
_relu_backward = torch.ops.aten.threshold_backward.default


@dataclass
class Stack:
    """Linear layers with one activation: `[W_1, b_1, W_2, b_2, ...]`."""

    layers: list[Tensor]
    activation: str
    is_last_bare: bool  # no activation after the last layer

    def __post_init__(self) -> None:
        self._addresses: list[int] = []
        self._arrays: list[np.ndarray] = []

    def arrays(self) -> list[np.ndarray]:
        """The layers' own memory as numpy sees it, weights transposed; looked up anew only when they have moved."""
        addresses = [layer.data_ptr() for layer in self.layers]
        if addresses != self._addresses:
            arrays = [layer.detach().numpy() for layer in self.layers]
            self._arrays = [array.T if array.ndim == 2 else array for array in arrays]
            self._addresses = addresses
        return self._arrays


def can_fuse(features: Tensor) -> bool:
    """Learning from plain float32 rows on a CPU; everything else goes layer by layer."""
    is_enough = features.numel() >= FEWEST_ROWS * features.shape[-1]
    return torch.is_grad_enabled() and is_enough and is_plain(features)


def can_only_act(features: Tensor) -> bool:
    """A few plain float32 rows on a CPU and nothing to learn from them."""
    return not torch.is_grad_enabled() and is_plain(features)


def is_plain(features: Tensor) -> bool:
    """float32 on a CPU, to be computed in float32 there and now."""
    return (
        features.dtype is torch.float32
        and features.is_cpu
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def act_with(features: Tensor, stack: Stack) -> Tensor:
    """Features `[..., F]` through the stack, without a graph: `[..., D]`.

    Eight rows through a 2x64 network are 20 microseconds of numpy, or 50 of torch, whose calls cost more each.
    """
    hidden = features.numpy()
    rows = features.numel() // features.shape[-1]
    arrays, last = stack.arrays(), len(stack.layers) - 2
    for i in range(0, last + 2, 2):
        if rows * arrays[i].size <= MOST_PRODUCTS:
            hidden = hidden @ arrays[i]
            hidden += arrays[i + 1]
        else:
            weight, bias = stack.layers[i].detach(), stack.layers[i + 1].detach()
            hidden = torch.nn.functional.linear(torch.from_numpy(hidden), weight, bias).numpy()
        if i < last or not stack.is_last_bare:
            if stack.activation == "tanh":
                np.tanh(hidden, out=hidden)
            else:
                np.maximum(hidden, 0.0, out=hidden)
    return torch.from_numpy(hidden)


def fused_stacks(features: Tensor, stacks: Sequence[Stack]) -> list[Tensor]:
    """Features `[..., F]` through each stack: one output `[..., D]` per stack."""
    leading = features.shape[:-1]
    rows = features if features.dim() == 2 else features.reshape(-1, features.shape[-1])
    parameters = stacks[0].layers if len(stacks) == 1 else [tensor for stack in stacks for tensor in stack.layers]
    outputs: tuple[Tensor, ...] = _Stacks.apply(rows, stacks, *parameters)  # type: ignore[no-untyped-call]
    return list(outputs) if len(leading) == 1 else [output.view(*leading, output.shape[-1]) for output in outputs]


class _Stacks(Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, stacks: Sequence[Stack], *parameters: Tensor) -> tuple[Tensor, ...]:
        outputs, inputs_of = forward_stacks(features, stacks)
        # Kept as they are: torch's own way of saving is for inputs and outputs and costs a microsecond for each.
        ctx.stacks, ctx.inputs_of = stacks, inputs_of
        ctx.save_for_backward(*[out for out, stack in zip(outputs, stacks, strict=True) if not stack.is_last_bare])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        needs_features, _, *needed = ctx.needs_input_grad
        active_outputs = iter(ctx.saved_tensors)
        before_last = [
            gradient if stack.is_last_bare else _slope(gradient, next(active_outputs), stack.activation)
            for stack, gradient in zip(ctx.stacks, gradients, strict=True)
        ]
        found, features_gradient = backward_stacks(ctx.stacks, ctx.inputs_of, before_last, needed, needs_features)
        return (features_gradient, None, *found)


def forward_stacks(features: Tensor, stacks: Sequence[Stack]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Rows `[M, F]` to the output of each stack, and the inputs of every layer of every stack."""
    outputs, inputs_of = [], []
    for stack in stacks:
        hidden, inputs = features, []
        last = len(stack.layers) - 2
        for i in range(0, last + 2, 2):
            inputs.append(hidden)
            hidden = torch.addmm(stack.layers[i + 1], hidden, stack.layers[i].t())
            if i < last or not stack.is_last_bare:
                _activate(hidden, stack.activation)
        inputs_of.append(inputs)
        outputs.append(hidden)
    return outputs, inputs_of


def backward_stacks(
    stacks: Sequence[Stack],
    inputs_of: Sequence[Sequence[Tensor]],
    gradients: Sequence[Tensor],
    needed: Sequence[bool],
    needs_features: bool,
) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of the last layers' sums to those of all needed parameters, and of the features."""
    found: list[Tensor | None] = []
    features_gradient: Tensor | None = None
    for stack, inputs, gradient in zip(stacks, inputs_of, gradients, strict=True):
        own: list[Tensor | None] = [None] * len(stack.layers)
        for i in reversed(range(0, len(stack.layers), 2)):
            before, weight = inputs[i // 2], stack.layers[i]
            if needed[len(found) + i]:
                # the same product either way; a few input columns are faster on the left
                is_narrow = weight.shape[1] < weight.shape[0]
                own[i] = before.t().mm(gradient).t() if is_narrow else gradient.t().mm(before)
            if needed[len(found) + i + 1]:
                own[i + 1] = gradient.sum(dim=0)
            if i > 0 or needs_features:
                gradient = gradient.mm(weight)
            if i > 0:
                gradient = _slope(gradient, before, stack.activation)
        found += own
        if needs_features:
            features_gradient = gradient if features_gradient is None else features_gradient + gradient
    return found, features_gradient


class Known(NamedTuple):
    """What a loss that knows its gradients wants changed; they lie one after the other in `flat`, too."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    flat: Tensor


class GradientRoom:
    """Memory for the gradients of all layers that learn, the same for every loss: it stays in a core's cache.

    What lies in it is overwritten by the next loss: change the parameters before.
    """

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self.layers, self.learns = list(layers), [layer.requires_grad for layer in layers]
        parameters = [layer for layer in layers if layer.requires_grad]
        flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
        parts = flat.split([parameter.numel() for parameter in parameters])
        gradients = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
        self.known = Known(parameters, gradients, flat)
        own = iter(gradients)
        self.places = [next(own) if learns else None for learns in self.learns]  # one for each layer
        self.arrays = [None if place is None else place.numpy() for place in self.places]

    def fits(self, layers: Sequence[Tensor]) -> bool:
        """Whether it was made for these; a phase may have frozen some since."""
        is_same = len(layers) == len(self.layers) and all(map(operator.is_, layers, self.layers))
        return is_same and self.learns == [layer.requires_grad for layer in layers]


def add_to_gradients(found: Sequence[tuple[Tensor, Tensor]], factor: Tensor) -> None:
    """Parameters and what one of their losses found for each, times that loss's factor: into their `grad`.

    A node that knows all its gradients names one parameter to autograd and calls this from its backward: a dozen
    small tensors that autograd hands on one by one take a fifth of the time of computing them.
    """
    if found and factor != 1.0:
        torch._foreach_mul_([gradient for _, gradient in found], factor)
    for parameter, gradient in found:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _activate(hidden: Tensor, activation: str) -> None:
    if activation == "tanh":
        values = hidden.numpy()
        np.tanh(values, out=values)  # on the same memory, six times as fast as torch.tanh on a CPU
    else:
        hidden.relu_()


def _slope(gradient: Tensor, outputs: Tensor, activation: str) -> Tensor:
    return _tanh_backward(gradient, outputs) if activation == "tanh" else _relu_backward(gradient, outputs, 0)
