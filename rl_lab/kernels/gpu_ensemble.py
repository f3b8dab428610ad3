"""An ensemble of small networks on a GPU as one autograd node: few kernels, and frozen networks cost only the gradient
of what they read.

    layer 1   all networks read the same rows, so their weights are one tall matrix: one product for all
    layer 2+  each reads its own hidden rows: one batched product
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rl_lab.kernels.door import FastPath

_relu_backward = torch.ops.aten.threshold_backward.default
_tanh_backward = torch.ops.aten.tanh_backward.default


class _Ensemble(Function):
    @staticmethod
    def forward(ctx: Any, is_relu: bool, num_inputs: int, *tensors: Tensor) -> Tensor:
        inputs, parameters = tensors[:num_inputs], tensors[num_inputs:]
        weights, biases = parameters[::2], parameters[1::2]
        rows = inputs[0] if num_inputs == 1 else torch.cat(inputs, dim=1)
        # A bias with a row for every row of the product keeps CUDA from a path of four kernels.
        wide = torch.addmm(biases[0].view(1, -1).expand(len(rows), -1), rows, weights[0].flatten(0, 1).t())
        hidden = [wide.view(len(rows), len(weights[0]), -1).transpose(0, 1)]
        for weight, bias in zip(weights[1:], biases[1:], strict=True):
            hidden[-1].relu_() if is_relu else hidden[-1].tanh_()
            hidden.append(torch.baddbmm(bias, hidden[-1], weight.transpose(1, 2)))
        ctx.is_relu, ctx.widths = is_relu, [part.shape[1] for part in inputs]
        ctx.save_for_backward(rows, *hidden[:-1], *weights)
        return hidden[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        num_inputs, count = len(ctx.widths), len(ctx.saved_tensors) // 2
        read, weights = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        needed = ctx.needs_input_grad[2:]
        found, wide = _backward_layers(gradient, read, weights, ctx.is_relu, needed[num_inputs:])
        parts = weights[0].flatten(0, 1).split(ctx.widths, dim=1)
        of_inputs = [wide.mm(part) if need else None for part, need in zip(parts, needed, strict=False)]
        return (None, None, *of_inputs, *found)


def _backward_layers(
    gradient: Tensor, read: Sequence[Tensor], weights: Sequence[Tensor], is_relu: bool, needed: Sequence[bool]
) -> tuple[list[Tensor | None], Tensor]:
    """From the output's gradient `[E, B, D]` to those of the needed parameters, and to that of the first layer before
    its activation, `[B, E * width]`. `read` are the rows, then the outputs of every hidden layer."""
    size, num_rows = gradient.shape[:2]
    found: list[Tensor | None] = [None] * (2 * len(weights))
    for index in reversed(range(1, len(weights))):
        if needed[2 * index]:
            found[2 * index] = torch.bmm(gradient.transpose(1, 2), read[index])
        if needed[2 * index + 1]:
            found[2 * index + 1] = gradient.sum(dim=1, keepdim=True)
        gradient = torch.bmm(gradient, weights[index])
        gradient = _relu_backward(gradient, read[index], 0) if is_relu else _tanh_backward(gradient, read[index])
    wide = gradient.transpose(0, 1).reshape(num_rows, -1)
    if needed[0]:
        found[0] = wide.t().mm(read[0]).view_as(weights[0])
    if needed[1]:
        found[1] = wide.sum(dim=0).view(size, 1, -1)
    return found, wide


def _run(module: Any, *inputs: Tensor) -> Tensor:
    rows = inputs[0]
    is_plain = rows.is_cuda and rows.dtype is torch.float32 and not torch.is_autocast_enabled("cuda")
    is_plain = is_plain and module.norms is None
    if not is_plain or rows.dim() != 2 or module.activation not in (torch.relu, torch.tanh):
        return NotImplemented
    parameters = [each for pair in zip(module.weights, module.biases, strict=True) for each in pair]
    is_relu = module.activation is torch.relu
    return _Ensemble.apply(is_relu, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call, no-any-return]


FORWARD = FastPath(_run, ("rl_lab.components.networks.ensemble:EnsembleMLP.forward",))
