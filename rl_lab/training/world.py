"""How many processes learn together, and how they agree. Alone, every answer is the question."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Value = TypeVar("Value")


class World:
    """One process: rank 0 of 1. Code that asks it needs no `if` for the case of many."""

    rank = 0
    size = 1

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """The mean over ranks of each tensor: with one rank, the very same list."""
        return tensors

    def broadcast(self, value: Value) -> Value:
        """What rank 0 has."""
        return value
