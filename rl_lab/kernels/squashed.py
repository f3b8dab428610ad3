"""One draw of a normal pressed into (-1, 1) by tanh, and its log-probability, as one autograd node."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rl_lab.kernels.door import FastPath, is_unchanged

LOG_TWO_PI = math.log(2.0 * math.pi)

_tanh_backward = torch.ops.aten.tanh_backward.default


class _Draw(Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        action, entropy, spread = draw(mean, log_std, noise)
        ctx.save_for_backward(action, spread)
        return action, -entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_action: Tensor, by_log_prob: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *draw_backward(by_action, -by_log_prob, *ctx.saved_tensors), None


def draw(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a = tanh(u), u = mean + spread, spread = noise * std; its entropy estimate -log p(a) `[...]`; the spread.

    -log p(a) = sum( noise^2 / 2 + log std + log(2 pi) / 2 + log(1 - a^2) )

    log(1 - a^2) = 2u + log 4 - 2 log(1 + exp(2u)), which neither overflows nor loses digits near the edge.
    """
    spread = noise * log_std.exp()
    unsquashed = mean + spread
    terms = torch.addcmul(log_std, noise, noise, value=0.5)
    terms = terms.add_(unsquashed, alpha=2.0).sub_(F.softplus(unsquashed, beta=2.0), alpha=4.0)
    constant = mean.shape[-1] * (0.5 * LOG_TWO_PI + math.log(4.0))
    return torch.tanh(unsquashed), terms.sum(dim=-1) + constant, spread


def draw_backward(by_action: Tensor, by_entropy: Tensor, action: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of mean and log_std from those of a draw's action `[..., A]` and entropy estimate `[...]`.

    d/d mean    = g_a (1 - a^2) - 2 a g_e  =: g_u        since log(1 - tanh(u)^2) has the derivative -2a
    d/d log_std = g_u * spread + g_e
    """
    per_dimension = by_entropy.unsqueeze(-1)
    gradient = torch.addcmul(_tanh_backward(by_action, action), per_dimension, action, value=-2.0)
    return gradient, torch.addcmul(per_dimension, gradient, spread)


def _run(policy: Any, noise: Tensor) -> tuple[Tensor, Tensor]:
    mean = policy.base.mean
    is_ours = is_unchanged(policy.base, f"{_HEADS}DiagonalGaussian", "draw")
    if not is_ours or mean.dtype is not torch.float32 or noise.requires_grad:
        return NotImplemented
    if not torch.is_grad_enabled():
        action, entropy, _ = draw(mean, policy.base.log_std.expand_as(mean), noise)
        return action, -entropy
    return _Draw.apply(mean, policy.base.log_std.expand_as(mean), noise)  # type: ignore[no-untyped-call, no-any-return]


_HEADS = "rl_lab.components.heads.distributions:"
DRAW = FastPath(_run, (f"{_HEADS}SquashedGaussian.rsample_with_log_prob", f"{_HEADS}DiagonalGaussian.draw"))
