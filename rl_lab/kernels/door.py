"""The one door through which faster code reaches a formula.

A formula stands once, in plain PyTorch, where the paper's reader looks for it. A faster version of it lies in this
package and is attached by a decorator that names it, `module:NAME`:

    @fast_path("rl_lab.kernels.cpu_losses:PPO_LOSS")       PPO_LOSS = FastPath(
    def ppo_loss(actor, critic, ...):                          run=_ppo_loss,
        ...the formula...                                      formulas=("rl_lab.workflows.ppo:ppo_loss", ...))

It takes the same arguments and answers NotImplemented where it does not fit them: then the formula itself runs.
`formulas` names everything the fast version computes: the formula it is attached to first, then those it calls. Their
digests, taken when the two were last tested against each other, are in `digests.json`. If one of them was edited since,
the fast version is not used and one line says so. After a change that is meant: change the fast version too, run
`pytest tests/kernels`, then `python -m rl_lab.kernels.door` records the digests anew. Code outside this package hands
its digests to `FastPath` itself; `digest(formula)` computes them.

`runtime.fast_paths=off` runs every formula as it is written.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch

Formula = TypeVar("Formula", bound=Callable[..., Any])
Report = Callable[[str, Any], None]  # a sentence and its level: detail or warning
DIGESTS = Path(__file__).parent / "digests.json"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of an nn.Module


@dataclass(frozen=True)
class FastPath:
    """A faster version of `formulas[0]`: the same arguments, results and gradients."""

    run: Callable[..., Any]  # NotImplemented: these arguments do not fit
    formulas: tuple[str, ...]  # `module:qualname` of what it stands for
    fits: Callable[..., bool] | None = None  # asked first, where that is cheaper than beginning
    digests: tuple[str, ...] = ()  # one per formula; empty: those of this package, in digests.json


class _Door:
    """Whether fast paths may be used in this process, which ones are, and who wants to know."""

    def __init__(self) -> None:
        self.is_open = True
        self.in_use: dict[str, str] = {}  # path -> the formula it stands in for
        self.edited: dict[str, str] = {}  # path -> the formula that was edited, so that the path is not used
        self.report: Report = lambda sentence, level: None
        self.takes_gradients = False  # whether who asks for a loss now takes gradients in place of a graph


_door = _Door()


def fast_path(name: str) -> Callable[[Formula], Formula]:
    """Attach the `FastPath` called `name` to a formula. `formula.plain` is the formula itself."""

    def attach(plain: Formula) -> Formula:
        found: FastPath | None = None
        is_looked_up = False

        @wraps(plain)
        def formula(*args: Any, **keywords: Any) -> Any:
            nonlocal found, is_looked_up
            if not _door.is_open or torch.compiler.is_compiling():
                return plain(*args, **keywords)
            if not is_looked_up:
                found, is_looked_up = _look_up(name, plain), True
            if found is None or (found.fits is not None and not found.fits(*args, **keywords)):
                return plain(*args, **keywords)
            result = found.run(*args, **keywords)
            if result is NotImplemented:
                return plain(*args, **keywords)
            if name not in _door.in_use:
                _door.in_use[name] = plain.__qualname__
                _door.report(f"{_short(name)} is used for {plain.__qualname__} (runtime.fast_paths).", "detail")
            return result

        formula.plain = plain  # type: ignore[attr-defined]
        formula.fast_path = name  # type: ignore[attr-defined]
        return formula  # type: ignore[return-value]

    return attach


def open_door(is_open: bool) -> None:
    """Allow fast paths in this process, or run every formula as it is written."""
    _door.is_open, _door.report = is_open, lambda sentence, level: None
    _door.in_use.clear()


def listen(report: Report) -> None:
    """Hear which fast paths are used from now on, and which are not because a formula was edited."""
    _door.report = report
    _door.in_use.clear()
    for name, place in _door.edited.items():
        report(_edited(name, place), "warning")


@contextmanager
def plain_formulas() -> Iterator[None]:
    """Inside, every formula runs as it is written."""
    before, _door.is_open = _door.is_open, False
    try:
        yield
    finally:
        _door.is_open = before


class precomputed_gradients:
    """Inside, the fast version of a loss may bring the gradients of its terms (`LossOutput.gradients`) and leave no
    graph: for a caller that hands the loss to `gradient_step` as it is. Everyone else gets terms to differentiate."""

    def __enter__(self) -> None:
        self.before, _door.takes_gradients = _door.takes_gradients, True

    def __exit__(self, *error: object) -> None:
        _door.takes_gradients = self.before


def takes_gradients() -> bool:
    """Whether precomputed gradients are asked for."""
    return _door.takes_gradients


def in_use() -> dict[str, str]:
    """The fast paths that were taken since the door was opened, and the formulas they stand in for."""
    return {_short(name): formula for name, formula in _door.in_use.items()}


def is_unchanged(part: Any, home: str, *methods: str) -> bool:
    """Whether `part` has these methods from the class at `module:Class` (itself, by inheritance or as copies), none of
    them replaced on the instance, and no hooks."""
    own = vars(part)
    if not _has_methods(type(part), home, methods) or not own.keys().isdisjoint(methods):  # type: ignore[arg-type]
        return False
    return "_forward_hooks" not in own or not has_hooks(part)


def has_hooks(module: Any) -> bool:
    """Whether something else runs when an `nn.Module` is called, forward or backward."""
    own = vars(module)
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    )


@cache
def _has_methods(kind: type, home: str, methods: tuple[str, ...]) -> bool:
    own = find(home)
    if issubclass(own, torch.nn.Module):
        methods = (*methods, "__call__")
    return all(_says_the_same(getattr(kind, method, None), getattr(own, method)) for method in methods)


def _says_the_same(theirs: Any, ours: Any) -> bool:
    """Whether two methods are one, or one is a copy of the other in another file."""
    if theirs is ours or not all(isinstance(_plain(each), FunctionType) for each in (theirs, ours)):
        return theirs is ours
    found = digest(theirs)
    return found is not None and found == digest(ours)


def _short(name: str) -> str:
    return name.removeprefix("rl_lab.kernels.")


# --- has a formula been edited? ------------------------------------------------------------------


def _look_up(name: str, plain: Callable[..., Any]) -> FastPath | None:
    """The fast path, or None where its formulas are not those it was tested against."""
    path: FastPath = find(name)
    known = dict(zip(path.formulas, path.digests, strict=True)) if path.digests else json.loads(DIGESTS.read_text())
    for place in path.formulas:
        formula = plain if place == path.formulas[0] else find(place)
        if digest(formula) != known.get(place):
            _door.edited[name] = place
            _door.report(_edited(name, place), "warning")
            return None
    return path


def _edited(name: str, place: str) -> str:
    return (
        f"{place.replace(':', '.')} is not the formula that the fast path {_short(name)} was tested against: the "
        "formula runs as it is written, without it."
    )


def digest(formula: Any) -> str | None:
    """Of a function's code without its docstring, of the constants of its module that it reads, and of the functions
    of its own package that it calls; None where its source cannot be read."""
    texts: dict[str, str] = {}
    _gather(formula, texts)
    if None in texts.values():
        return None
    text = "\n".join(f"{place}\n{texts[place]}" for place in sorted(texts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _gather(formula: Any, texts: dict[str, Any]) -> None:
    plain = _plain(formula)
    place = plain.__qualname__  # without the module: a copy that says the same is the same
    if place in texts:
        return
    texts[place] = _definitions(sys.modules[plain.__module__]).get(place)
    for name in sorted(_names(plain.__code__)):
        value = plain.__globals__.get(name)
        if isinstance(value, bool | int | float | str | tuple | frozenset):
            texts[f"{place} {name}"] = repr(value)
        elif isinstance(_plain(value), FunctionType) and _package(value) in (_package(plain), "rl_lab"):
            _gather(value, texts)


def _plain(formula: Any) -> Any:
    """The function itself, without decorators, properties and the like."""
    formula = getattr(formula, "fget", None) or formula
    while hasattr(formula, "plain"):
        formula = formula.plain
    return inspect.unwrap(getattr(formula, "__func__", formula)) if callable(formula) else formula


def _names(code: Any) -> set[str]:
    inner = (each for each in code.co_consts if hasattr(each, "co_names"))
    return set(code.co_names).union(*(_names(each) for each in inner))


def _package(function: Any) -> str:
    return str(getattr(_plain(function), "__module__", "")).partition(".")[0]


@cache
def _definitions(module: ModuleType) -> dict[str, str]:
    """Every function of a module by its qualified name, as text without docstrings and decorators."""
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
                node.decorator_list = []
                found[f"{prefix}{node.name}"] = ast.unparse(node)

    walk(ast.parse(Path(file).read_text()).body, "")
    return found


def find(place: str) -> Any:
    """What `module:qualname` names."""
    module, _, names = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def attached_paths() -> list[str]:
    """The names of all fast paths that are attached to a formula of this package, from its sources."""
    package = Path(__file__).parents[1]
    found: set[str] = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "fast_path":
                found.add(ast.literal_eval(node.args[0]))
    return sorted(found)


def record() -> dict[str, str | None]:
    """The digests of all formulas as they are now."""
    places = {place for name in attached_paths() for place in find(name).formulas}
    return {place: digest(find(place)) for place in sorted(places)}


if __name__ == "__main__":
    DIGESTS.write_text(json.dumps(record(), indent=1) + "\n")
