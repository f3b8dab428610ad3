"""The shape of the code: who imports whom, how long things are, and where each concern has its one place.

Every rule is a function from sources to places that break it, so that a test can show each rule a bad snippet.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "rl_lab"

# Which of our modules each part may import, besides itself. A name also allows what lies below it.
LEAVES = ("buffers", "environments", "runs", "metrics")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(LEAVES, ("types", "utils")),
    "components": ("kernels.door", "types", "utils"),
    "training": ("kernels.door", "types", "utils"),
    "kernels": ("types",),
    "types": (),
    "utils": (),
    "configs": (),
    "config": ("types", "utils"),
    "collection": ("environments.base", "types", "utils"),
    "workflows": ("components", "kernels.door", "training", "types"),
    "orchestration": (
        *("workflows.base", "collection", "buffers.base", "runs", "metrics", "training.world", "types", "utils"),
    ),
    "experiment": (
        *("config", "orchestration", "workflows", "collection", "environments", "buffers", "kernels.door"),
        *("training", "runs", "metrics", "policy", "types", "utils"),
    ),
    "policy": ("", "collection.collector", "environments.recipe", "experiment.export", "workflows.base", "types"),
    "api": (
        *("collection", "config", "environments", "experiment", "orchestration.callbacks", "policy", "runs", "types"),
    ),
    "launch": ("types", "utils"),
    "cli": ("", "api", "config", "experiment", "launch", "runs", "types", "utils"),  # "": the package, for its version
    "__init__": ("api", "policy"),
    "__main__": ("cli",),
}

# Where an exception of any kind is met, file and function: user code runs inside, and why is said there.
BROAD_EXCEPTS = {
    "rl_lab/environments/cell.py": {"begin", "prepare", "step", "_rebuild", "_is_restored"},
    "rl_lab/environments/checker.py": {"_call"},
    "rl_lab/environments/factory.py": {"make_native"},
    "rl_lab/environments/handed.py": {"__call__"},
    "rl_lab/environments/lookup.py": {"_import_users_module"},
    "rl_lab/environments/recipe.py": {"_make", "close"},
    "rl_lab/environments/rendering.py": {"take"},
    "rl_lab/environments/vector.py": {"reset", "step"},
    "rl_lab/environments/wrappers.py": {"apply_wrappers"},
    "rl_lab/metrics/sinks.py": {"_attempt"},
    "rl_lab/orchestration/callbacks.py": {"_call"},
}

LONGEST_FILE, LONGEST_FUNCTION, LONGEST_WORKFLOW, LONGEST_ORCHESTRATOR = 500, 60, 330, 200
LONGEST_KERNEL = 160  # on a GPU: what keeps its values through all time steps is one function


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    path: str  # rl_lab/workflows/ppo.py
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """`workflows.ppo`; the package's own __init__ and __main__ keep their names."""
        inner = self.path.removeprefix(f"{PACKAGE}/").removesuffix(".py")
        return (inner if inner.startswith("__") else inner.removesuffix("/__init__")).replace("/", ".")

    def place(self, node: ast.AST, what: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 0)} {what}"


SOURCES = [
    Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in sorted((ROOT / PACKAGE).rglob("*.py"))
]
MODULES = {source.module for source in SOURCES}
Rule = Callable[[Source], Iterator[str]]


# --- who imports whom --------------------------------------------------------------------------


def imported_names(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Every name imported anywhere in a file, in full: `rl_lab.api`, `hydra.errors`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = [PACKAGE, *source.module.split(".")]
                base = ".".join([*package[: len(package) - node.level], *([base] if base else [])])
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def our_module(name: str) -> str | None:
    """The module of ours that a full name lies in (`rl_lab.types.Batch` -> `types`), None for others' names."""
    if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
        return None
    inner = name.removeprefix(PACKAGE).lstrip(".")
    while inner and inner not in MODULES:
        inner = inner.rpartition(".")[0]
    return inner


def wrong_imports(source: Source) -> Iterator[str]:
    part = source.module.split(".")[0]
    allowed = (part, *MAY_IMPORT[part])
    for node, name in imported_names(source):
        found = our_module(name)
        if found is not None and not any(found == each or (each and found.startswith(f"{each}.")) for each in allowed):
            yield source.place(node, f"imports {name}; {part} may import {', '.join(MAY_IMPORT[part]) or 'nothing'}")


def wrong_libraries(source: Source) -> Iterator[str]:
    """Each big library has one home."""
    homes = {
        "hydra": ("config",),
        "omegaconf": ("config",),
        "gymnasium": ("environments", "api", "cli.doctor"),
    }
    for node, name in imported_names(source):
        home = homes.get(name.split(".")[0])
        if home is not None and not source.module.startswith(home):
            yield source.place(node, f"imports {name}, which belongs in {' and '.join(home)}")
        if name.split(".")[0] == "torch" and source.module.startswith("environments"):
            yield source.place(node, f"imports {name}; environments are numpy only")
        if our_module(name) == "environments.recipe" and not source.module.startswith(("environments", "policy")):
            yield source.place(node, "imports environments.recipe, which only policy.py may")


# --- how long things are -----------------------------------------------------------------------


def long_files(source: Source) -> Iterator[str]:
    limit = LONGEST_FILE
    if source.module.startswith("workflows"):
        limit = LONGEST_WORKFLOW
    if source.module == "orchestration.orchestrator":
        limit = LONGEST_ORCHESTRATOR
    lines = len(source.text.splitlines())
    if lines > limit:
        yield f"{source.path} has {lines} lines; at most {limit}"


def long_functions(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            is_kernel = any(ast.unparse(each) == "triton.jit" for each in node.decorator_list)
            limit = LONGEST_KERNEL if is_kernel else LONGEST_FUNCTION
            if lines > limit:
                yield source.place(node, f"{node.name} has {lines} lines; at most {limit}")


# --- one place per concern ---------------------------------------------------------------------


def calls(source: Source) -> Iterator[tuple[ast.Call, str]]:
    """Every call with the dotted text of what is called: `self.environment.step`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def item_in_workflows(source: Source) -> Iterator[str]:
    """Reading a number waits for the device; the logger does it once per row."""
    if source.module.startswith("workflows"):
        for node, name in calls(source):
            if name.endswith((".item", ".tolist", ".cpu", ".numpy")):
                yield source.place(node, f"calls {name}()")


def prints(source: Source) -> Iterator[str]:
    if not source.module.startswith(("cli", "metrics.terminal")):
        for node, name in calls(source):
            if name == "print":
                yield source.place(node, "prints")


def broad_excepts(source: Source) -> Iterator[str]:
    """`except Exception` hides what nobody thought of. One that ends with a bare `raise` hides nothing."""
    for node, function in broad_handlers(source):
        if function not in BROAD_EXCEPTS.get(source.path, ()):
            yield source.place(node, f"catches {'everything' if node.type is None else ast.unparse(node.type)}")


def broad_handlers(source: Source) -> Iterator[tuple[ast.ExceptHandler, str]]:
    """Each with the name of the function it stands in."""
    functions = [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = "BaseException" if node.type is None else ast.unparse(node.type)
            raises_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if re.search(r"\b(Base)?Exception\b", caught) and not raises_again:
                around = [each for each in functions if each.lineno <= node.lineno <= (each.end_lineno or 0)]
                yield node, max(around, key=lambda each: each.lineno).name if around else ""


def unfinished(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line) or re.search(r"\bNotImplementedError\(\)", line):
            yield f"{source.path}:{number} is unfinished: {line.strip()}"


def environment_steps(source: Source) -> Iterator[str]:
    if not source.module.startswith("collection"):
        for node, name in calls(source):
            if name.endswith("environment.step"):
                yield source.place(node, "steps an environment; only collection does")


def backwards(source: Source) -> Iterator[str]:
    if source.module != "training.optimizer":
        for node, name in calls(source):
            if name.endswith(".backward"):
                yield source.place(node, "calls backward; only training/optimizer.py does")


def compilations(source: Source) -> Iterator[str]:
    if source.module in ("training.runtime", "training.capture"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"torch\.(compile|autocast|amp|cuda\.amp|cuda\.CUDAGraph|cuda\.graph)", name):
                yield source.place(node, f"uses {name}; only training/runtime.py does")
    for node, name in imported_names(source):
        if re.match(r"torch\.(compile|autocast|amp|cuda\.amp)\b", name):
            yield source.place(node, f"imports {name}; only training/runtime.py does")


def seeds(source: Source) -> Iterator[str]:
    if source.module != "utils.seeding":
        for node, name in calls(source):
            if re.search(r"(^|\.)(manual_seed|manual_seed_all)$|^(np|numpy)\.random\.seed$|^random\.seed$", name):
                yield source.place(node, f"calls {name}; only utils/seeding.py seeds this process")


def ranks(source: Source) -> Iterator[str]:
    if source.module != "training.world":
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Compare) and re.search(r"\brank\b", ast.unparse(node.left)):
                yield source.place(node, f"compares a rank: {ast.unparse(node)}")


RULES: list[Rule] = [
    wrong_imports,
    wrong_libraries,
    long_files,
    long_functions,
    item_in_workflows,
    prints,
    broad_excepts,
    unfinished,
    environment_steps,
    backwards,
    compilations,
    seeds,
    ranks,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    broken = [place for source in SOURCES for place in rule(source)]
    assert not broken, "\n".join(["", *broken])


def test_every_part_of_the_package_has_its_rule() -> None:
    parts = {source.module.split(".")[0] for source in SOURCES}
    assert parts == MAY_IMPORT.keys()


def test_the_list_of_broad_excepts_is_up_to_date() -> None:
    found = {source.path: {function for _, function in broad_handlers(source)} for source in SOURCES}
    assert {path: functions for path, functions in found.items() if functions} == BROAD_EXCEPTS


def test_test_modules_have_names_of_their_own() -> None:
    """pytest imports a test file that is in no package by its bare name: two alike would hide one another."""
    tests = [path for path in (ROOT / "tests").rglob("*.py") if not (path.parent / "__init__.py").exists()]
    doubled = [name for name, count in Counter(path.name for path in tests).items() if count > 1]
    assert set(doubled) <= {"conftest.py"}


# --- every rule can be broken ------------------------------------------------------------------

BREAKS: list[tuple[Rule, str, str, int]] = [
    (wrong_imports, "buffers/new.py", "from rl_lab.runs.files import read_json", 1),
    (wrong_imports, "buffers/new.py", "from rl_lab.buffers.base import Buffer\nfrom rl_lab.types import Batch", 0),
    (wrong_imports, "components/new.py", "def f():\n    import rl_lab.training.optimizer", 1),
    (wrong_imports, "components/new.py", "from rl_lab.kernels import cpu_mlp", 1),
    (wrong_imports, "components/new.py", "from rl_lab.kernels.door import fast_path", 0),
    (wrong_imports, "kernels/new.py", "from rl_lab.components.networks.encoders import MLP", 1),
    (wrong_imports, "utils/new.py", "from rl_lab.types import Batch", 1),
    (wrong_imports, "types.py", "from rl_lab import utils", 1),
    (
        wrong_imports,
        "workflows/new.py",
        "from rl_lab.components.networks.encoders import MLP\nfrom rl_lab import collection",
        1,
    ),
    (wrong_imports, "workflows/new.py", "from ..collection import collector", 1),
    (wrong_imports, "collection/new.py", "from rl_lab.environments.factory import make_environment", 1),
    (wrong_imports, "collection/new.py", "from rl_lab.environments.base import Environment", 0),
    (wrong_imports, "orchestration/new.py", "from rl_lab.workflows.ppo import PPO", 1),
    (wrong_imports, "orchestration/new.py", "from rl_lab.training.optimizer import Optimizer", 1),
    (wrong_imports, "orchestration/new.py", "from rl_lab.workflows.base import Workflow", 0),
    (wrong_imports, "cli/new.py", "from rl_lab import __version__, api\nfrom rl_lab.runs.index import RunIndex", 0),
    (wrong_imports, "cli/new.py", "from rl_lab.training.runtime import Runtime", 1),
    (wrong_imports, "experiment/build.py", "from rl_lab.workflows.ppo import PPO", 0),
    (wrong_imports, "config/new.py", "from rl_lab.training.schedules import Schedule", 1),
    (wrong_imports, "experiment/new.py", "from rl_lab import api\nfrom rl_lab.cli.main import main", 2),
    (wrong_imports, "api.py", "from rl_lab.cli.main import main\nfrom rl_lab.training.runtime import Runtime", 2),
    (wrong_imports, "policy.py", "from rl_lab.experiment.load import load_agent", 1),
    (wrong_imports, "launch/new.py", "from rl_lab.experiment.session import start_run", 1),
    (wrong_libraries, "experiment/build.py", "from omegaconf import OmegaConf", 1),
    (wrong_libraries, "config/compose.py", "import hydra", 0),
    (wrong_libraries, "collection/new.py", "import gymnasium as gym", 1),
    (wrong_libraries, "environments/new.py", "import torch", 1),
    (wrong_libraries, "experiment/build.py", "from rl_lab.environments.recipe import Recipe", 1),
    (wrong_libraries, "policy.py", "from rl_lab.environments.recipe import Blueprint", 0),
    (long_files, "types.py", "x = 1\n" * 501, 1),
    (long_files, "workflows/new.py", "x = 1\n" * 331, 1),
    (long_files, "orchestration/orchestrator.py", "x = 1\n" * 201, 1),
    (long_files, "types.py", "x = 1\n" * 500, 0),
    (long_functions, "types.py", "def f():\n" + "    x = 1\n" * 60, 1),
    (long_functions, "types.py", "@triton.jit\ndef f():\n" + "    x = 1\n" * 60, 0),
    (long_functions, "types.py", "@triton.jit\ndef f():\n" + "    x = 1\n" * 160, 1),
    (long_functions, "types.py", "class A:\n    def f(self):\n" + "        x = 1\n" * 59, 0),
    (item_in_workflows, "workflows/new.py", "print(loss.mean().item())", 1),
    (item_in_workflows, "components/new.py", "loss.item()", 0),
    (prints, "runs/new.py", "print(1)", 1),
    (prints, "cli/new.py", "print(1)", 0),
    (broad_excepts, "runs/new.py", "try:\n    x\nexcept Exception:\n    pass", 1),
    (broad_excepts, "runs/new.py", "try:\n    x\nexcept:\n    pass", 1),
    (broad_excepts, "runs/new.py", "try:\n    x\nexcept (ValueError, BaseException) as e:\n    raise KeyError", 1),
    (broad_excepts, "runs/new.py", "try:\n    x\nexcept BaseException:\n    note()\n    raise", 0),
    (broad_excepts, "runs/new.py", "try:\n    x\nexcept OSError:\n    pass", 0),
    (broad_excepts, "environments/cell.py", "def f():\n    try:\n        x\n    except Exception:\n        y", 1),
    (broad_excepts, "environments/cell.py", "def step():\n    try:\n        x\n    except Exception:\n        y", 0),
    (unfinished, "runs/new.py", "x = 1  # TODO: more", 1),
    (environment_steps, "workflows/new.py", "rows = self.environment.step(action)", 1),
    (environment_steps, "collection/new.py", "rows = self.environment.step(action)", 0),
    (backwards, "workflows/new.py", "loss.backward()", 1),
    (backwards, "workflows/new.py", "torch.autograd.backward(loss)", 1),
    (compilations, "workflows/new.py", "with torch.autocast('cuda'):\n    pass", 1),
    (compilations, "components/new.py", "from torch.amp import autocast", 1),
    (compilations, "workflows/new.py", "with self.context.runtime.autocast():\n    pass", 0),
    (seeds, "workflows/new.py", "torch.manual_seed(0)\nnp.random.seed(0)", 2),
    (seeds, "workflows/new.py", "generator.random(3)", 0),
    (ranks, "runs/new.py", "if world.rank == 0:\n    save()", 1),
]


@pytest.mark.parametrize(("rule", "path", "text", "count"), BREAKS)
def test_the_rule_sees_what_breaks_it_and_nothing_else(rule: Rule, path: str, text: str, count: int) -> None:
    found = list(rule(Source(f"{PACKAGE}/{path}", text)))
    assert len(found) == count, found
    assert all(place.startswith(f"{PACKAGE}/{path}") for place in found)


def test_every_rule_has_a_snippet_that_breaks_it() -> None:
    assert {rule for rule, _, _, count in BREAKS if count} == set(RULES)
