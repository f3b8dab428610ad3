"""Whether modules compute the gradients of what they compute: autograd against finite differences, in float64.

A directional derivative along one random direction of parameters and inputs is compared; that finds a wrong backward of
a module written by hand with two more calls of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.utils.seeding import seed_everything, untouched_randomness
from rl_lab.utils.tree import leaves_with_paths, map_leaves

STEP, TOLERANCE = 1e-6, 1e-4  # of the difference; relative to the larger of both derivatives
MOST_ROWS = 64  # of an input: a module treats them alike


@dataclass(frozen=True)
class Result:
    """The derivative of one module along a random direction, by autograd and by a difference of two calls."""

    module: str
    analytic: float
    numeric: float

    @property
    def is_right(self) -> bool:
        larger = max(abs(self.analytic), abs(self.numeric), 1e-8)
        return abs(self.analytic - self.numeric) <= TOLERANCE * larger


class GradientCheck:
    """Remembers the first inputs of every module that is not torch's own, then checks them one by one."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        self.modules = {
            f"{name}.{inner}".rstrip("."): module
            for name, part in parts.items()
            for inner, module in part.named_modules()
            if not type(module).__module__.startswith("torch.") and any(True for _ in module.parameters())
        }
        self.skipped: list[str] = []
        self._inputs: dict[str, tuple[Any, ...]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, the inputs of the first call of each module are kept."""
        with ExitStack() as stack:
            for name, module in self.modules.items():
                hook = module.register_forward_pre_hook(lambda _, inputs, name=name: self._take(name, inputs))
                stack.callback(hook.remove)
            yield

    def _take(self, name: str, inputs: tuple[Any, ...]) -> None:
        if name not in self._inputs:
            self._inputs[name] = map_leaves(_own, inputs)

    def results(self) -> list[Result]:
        """One for every module that was called with tensors and answered with tensors."""
        found = []
        for name, inputs in self._inputs.items():
            with untouched_randomness():
                result = self._check(name, inputs)
            if result is None:
                self.skipped.append(name)
            else:
                found.append(result)
        return found

    def _check(self, name: str, inputs: tuple[Any, ...]) -> Result | None:
        module = copy.deepcopy(self.modules[name]).double()
        if not all(leaf is None or isinstance(leaf, Tensor) for _, leaf in leaves_with_paths(inputs)):
            return None
        module.requires_grad_(True)
        variables = [*module.parameters(), *(leaf for _, leaf in leaves_with_paths(inputs) if _is_variable(leaf))]
        for variable in variables[len(list(module.parameters())) :]:
            variable.requires_grad_(True)
        seed_everything(0)
        directions = [torch.randn(v.shape, dtype=torch.float64).to(v.device) for v in variables]
        output = self._call(module, inputs)
        if output is None or not output.requires_grad:
            return None
        gradients = torch.autograd.grad(output, variables, allow_unused=True)
        pairs = [(g, d) for g, d in zip(gradients, directions, strict=True) if g is not None]
        analytic = float(sum((gradient * direction).sum() for gradient, direction in pairs))
        values = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                _move(variables, directions, sign * STEP)
                moved = self._call(module, inputs)
                _move(variables, directions, -sign * STEP)
            assert moved is not None
            values.append(float(moved))
        return Result(name, analytic, (values[0] - values[1]) / (2.0 * STEP))

    def _call(self, module: nn.Module, inputs: tuple[Any, ...]) -> Tensor | None:
        """The module's output times fixed random weights, as one number; the same noise at every call."""
        seed_everything(1)
        output = module(*inputs)
        tensors = [leaf for _, leaf in leaves_with_paths(output) if isinstance(leaf, Tensor)]
        if not tensors or not all(tensor.dtype == torch.float64 for tensor in tensors):
            return None
        seed_everything(2)
        parts = [(t * torch.randn(t.shape, dtype=t.dtype).to(t.device)).sum() for t in tensors]
        return torch.stack(parts).sum()


def _own(leaf: Any) -> Any:
    """A copy of a few rows; floats in float64."""
    if not isinstance(leaf, Tensor):
        return leaf
    few = leaf.detach()[:MOST_ROWS].clone() if leaf.dim() else leaf.detach().clone()
    return few.double() if few.is_floating_point() else few


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _move(variables: list[Tensor], directions: list[Tensor], distance: float) -> None:
    for variable, direction in zip(variables, directions, strict=True):
        variable.add_(direction, alpha=distance)
