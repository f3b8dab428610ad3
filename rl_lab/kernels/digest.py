"""Of which code a formula consists: a digest of it, and what tells whether any of it was replaced since.

The digest covers the text of a function and what it reads, as far as the package goes; torch's own functions and layers
are compared by identity alone. How fast versions use both is in `door`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
from functools import cache, cached_property
from itertools import repeat
from operator import call, eq, is_, itemgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of an nn.Module
HOOKS_OF_ALL = [getattr(nn.modules.module, f"_global{name}") for name in HOOKS]
LAYERS = [  # what the plain formulas go through in torch, and fast versions do not
    (owner, name, getattr(owner, name))
    for owner, name in (
        (nn.Module, "__call__"),
        (nn.Module, "_call_impl"),
        (nn.Linear, "forward"),
        (nn.Conv2d, "forward"),
        (nn.Sequential, "forward"),
        (nn.functional, "linear"),
    )
]


class Read:
    """What the digests of a fast path were taken from: who holds it, under which name, and what it was then."""

    def __init__(self) -> None:
        self.owners: list[Any] = []  # classes, modules and functions, by attribute
        self.names: list[str] = []
        self.values: list[Any] = []
        self.tables: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # names of modules, and what they were
        self.has_hooks = any(HOOKS_OF_ALL)
        for owner, name, _ in LAYERS:
            self.attribute(owner, name, getattr(owner, name))

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        self.owners.append(owner)
        self.names.append(name)
        self.values.append(value)

    def entry(self, table: dict[str, Any], key: str, value: Any) -> None:
        self.tables.setdefault(id(table), (table, {}))[1][key] = value

    @cached_property
    def _lookups(self) -> list[tuple[Any, ...]]:
        """What gets several names of a module in one call; the module; what they were."""
        found = []
        for table, entries in self.tables.values():
            keys = [*entries, next(iter(entries))]  # two at least, so that they come as a tuple
            found.append((itemgetter(*keys), table, tuple(entries[key] for key in keys)))
        return list(zip(*found, strict=True)) or [(), (), ()]

    def still_holds(self) -> bool:
        getters, tables, values = self._lookups
        try:
            return (
                all(map(is_, map(getattr, self.owners, self.names, repeat(None)), self.values))
                and all(map(eq, map(call, getters, tables), values))  # tuples compare by identity first
                and any(HOOKS_OF_ALL) == self.has_hooks
            )
        except KeyError:  # a name is gone
            return False


def digest(formula: Any, read: Read | None = None) -> str | None:
    """Of a function's code without its docstring, of its decorators and defaults, of the constants and the names of
    classes of its module that it reads, and of the functions of its own package that it calls; None where its source
    cannot be read."""
    texts: dict[str, str] = {}
    _gather(formula, texts, read or Read())
    if None in texts.values():
        return None
    text = "\n".join(f"{place}\n{texts[place]}" for place in sorted(texts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _gather(formula: Any, texts: dict[str, Any], read: Read) -> None:
    plain, wrappers = _unwrapped(formula)
    place = getattr(plain, "__qualname__", str(plain))  # without the module: a copy that says the same is the same
    if place in texts:
        return
    read.attribute(plain, "__code__", getattr(plain, "__code__", None))
    if not isinstance(plain, FunctionType) or plain.__code__.co_qualname != place:  # somebody's wrapper of it
        texts[place] = None
        return
    texts[place] = definitions(sys.modules[plain.__module__]).get(place)
    defaults = (*(plain.__defaults__ or ()), *(plain.__kwdefaults__ or {}).values())
    texts[f"{place} as called"] = repr([*wrappers, *filter(_is_constant, defaults)])
    for table, name in _names_read(plain):
        value = table[name]
        read.entry(table, name, value)
        if isinstance(value, ModuleType):
            continue
        is_ours = _package(value) in (_package(plain), "rl_lab")
        if _is_constant(value):
            texts[f"{place} {name}"] = repr(value)
        elif isinstance(value, type):
            if is_ours:
                texts[f"{place} {name}"] = value.__qualname__
        elif isinstance(_plain(value), FunctionType) and is_ours:
            _gather(value, texts, read)
        elif table is not plain.__globals__ and _package(value) not in ("", "None", "torch", "math", "rl_lab"):
            texts[f"{place} {name}"] = None  # somebody's function in place of one of torch


def _names_read(function: FunctionType) -> list[tuple[dict[str, Any], str]]:
    """Where a function looks names up, and which: in its own module, and in the modules that it names."""
    names, tables, found = sorted(_names(function.__code__)), [function.__globals__], []
    for table in tables:
        for name in names:
            if name in table:
                found.append((table, name))
                if isinstance(table[name], ModuleType) and not any(vars(table[name]) is each for each in tables):
                    tables.append(vars(table[name]))
    return found


def _is_constant(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | tuple | frozenset | None)


def _plain(formula: Any) -> Any:
    """The function itself, without properties and the decorators of this module, of torch and of Python."""
    return _unwrapped(formula)[0]


def _unwrapped(formula: Any) -> tuple[Any, list[str]]:
    """The function itself, and the names of the decorators of torch and of Python around it."""
    formula, names = getattr(formula, "fget", None) or formula, []
    formula = getattr(formula, "__func__", formula)
    while hasattr(formula, "__wrapped__"):
        home = getattr(formula, "__globals__", {"__name__": type(formula).__module__})["__name__"]
        if home != f"{__package__}.door":  # not `__name__`: this module may be the program
            if home.partition(".")[0] not in ("torch", "functools", "contextlib"):
                break  # somebody else's wrapper may do anything
            names.append(formula.__code__.co_qualname if hasattr(formula, "__code__") else type(formula).__qualname__)
        formula = formula.__wrapped__
    return formula, names


def _names(code: Any) -> set[str]:
    inner = (each for each in code.co_consts if hasattr(each, "co_names"))
    return set(code.co_names).union(*(_names(each) for each in inner))


def _package(function: Any) -> str:
    return str(getattr(_plain(function), "__module__", "")).partition(".")[0]


@cache
def definitions(module: ModuleType) -> dict[str, str]:
    """Every function of a module by its qualified name, as text without docstrings and `fast_path`."""
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():
        return {}
    found: dict[str, str] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                if ast.get_docstring(node) is not None:
                    node.body = node.body[1:] or [ast.Pass()]
                own = [each for each in node.decorator_list if not ast.unparse(each).startswith("fast_path(")]
                node.decorator_list = own
                found[f"{prefix}{node.name}"] = ast.unparse(node)

    walk(ast.parse(Path(file).read_text()).body, "")
    return found


def find(place: str) -> Any:
    """What `module` or `module:qualname` names."""
    module, _, names = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split(".") if names else ():
        found = getattr(found, name)
    return found
