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
        kept: list[Tensor] = [features]
        outputs = []
        for stack in stacks:
            hidden = features
            count = len(stack.layers) // 2
            for i in range(count):
                hidden = torch.addmm(stack.layers[2 * i + 1], hidden, stack.layers[2 * i].t())
                if i < count - 1 or not stack.is_last_bare:
                    _activate(hidden, stack.activation)
                kept.append(hidden)
            outputs.append(hidden)
        ctx.stacks = stacks
        ctx.save_for_backward(*kept, *parameters[::2])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        num_layers = len(saved) // 2
        found: list[Tensor | None] = []
        features_gradient: Tensor | None = None
        first = 0  # index of the stack's first layer among all layers
        for stack, gradient in zip(ctx.stacks, gradients, strict=True):
            count = len(stack.layers) // 2
            own: list[Tensor | None] = [None] * (2 * count)
            for i in reversed(range(count)):
                inputs = saved[first + i] if i > 0 else saved[0]
                weight = saved[1 + num_layers + first + i]
                if i < count - 1 or not stack.is_last_bare:
                    gradient = _slope(gradient, saved[1 + first + i], stack.activation)
                if needed[2 + 2 * (first + i)]:
                    # the same product either way; a few input columns are faster on the left
                    is_narrow = weight.shape[1] < weight.shape[0]
                    own[2 * i] = inputs.t().mm(gradient).t() if is_narrow else gradient.t().mm(inputs)
                if needed[3 + 2 * (first + i)]:
                    own[2 * i + 1] = gradient.sum(dim=0)
                if i > 0 or needed[0]:
                    gradient = gradient.mm(weight)
            found += own
            first += count
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
