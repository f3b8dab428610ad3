"""Everything a run directory promises, checked: what is damaged, and what can still be used."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rl_lab.runs.checkpoint import CheckpointStore, DamagedCheckpoint, read_manifest
from rl_lab.runs.files import entries_below, is_leftover, read_bytes, refuse_links_out_of
from rl_lab.runs.lock import is_held
from rl_lab.runs.metrics_file import parse_row
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.types import RunError

POLICY, OPTIMIZERS = frozenset({"components", "controllers"}), frozenset({"optimizers"})
Level = Literal["warning", "error"]


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be. An error keeps the run from going on exactly; a warning does not."""

    level: Level
    where: str
    what: str


@dataclass(frozen=True)
class CheckpointVerdict:
    """What one checkpoint is good for, best first: `exact`, `warm_start_optimizer`, `warm_start`, `evaluate`."""

    name: str
    counts: dict[str, int]
    usable_for: tuple[str, ...]


@dataclass
class Verdict:
    """What was found in a run directory."""

    findings: list[Finding] = field(default_factory=list)
    checkpoints: list[CheckpointVerdict] = field(default_factory=list)  # newest first

    def usable_for(self, purpose: str) -> CheckpointVerdict | None:
        """The newest checkpoint that serves a purpose."""
        return next((each for each in self.checkpoints if purpose in each.usable_for), None)

    @property
    def is_whole(self) -> bool:
        return not self.has_error()

    def has_error(self, *places: str) -> bool:
        """Whether there is an error in one of some places, or anywhere."""
        return any(each.level == "error" and (not places or each.where in places) for each in self.findings)

    def note(self, level: Level, where: str, what: str) -> None:
        self.findings.append(Finding(level, where, what))

    def check(self, where: str, look: Callable[[], Any], level: Level = "error") -> Any:
        """What `look` returns; None, and a finding, where it cannot."""
        try:
            return look()
        except (RunError, OSError) as error:
            # Of a checkpoint only what is wrong: its name stands before it.
            reason = str(error).partition(" is damaged: ")[2] if isinstance(error, DamagedCheckpoint) else str(error)
            self.note(level, where, reason)
            return None


def verify_run(run: RunDirectory) -> Verdict:
    """Read every file of a run and compare it with its checksums and with each other; nothing is changed."""
    verdict = Verdict()
    manifest = verdict.check("manifest.json", run.read_manifest)
    verdict.check("config.yaml", run.check_config if manifest else run.read_config_text)
    status = run.read_status()
    if status["state"] == "unknown":
        verdict.note("warning", "status.json", status["message"])
    verdict.check("environment.json", run.read_environment, "warning")
    verdict.check("tags.json", run.read_tags, "warning")
    verdict.check("links", lambda: refuse_links_out_of(run.path))
    if is_held(run.lock_path):
        verdict.note("warning", ".lock", "a process is at work on this run: files may still change")
    rows = _read_rows(run.metrics_path, verdict)
    verdict.check("files", lambda: _note_leftovers(run.path, verdict))
    store = CheckpointStore(run.checkpoints_dir, identity=manifest.get("identity") if manifest else None)
    for path in verdict.check("checkpoints", store.paths) or []:
        verdict.checkpoints.append(_verify_checkpoint(store, path, rows, verdict))
    verdict.check("checkpoints", lambda: _note_dangling(run.checkpoints_dir, verdict))
    return verdict


def _verify_checkpoint(store: CheckpointStore, path: Path, rows: _Rows, verdict: Verdict) -> CheckpointVerdict:
    """Each section by itself, so that damage to one does not hide that the others are whole."""
    where = f"checkpoints/{path.name}"
    manifest = verdict.check(where, lambda: read_manifest(path))
    if manifest is None:
        return CheckpointVerdict(path.name, {}, ())
    counts, sections = manifest["counts"], {file.removesuffix(".pt") for file in manifest["sections"]}
    verdict.check(where, lambda: store.refuse_foreign(path, manifest))
    whole: set[str] = set()
    for section in sorted(sections):
        loaded = verdict.check(where, partial(store.load, path.absolute(), [section]))
        if loaded is not None:
            whole.add(section)
            if section == "logger" and (what := rows.mismatch(loaded.state["logger"], counts)):
                verdict.note("error", where, what)
    if counts.get("agent_steps") != int(path.name.removeprefix("step_").partition("-")[0]):
        verdict.note("error", where, f"its name and its counts differ: {counts}")
    with suppress(OSError):
        for extra in sorted({*os.listdir(path)} - {"manifest.json", *(f"{section}.pt" for section in sections)}):
            verdict.note("warning", f"{where}/{extra}", "belongs to no section")
    if not whole >= sections & POLICY:
        return CheckpointVerdict(path.name, counts, ())
    purposes = ("warm_start_optimizer",) if whole >= OPTIMIZERS else ()
    exact = () if verdict.has_error(where, "manifest.json", "config.yaml", "links") else ("exact",)
    return CheckpointVerdict(path.name, counts, (*exact, *purposes, "warm_start", "evaluate"))


def _note_leftovers(directory: Path, verdict: Verdict) -> None:
    names = [os.path.relpath(each.path, directory) for each in entries_below(directory) if is_leftover(each.name)]
    for name in sorted(names):
        verdict.note("warning", name, "was left by a killed process; a later start removes it")


def _note_dangling(directory: Path, verdict: Verdict) -> None:
    for link in (directory / "latest", directory / "best"):
        if link.is_symlink() and not link.exists():
            verdict.note("warning", f"{directory.name}/{link.name}", f"names {os.readlink(link)}, which is missing")


@dataclass
class _Rows:
    """The rows of metrics.jsonl with the byte at which each ends."""

    ends: dict[int, int]  # byte behind a row -> its agent steps
    size: int

    def mismatch(self, logger: Any, counts: dict[str, int]) -> str | None:
        """What is wrong, unless the rows up to a checkpoint are there and none of them is newer than it."""
        with suppress(KeyError, TypeError):
            end, steps = int(logger["writers"]["jsonl"]["bytes"]), counts["agent_steps"]
            if end > self.size:
                return f"metrics.jsonl has {self.size} bytes where the checkpoint needs {end}"
            if end not in self.ends:
                return f"metrics.jsonl has no row that ends at byte {end}, where the checkpoint stood"
            if self.ends[end] > steps:
                return f"metrics.jsonl is at {self.ends[end]:,} agent steps where the checkpoint is at {steps:,}"
        return None


def _read_rows(path: Path, verdict: Verdict) -> _Rows:
    rows, before = _Rows({0: 0}, 0), 0
    try:
        lines = read_bytes(path).splitlines(keepends=True)
    except FileNotFoundError:
        return rows
    except OSError as error:
        verdict.note("error", path.name, f"cannot be read ({error.strerror})")
        return rows
    for number, line in enumerate(lines, start=1):
        rows.size += len(line)
        steps = (parse_row(line) or {}).get("agent_steps")
        if not line.endswith(b"\n"):
            verdict.note("warning", path.name, f"line {number} was cut short by a kill")
        elif not isinstance(steps, int):
            verdict.note("warning", path.name, f"line {number} is no row of metrics")
        else:
            if steps < before:
                what = f"line {number} goes back from {before:,} to {steps:,} agent steps"
                verdict.note("warning", path.name, what)
            before = rows.ends[rows.size] = steps
    return rows
