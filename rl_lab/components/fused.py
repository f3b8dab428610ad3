"""Small networks that read the same features, as one autograd node, for training on CPUs.

A 2x64 network on a minibatch of 256 rows computes for about 100 microseconds; torch.tanh and autograd's bookkeeping,
layer by layer, take twice as long again. Here all layers of all networks are one node, its backward written out:

    forward    h_0 = x,   h_i = f(h_{i-1} W_i' + b_i);   the last layer may have no f
    backward   g_i = dL/dh_i * f'(h_i),   dW_i = g_i' h_{i-1},   db_i = sum g_i,   dL/dh_{i-1} = g_i W_i

Both activations know their slope from their own output, so nothing but the h_i is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

ACTIVATIONS = ("tanh", "relu")
FEWEST_ROWS = 64  # below that, calling Python from the backward pass costs more than it saves
MOST_PRODUCTS = 2**17  # of one matrix product in numpy; its BLAS would wake threads for more than twice as many

_tanh_backward = torch.ops.aten.tanh_backward.default
_relu_backward = torch.ops.aten.threshold_backward.default


@dataclass(frozen=True)
class Stack:
    """Linear layers with one activation: `[W_1, b_1, W_2, b_2, ...]`."""

    layers: list[Tensor]
    activation: str
    is_last_bare: bool  # no activation after the last layer


def can_fuse(features: Tensor) -> bool:
    """Learning from plain float32 rows on a CPU; everything else goes layer by layer."""
    return (
        torch.is_grad_enabled()
        and features.dtype is torch.float32
        and features.device.type == "cpu"
        and features.numel() >= FEWEST_ROWS * features.shape[-1]
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def can_only_act(features: Tensor) -> bool:
    """A few plain float32 rows on a CPU and nothing to learn from them."""
    return (
        not torch.is_grad_enabled()
        and features.dtype is torch.float32
        and features.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def act_with(features: Tensor, stack: Stack) -> Tensor:
    """Features `[..., F]` through the stack, without a graph: `[..., D]`.

    Eight rows through a 2x64 network are 20 microseconds of numpy, or 50 of torch, whose calls cost more each.
    """
    hidden = features.numpy()
    rows = features.numel() // features.shape[-1]
    count = len(stack.layers) // 2
    for i in range(count):
        weight, bias = stack.layers[2 * i].detach(), stack.layers[2 * i + 1].detach()
        if rows * weight.numel() <= MOST_PRODUCTS:
            hidden = hidden @ weight.numpy().T
            hidden += bias.numpy()
        else:
            hidden = torch.nn.functional.linear(torch.from_numpy(hidden), weight, bias).numpy()
        if i < count - 1 or not stack.is_last_bare:
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
        outputs = []
        inputs_of: list[list[Tensor]] = []  # of every layer of every stack
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
        # Kept as they are: torch's own way of saving is for inputs and outputs and costs a microsecond for each.
        ctx.stacks, ctx.inputs_of = stacks, inputs_of
        ctx.save_for_backward(*[out for out, stack in zip(outputs, stacks, strict=True) if not stack.is_last_bare])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad
        active_outputs = iter(ctx.saved_tensors)
        found: list[Tensor | None] = []
        features_gradient: Tensor | None = None
        for stack, inputs, gradient in zip(ctx.stacks, ctx.inputs_of, gradients, strict=True):
            first = 2 + len(found)  # among the node's inputs: features and stacks come before the parameters
            own: list[Tensor | None] = [None] * len(stack.layers)
            if not stack.is_last_bare:
                gradient = _slope(gradient, next(active_outputs), stack.activation)
            for i in reversed(range(0, len(stack.layers), 2)):
                before, weight = inputs[i // 2], stack.layers[i]
                if needed[first + i]:
                    # the same product either way; a few input columns are faster on the left
                    is_narrow = weight.shape[1] < weight.shape[0]
                    own[i] = before.t().mm(gradient).t() if is_narrow else gradient.t().mm(before)
                if needed[first + i + 1]:
                    own[i + 1] = gradient.sum(dim=0)
                if i > 0 or needed[0]:
                    gradient = gradient.mm(weight)
                if i > 0:
                    gradient = _slope(gradient, before, stack.activation)
            found += own
            if needed[0]:
                features_gradient = gradient if features_gradient is None else features_gradient + gradient
        return (features_gradient, None, *found)


def _activate(hidden: Tensor, activation: str) -> None:
    if activation == "tanh":
        values = hidden.numpy()
        np.tanh(values, out=values)  # on the same memory, six times as fast as torch.tanh on a CPU
    else:
        hidden.relu_()


def _slope(gradient: Tensor, outputs: Tensor, activation: str) -> Tensor:
    return _tanh_backward(gradient, outputs) if activation == "tanh" else _relu_backward(gradient, outputs, 0)
