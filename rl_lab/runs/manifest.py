"""What made a run: versions, commit, command and machine, so that a result can be traced and repeated."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_lab.runs.files import Kinds, check_types
from rl_lab.types import RunError

CONFIG_SCHEMA_VERSION = 3  # 3: MLP lies in networks.encoders
CHECKPOINT_SCHEMA_VERSION = 2  # 2: files outside a checkpoint are checksummed in blocks

_GIT_TIMEOUT_S = 5.0
_PACKAGES = ("torch", "numpy", "gymnasium")
_TEXT = (str, type(None))
_KINDS: Kinds = {
    **dict.fromkeys(("name", "algorithm", "environment_id", "config_hash", "created", "command_line"), _TEXT),
    **dict.fromkeys(("identity", "rl_lab_version", "python", "cpu", "gpu"), _TEXT),
    **dict.fromkeys(("git", "packages"), (dict, type(None))),
    **dict.fromkeys(("lineage", "continuations"), (list, type(None))),
    "seed": (int, type(None)),
}


def collect_manifest(
    *, config_text: str, seed: int, algorithm: str, environment_id: str, name: str = ""
) -> dict[str, Any]:
    """The manifest of a run that starts now in this process."""
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
        **machine(),
        "git": git_state(Path.cwd()),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "cpu_cores": os.cpu_count(),
    }


def machine() -> dict[str, Any]:
    """What decides the last bits of a number here: versions and processors."""
    import torch  # here, so that commands that only read manifests start without it

    return {
        "rl_lab_version": _package_version("rl-lab"),
        "python": platform.python_version(),
        "packages": {package: _package_version(package) for package in _PACKAGES},
        "cpu": _cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def config_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def changes_since(manifest: Mapping[str, Any]) -> list[str]:
    """How the versions and processors here differ from those a run began with: `torch 2.10.0, now 2.11.0`."""
    then, now = _flat(manifest), _flat(machine())
    return [f"{name} {then[name]}, now {now[name]}" for name in now if name in then and then[name] != now[name]]


def _flat(manifest: Mapping[str, Any]) -> dict[str, Any]:
    names = {"rl_lab_version": "rl-lab", "python": "Python", "cpu": "CPU", "gpu": "GPU"}
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
            "Upgrade with `pip install --upgrade rl-lab`."
        )


def check_manifest(manifest: Mapping[str, Any], *, place: str) -> None:
    """Refuse what a newer RL Lab wrote, and entries that are not what they should be."""
    for what, supported in (("config", CONFIG_SCHEMA_VERSION), ("checkpoint", CHECKPOINT_SCHEMA_VERSION)):
        check_schema_version(manifest.get(f"{what}_schema_version"), supported=supported, what=what, place=place)
    check_types(manifest, _KINDS, place=place)
    check_types(manifest.get("git") or {}, {"commit": _TEXT}, place=f"{place}: git")


def git_state(directory: Path) -> dict[str, Any]:
    """`{"commit": ..., "dirty": ...}` of the repository around a directory; both None without git or repository."""
    unknown: dict[str, Any] = {"commit": None, "dirty": None}
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        # Without optional locks git never writes, so that it cannot disturb a commit under way.
        environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
        answer = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
        return unknown
    if answer.returncode != 0:
        return unknown
    lines = answer.stdout.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    return {
        "commit": None if commit == "(initial)" else commit,
        "dirty": any(not line.startswith("#") for line in lines),
    }


def _package_version(package: str) -> str | None:
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
