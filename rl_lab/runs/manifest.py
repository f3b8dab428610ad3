"""What made a run: versions, commit, command and machine, so that a result can be traced and repeated."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_lab.runs.files import Kinds, check_types
from rl_lab.runs.git import git_state
from rl_lab.types import RunError

CONFIG_SCHEMA_VERSION = 3  # 3: MLP lies in networks.encoders
CHECKPOINT_SCHEMA_VERSION = 2  # 2: files outside a checkpoint are checksummed in blocks

_PACKAGES = ("torch", "numpy", "gymnasium")
_TEXT = (str, type(None))
_KINDS: Kinds = {
    **dict.fromkeys(("name", "algorithm", "environment_id", "config_hash", "created", "command_line"), _TEXT),
    **dict.fromkeys(("identity", "rl_lab_version", "python", "cpu", "cpu_instructions", "gpu"), _TEXT),
    **dict.fromkeys(("git", "packages", "sources"), (dict, type(None))),
    **dict.fromkeys(("lineage", "continuations"), (list, type(None))),
    **dict.fromkeys(("seed", "threads"), (int, type(None))),
}


def collect_manifest(
    *, config_text: str, seed: int, algorithm: str, environment_id: str, name: str = "", threads: int | None = None
) -> dict[str, Any]:
    """The manifest of a run that starts now in this process; `threads`: those it is about to use."""
    return {
        "config_schema_version": CONFIG_SCHEMA_VERSION,
        "checkpoint_schema_version": CHECKPOINT_SCHEMA_VERSION,
        "identity": secrets.token_hex(8),  # stays when the directory is renamed; its checkpoints carry it too
        "name": name,
        "algorithm": algorithm,
        "environment_id": environment_id,
        "seed": seed,
        "config_hash": config_hash(config_text),
        "created": datetime.now(UTC).isoformat(),
        "command_line": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **machine(threads),
        "git": git_state(Path.cwd()),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "cpu_cores": os.cpu_count(),
    }


def machine(threads: int | None = None) -> dict[str, Any]:
    """What decides the last bits of a number here: versions, processors and threads (by default those in use)."""
    import torch  # here, so that commands that only read manifests start without it

    return {
        "rl_lab_version": _package_version("rl-lab"),
        "python": platform.python_version(),
        "packages": {package: _package_version(package) for package in _PACKAGES},
        "cpu": _cpu_name(),
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": threads or torch.get_num_threads(),
    }


def config_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def changes_since(manifest: Mapping[str, Any]) -> list[str]:
    """How the versions and processors here differ from those a run began with: `torch 2.10.0, now 2.11.0`."""
    then, now = _flat(manifest), _flat(machine())
    return [f"{name} {then[name]}, now {now[name]}" for name in now if name in then and then[name] != now[name]]


def git_changes_since(manifest: Mapping[str, Any], directory: Path) -> list[str]:
    """How the code here differs from the code a run began with, as far as git knows."""
    then, now = manifest.get("git") or {}, git_state(directory)
    found = []
    if then.get("commit") and now["commit"] and then["commit"] != now["commit"]:
        found.append(f"commit {then['commit'][:12]}, now {now['commit'][:12]}")
    if then.get("dirty"):
        found.append("the run began with changes that were not committed")
    if now["dirty"]:
        found.append("there are changes now that are not committed")
    return found


def _flat(manifest: Mapping[str, Any]) -> dict[str, Any]:
    names = {"rl_lab_version": "rl-lab", "python": "Python", "cpu": "CPU", "cpu_instructions": "CPU instructions"}
    names |= {"gpu": "GPU", "threads": "threads of torch"}
    return {title: manifest[name] for name, title in names.items() if name in manifest} | (
        manifest.get("packages") or {}
    )


def check_schema_version(found: Any, *, supported: int, what: str, place: str) -> None:
    """Refuse what a newer RL Lab wrote (older versions are migrated) and what carries no version."""
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise RunError(f"{place}: the {what} schema version is {found!r}; a whole number belongs there.")
    if found > supported:
        raise RunError(
            f"{place} was written by a newer RL Lab: {what} schema version {found}, this one reads up to {supported}. "
            "Take a newer RL Lab (in its checkout: `git pull`)."
        )


def check_manifest(manifest: Mapping[str, Any], *, place: str) -> None:
    """Refuse what a newer RL Lab wrote, and entries that are not what they should be."""
    for what, supported in (("config", CONFIG_SCHEMA_VERSION), ("checkpoint", CHECKPOINT_SCHEMA_VERSION)):
        check_schema_version(manifest.get(f"{what}_schema_version"), supported=supported, what=what, place=place)
    check_types(manifest, _KINDS, place=place)
    check_types(manifest.get("git") or {}, {"commit": _TEXT}, place=f"{place}: git")
    for number, changes in enumerate(continuations_of(manifest)):
        check_types({"continuations": changes}, {"continuations": dict}, place=f"{place}, continuation {number}")


def continuations_of(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The durations and stop rules, by their keys, that each continuation gave the run; some gave none."""
    return manifest.get("continuations") or []


def _package_version(package: str) -> str | None:
    import importlib.metadata  # here: commands that only read manifests start without it

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or a processor that does not give its name
        return platform.processor() or platform.machine()
