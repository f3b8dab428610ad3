"""What a fast path found out about a module, kept for as long as nothing that it was found out from has changed.

Reading a network apart, layer by layer, takes longer than asking whether it is still the one read before: the same
classes with the same `forward`, attributes, submodules and parameters, these at the same place in memory, and no hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from rl_lab.kernels.digest import HOOKS
from rl_lab.kernels.door import has_gradient_hooks

Answer = TypeVar("Answer")
_MEMBERS = ("_modules", "_parameters", "_buffers")
_OF_EVERY_MODULE = vars(nn.Module()).keys() - set(_MEMBERS)  # nobody replaces these; what hooks hold is looked at
_forward = attrgetter("forward")


def remembered(read: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
    """`read(module)`, asked again only once the module is another one than it was."""
    known: WeakKeyDictionary[Any, _Known[Answer]] = WeakKeyDictionary()

    def answer(module: Any) -> Answer:
        found = known.get(module)
        if found is None or not found.still_holds(module):
            found = known[module] = _Known(module, read(module))
        return found.answer

    return answer


class _Known(Generic[Answer]):
    """Holds no reference to the module itself, only to what it consists of."""

    def __init__(self, module: nn.Module, answer: Answer) -> None:
        self.answer, self.kind = answer, type(module)
        self.inner = list(module.modules())[1:]
        self.inner_kinds = [type(each) for each in self.inner]
        self.kinds = list(dict.fromkeys((self.kind, *self.inner_kinds)))
        self.forwards = [each.forward for each in self.kinds]
        attributes = [vars(each) for each in module.modules()]
        self.members = [each[name] for each in attributes for name in _MEMBERS]
        self.member_values = [value for table in self.members for value in table.values()]
        self.tables = attributes + self.members
        self.size = sum(map(len, self.tables))
        own = [
            (each, name, value) for each in attributes for name, value in each.items() if name not in _OF_EVERY_MODULE
        ]
        self.owners, self.names, self.values = zip(*own, strict=True)
        self.hooks = [each[name] for each in attributes for name in HOOKS]
        self.tensors = list(module.parameters())
        self.places = self._places()

    def still_holds(self, module: nn.Module) -> bool:
        return (
            type(module) is self.kind
            and list(map(type, self.inner)) == self.inner_kinds
            and all(map(is_, map(_forward, self.kinds), self.forwards))
            and sum(map(len, self.tables)) == self.size
            and all(map(is_, map(dict.get, self.owners, self.names), self.values))
            and all(map(is_, chain.from_iterable(map(dict.values, self.members)), self.member_values))
            and not any(self.hooks)
            and self._places() == self.places
        )

    def _places(self) -> list[Any]:
        """An array that shares a tensor's memory keeps it, so no other tensor can take its place."""
        tensors = self.tensors
        return [*map(Tensor.data_ptr, tensors), *map(Tensor.is_contiguous, tensors), *map(has_gradient_hooks, tensors)]
