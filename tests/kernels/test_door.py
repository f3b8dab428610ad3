"""The door: a fast version is used where it fits, and steps aside, saying so, when its formula was edited."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rl_lab.kernels import digest, door
from rl_lab.training.runtime import Runtime

FORMULA = '''
"""A formula and a helper."""
import torch
from rl_lab.kernels.door import fast_path

HALF = 0.5

def helper(x, *, more=0 * HALF):
    """Words."""
    return x + 1 + more

def absolute(x):
    return x if isinstance(x, int) else torch.abs(x)

class Loss:
    @fast_path("{name}_fast:DOUBLE")
    def __call__(self, x):
        """More words."""
        return helper(absolute(x)) * HALF * 4 - 2

    @property
    def size(self):
        return HALF
'''
FAST = """
from rl_lab.kernels.door import FastPath
DOUBLE = FastPath(
    run=lambda self, x: ("fast", 2 * x) if x > 0 else NotImplemented,
    formulas=("{name}:Loss.__call__", "{name}:Loss.size"),
)
"""


@pytest.fixture
def heard() -> Iterator[list[tuple[str, str]]]:
    sentences: list[tuple[str, str]] = []
    door.open_door(True)
    door.listen(lambda sentence, level: sentences.append((level, sentence)))
    yield sentences
    door.open_door(True)


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, formula: str = FORMULA) -> ModuleType:
    (folder / f"{name}.py").write_text(formula.replace("{name}", "plain"))
    (folder / "plain_fast.py").write_text(FAST.replace("{name}", "plain"))
    monkeypatch.syspath_prepend(str(folder))
    for each in (name, "plain_fast"):
        monkeypatch.delitem(sys.modules, each, raising=False)
    importlib.invalidate_caches()
    return importlib.import_module(name)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with a fast path whose digests are recorded."""
    module = write(tmp_path, monkeypatch, "plain")
    digests = {f"plain:Loss.{each}": door.digest(door.find(f"plain:Loss.{each}")) for each in ("__call__", "size")}
    (tmp_path / "digests.json").write_text(json.dumps(digests))
    monkeypatch.setattr(door, "DIGESTS", tmp_path / "digests.json")
    return module


def test_the_fast_version_runs_where_it_fits_and_says_so_once(recorded: ModuleType, heard: list) -> None:
    loss = recorded.Loss()
    assert [loss(3), loss(4), loss(-3)] == [("fast", 6), ("fast", 8), -6.0]
    assert heard == [("detail", "plain_fast:DOUBLE is used for Loss.__call__ (runtime.fast_paths).")]
    assert door.in_use() == {"plain_fast:DOUBLE": "Loss.__call__"}
    assert recorded.Loss.__call__.plain(loss, 3) == 6.0


def test_a_version_that_no_gpu_has_measured_is_asked_for(recorded: ModuleType, heard: list) -> None:
    fast = importlib.import_module("plain_fast")
    fast.DOUBLE = replace(fast.DOUBLE, is_measured=False)  # type: ignore[attr-defined]
    assert recorded.Loss()(3) == 6.0 and door.in_use() == {}
    Runtime(device="cpu", fast_paths="all")
    assert recorded.Loss()(3) == ("fast", 6)
    Runtime(device="cpu", fast_paths="on")
    assert recorded.Loss()(3) == 6.0


def test_a_closed_door_runs_formulas_as_they_are_written(recorded: ModuleType, heard: list) -> None:
    with door.plain_formulas():
        assert recorded.Loss()(3) == 6.0
    assert recorded.Loss()(3) == ("fast", 6)
    door.open_door(False)
    assert recorded.Loss()(3) == 6.0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("* HALF * 4 - 2", "* HALF * 4 - 1"),  # the formula itself
        ("HALF = 0.5", "HALF = 0.25"),  # a constant that it reads
        ("return x + 1", "return x + 2"),  # a function that it calls
        ("        return HALF", "        return HALF + 1"),  # another formula that the fast version stands for
        ("def helper", "@torch.no_grad()\ndef helper"),  # a decorator of torch
        ("more=0 * HALF", "more=2 * HALF"),  # a default
    ],
)
def test_an_edited_formula_runs_as_it_is_written(
    recorded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list, old: str, new: str
) -> None:
    assert old in FORMULA
    edited = write(tmp_path, monkeypatch, "plain", FORMULA.replace(old, new))
    assert not isinstance(edited.Loss()(3), tuple)
    [(level, sentence)] = heard
    assert (
        level == "warning" and "is not the formula that the fast path plain_fast:DOUBLE was tested against" in sentence
    )
    late: list[str] = []
    door.listen(lambda sentence, level: late.append(sentence))
    assert sentence in late  # whoever listens later hears it, too
    door._door.edited.clear()


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


REPLACED: dict[str, Callable[[ModuleType, pytest.MonkeyPatch], Any]] = {
    "a constant": lambda module, patch: patch.setattr(module, "HALF", 0.25),
    "a function that the formula calls": lambda module, patch: patch.setattr(module, "helper", lambda x: x + 2),
    "the code of a function": lambda module, patch: patch.setattr(module.helper, "__code__", (lambda x: 7).__code__),
    "a function, by a wrapper of it": lambda module, patch: patch.setattr(module, "helper", _wrapped(module.helper)),
    "another formula": lambda module, patch: patch.setattr(module.Loss, "size", property(lambda self: 1.0)),
    "another formula, by an object": lambda module, patch: patch.setattr(module.Loss, "size", 3),
    "a function, by a decorator of torch": lambda module, patch: patch.setattr(
        module, "helper", torch.no_grad()(module.helper)
    ),
    "a function of torch": lambda module, patch: patch.setattr(torch, "abs", lambda x: x),
    "a layer of torch": lambda module, patch: patch.setattr(nn.Linear, "forward", lambda self, x: 2.0 * x),
    "a hook for all modules": lambda module, patch: patch.setitem(nn.modules.module._global_forward_hooks, 0, print),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_is_replaced_while_a_program_runs_is_seen_and_so_is_its_return(
    what: str, recorded: ModuleType, monkeypatch: pytest.MonkeyPatch, heard: list
) -> None:
    loss = recorded.Loss()
    assert loss(3) == ("fast", 6)
    with monkeypatch.context() as patch:
        REPLACED[what](recorded, patch)
        assert not isinstance(loss(3), tuple) and not isinstance(loss(4), tuple)
        assert [level for level, _ in heard] == ["detail", "warning"] and "plain_fast:DOUBLE" in heard[-1][1]
        assert not door.in_use()
    assert loss(3) == ("fast", 6) and "plain_fast:DOUBLE" in door.in_use()


TRANSFORMS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "vmap": lambda run: torch.func.vmap(lambda x: x + (run(3) == 6.0))(torch.zeros(2)),
    "forward mode": lambda run: _inside(forward_ad.dual_level(), run),
    "a mode that watches operations": lambda run: _inside(TorchDispatchMode(), run),
    "a mode that replaces functions": lambda run: _inside(TorchFunctionMode(), run),
}


def _inside(context: Any, run: Callable[[Any], Any]) -> Any:
    with context:
        found = run(3)
    return torch.tensor(found == 6.0)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_where_torch_transforms_operations_the_formula_runs(transform: str, recorded: ModuleType, heard: list) -> None:
    loss = recorded.Loss()
    assert TRANSFORMS[transform](loss).all()
    assert loss(3) == ("fast", 6)


def test_looking_whether_something_was_replaced_does_not_read_sources_again(
    recorded: ModuleType, monkeypatch: pytest.MonkeyPatch, heard: list
) -> None:
    loss = recorded.Loss()
    loss(3)
    monkeypatch.setattr(digest, "_gather", None)
    assert loss(3) == ("fast", 6)


def test_what_every_path_was_read_from_holds() -> None:
    for name in door.attached_paths():
        formula = door.find(door.find(name).formulas[0])
        found, read = door._look_up(name, getattr(formula, "plain", formula))
        assert found is not None and read.still_holds(), name


def test_words_do_not_count_as_edits(
    recorded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list
) -> None:
    changed = FORMULA.replace("words", "sentences").replace("HALF = ", "\nHALF = ")
    reworded = write(tmp_path, monkeypatch, "plain", changed)
    assert reworded.Loss()(3) == ("fast", 6)


def test_a_copy_of_a_formula_counts_as_the_formula_until_it_is_edited(
    recorded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list
) -> None:
    assert write(tmp_path, monkeypatch, "my_copy").Loss()(3) == ("fast", 6)
    assert write(tmp_path, monkeypatch, "my_edit", FORMULA.replace("4 - 2", "4 - 1")).Loss()(3) == 7.0
    door._door.edited.clear()


def test_a_formula_without_a_source_runs_as_it_is(recorded: ModuleType, heard: list) -> None:
    namespace: dict = {"__name__": "plain"}
    exec("def other(x):\n    return x", namespace)
    assert door.digest(namespace["other"]) is None
    door._door.edited.clear()


def test_the_recorded_digests_are_those_of_the_formulas() -> None:
    """If this fails, a formula with a fast version was edited: change the fast version likewise, see that the other
    tests of this folder pass, then run `python -m rl_lab.kernels.door`."""
    assert json.loads(door.DIGESTS.read_text()) == door.record()
