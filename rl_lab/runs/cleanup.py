"""Free disk space: what may go from runs that are done, and taking it away so that a kill in between spoils nothing.

Only what can be trained again goes: checkpoints and the rows of a replay, and what else is asked for. The config,
metrics, report, curve, log, tags and manifest of a run always stay. A run that is under way is never touched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rl_lab.runs.files import entries_below, is_leftover, readable_disk_errors, remove, remove_at_once, write_json
from rl_lab.runs.index import RunIndex
from rl_lab.runs.lock import RunLock
from rl_lab.runs.run_directory import DONE, RunDirectory
from rl_lab.types import ConfigError, RunError

KEEP_TAG = "keep"
# Folders of a run that may go. Checkpoints before the replay they name: a kill in between leaves none that is damaged.
ALWAYS = ("checkpoints", "replay")
ON_REQUEST = ("videos", "tensorboard", "episodes")
_AGES = {"h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True)
class Removal:
    """What goes from one run: folder -> bytes."""

    run: RunDirectory
    score: float | None
    written: str | None  # when its status was last written, at the time of the plan
    folders: Mapping[str, int]

    @property
    def size(self) -> int:
        return sum(self.folders.values())


@dataclass
class Plan:
    """What a cleanup would do: what goes, and why other runs stay as they are."""

    removals: list[Removal] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(each.size for each in self.removals)


def parse_age(text: str) -> timedelta:
    """`30d`, `12h`, `2w`."""
    found = re.fullmatch(r"(\d{1,6})([hdw])", text.strip())
    if found is None:
        raise ConfigError(f"'{text}' is no age: write a number and h, d or w, such as 30d.")
    return timedelta(**{_AGES[found[2]]: int(found[1])})


def plan_cleanup(
    runs_dir: Path,
    *,
    keep_best: int,
    keep_recent: timedelta,
    also: Sequence[str] = (),
    with_unfinished: bool = False,
    now: datetime | None = None,
) -> Plan:
    """What may go. `keep_best` runs of each environment stay, and all that were written to within `keep_recent`."""
    oldest = (now or datetime.now(UTC)) - keep_recent
    rows = RunIndex(runs_dir).find()
    best = {row["id"] for rows_of_one in _by_environment(rows) for row in rows_of_one[:keep_best]}
    sources = _sources_of_unfinished(rows, runs_dir)
    plan = Plan()
    for row in rows:
        run = RunDirectory(runs_dir / row["id"])
        reason = _reason_to_keep(row, best, oldest, sources, with_unfinished)
        folders = {} if reason else _sizes(run, (*ALWAYS, *also))
        if reason or not folders:
            plan.kept[row["id"]] = reason or "nothing to remove"
        else:
            plan.removals.append(Removal(run, row["score"], row["updated"], folders))
    return plan


def _by_environment(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Runs with a score, best first, one list for each environment: others' scores mean something else."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["score"] is not None:
            groups.setdefault(str(row["environment"]), []).append(row)
    return [sorted(group, key=lambda row: -row["score"]) for group in groups.values()]


def _sources_of_unfinished(rows: Iterable[Mapping[str, Any]], runs_dir: Path) -> dict[str, str]:
    """Runs whose checkpoints another run still reads: one that is not done may name them in its config."""
    found: dict[str, str] = {}
    unfinished = [row["id"] for row in rows if row["status"] not in DONE]
    for run_id in unfinished:
        try:
            words = set(re.findall(r"[\w.-]+", RunDirectory(runs_dir / run_id).read_config_text()))
        except RunError:
            continue
        found |= {row["id"]: run_id for row in rows if row["id"] in words and row["id"] != run_id}
    return found


def _reason_to_keep(
    row: Mapping[str, Any], best: set[str], oldest: datetime, sources: Mapping[str, str], with_unfinished: bool
) -> str | None:
    written = row["updated"] or row["created"]
    if row["status"] == "running":
        return "it is running"
    if row["status"] not in DONE and not with_unfinished:
        return f"it is {row['status']}: `rl-lab resume` needs its checkpoints (--unfinished takes them)"
    if KEEP_TAG in row["tags"]:
        return f"it is tagged {KEEP_TAG}"
    if row["id"] in best:
        return f"it is among the best in {row['environment']}"
    if row["id"] in sources:
        return f"run {sources[row['id']]}, which is not done, reads it"
    try:
        is_recent = written is not None and datetime.fromisoformat(written) >= oldest
    except (ValueError, TypeError):  # no time, or one without its zone
        return f"its time '{written}' cannot be read"
    return "it is recent" if is_recent else None


def _sizes(run: RunDirectory, names: Iterable[str]) -> dict[str, int]:
    """The bytes in each folder that is there, with what a killed cleanup left of it."""
    sizes = {}
    for name in names:
        places = [run.path / name, *_leftovers(run, name)]
        size = sum(folder_size(place) for place in places if place.is_dir() and not place.is_symlink())
        if size:
            sizes[name] = size
    return sizes


def folder_size(folder: Path) -> int:
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries_below(folder) if entry.is_file())
    except OSError:  # somebody else is taking it away
        return 0


def _leftovers(run: RunDirectory, name: str) -> list[Path]:
    try:
        names = os.listdir(run.path)
    except OSError:
        return []
    return [run.path / each for each in names if each.startswith(f".{name}.tmp-") and is_leftover(each)]


def clean(removal: Removal) -> int:
    """Take away what was planned for one run; the bytes that are free now. A run that has begun to work again since is
    left alone: a RunError names the process."""
    run = removal.run
    with RunLock(run), readable_disk_errors(run.path):
        if run.read_status()["time"] != removal.written:
            raise RunError(f"Run '{run.id}' has been continued since: it is left alone.")
        # Written first: whoever misses a checkpoint reads here where it went.
        facts = {"time": datetime.now(UTC).isoformat(), "removed": list(removal.folders), "bytes": removal.size}
        write_json(run.cleaned_path, facts, run_id=run.id)
        for name in removal.folders:
            if os.path.lexists(run.path / name):
                remove_at_once(run.path / name)
            for leftover in _leftovers(run, name):
                remove(leftover)
    return removal.size


def remove_run(run: RunDirectory) -> int:
    """Take a whole run away, at one instant; the bytes that are free now. One that is under way is refused."""
    size = 0 if run.path.is_symlink() else folder_size(run.path)
    with RunLock(run), readable_disk_errors(run.path):
        remove_at_once(run.path)
    return size
