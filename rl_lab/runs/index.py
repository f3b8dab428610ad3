"""The searchable index of all runs. The directories are the truth; this is only a quick way to ask them."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from rl_lab.runs.index_rows import (
    COLUMNS,
    LISTS,
    SCORE,
    VISIBLE,
    fingerprint,
    parsed,
    public,
    read_settings,
    row_of,
)
from rl_lab.runs.lock import is_held
from rl_lab.runs.query import ALIASES, FIELDS, Condition, Field, in_order, with_short_names
from rl_lab.runs.run_directory import LOCK, RunDirectory
from rl_lab.types import ConfigError, RunError, did_you_mean
from rl_lab.utils.text import printable

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Selection = tuple[list[str], list[tuple[Any, ...]]]  # names of columns, and rows

_SCHEMA_VERSION = 3
_BUSY_TIMEOUT_S = 30.0  # 32 runs that begin at once, or a rebuild of ten thousand, take seconds
_SEARCHED = ("id", "name", "algorithm", "environment", "tags", "notes")
# A database that cannot be used now, though nothing is wrong with it: answered without the file.
_NOT_NOW = ("BUSY", "LOCKED", "READONLY", "CANTOPEN", "FULL", "IOERR", "PERM", "AUTH", "NOLFS", "PROTOCOL")


class RunIndex:
    """`<runs_dir>/index.sqlite`. Every question first takes in what changed in the directories, so a copied,
    deleted or foreign run needs no registration. Trouble with the database never stops a run or a question."""

    def __init__(self, runs_dir: str | Path) -> None:
        self.runs_dir = Path(runs_dir)
        self.path = self.runs_dir / "index.sqlite"

    def record(self, run: RunDirectory) -> None:
        """Take in one run from its manifest.json, status.json, tags.json, config.yaml and metrics.jsonl."""

        def store(database: sqlite3.Connection) -> None:
            row = row_of(run)
            with _writing(database):
                _store(database, row)
            key = row["settings_key"]
            if key and not database.execute("SELECT 1 FROM settings WHERE key = ?", (key,)).fetchone():
                _store_settings(database, {key: run})

        try:
            self._ask(store)
        except (RunError, sqlite3.Error) as error:
            logger.warning("run '%s' is not in the index: %s", printable(run.id), printable(str(error)))

    def find(
        self,
        text: str | None = None,
        *,
        status: str | Sequence[str] | None = None,
        algorithm: str | None = None,
        environment: str | None = None,
        where: Sequence[str] = (),
        sort: str | None = None,
        is_reversed: bool = False,
        show: Sequence[str] = (),
    ) -> list[dict[str, Any]]:
        """The runs that fit, newest first or by `sort` (`-FIELD`: texts descending, too). `text` may stand in the id,
        name, algorithm, environment, tags or notes; `where` are conditions such as `algorithm=ppo` and
        `eval/return>200` that all hold. Metrics and settings that `where`, `sort` or `show` name stand in the rows
        under their own names."""
        is_descending, sort = (sort or "").startswith("-"), (sort or "").removeprefix("-")
        conditions = [Condition.parse(each) for each in where]
        fields = [condition.field for condition in conditions]
        fields += [Field.parse(word) for word in (*([sort] if sort else []), *show)]
        wanted = {"algorithm": algorithm, "environment": environment}
        if not self._is_there():
            return []

        def answer(database: sqlite3.Connection) -> Selection:
            self._synchronise(database)
            if any(field.kind == "setting" for field in fields):
                self._take_in_settings(database)
            selection = _select(database, list(dict.fromkeys(fields)))
            _refuse_unknown(database, fields, selection)
            return selection

        names, rows = self._ask(answer)
        exactly: dict[str, Sequence[str]] = {name: (value,) for name, value in wanted.items() if value is not None}
        if status is not None:
            exactly["status"] = (status,) if isinstance(status, str) else status
        rows = _matching(names, rows, conditions, text, exactly)
        found = [public(dict(zip(names, row, strict=True))) for row in rows]
        if sort:
            name = Field.parse(sort).name
            values = [row[name] for row in found]
            found = in_order(found, values, is_reversed=is_reversed, is_descending=is_descending)
        return found[::-1] if is_reversed and not sort else found

    def rebuild(self) -> int:
        """Forget everything and read all directories anew; how many runs there are."""

        def answer(database: sqlite3.Connection) -> int:
            with _writing(database):
                _make_tables(database)
            self._synchronise(database)
            self._take_in_settings(database)
            count: int = database.execute("SELECT count(*) FROM runs").fetchone()[0]
            return count

        return self._ask(answer) if self._is_there() else 0

    def _ask(self, question: Callable[[sqlite3.Connection], Answer]) -> Answer:
        if os.path.islink(self.path):  # it could name any database of this user
            logger.warning("%s is a symbolic link and is not used; reading the run directories instead", self.path)
            return self._once(":memory:", question)
        try:
            try:
                return self._once(str(self.path), question)
            except sqlite3.DatabaseError as error:
                if _is_not_now(error):
                    raise
                logger.warning("%s is damaged (%s); rebuilding it from the run directories", self.path, error)
                for ending in ("", "-journal", "-wal", "-shm"):
                    self.path.with_name(f"index.sqlite{ending}").unlink(missing_ok=True)
                return self._once(str(self.path), question)
        except (sqlite3.DatabaseError, OSError) as error:  # locked, read-only, disk full: answer without the file
            logger.warning("%s cannot be used (%s); reading the run directories instead", self.path, error)
            return self._once(":memory:", question)

    def _is_there(self) -> bool:
        try:
            return self.runs_dir.is_dir()
        except OSError as error:
            raise RunError(f"{self.runs_dir} cannot be read: {error.strerror}.") from error

    def _once(self, path: str, question: Callable[[sqlite3.Connection], Answer]) -> Answer:
        with closing(sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)) as database:
            database.row_factory = sqlite3.Row
            database.execute("PRAGMA synchronous = NORMAL")  # what a power cut takes is read from the directories again
            if not _is_current(database):
                if path != ":memory:":
                    logger.info("%s is new or of another version; filling it from the run directories", path)
                    database.execute("PRAGMA journal_mode = WAL")  # readers and a writer do not wait for each other
                with _writing(database):  # two processes that both find it missing must not both fill it
                    if not _is_current(database):
                        _make_tables(database)
                        self._fill(database)
            return question(database)

    def _synchronise(self, database: sqlite3.Connection) -> None:
        """Bring the table in line with the directories: three stat calls per run, reading only what changed."""
        cursor = database.execute("SELECT id, fingerprint, status FROM runs")
        cursor.row_factory = None
        known = {run_id: (written, status) for run_id, written, status in cursor}
        gone, changed = set(known), []
        for name, path, written in self._present():
            gone.discard(name)
            before, status = known.get(name, (None, None))
            # A killed process changes no file, so what is said to be running is always looked at again.
            is_alive = status == "running" or (status == "killed" and is_held(Path(path, LOCK)))
            if before != written or is_alive:
                changed.append(path)
        if gone or changed:
            self._fill(database, changed, gone)

    def _fill(self, database: sqlite3.Connection, paths: Sequence[str] | None = None, gone: Iterable[str] = ()) -> None:
        """Store runs, all of them where no paths are given; files are read before anybody has to wait."""
        paths = [path for _, path, _ in self._present()] if paths is None else paths
        rows = [row_of(RunDirectory(Path(path))) for path in paths]
        with _writing(database):
            database.executemany("DELETE FROM runs WHERE id = ?", [(run_id,) for run_id in gone])
            for row in rows:
                _store(database, row)

    def _take_in_settings(self, database: sqlite3.Connection) -> None:
        """Read the config.yaml of every run whose settings were never asked for."""
        question = "SELECT settings_key, id FROM runs WHERE settings_key NOT IN (SELECT key FROM settings)"
        rows = database.execute(question).fetchall()
        _store_settings(database, {row["settings_key"]: RunDirectory(self.runs_dir / row["id"]) for row in rows})

    def _entries(self) -> list[os.DirEntry[str]]:
        """What may be runs; nothing where there is no directory yet."""
        try:
            with os.scandir(self.runs_dir) as entries:
                return [entry for entry in entries if not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise RunError(f"{self.runs_dir} cannot be read: {error.strerror}.") from error

    def _present(self) -> Iterator[tuple[str, str, str]]:
        """The runs that can be read: id, path, when they were last written; others are named and left out."""
        for entry in self._entries():
            try:
                entry.name.encode()
                written = fingerprint(entry.path)
                if written is None:
                    RunDirectory(Path(entry.path)).exists()  # not a run, or a RunError that says why it cannot be seen
                    continue
            except (RunError, UnicodeEncodeError) as error:
                logger.warning("left out: %s", printable(str(error)))
                continue
            yield entry.name, entry.path, written


# --- the database ------------------------------------------------------------------------------


def _is_not_now(error: sqlite3.DatabaseError) -> bool:
    """Locked, read-only, full: nothing is wrong with the database itself."""
    name = getattr(error, "sqlite_errorname", "SQLITE_CANTOPEN").removeprefix("SQLITE_")
    return isinstance(error, sqlite3.OperationalError) and name.startswith(_NOT_NOW)


def _is_current(database: sqlite3.Connection) -> bool:
    return bool(database.execute("PRAGMA user_version").fetchone()[0] == _SCHEMA_VERSION)


def _make_tables(database: sqlite3.Connection) -> None:
    columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    for name, content in {"runs": columns, "settings": "key TEXT PRIMARY KEY, content TEXT"}.items():
        database.execute(f"DROP TABLE IF EXISTS {name}")
        database.execute(f"CREATE TABLE {name} ({content})")
    database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")


@contextmanager
def _writing(database: sqlite3.Connection) -> Iterator[None]:
    """One writer at a time, from the first statement on; inside another `_writing` it is part of that."""
    if database.in_transaction:
        yield
        return
    database.execute("BEGIN IMMEDIATE")
    with database:
        yield


def _store(database: sqlite3.Connection, row: Mapping[str, Any]) -> None:
    marks = ", ".join(f":{name}" for name in COLUMNS)
    database.execute(f"INSERT OR REPLACE INTO runs ({', '.join(COLUMNS)}) VALUES ({marks})", row)


def _store_settings(database: sqlite3.Connection, runs: Mapping[str, RunDirectory]) -> None:
    """Booleans are stored as texts: SQLite would give them back as 0 and 1."""
    words = {True: "true", False: "false"}
    rows = []
    for key, run in runs.items():
        settings = {
            name: words[value] if isinstance(value, bool) else value for name, value in read_settings(run).items()
        }
        rows.append((key, json.dumps(settings, default=str)))
    if rows:
        with _writing(database):
            database.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", rows)


def _select(database: sqlite3.Connection, fields: Sequence[Field]) -> Selection:
    """Every run, newest first, with the fields asked for."""
    sources = {"metric": "runs.metrics", "setting": "settings.content"}
    asked = [field for field in fields if field.kind != "column"]
    extracted = "".join(f", json_extract({sources[field.kind]}, ?)" for field in asked)
    join = " LEFT JOIN settings ON settings.key = runs.settings_key" if extracted else ""
    columns = ", ".join(f"runs.{name}" for name in VISIBLE)
    score = "max(ifnull(best_score, final_score), ifnull(final_score, best_score))"
    question = f"SELECT {columns}, {score}{extracted} FROM runs{join} ORDER BY runs.created DESC, runs.id DESC"
    cursor = database.execute(question, [f'$."{field.name}"' for field in asked])
    cursor.row_factory = None
    return [*VISIBLE, SCORE, *(field.name for field in asked)], cursor.fetchall()


def _matching(
    names: Sequence[str],
    rows: list[tuple[Any, ...]],
    conditions: Sequence[Condition],
    text: str | None,
    exactly: Mapping[str, Sequence[str]],
) -> list[tuple[Any, ...]]:
    """The rows that fit, in their order; one test after the other, as most rows fail the first."""
    for name, values in exactly.items():
        place = names.index(name)
        rows = [row for row in rows if row[place] in values]
    for condition in conditions:
        place, fits = names.index(condition.field.name), condition.predicate()
        is_list = condition.field.name in LISTS
        rows = [row for row in rows if fits(parsed(row[place]) if is_list else row[place])]
    if text:
        places, letters = [names.index(name) for name in _SEARCHED], text.lower()
        rows = [row for row in rows if letters in " ".join(str(row[place] or "") for place in places).lower()]
    return rows


def _refuse_unknown(database: sqlite3.Connection, fields: Sequence[Field], selection: Selection) -> None:
    """A field that no run has is a misspelling, unless it stands there without a value."""
    names, rows = selection
    for field in fields:
        place = names.index(field.name)
        if not rows or field.kind == "column" or any(row[place] is not None for row in rows):
            continue
        source = "settings, json_each(settings.content)" if field.kind == "setting" else "runs, json_each(runs.metrics)"
        known = sorted(row["key"] for row in database.execute(f"SELECT DISTINCT json_each.key FROM {source}"))
        if field.name in known:
            continue
        near = [key for key in known if key.endswith(f".{field.name}")][:5]
        near = near or [f"{where}/{field.name}" for where in ("eval", "collect") if field.name in ("return", "length")]
        names = [*FIELDS, *ALIASES, *with_short_names(known)]
        hint = f" Did you mean {' or '.join(near)}?" if near else did_you_mean(field.name, names)
        raise ConfigError(
            f"No run has a {field.kind} '{field.name}'.{hint} A field is one of {', '.join(FIELDS)}; a metric, such as "
            "eval/return; or a setting by its dotted key, such as algorithm.discount."
        )


# --- naming a run ------------------------------------------------------------------------------


def resolve_run(reference: str | Path, runs_dir: str | Path) -> RunDirectory:
    """The run a person means: an id, a unique prefix of one, a path, `@last` (newest), `@best:ENV` (highest score in an
    environment) or `@best` (in that of the newest run with a score: others' scores mean something else)."""
    index, text = RunIndex(runs_dir), str(reference)
    if text.startswith("@"):
        return _resolve_mark(text, index)
    if isinstance(reference, Path) or os.sep in text:
        return RunDirectory.open(reference)
    if text and RunDirectory(index.runs_dir / text).exists():
        return RunDirectory.open(index.runs_dir / text)
    ids = [row["id"] for row in index.find()]
    candidates = sorted(run_id for run_id in ids if text and run_id.startswith(text))
    if len(candidates) == 1:
        return RunDirectory.open(index.runs_dir / candidates[0])
    if candidates:
        listing = "\n  ".join(candidates[:10] + ["..."] * (len(candidates) > 10))
        raise RunError(f"'{text}' fits {len(candidates)} runs; write more of the id:\n  {listing}")
    if text and RunDirectory(Path(text)).exists():  # a path without a slash: a run in this very folder
        return RunDirectory.open(text)
    near = [run_id for run_id in ids if text and text in run_id][:3]
    near = near or get_close_matches(text, ids, n=3, cutoff=0.4) or ids[:3]
    near = [f"@{text}"] if text in ("last", "best") else near
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
    scored = [(row["score"], row["id"], row["environment"]) for row in rows if row["score"] is not None]
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
