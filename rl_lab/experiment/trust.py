"""Consent to import what a saved config names.

A run directory may come from somebody else, and building its config imports packages: those under `plugins`, of a
`_target_`, of an environment's id `package:Env-v0`. Consent must come from outside the run: from the caller
(`--trust NAME`, `trust=[...]`) or from the user's file of trusted packages, to which training with a package adds it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rl_lab.config.construct import OWN_PACKAGES
from rl_lab.environments.lookup import SUITES
from rl_lab.types import ConfigError

KNOWN = {*OWN_PACKAGES, "gymnasium", *(suite.module for suite in SUITES if suite.module is not None)}
_consented: set[str] = set()  # packages with which this process trains


def foreign_packages(config: Mapping[str, Any]) -> dict[str, str]:
    """Packages that building a config imports, besides ours and those of known environments: {package: place}."""
    found = {module.split(".")[0]: place for module, place in _modules(config)}
    return {package: place for package, place in found.items() if package not in KNOWN}


def check_consent(config: Mapping[str, Any], run: Path, trust: Sequence[str]) -> None:
    """Refuse a saved config that would import what its reader has not agreed to, or anything that lies among runs."""
    foreign = foreign_packages(config)
    agreed = {*trust, *_consented, *_read_trusted()} if foreign else set()
    for package, place in foreign.items():
        if package in sys.stdlib_module_names:
            raise ConfigError(
                f"Run {run.name} names '{package}', a part of Python itself, which no run may use ({place})."
            )
        if package not in agreed:
            raise ConfigError(
                f"Run {run.name} names the package '{package}' in {place}, and opening the run would run its code. If "
                f"you trust that package, add --trust {package} (in Python: trust=['{package}']), or write its name "
                f"into {trusted_file()}."
            )
    for module, place in _modules(config):
        package = module.split(".")[0]
        for path in _locations(module) if package not in OWN_PACKAGES else ():
            if _is_among_runs(path, run):
                raise ConfigError(
                    f"Run {run.name} would import '{module}' from {path}, a folder of runs. Code that lies there is "
                    f"never imported ({place}): move it into your own project, or install it."
                )


def remember_consent(config: Mapping[str, Any]) -> None:
    """Whoever trains with a package agrees to it: in this process, and in later ones through the user's file."""
    new = sorted(foreign_packages(config).keys() - _read_trusted() - _consented - sys.stdlib_module_names)
    _consented.update(foreign_packages(config))
    if new:
        with suppress(OSError):  # without a home that can be written, --trust remains
            trusted_file().parent.mkdir(parents=True, exist_ok=True)
            with trusted_file().open("a", encoding="utf-8") as file:
                file.write("".join(f"{package}\n" for package in new))
            names = ", ".join(new)
            logging.getLogger("rl_lab").warning(
                f"{names}: trusted from now on, so that your runs open without --trust ({trusted_file()})."
            )


def trusted_file() -> Path:
    """The user's own list of packages that runs may import, one name per line."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "rl_lab" / "trusted"


def _read_trusted() -> set[str]:
    try:
        lines = trusted_file().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return set()
    return {name for line in lines if (name := line.partition("#")[0].strip())}


def _modules(node: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Every module that a config names, with its place."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            inner = f"{place}.{key}" if place else str(key)
            last = inner.rpartition(".")[2]  # a phase may write `environment.id` as one key
            if last == "_target_":
                yield str(value).rpartition(".")[0] or str(value), inner
            elif inner == "plugins":
                plugins = value if isinstance(value, list) else [value] if value else []
                yield from ((str(plugin), inner) for plugin in plugins)
            elif "environment" in inner and last in ("id", "env_id") and ":" in str(value):
                yield str(value).rpartition(":")[0], inner
            else:
                yield from _modules(value, inner)
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            if place.endswith("environment.tasks") and ":" in str(value) and isinstance(value, str):
                yield value.rpartition(":")[0], f"{place}.{index}"
            yield from _modules(value, f"{place}.{index}")


def _locations(module: str) -> list[Path]:
    """Where Python would find a module, without importing anything."""
    package, *rest = module.split(".")
    spec = None
    with suppress(ValueError):  # a module made in this process has no place
        spec = importlib.util.find_spec(package)
    if spec is None:
        spec = PathFinder.find_spec(package, [str(Path.cwd())])  # where plugins are looked for last
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        return [Path(spec.origin).resolve()] if spec.has_location and spec.origin else []
    return [Path(folder, *rest).resolve() for folder in spec.submodule_search_locations]


def _is_among_runs(path: Path, run: Path) -> bool:
    """In a run, or in a folder that holds runs; a folder one works in, or below, is more than that."""
    for folder in () if path.is_relative_to(sys.prefix) else (path, *path.parents):
        if (folder / "manifest.json").is_file() and (folder / "config.yaml").is_file():
            return True
        holds_runs = folder == run.resolve().parent or (folder / "index.sqlite").is_file()
        if holds_runs and not Path.cwd().is_relative_to(folder):
            return True
    return False
