"""RMS norm and SiLU as one autograd node: nine small operations of every world-model layer in one kernel each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rl_lab.kernels.plain import kernels_for


def norm_silu(total: Tensor, bias: Tensor | None, weight: Tensor, *, epsilon: float) -> Tensor:
    """`silu(rms_norm(total + bias) * weight)` over the last axis, computed in float32, in the dtype that came."""
    return _NormSilu.apply(total, bias, weight, epsilon)  # type: ignore[no-untyped-call]


class _NormSilu(Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, bias: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        rows = total.reshape(-1, total.shape[-1])
        out = torch.empty_like(rows)
        kernels_for(rows.device).norm_silu(rows, bias, weight, out, segments=1, epsilon=epsilon)
        ctx.save_for_backward(rows, bias, weight)
        ctx.epsilon = epsilon
        return out.view(total.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, bias, weight = ctx.saved_tensors
        _, needs_bias, needs_weight, _ = ctx.needs_input_grad
        slope = torch.empty_like(rows)
        found = kernels_for(rows.device).norm_silu_backward(
            rows,
            bias,
            weight,
            gradient.reshape(rows.shape),
            slope,
            segments=1,
            epsilon=ctx.epsilon,
            wants_parameters=needs_bias or needs_weight,
        )
        bias_slope, weight_slope = found or (None, None)
        return slope.view(gradient.shape), bias_slope if needs_bias else None, weight_slope, None
