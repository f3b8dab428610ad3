"""Means over the samples that count."""

from __future__ import annotations

from torch import Tensor


def mean(values: Tensor, valid: Tensor | None) -> Tensor:
    """The mean over valid samples; None: every sample counts."""
    return values.mean() if valid is None else (values * valid).sum() / valid.sum()


def standardize(values: Tensor, valid: Tensor | None) -> Tensor:
    """Zero mean and unit std over valid samples; fewer than two have no std and are only centred."""
    chosen = values if valid is None else values[valid]
    if chosen.numel() < 2:
        return values - chosen.mean()
    return (values - chosen.mean()) / (chosen.std() + 1e-8)
