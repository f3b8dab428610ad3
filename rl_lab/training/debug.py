"""Finding where numbers went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def first_non_finite(named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that holds NaN or infinity, or None. It waits for the device: ask rarely."""
    items = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    for name, tensor in items:
        if not bool(torch.isfinite(tensor).all()):
            return name
    return None
