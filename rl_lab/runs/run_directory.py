"""The directory of one run: where each file lies, and the small files that say what and how the run is."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_lab.runs.files import read_json, readable_disk_errors, write_atomic, write_json
from rl_lab.runs.lock import is_held
from rl_lab.runs.manifest import check_manifest_versions
from rl_lab.types import ConfigError, RunError, did_you_mean

STATES = ("running", "finished", "stopped", "failed", "interrupted")
"""What write_status accepts. read_status adds `killed` (running, but nobody holds the lock), `created`
(no status written yet) and `unknown` (status.json is damaged)."""

_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


@dataclass(frozen=True)
class RunDirectory:
    """One run on disk. Sub-directories appear when something is first written into them."""

    path: Path

    @classmethod
    def create(cls, runs_dir: str | Path, *, run_id: str | None = None, name: str, seed: int) -> RunDirectory:
        """Make the directory of a new run.

        An empty directory of that name is taken over, so that a process killed before it wrote its config
        does not block the id. Take the RunLock before writing: it settles who of two starters goes on.
        """
        if run_id is None:
            run_id = new_run_id(name, seed)
        elif not _ID_PATTERN.fullmatch(run_id) or run_id.startswith("index.sqlite"):
            raise ConfigError(
                f"--run-id '{run_id}' is not usable as a directory name: begin with a letter or digit and use only "
                f"letters, digits, '.', '_' and '-' (at most 120), for example '{slug(run_id)}'."
            )
        path = Path(runs_dir) / run_id
        with readable_disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()
            except FileExistsError:
                _refuse_unless_empty(path)
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run; a directory without a config.yaml is not one."""
        run = cls(Path(path))
        if not run.config_path.is_file():
            what = "has no config.yaml" if run.path.is_dir() else "does not exist"
            raise RunError(f"{run.path} is not a run directory: it {what}. `rl-lab list` shows the runs there are.")
        return run

    # --- where things lie ----------------------------------------------------------------------

    @property
    def id(self) -> str:
        return Path(os.path.abspath(self.path)).name  # a linked run keeps the name it is found by

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def overrides_path(self) -> Path:
        return self.path / "overrides.yaml"

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def status_path(self) -> Path:
        return self.path / "status.json"

    @property
    def tags_path(self) -> Path:
        return self.path / "tags.json"

    @property
    def lock_path(self) -> Path:
        return self.path / ".lock"

    @property
    def log_path(self) -> Path:
        return self.path / "run.log"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report_path(self) -> Path:
        return self.path / "report.md"

    @property
    def curve_path(self) -> Path:
        return self.path / "learning_curve.png"

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    @property
    def videos_dir(self) -> Path:
        return self.path / "videos"

    @property
    def episodes_dir(self) -> Path:
        return self.path / "episodes"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    # --- what the run is -----------------------------------------------------------------------

    def write_config(self, text: str) -> None:
        write_atomic(self.config_path, text, run_id=self.id)

    def read_config_text(self) -> str:
        try:
            return self.config_path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise RunError(f"{self.config_path} is missing, so run '{self.id}' cannot be rebuilt.") from None

    def write_overrides(self, overrides: Sequence[str]) -> None:
        """One YAML list item per override; a JSON string is a valid YAML string, whatever it contains."""
        lines = [f"- {json.dumps(override, ensure_ascii=False)}\n" for override in overrides]
        write_atomic(self.overrides_path, "".join(lines) or "[]\n", run_id=self.id)

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        write_json(self.manifest_path, dict(manifest), run_id=self.id)

    def read_manifest(self) -> dict[str, Any]:
        """The manifest, refused when a newer RL Lab wrote it."""
        manifest = read_json(self.manifest_path)
        check_manifest_versions(manifest, place=str(self.manifest_path))
        return manifest

    def write_tags(self, tags: Sequence[str], notes: str = "") -> None:
        write_json(self.tags_path, {"tags": list(tags), "notes": notes}, run_id=self.id)

    def read_tags(self) -> dict[str, Any]:
        """`{"tags": [...], "notes": "..."}`, empty where nobody wrote any."""
        empty: dict[str, Any] = {"tags": [], "notes": ""}
        return empty | read_json(self.tags_path) if self.tags_path.exists() else empty

    def discard(self) -> None:
        """Remove the directory of a run that never began, and the folder of runs if that was to be its first."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # other runs lie there
            self.path.parent.rmdir()

    # --- how the run is ------------------------------------------------------------------------

    def write_status(
        self,
        state: str,
        *,
        counts: Mapping[str, int] | None = None,
        wall_s: float | None = None,
        best_score: float | None = None,
        final_score: float | None = None,
        message: str = "",
    ) -> None:
        """Replace status.json. What is not given keeps its last value, except the message."""
        if state not in STATES:
            raise ConfigError(
                f"Run status '{state}' is unknown: use one of {', '.join(STATES)}.{did_you_mean(state, STATES)}"
            )
        given = {"counts": counts, "wall_s": wall_s, "best_score": best_score, "final_score": final_score}
        status = self._stored_status() | {name: value for name, value in given.items() if value is not None}
        status |= {"state": state, "message": message, "time": datetime.now(UTC).isoformat()}
        status |= {"pid": os.getpid(), "host": socket.gethostname()}
        write_json(self.status_path, status, run_id=self.id)

    def read_status(self) -> dict[str, Any]:
        """The last status: `state`, `counts`, `wall_s`, `best_score`, `final_score`, `message`, `time`, `pid`, `host`.

        A process that died without a word left `running` behind; nobody holding the lock betrays it.
        """
        status = self._stored_status()
        if status["state"] == "running" and not is_held(self.lock_path):
            status |= {
                "state": "killed",
                "message": f"The process ended without a word. Continue with `rl-lab resume {self.id}`.",
            }
        return status

    def _stored_status(self) -> dict[str, Any]:
        blank: dict[str, Any] = {"state": "created", "message": "", "time": None, "pid": None, "host": None}
        blank |= {"counts": {}, "wall_s": 0.0, "best_score": None, "final_score": None}
        if not self.status_path.exists():
            return blank
        try:
            return blank | read_json(self.status_path)
        except RunError as error:  # how a run is doing must never decide whether it can go on
            return blank | {"state": "unknown", "message": str(error)}


def new_run_id(name: str, seed: int) -> str:
    """`20261115-201530-ppo_cartpole-s1-ab12`: sorts by time; the tail keeps two starts of one second apart."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{slug(name)}-s{seed}-{secrets.token_hex(2)}"


def slug(text: str) -> str:
    """The nearest text that may stand in a run id."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip("._-")[:80] or "run"


def _refuse_unless_empty(path: Path) -> None:
    if not path.is_dir():
        raise RunError(f"{path} exists and is a file: choose another --run-id or --runs-dir, or move it away.")
    entries = {entry.name for entry in path.iterdir()} - {".lock"}
    if "config.yaml" in entries:
        raise RunError(
            f"Run '{path.name}' exists already in {path.parent}: continue it with `rl-lab resume {path.name}`, "
            "or choose another --run-id."
        )
    if entries:
        raise RunError(
            f"{path} exists, holds files and is not a run (no config.yaml): choose another --run-id, or move it away."
        )
