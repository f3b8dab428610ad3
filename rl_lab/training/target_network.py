"""Networks that do not learn: slow copies for targets, and networks that gradients only pass through."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.types import ConfigError


class TargetNetwork(nn.Module):
    """A copy that learns nothing and follows: `slow_critic.follow(critic)` after each update.

    rate 1 with every 500 is a hard update now and then; rate 0.005 with every 1 is a soft one each time.
    """

    def __init__(self, module: nn.Module, *, rate: float = 1.0, every: int = 1) -> None:
        super().__init__()
        if not 0.0 < rate <= 1.0 or every < 1:
            raise ConfigError(
                f"target network: rate is {rate} and every is {every}; allowed is 0 < rate <= 1 and every >= 1. "
                "Write rate: 0.005, every: 1 (soft) or rate: 1.0, every: 500 (hard)."
            )
        self.module = copy.deepcopy(module).requires_grad_(False)
        self.rate = rate
        self.every = every
        self.calls = 0
        self._followed: _Followed | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the copy says."""
        return self.module(*inputs, **named)

    def requires_grad_(self, requires_grad: bool = True) -> TargetNetwork:
        """A copy learns nothing, whatever a phase freezes or thaws."""
        return self

    def follow(self, module: nn.Module) -> None:
        """Every `every`-th call, move towards `module` by `rate`; buffers are copied."""
        self.calls += 1
        if self.calls % self.every == 0:
            self.move_towards(module)

    @torch.no_grad()
    def move_towards(self, module: nn.Module, rate: Tensor | None = None) -> None:
        """One move by the own rate or, where it changes over a run, by a 0-dim `rate`; uncounted: nothing but tensors
        changes, so that a captured update may contain it."""
        if self._followed is None or self._followed.module is not module or not self._followed.still_holds():
            self._followed = _Followed(self.module, module)
        pairs = self._followed
        if not pairs.parameters:
            pass  # nothing learns, as in an encoder that hands its input on
        elif rate is not None:
            distance = torch._foreach_sub(pairs.their_parameters, pairs.parameters)
            torch._foreach_mul_(distance, rate)
            torch._foreach_add_(pairs.parameters, distance)
        elif self.rate == 1.0:
            torch._foreach_copy_(pairs.parameters, pairs.their_parameters)
        else:
            torch._foreach_lerp_(pairs.parameters, pairs.their_parameters, self.rate)
        if pairs.buffers:
            torch._foreach_copy_(pairs.buffers, pairs.their_buffers)

    def get_extra_state(self) -> Tensor:
        """The count of calls travels in the state_dict, so that `every` survives a resume."""
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)


class _Followed:
    """The tensors of a copy and of its model side by side; walking the modules takes longer than moving them."""

    def __init__(self, copied: nn.Module, module: nn.Module) -> None:
        self.module = module
        self.parameters: list[Tensor] = list(copied.parameters())
        self.their_parameters: list[Tensor] = list(module.parameters())
        self.buffers, self.their_buffers = list(copied.buffers()), list(module.buffers())
        parts = [vars(part) for side in (copied, module) for part in side.modules()]
        self._tables = [part[name] for part in parts for name in ("_modules", "_parameters", "_buffers")]
        self._members = [member for table in self._tables for member in table.values()]

    def still_holds(self) -> bool:
        """Whether both consist of the same modules and tensors as when they were read."""
        return sum(map(len, self._tables)) == len(self._members) and all(
            map(is_, chain.from_iterable(map(dict.values, self._tables)), self._members)
        )


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Inside, gradients pass through these modules but not into them."""
    learning = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
