"""Gradients that are too large: by the norm of all of them, or each by its parameter's norm (AGC)."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_lab.training.segments import Segments

SMALLEST_PARAMETER_NORM = 1e-3  # lets parameters that start at zero move (Brock et al. 2021)


def divisor_to(limit: float, norm: Tensor) -> Tensor | None:
    """What brings gradients of this norm down to `limit`; on a CPU, where nobody waits for it, None if nothing must."""
    if norm.device.type == "cpu":
        return None if float(norm) <= limit else norm / limit
    return (norm / limit).clamp_(min=1.0)


def clip_adaptively(
    parameters: list[Tensor],
    gradients: list[Tensor],
    clip: float,
    segments: Segments | None = None,
    norms: Tensor | None = None,
) -> list[Tensor]:
    """Each gradient's norm at most `clip` times its parameter's norm (AGC, one norm per tensor); in place, or with
    `segments` in there. `norms` are those of the gradients, where somebody has them."""
    with torch.no_grad():
        sizes = torch.stack(torch._foreach_norm(parameters)).clamp_(min=SMALLEST_PARAMETER_NORM)
        norms = (torch.stack(torch._foreach_norm(gradients)) if norms is None else norms).clamp(min=1e-6)
        factors = (sizes * clip / norms).clamp_(max=1.0)
        if segments is None:
            torch._foreach_mul_(gradients, list(factors.unbind()))
            return gradients
        segments.take(gradients).mul_(segments.by_row(factors))
        return segments.views
