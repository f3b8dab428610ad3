"""Named lists of numbers as three plain entries of a checkpoint: hundreds of tiny tensors would be slow to save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def pack_series(series: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """`{"a": [1.0, 2.0], "b": [3.0]}` as names, lengths and one float64 tensor; exact to the bit."""
    flat = [value for values in series.values() for value in values]
    return {
        "names": list(series),
        "lengths": [len(values) for values in series.values()],
        "values": torch.tensor(flat, dtype=torch.float64),
    }


def unpack_series(packed: Mapping[str, Any]) -> dict[str, list[float]]:
    """What `pack_series` was given."""
    flat: list[float] = packed["values"].tolist()
    series: dict[str, list[float]] = {}
    start = 0
    for name, length in zip(packed["names"], packed["lengths"], strict=True):
        series[name] = flat[start : start + length]
        start += length
    return series
