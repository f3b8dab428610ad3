"""The layers of TD-MPC2's networks on a CPU: products by oneDNN, Mish from one sigmoid, SimNorm over columns.

    mish(x)      = x tanh(log(1 + e^x)) = x t        t = n / (2 - n),   n = s (2 - s),   s = sigmoid(x)
    d mish / dx  = t + 4 x s (1 - s)^2 / (2 - n)^2

torch.mish takes an exponential, a logarithm and a tanh of every number; torch's sigmoid alone costs a thirteenth of
that.
No term of either form is a difference of nearly equal numbers, so both are as exact as torch's.

A softmax over a handful of neighbours is slow in torch, one over as many long rows is not: SimNorm turns the simplices
to columns, `[8, rows * simplices]`, and back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from rl_lab.kernels import cpu_mlp
from rl_lab.kernels.cpu_mlp import is_plain, large_product
from rl_lab.kernels.door import FastPath

IMPLICIT = "rl_lab.components.world_model.implicit"
CHUNK = 2**15  # numbers that the processor's second cache holds together with what is computed from them
ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)  # a number costs a conversion at every call


# --- Mish -----------------------------------------------------------------------------------------


class _Mish(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return mish(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return mish_backward(gradient, *ctx.saved_tensors)


def mish(values: Tensor) -> Tensor:
    """Of contiguous numbers in float32."""
    result, scratch = torch.empty_like(values), torch.empty(min(CHUNK, values.numel()))
    for x, out in zip(values.view(-1).split(CHUNK), result.view(-1).split(CHUNK), strict=True):
        other = scratch[: len(x)]
        torch.sigmoid(x, out=out)
        out.mul_(torch.sub(TWO, out, out=other))  # n
        out.div_(torch.sub(TWO, out, out=other)).mul_(x)
    return result


def mish_backward(gradient: Tensor, values: Tensor) -> Tensor:
    """From the gradient of the result to that of the numbers."""
    result = torch.empty_like(values)
    scratch = torch.empty(3, min(CHUNK, values.numel()))
    parts = (each.reshape(-1).split(CHUNK) for each in (gradient, values, result))
    for by_result, x, out in zip(*parts, strict=True):
        rest, other, steep = scratch[:, : len(x)]
        torch.sub(ONE, torch.sigmoid(x, out=out), out=rest)  # s and 1 - s
        torch.mul(x, out, out=steep).mul_(rest).mul_(rest)  # x s (1 - s)^2
        out.addcmul_(out, rest)  # n = s + s (1 - s)
        torch.sub(TWO, out, out=other)
        out.add_(steep.div_(other), alpha=4.0).div_(other).mul_(by_result)
    return result


def _fits(values: Tensor) -> bool:
    is_wide = type(values) is Tensor and values.is_cpu and values.dtype is torch.float32
    return is_wide and values.is_contiguous() and values.numel() > 0


def _run_mish(values: Tensor) -> Tensor:
    if not _fits(values):
        return NotImplemented
    if torch.is_grad_enabled() and values.requires_grad:
        return _Mish.apply(values)  # type: ignore[no-untyped-call, no-any-return]
    return mish(values)


MISH = FastPath(_run_mish, (f"{IMPLICIT}:mish",))


# --- SimNorm --------------------------------------------------------------------------------------


def _run_simnorm(values: Tensor, simplex_size: int) -> Tensor:
    if not _fits(values) or values.shape[-1] % simplex_size:
        return NotImplemented
    columns = values.view(-1, simplex_size).t().contiguous()
    return torch.softmax(columns, dim=0).t().reshape(values.shape)


SIMNORM = FastPath(_run_simnorm, (f"{IMPLICIT}:simnorm",))


# --- products -------------------------------------------------------------------------------------


class _Products(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return products(rows, weights, biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weights = ctx.saved_tensors
        of_rows, of_weights, of_biases = ctx.needs_input_grad
        gradient = gradient.contiguous()
        return (
            _joined([large_product(g, w) for g, w in zip(gradient, weights, strict=True)]) if of_rows else None,
            _joined([large_product(x.t(), g.t()) for x, g in zip(rows, gradient, strict=True)]) if of_weights else None,
            gradient.sum(dim=1, keepdim=True) if of_biases else None,
        )


def products(rows: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    """Each member's rows `[E, R, in]`, weights `[E, in, out]` and bias `[E, 1, out]`."""
    each = zip(rows, weights, biases.squeeze(1), strict=True)
    return _joined([large_product(x, weight.t(), bias) for x, weight, bias in each])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def _run_products(rows: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    parameters = (weights, biases)
    if not is_plain(rows) or any(type(each) not in (Tensor, nn.Parameter) or not each.is_cpu for each in parameters):
        return NotImplemented
    if rows.shape[1:].numel() * weights.shape[2] <= cpu_mlp.MOST_PRODUCTS_OF_MKL or biases.shape[1:2] != (1,):
        return NotImplemented
    if not weights.is_contiguous() or rows.stride()[1:] != (rows.shape[2], 1):
        return NotImplemented  # oneDNN is slow with numbers that lie apart
    if torch.is_grad_enabled() and any(each.requires_grad for each in (rows, *parameters)):
        return _Products.apply(rows, weights, biases)  # type: ignore[no-untyped-call, no-any-return]
    return products(rows, weights, biases)


PRODUCTS = FastPath(_run_products, (f"{IMPLICIT}:products",))
