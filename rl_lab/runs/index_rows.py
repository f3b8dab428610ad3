"""What the index keeps of one run: its manifest, status and tags, how far it is, and its last metrics."""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rl_lab.runs.lineage import mark, parents
from rl_lab.runs.metrics_file import parse_row
from rl_lab.runs.run_directory import DONE, RunDirectory
from rl_lab.runs.settings import Settings, settings_of
from rl_lab.types import RunError
from rl_lab.utils.text import printable

logger = logging.getLogger(__name__)

COUNTS = ("agent_steps", "env_frames", "episodes", "updates")
COLUMNS = {
    "id": "TEXT PRIMARY KEY",
    **dict.fromkeys(("name", "algorithm", "environment"), "TEXT"),
    "seed": "INTEGER",
    **dict.fromkeys(("git", "branch", "config_hash", "host", "tags", "notes", "status"), "TEXT"),
    "progress": "REAL",  # between 0 and 1, of a run that is not done
    **dict.fromkeys(("created", "updated", "lineage", "parents"), "TEXT"),
    **dict.fromkeys(COUNTS, "INTEGER"),
    **dict.fromkeys(("wall_s", "best_score", "final_score"), "REAL"),
    "fingerprint": "TEXT",  # when the files behind the row were last written
    "settings_key": "TEXT",  # where its settings stand in the table of settings
    "metrics": "TEXT",  # the last value of each, as JSON
}
VISIBLE = tuple(name for name in COLUMNS if name not in ("fingerprint", "settings_key", "metrics"))
SCORE = "score"  # the best evaluation of a run
LISTS = ("tags", "parents")

_GENERATED_ID = re.compile(r"\d{8}-\d{6}-(.+)-s-?\d+-[0-9a-f]{4}")
_TAIL_BYTES = 2**16


def fingerprint(folder: str) -> str | None:
    """When the files of a run were last written; None where there is no run. Three stat calls and nothing else."""
    try:
        marks = [os.stat(f"{folder}/manifest.json").st_mtime_ns]
    except OSError:
        if not os.path.isfile(f"{folder}/config.yaml"):
            return None
        marks = [0]
    for name in ("status.json", "tags.json"):
        try:
            marks.append(os.stat(f"{folder}/{name}").st_mtime_ns)
        except OSError:
            marks.append(0)
    return f"{marks[0]}/{marks[1]}/{marks[2]}"


def row_of(run: RunDirectory) -> dict[str, Any]:
    """A run as the index stores it. What cannot be read is left empty, with a warning, and tried again next time."""
    written = fingerprint(str(run.path))  # taken before reading: a change in between is noticed next time
    status, generated = run.read_status(), _GENERATED_ID.fullmatch(run.id)
    is_readable = status["state"] != "unknown"
    try:
        manifest, tags = run.read_manifest(), run.read_tags()
    except RunError as error:
        logger.warning("run '%s' is listed without details: %s", printable(run.id), printable(str(error)))
        manifest, tags, is_readable = {}, {"tags": [], "notes": ""}, False
    git, metrics = manifest.get("git") or {}, last_metrics(run)
    counts = status["counts"]
    if status["state"] not in DONE:  # its status is as old as its last checkpoint
        newest = {name: metrics[name] for name in COUNTS if _is_count(metrics.get(name))}
        counts = {name: max(counts.get(name, 0), newest.get(name, 0)) for name in COUNTS}
    return {
        "id": run.id,
        "name": manifest.get("name") or (generated[1] if generated else run.id),
        "algorithm": manifest.get("algorithm"),
        "environment": manifest.get("environment_id"),
        "seed": manifest.get("seed"),
        "git": f"{git['commit'][:12]}{'+changes' if git.get('dirty') else ''}" if git.get("commit") else None,
        "branch": _text(git.get("branch")),
        "config_hash": manifest.get("config_hash"),
        "host": _text(status["host"]) or _text(manifest.get("hostname")),
        "tags": json.dumps(tags["tags"]),
        "notes": tags["notes"],
        "status": status["state"],
        "progress": _progress(run, manifest, status["state"], counts, metrics),
        "created": manifest.get("created"),
        "lineage": mark(manifest),
        "parents": json.dumps(parents(manifest)),
        "updated": status["time"],
        **{name: counts.get(name, 0) for name in COUNTS},
        **{name: status[name] for name in ("wall_s", "best_score", "final_score")},
        "settings_key": settings_key(manifest),
        "metrics": json.dumps(metrics),
        "fingerprint": written if is_readable else None,
    }


def public(row: dict[str, Any]) -> dict[str, Any]:
    """A stored row as callers see it."""
    for name in LISTS:
        row[name] = [*parsed(row[name])]
    return row


@lru_cache(maxsize=4096)
def parsed(text: str) -> list[str]:
    """Many runs have the same tags: each list is parsed once."""
    found: list[str] = json.loads(text)
    return found


def settings_key(manifest: Mapping[str, Any]) -> str | None:
    """The same for the same settings: the hash of config.yaml, and how the run was continued."""
    known = manifest.get("config_hash")
    return f"{known}{json.dumps(manifest.get('continuations') or [])}" if known else None


def last_metrics(run: RunDirectory) -> dict[str, Any]:
    """The last value of each metric near the end of metrics.jsonl, and the last evaluation wherever it stands."""
    try:
        with open(run.metrics_path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return {}
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                lines = content[max(0, size - _TAIL_BYTES) :].split(b"\n")
                evaluated = content.rfind(b'"eval/', 0, size)
                start = content.rfind(b"\n", 0, max(evaluated, 0)) + 1
                lines.insert(0, content[start : start + _TAIL_BYTES].partition(b"\n")[0] if evaluated >= 0 else b"")
    except (OSError, ValueError):  # not there yet, or nothing that can be mapped
        return {}
    last: dict[str, Any] = {}
    for line in lines:
        last |= {name: value for name, value in (parse_row(line) or {}).items() if name != "non_finite"}
    return {name: value if value is not None and math.isfinite(value) else None for name, value in last.items()}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _progress(
    run: RunDirectory, manifest: Mapping[str, Any], state: str, counts: Mapping[str, int], metrics: Mapping[str, Any]
) -> float | None:
    """The fraction of the planned agent steps that is done or, where a phase counts something else, of the phases."""
    if state in DONE:
        return 1.0
    try:
        settings = settings_of(run, manifest)
    except RunError:
        return None
    prefix = "training.phases."
    phases = dict.fromkeys(key.split(".")[2] for key in settings if key.startswith(prefix))
    durations = [settings.get(f"{prefix}{phase}.duration_steps") for phase in phases]
    planned = [steps for steps in durations if isinstance(steps, int)]
    if planned and len(planned) == len(durations):
        return min(1.0, counts.get("agent_steps", 0) / max(1, sum(planned)))
    index, fraction = metrics.get("train/phase_index"), metrics.get("train/phase_fraction")
    if index is None or fraction is None:
        return None
    return min(1.0, (index + fraction) / max(1, len(phases)))


def read_settings(run: RunDirectory) -> Settings:
    """The settings of a run for the index; none where they cannot be read."""
    try:
        return settings_of(run)
    except RunError as error:
        logger.warning("run '%s' is listed without its settings: %s", printable(run.id), printable(str(error)))
        return {}
