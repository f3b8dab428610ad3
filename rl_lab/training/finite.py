"""Which number was the first that is not finite: in which tensor, from which operation, of which module and line.

For debugging only: every operation is looked at, forward and backward, which takes many times as long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl_lab.utils.tree import leaves_with_paths

UNWRITTEN = ("aten.empty", "aten.new_empty", "aten.resize")  # memory as it is: nothing was computed
CONSTANTS = ("aten.lift_fresh",)  # a number of Python's becomes a tensor: it comes from there
OUTSIDE = (os.path.dirname(torch.__file__), __file__)


@dataclass(frozen=True)
class Origin:
    """The first operation that made such a number out of others."""

    operation: str  # aten.log, or SqrtBackward0 in the backward pass
    line: str  # ppo.py:310 in ppo_loss
    module: str  # actor.network.hidden.0 (Linear); empty outside of modules
    infinity: str = ""  # of a NaN that was made out of an infinity: where that came from

    def __str__(self) -> str:
        inside = f", module {self.module}" if self.module else ""
        before = f", out of an infinity from {self.infinity}" if self.infinity else ""
        return f"{self.operation} at {self.line or 'an unknown line'}{inside}{before}"


@dataclass(frozen=True)
class Place:
    """One number that is not finite."""

    what: str  # observation, reward, action, batch, loss, gradient, parameter or metric
    name: str  # vector, loss/policy, actor.network.hidden.0.weight
    index: tuple[int, ...]  # of the first such number in the tensor
    value: str  # nan, inf or -inf
    origin: Origin | None = None

    def __str__(self) -> str:
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        named = self.name if self.what in ("loss", "metric") else f"{self.what} {self.name}"
        return f"{named}{where} is {self.value}"

    def as_dict(self) -> dict[str, Any]:
        origin = None if self.origin is None else dict(vars(self.origin))
        return {**vars(self), "index": list(self.index), "origin": origin}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Place:
        origin = None if facts["origin"] is None else Origin(**facts["origin"])
        return cls(**{**facts, "index": tuple(facts["index"]), "origin": origin})


def first_bad(what: str, tensors: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> Place | None:
    """The first number that is not finite in named tensors (or numbers, or trees of them)."""
    named = tensors.items() if isinstance(tensors, Mapping) else tensors
    for name, tree in named:
        for path, leaf in leaves_with_paths(tree, name):
            tensor = torch.as_tensor(leaf).detach() if isinstance(leaf, Tensor | float) else None
            if tensor is None or not _is_bad(tensor):
                continue
            index = (~torch.isfinite(tensor)).nonzero()[0].tolist()
            return Place(what, path, tuple(index), str(float(tensor[tuple(index)])))
    return None


class OperationWatch(TorchDispatchMode):
    """Inside, every operation is looked at; `origin_of` says which one first made a NaN, or an infinity."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules = modules
        self._inside: list[str] = []  # the modules that are being called
        self._first: dict[str, Origin] = {}  # nan, inf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for _, leaf in leaves_with_paths([list(args), dict(kwargs)]) if isinstance(leaf, Tensor)]
        given = [] if str(func).startswith(CONSTANTS) else given
        before = _kinds(given) if func._schema.is_mutable else None  # it may write over what it was given
        result = func(*args, **kwargs)
        if not str(func).startswith(UNWRITTEN):
            made = _kinds([leaf for _, leaf in leaves_with_paths([result]) if isinstance(leaf, Tensor)])
            if made - self._first.keys():
                inputs = _kinds(given) if before is None else before
                for kind in sorted(made - inputs - self._first.keys()):  # inf before nan
                    self._first[kind] = self._origin(func, is_of_infinity=kind == "nan" and "inf" in inputs)
        return result

    def _origin(self, func: Any, *, is_of_infinity: bool) -> Origin:
        infinity = str(self._first.get("inf", "")) if is_of_infinity else ""
        node = torch._C._current_autograd_node()
        if node is not None:
            metadata: Any = node.metadata  # declared as a method, but a dictionary
            return Origin(node.name(), _forward_line(metadata.get("traceback_")), "", infinity)
        module = self._inside[-1] if self._inside else ""
        return Origin(str(func).rpartition(".")[0], _line_of(sys._getframe(2)), module, infinity)

    def origin_of(self, place: Place) -> Place:
        """The place with what it comes from, as far as an operation in here made it."""
        kinds = ("nan", "inf") if place.value == "nan" else ("inf",)
        origin = next((self._first[kind] for kind in kinds if kind in self._first), None)
        return Place(place.what, place.name, place.index, place.value, origin)

    @contextmanager
    def watching(self) -> Iterator[OperationWatch]:
        """Operations, and which module is being called; backward knows the line of its forward operation."""
        self._first, self._inside = {}, []
        with ExitStack() as stack:
            for name, module in self._modules.items():
                title = f"{name} ({type(module).__name__})"
                entering = module.register_forward_pre_hook(lambda *_, title=title: self._inside.append(title))
                leaving = module.register_forward_hook(lambda *_: self._inside.pop() and None, always_call=True)
                stack.callback(entering.remove)
                stack.callback(leaving.remove)
            stack.enter_context(_forward_lines())
            stack.enter_context(self)
            yield self


def _forward_lines() -> AbstractContextManager[Any]:
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


def _is_bad(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    return not bool(torch.isfinite(tensor.detach().sum())) and not bool(torch.isfinite(tensor.detach()).all())


def _kinds(tensors: Sequence[Tensor]) -> set[str]:
    found: set[str] = set()
    for tensor in tensors:
        if _is_bad(tensor):
            found |= {"nan"} if bool(torch.isnan(tensor).any()) else set()
            found |= {"inf"} if bool(torch.isinf(tensor).any()) else set()
    return found


def _line_of(frame: FrameType | None) -> str:
    """The innermost line outside of torch."""
    while frame is not None and frame.f_code.co_filename.startswith(OUTSIDE):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _forward_line(traceback: Sequence[str] | None) -> str:
    """The same of the forward operation: autograd keeps its traceback as text."""
    for entry in reversed(traceback or []):
        words = entry.strip().splitlines()[0].split('"')
        if len(words) == 3 and not words[1].startswith(OUTSIDE):
            number, _, function = words[2].removeprefix(", line ").partition(", in ")
            return f"{os.path.basename(words[1])}:{number} in {function}"
    return ""
