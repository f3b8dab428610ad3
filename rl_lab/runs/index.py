"""The searchable index of all runs. The directories are the truth; this is only a quick way to ask them."""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from rl_lab.runs.lineage import mark
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import RunError, did_you_mean
from rl_lab.utils.text import printable

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

_SCHEMA_VERSION = 2
_BUSY_TIMEOUT_S = 5.0
_COUNTS = ("agent_steps", "env_frames", "episodes", "updates")
_COLUMNS = {
    "id": "TEXT PRIMARY KEY",
    **dict.fromkeys(("name", "algorithm", "environment"), "TEXT"),
    "seed": "INTEGER",
    **dict.fromkeys(("git", "config_hash", "tags", "notes", "status", "created", "updated", "lineage"), "TEXT"),
    **dict.fromkeys(_COUNTS, "INTEGER"),
    **dict.fromkeys(("wall_s", "best_score", "final_score"), "REAL"),
    "fingerprint": "TEXT",  # when the files behind the row were last written
}
_SEARCHED = ("id", "name", "algorithm", "environment", "tags", "notes")
_GENERATED_ID = re.compile(r"\d{8}-\d{6}-(.+)-s-?\d+-[0-9a-f]{4}")


class RunIndex:
    """`<runs_dir>/index.sqlite`. Every question first takes in what changed in the directories, so a copied,
    deleted or foreign run needs no registration. Trouble with the database never stops a run or a question."""

    def __init__(self, runs_dir: str | Path) -> None:
        self.runs_dir = Path(runs_dir)
        self.path = self.runs_dir / "index.sqlite"

    def record(self, run: RunDirectory) -> None:
        """Take in one run from its manifest.json, status.json and tags.json."""
        try:
            self._ask(lambda database: _store(database, run))
        except (RunError, sqlite3.Error) as error:
            logger.warning("run '%s' is not in the index: %s", printable(run.id), printable(str(error)))

    def find(
        self,
        text: str | None = None,
        *,
        status: str | None = None,
        algorithm: str | None = None,
        environment: str | None = None,
    ) -> list[dict[str, Any]]:
        """The runs that fit, newest first; `text` may stand in the id, name, algorithm, environment, tags or notes."""
        if not self._entries():
            return []
        wanted = {"status": status, "algorithm": algorithm, "environment": environment}

        def answer(database: sqlite3.Connection) -> list[dict[str, Any]]:
            self._synchronise(database)
            return [_public(row) for row in database.execute("SELECT * FROM runs ORDER BY created DESC, id DESC")]

        return [
            row
            for row in self._ask(answer)
            if all(value in (None, row[name]) for name, value in wanted.items())
            and (text or "").lower() in " ".join(str(row[name] or "") for name in _SEARCHED).lower()
        ]

    def _ask(self, question: Callable[[sqlite3.Connection], Answer]) -> Answer:
        if os.path.islink(self.path):  # it could name any database of this user
            logger.warning("%s is a symbolic link and is not used; reading the run directories instead", self.path)
            return self._once(":memory:", question)
        try:
            try:
                return self._once(str(self.path), question)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                logger.warning("%s is damaged (%s); rebuilding it from the run directories", self.path, error)
                for name in (self.path, self.path.with_name("index.sqlite-journal")):
                    name.unlink(missing_ok=True)
                return self._once(str(self.path), question)
        except (sqlite3.DatabaseError, OSError) as error:  # locked, read-only, disk full: answer without the file
            logger.warning("%s cannot be used (%s); reading the run directories instead", self.path, error)
            return self._once(":memory:", question)

    def _once(self, path: str, question: Callable[[sqlite3.Connection], Answer]) -> Answer:
        with closing(sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)) as database, database:
            database.row_factory = sqlite3.Row
            database.execute("BEGIN IMMEDIATE")  # two processes that both find it missing must not both fill it
            if database.execute("PRAGMA user_version").fetchone()[0] != _SCHEMA_VERSION:
                if path != ":memory:":
                    logger.info("%s is new or of another version; filling it from the run directories", path)
                database.execute("DROP TABLE IF EXISTS runs")
                columns = ", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())
                database.execute(f"CREATE TABLE runs ({columns})")
                database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
                self._synchronise(database)
            return question(database)

    def _synchronise(self, database: sqlite3.Connection) -> None:
        """Bring the table in line with the directories: a few stat calls per run, reading only what changed."""
        known = {row["id"]: row for row in database.execute("SELECT id, fingerprint, status FROM runs")}
        present = self._runs()
        for run_id in known.keys() - present.keys():
            database.execute("DELETE FROM runs WHERE id = ?", (run_id,))
        for run_id, run in present.items():
            row = known.get(run_id)
            # A killed process changes no file, so what is said to be running is always looked at again.
            if row is None or row["fingerprint"] != _fingerprint(run) or row["status"] in ("running", "killed"):
                _store(database, run)

    def _entries(self) -> list[Path]:
        """What may be runs; nothing where there is no directory yet."""
        try:
            return [path for path in self.runs_dir.iterdir() if not path.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise RunError(f"{self.runs_dir} cannot be read: {error.strerror}.") from error

    def _runs(self) -> dict[str, RunDirectory]:
        """The runs that can be read, by id; others are named and left out."""
        runs = {}
        for run in map(RunDirectory, self._entries()):
            try:
                run.id.encode()
                if run.exists():
                    runs[run.id] = run
            except (RunError, UnicodeEncodeError) as error:
                logger.warning("left out: %s", printable(str(error)))
        return runs


def resolve_run(reference: str | Path, runs_dir: str | Path) -> RunDirectory:
    """The run a person means: an id, a unique prefix of one, a path, `@last` (newest), `@best:ENV` (highest score in an
    environment) or `@best` (in that of the newest run with a score: others' scores mean something else)."""
    index, text = RunIndex(runs_dir), str(reference)
    if text.startswith("@"):
        return _resolve_mark(text, index)
    if isinstance(reference, Path) or os.sep in text:
        return RunDirectory.open(reference)
    ids = [row["id"] for row in index.find()]
    candidates = [text] if text in ids else sorted(run_id for run_id in ids if text and run_id.startswith(text))
    if len(candidates) == 1:
        return RunDirectory.open(index.runs_dir / candidates[0])
    if candidates:
        listing = "\n  ".join(candidates[:10] + ["..."] * (len(candidates) > 10))
        raise RunError(f"'{text}' fits {len(candidates)} runs; write more of the id:\n  {listing}")
    if text and RunDirectory(Path(text)).exists():  # a path without a slash: a run in this very folder
        return RunDirectory.open(text)
    near = [run_id for run_id in ids if text and text in run_id][:3]
    near = near or get_close_matches(text, ids, n=3, cutoff=0.4) or ids[:3]
    hint = f" Nearest: {', '.join(near)}." if near else " There are no runs there yet: `rl-lab train` makes one."
    raise RunError(f"There is no run '{text}' in {index.runs_dir}.{hint} `rl-lab list` shows them all.")


def _resolve_mark(mark: str, index: RunIndex) -> RunDirectory:
    kind, _, environment = mark.partition(":")
    if mark != "@last" and kind != "@best":
        raise RunError(
            f"'{mark}' names no run: write @last, @best, @best:ENVIRONMENT, an id, a unique prefix of one, or a path."
        )
    rows = index.find()
    if not rows:
        raise RunError(f"{mark}: there are no runs in {index.runs_dir} yet; `rl-lab train` makes one.")
    if mark == "@last":
        return RunDirectory.open(index.runs_dir / rows[0]["id"])
    scored = [(score, row["id"], row["environment"]) for row in rows if (score := _score(row)) is not None]
    if not scored:
        raise RunError(f"@best: no run in {index.runs_dir} has been evaluated yet; use @last or an id.")
    of_one = [each for each in scored if each[2] == (environment or scored[0][2])]
    if not of_one:
        known = sorted({each[2] for each in scored if each[2]})
        raise RunError(
            f"{mark}: no run in {index.runs_dir} has been evaluated in {environment}."
            f"{did_you_mean(environment, known)} There are scores in {', '.join(known)}."
        )
    return RunDirectory.open(index.runs_dir / max(of_one)[1])


def _score(row: dict[str, Any]) -> float | None:
    scores = [row[name] for name in ("best_score", "final_score") if row[name] is not None]
    return max(scores, default=None)


def _store(database: sqlite3.Connection, run: RunDirectory) -> None:
    fingerprint = _fingerprint(run)  # taken before reading: a change in between is noticed next time
    row = {"fingerprint": fingerprint, **_row(run)}
    marks = ", ".join(f":{name}" for name in _COLUMNS)
    database.execute(f"INSERT OR REPLACE INTO runs ({', '.join(_COLUMNS)}) VALUES ({marks})", row)


def _row(run: RunDirectory) -> dict[str, Any]:
    status, generated = run.read_status(), _GENERATED_ID.fullmatch(run.id)
    is_readable = status["state"] != "unknown"
    try:
        manifest, tags = run.read_manifest(), run.read_tags()
    except RunError as error:
        logger.warning("run '%s' is listed without details: %s", printable(run.id), printable(str(error)))
        manifest, tags, is_readable = {}, {"tags": [], "notes": ""}, False
    git = manifest.get("git") or {}
    return {
        "id": run.id,
        "name": manifest.get("name") or (generated[1] if generated else run.id),
        "algorithm": manifest.get("algorithm"),
        "environment": manifest.get("environment_id"),
        "seed": manifest.get("seed"),
        "git": f"{git['commit'][:12]}{'+changes' if git.get('dirty') else ''}" if git.get("commit") else None,
        "config_hash": manifest.get("config_hash"),
        "tags": json.dumps(tags["tags"]),
        "notes": tags["notes"],
        "status": status["state"],
        "created": manifest.get("created"),
        "lineage": mark(manifest),
        "updated": status["time"],
        **{name: status["counts"].get(name, 0) for name in _COUNTS},
        **{name: status[name] for name in ("wall_s", "best_score", "final_score")},
        **({} if is_readable else {"fingerprint": None}),  # what cannot be read is tried again at the next question
    }


def _public(row: sqlite3.Row) -> dict[str, Any]:
    visible = {name: row[name] for name in _COLUMNS if name != "fingerprint"}
    return visible | {"tags": json.loads(row["tags"])}


def _fingerprint(run: RunDirectory) -> str:
    marks = []
    for path in (run.manifest_path, run.status_path, run.tags_path):
        try:
            marks.append(str(path.stat().st_mtime_ns))
        except OSError:
            marks.append("-")
    return "/".join(marks)
