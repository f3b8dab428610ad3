"""The directory of one run: where each file lies, and the small files that say what and how the run is."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rl_lab.runs.files import (
    Kinds,
    MissingFile,
    appearing,
    check_types,
    read_json,
    read_text,
    readable_disk_errors,
    refuse_links_out_of,
    remove_at_once,
    remove_leftovers,
    sync_directory,
    to_json,
    write_durably,
    write_json,
)
from rl_lab.runs.lock import is_held
from rl_lab.runs.manifest import check_manifest, config_hash
from rl_lab.types import ConfigError, RunError, did_you_mean

DONE = ("finished", "stopped", "pruned")  # states of a run that has nothing left to continue
STATES = ("running", "finished", "stopped", "pruned", "failed", "interrupted")
"""What write_status accepts. read_status adds `killed` (running, but nobody holds the lock), `created`
(no status written yet) and `unknown` (status.json is damaged)."""

LOCK = ".lock"
CHANGES = "changes.diff"  # what was not committed when the run began
CLEANED = "cleanup.json"  # what `rl-lab cleanup` took away

# Before run directories appeared at one instant, a kill could leave these; never more without a manifest.
_OF_A_KILLED_START = frozenset({".lock", "config.yaml", "overrides.yaml"})
_NUMBER, _TEXT = (int, float), (str, type(None))
_STATUS_TYPES: Kinds = {
    "state": str,
    "message": str,
    "time": _TEXT,
    "counts": dict,
    "wall_s": _NUMBER,
    **dict.fromkeys(("best_score", "final_score"), (*_NUMBER, type(None))),
}
_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


class _Place:
    """An attribute that is a path inside the run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """One run on disk. Sub-directories appear when something is first written into them."""

    path: Path

    @classmethod
    def create(
        cls,
        runs_dir: str | Path,
        *,
        run_id: str | None = None,
        name: str,
        seed: int,
        files: Mapping[str, str] = MappingProxyType({}),
    ) -> RunDirectory:
        """Make the directory of a new run with its first files (see `first_files`): it appears whole or not at all.

        What a process that was killed before the run began left behind is taken away, so that it blocks no id.
        """
        if run_id is None:
            run_id = new_run_id(name, seed)
        elif not _ID_PATTERN.fullmatch(run_id) or run_id.startswith("index.sqlite"):
            raise ConfigError(
                f"--run-id '{run_id}' is not usable as a directory name: begin with a letter or digit and use only "
                f"letters, digits, '.', '_' and '-' (at most 120), for example '{slug(run_id)}'."
            )
        path = Path(os.path.abspath(runs_dir)) / run_id  # an environment may change the working directory
        with readable_disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(os.scandir(path.parent))
            _make_way(path)
            try:
                with appearing(path) as temporary:
                    temporary.mkdir()
                    for file, text in files.items():
                        write_durably(temporary / file, text.encode())
                    sync_directory(temporary)
            except OSError:
                _make_way(path)  # another process was quicker: say so
                raise
            sync_directory(path.parent)
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run; a directory without a config.yaml is not one."""
        run = cls(Path(os.path.abspath(path)))
        if not run.exists():
            what = "has no config.yaml" if os.path.isdir(run.path) else "does not exist"
            raise RunError(f"{run.path} is not a run directory: it {what}. `rl-lab list` shows the runs there are.")
        return run

    def exists(self) -> bool:
        """Whether there is a run here; a RunError where that cannot be seen."""
        try:
            return self.config_path.is_file()
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror}.") from error

    def output(self, *parts: str) -> Path:
        """Where somebody without the run's lock may write; refused where links leave the run, as the lock does."""
        refuse_links_out_of(self.path)
        return self.path.joinpath(*parts)

    @property
    def id(self) -> str:
        return Path(os.path.abspath(self.path)).name  # a linked run keeps the name it is found by

    config_path = _Place("config.yaml")
    overrides_path = _Place("overrides.yaml")
    manifest_path = _Place("manifest.json")
    environment_path = _Place("environment.json")
    status_path = _Place("status.json")
    tags_path = _Place("tags.json")
    alerts_path = _Place("alerts.json")
    changes_path = _Place(CHANGES)
    cleaned_path = _Place(CLEANED)
    lock_path = _Place(LOCK)
    log_path = _Place("run.log")
    metrics_path = _Place("metrics.jsonl")
    report_path = _Place("report.md")
    curve_path = _Place("learning_curve.png")
    tensorboard_dir = _Place("tensorboard")
    videos_dir = _Place("videos")
    episodes_dir = _Place("episodes")
    checkpoints_dir = _Place("checkpoints")

    # --- what the run is -----------------------------------------------------------------------

    def read_config_text(self) -> str:
        try:
            return read_text(self.config_path)
        except RunError as error:
            raise RunError(f"{str(error).removesuffix('.')}, so run '{self.id}' cannot be rebuilt.") from error

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        write_json(self.manifest_path, dict(manifest), run_id=self.id)

    def read_manifest(self) -> dict[str, Any]:
        """The manifest, refused when a newer RL Lab wrote it or its entries are not what they should be."""
        manifest = read_json(self.manifest_path)
        check_manifest(manifest, place=str(self.manifest_path))
        return manifest

    def identity(self) -> str | None:
        """What tells this run from every other, whatever its directory is called; older runs have none."""
        with suppress(MissingFile):
            return self.read_manifest().get("identity")
        return None

    def has_changed_config(self) -> bool:
        """Whether config.yaml is not the one the run began with."""
        return self.read_manifest().get("config_hash") not in (None, config_hash(self.read_config_text()))

    def check_config(self) -> None:
        """Refuse a config.yaml that is not the one the run began with."""
        if self.has_changed_config():
            raise RunError(
                f"{self.config_path} has been changed since run '{self.id}' began (its hash in manifest.json differs), "
                "so it cannot be continued bit for bit. Put the file back, or begin a new run from its weights with "
                f"`rl-lab resume {self.id} --mode warm_start key=value`."
            )

    def write_environment(self, description: Mapping[str, Any]) -> None:
        """The environment's spaces, as plain data: what a policy must know to act without it."""
        write_json(self.environment_path, dict(description), run_id=self.id)

    def read_environment(self) -> dict[str, Any] | None:
        """What `write_environment` wrote; None in runs of earlier versions."""
        with suppress(MissingFile):
            return read_json(self.environment_path)
        return None

    def write_tags(self, tags: Sequence[str], notes: str = "") -> None:
        write_json(self.tags_path, {"tags": list(tags), "notes": notes}, run_id=self.id)

    def read_tags(self) -> dict[str, Any]:
        """`{"tags": [...], "notes": "..."}`, empty where nobody wrote any."""
        content: dict[str, Any] = {"tags": [], "notes": ""}
        with suppress(MissingFile):
            content |= read_json(self.tags_path)
        check_types(content, {"tags": list, "notes": str}, place=str(self.tags_path))
        return content | {"tags": [str(tag) for tag in content["tags"]]}

    def write_alerts(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        """What the run's metric rules have said so far."""
        if alerts or self.alerts_path.exists():
            write_json(self.alerts_path, {"alerts": list(alerts)}, run_id=self.id)

    def read_alerts(self) -> list[dict[str, Any]]:
        """What `write_alerts` wrote, oldest first; none where there is nothing, or nothing readable."""
        with suppress(RunError):  # what was said must never decide whether a run can be shown
            found = read_json(self.alerts_path).get("alerts")
            return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
        return []

    def read_cleaned(self) -> dict[str, Any]:
        """What `rl-lab cleanup` took away from it, and when; empty where nothing."""
        with suppress(MissingFile):
            return read_json(self.cleaned_path)
        return {}

    def discard(self) -> None:
        """Remove the directory of a run that never began, and the folder of runs if that was to be its first."""
        with suppress(OSError):  # the error that ended the run is the one to tell; or other runs lie there
            remove_at_once(self.path)
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

        A killed process leaves `running` behind, and its lock is free.
        """
        status = self._stored_status()
        if status["state"] == "running" and not is_held(self.lock_path):
            status |= {
                "state": "killed",
                "message": f"The process was killed or crashed. Continue with `rl-lab resume {self.id}`.",
            }
        return status

    def _stored_status(self) -> dict[str, Any]:
        blank: dict[str, Any] = {"state": "created", "message": "", "time": None, "pid": None, "host": None}
        blank |= {"counts": {}, "wall_s": 0.0, "best_score": None, "final_score": None}
        try:
            status = read_json(self.status_path)
            check_types(status, _STATUS_TYPES, place=str(self.status_path))
            counts = status.get("counts", {})
            check_types(counts, dict.fromkeys(counts, int), place=f"{self.status_path}: counts")
        except MissingFile:
            return blank
        except RunError as error:  # how a run is doing must never decide whether it can go on
            return blank | {"state": "unknown", "message": str(error)}
        return blank | status


def first_files(
    *,
    config_text: str,
    overrides: Sequence[str],
    manifest: Mapping[str, Any],
    tags: Sequence[str],
    changes: str | None = None,
) -> dict[str, str]:
    """What lies in a run's directory from its first instant on, by file name; `changes` is the code's diff."""
    # One YAML list item per override; a JSON string is a valid YAML string, whatever it contains.
    lines = [f"- {json.dumps(override, ensure_ascii=False)}\n" for override in overrides]
    return {
        "config.yaml": config_text,
        "overrides.yaml": "".join(lines) or "[]\n",
        "manifest.json": to_json(manifest),
        "tags.json": to_json({"tags": list(tags), "notes": ""}),
        "run.log": "",
        **({} if changes is None else {CHANGES: changes}),
    }


def new_run_id(name: str, seed: int) -> str:
    """`20261115-201530-ppo_cartpole-s1-ab12`: sorts by time; the tail keeps two starts of one second apart."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{slug(name)}-s{seed}-{secrets.token_hex(2)}"


def slug(text: str) -> str:
    """The nearest text that may stand in a run id."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip("._-")[:80] or "run"


def _make_way(path: Path) -> None:
    """Refuse to build on what is there, but for what a start that was killed left behind."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise RunError(f"{path} exists and is a file: choose another --run-id or --runs-dir, or move it away.")
    entries = {entry.name for entry in path.iterdir()}
    if ".lock" in entries and entries <= _OF_A_KILLED_START and not is_held(path / ".lock"):
        remove_at_once(path)
    elif "config.yaml" in entries:
        raise RunError(
            f"Run '{path.name}' exists already in {path.parent}: continue it with `rl-lab resume {path.name}`, "
            "or choose another --run-id."
        )
    elif entries:
        raise RunError(
            f"{path} exists, holds files and is not a run (no config.yaml): choose another --run-id, or move it away."
        )
