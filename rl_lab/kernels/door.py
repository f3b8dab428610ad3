"""The one door through which faster code reaches a formula.

A formula stands once, in plain PyTorch, where the paper's reader looks for it. A faster version of it lies in this
package and is attached by a decorator that names it, `module:NAME`:

    @fast_path("rl_lab.kernels.cpu_ppo:PPO_LOSS")       PPO_LOSS = FastPath(
    def ppo_loss(actor, critic, ...):                          run=_ppo_loss,
        ...the formula...                                      formulas=("rl_lab.workflows.ppo:ppo_loss", ...))

It takes the same arguments and answers NotImplemented where it does not fit them: then the formula itself runs.
`formulas` names everything the fast version computes: the formula it is attached to first, then those it calls. Their
digests, taken when the two were last tested against each other, are in `digests.json`. If one of them was edited since,
the fast version is not used and one line says so. So it is where, while a program runs, one of them, a constant or a
function that it reads (torch's, too) or a layer of torch is replaced, or hooks are registered for all modules. Inside
the transforms of `torch.func`, forward-mode differentiation and the modes that watch torch's operations, formulas run.

After a change that is meant: change the fast version too, run `pytest tests/kernels`, then
`python -m rl_lab.kernels.door` records the digests anew. Code outside this package hands its digests to `FastPath`
itself; `digest(formula)` computes them.

`runtime.fast_paths=off` runs every formula as it is written. A kernel that only Triton's interpreter has seen is not
`is_measured`: it is used with `runtime.fast_paths=all`, until a GPU has confirmed its results and its gain.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from itertools import repeat
from operator import is_
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad

from rl_lab.kernels.digest import LAYERS, Read, definitions, digest, find

Formula = TypeVar("Formula", bound=Callable[..., Any])
Report = Callable[[str, Any], None]  # a sentence and its level: detail or warning
DIGESTS = Path(__file__).parent / "digests.json"


@dataclass(frozen=True)
class FastPath:
    """A faster version of `formulas[0]`: the same arguments, results and gradients."""

    run: Callable[..., Any]  # NotImplemented: these arguments do not fit
    formulas: tuple[str, ...]  # `module:qualname` of what it stands for
    fits: Callable[..., bool] | None = None  # asked first, where that is cheaper than beginning
    digests: tuple[str, ...] = ()  # one per formula; empty: those of this package, in digests.json
    is_measured: bool = True  # False: used where `runtime.fast_paths=all` asks for it


class _Door:
    """Whether fast paths may be used in this process, which ones are, and who wants to know."""

    def __init__(self) -> None:
        self.is_open = True
        self.takes_unmeasured = False
        self.in_use: dict[str, str] = {}  # path -> the formula it stands in for
        self.edited: dict[str, str] = {}  # path -> the formula that was edited, so that the path is not used
        self.report: Report = lambda sentence, level: None
        self.takes_gradients = False  # whether who asks for a loss now takes gradients in place of a graph


_door = _Door()
_ALL_MODULES = "all modules"


def fast_path(name: str) -> Callable[[Formula], Formula]:
    """Attach the `FastPath` called `name` to a formula. `formula.plain` is the formula itself."""

    def attach(plain: Formula) -> Formula:
        found: FastPath | None = None
        read: Read | None = None

        @wraps(plain)
        def formula(*args: Any, **keywords: Any) -> Any:
            nonlocal found, read
            if not _door.is_open or torch.compiler.is_compiling() or _is_transformed():
                return plain(*args, **keywords)
            if read is None or not read.still_holds():
                found, read = _look_up(name, plain)
            if found is None or not (found.is_measured or _door.takes_unmeasured):
                return plain(*args, **keywords)
            if found.fits is not None and not found.fits(*args, **keywords):
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


_transforms = torch._C._functorch.peek_interpreter_stack
_watching_modes = torch._C._len_torch_dispatch_stack
_replacing_modes = torch._C._len_torch_function_stack


def _is_transformed() -> bool:
    """Whether torch does more with operations than compute them: vmap or grad of `torch.func`, forward-mode
    differentiation, a mode that watches or replaces them. A fast version would hide its operations from that."""
    return bool(_transforms() is not None or _watching_modes() or _replacing_modes() or forward_ad._current_level >= 0)


def open_door(is_open: bool, *, takes_unmeasured: bool = False) -> None:
    """Allow fast paths in this process (also those that no GPU has measured), or run every formula as it is written."""
    _door.takes_unmeasured = takes_unmeasured
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


def has_gradient_hooks(parameter: Any) -> bool:
    """Whether something else runs when the gradient of a parameter is computed or stored."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _has_methods(kind: type, home: str, methods: tuple[str, ...]) -> bool:
    names, originals = _originals(home, methods)
    if all(map(is_, map(getattr, repeat(kind), names, repeat(None)), originals)):
        return True
    return all(map(_says_the_same, map(getattr, repeat(kind), names, repeat(None)), originals))


@cache
def _originals(home: str, methods: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The methods of a class, and what they were when it was first asked for them."""
    own = find(home)
    names = (*methods, "__call__") if issubclass(own, nn.Module) else methods
    return names, tuple(getattr(own, name) for name in names)


_compared: dict[tuple[Any, Any], tuple[bool, Read]] = {}


def _says_the_same(theirs: Any, ours: Any) -> bool:
    """Whether two methods are one, or one is a copy of the other in another file."""
    if theirs is ours:
        return True
    known = _compared.get((theirs, ours))
    if known is None or not known[1].still_holds():
        read = Read()
        found = digest(theirs, read)
        known = _compared[theirs, ours] = found is not None and found == digest(ours, read), read
    return known[0]


def _short(name: str) -> str:
    return name.removeprefix("rl_lab.kernels.")


def _look_up(name: str, plain: Callable[..., Any]) -> tuple[FastPath | None, Read]:
    """The fast path, or None where its formulas are not those it was tested against; and what tells whether that is
    still so."""
    definitions.cache_clear()
    path: FastPath = find(name)
    known = dict(zip(path.formulas, path.digests, strict=True)) if path.digests else json.loads(DIGESTS.read_text())
    read, other = Read(), ""
    for place in path.formulas:
        formula: Any = plain
        if place != path.formulas[0]:
            owner, _, attribute = place.rpartition("." if "." in place.partition(":")[2] else ":")
            formula = getattr(find(owner), attribute, None)
            read.attribute(find(owner), attribute, formula)
        if digest(formula, read) != known.get(place) and not other:
            other = place
    if not other:
        changed = (f"{owner.__name__}.{name}" for owner, name, value in LAYERS if getattr(owner, name) is not value)
        other = next(changed, _ALL_MODULES if read.has_hooks else "")
    if other:
        _door.edited[name] = other
        _door.in_use.pop(name, None)
        _door.report(_edited(name, other), "warning")
        return None, read
    _door.edited.pop(name, None)
    return path, read


def _edited(name: str, place: str) -> str:
    if place == _ALL_MODULES:
        return f"Hooks are registered for all modules: formulas run as they are written, without {_short(name)}."
    return (
        f"{place.replace(':', '.')} is not the formula that the fast path {_short(name)} was tested against: the "
        "formula runs as it is written, without it."
    )


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
