"""The state of the code around a run: commit, branch, and what was changed and not committed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

LARGEST_CHANGES_BYTES = 2**20
_TIMEOUT_S = 5.0
_CANNOT_BE_ASKED = (FileNotFoundError, NotADirectoryError, PermissionError)


def git_state(directory: Path) -> dict[str, Any]:
    """`{"commit": ..., "branch": ..., "dirty": ...}` of the repository around a directory; all None without git or
    repository, the branch also where none is checked out."""
    unknown: dict[str, Any] = {"commit": None, "branch": None, "dirty": None}
    text = _answer(directory, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if text is None:
        return unknown
    lines = text.decode(errors="replace").splitlines()
    facts = {
        key: line.removeprefix(f"# branch.{key} ") for line in lines for key in ("oid", "head") if key in line[:13]
    }
    return {
        "commit": None if facts.get("oid") in (None, "(initial)") else facts["oid"],
        "branch": None if facts.get("head") in (None, "(detached)") else facts["head"],
        "dirty": any(not line.startswith("#") for line in lines),
    }


def uncommitted_changes(directory: Path) -> str | None:
    """What `git diff HEAD` says, cut at one MiB; None where nothing was changed or nobody can say. `git apply` makes
    the code of a run again from it and the commit, unless it was cut. Files that git does not know are not in it."""
    data = _answer(directory, "diff", "HEAD", "--no-color", "--no-ext-diff", at_most=LARGEST_CHANGES_BYTES + 1)
    if not data:
        return None
    text = data[:LARGEST_CHANGES_BYTES].decode(errors="replace")
    return text if len(data) <= LARGEST_CHANGES_BYTES else f"{text}\n# cut here: more than 1 MiB was changed\n"


def _answer(directory: Path, *words: str, at_most: int = -1) -> bytes | None:
    """What git prints; None where it is not there, fails or takes too long."""
    import subprocess  # here: commands that only read manifests start without it
    from threading import Timer

    # Without optional locks git never writes, so that it cannot disturb a commit under way.
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    try:
        process = subprocess.Popen(["git", *words], cwd=directory, env=environment, **streams)
    except _CANNOT_BE_ASKED:
        return None
    timer = Timer(_TIMEOUT_S, process.kill)
    timer.start()
    try:
        with process:
            assert process.stdout is not None
            data: bytes = process.stdout.read(at_most)
            is_cut = at_most >= 0 and len(data) >= at_most
            if is_cut:
                process.kill()
    finally:
        timer.cancel()
    return data if is_cut or process.returncode == 0 else None
