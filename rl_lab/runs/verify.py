"""Everything a run directory promises, checked: what is damaged, and what can still be used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
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
        return not any(finding.level == "error" for finding in self.findings)


def verify_run(run: RunDirectory) -> Verdict:
    """Read every file of a run and compare it with its checksums and with each other; nothing is changed."""
    verdict = Verdict()

    def check(where: str, look: Callable[[], Any], level: Level = "error") -> Any:
        try:
            return look()
        except (RunError, OSError) as error:
            verdict.findings.append(Finding(level, where, str(error)))
            return None

    manifest = check("manifest.json", run.read_manifest)
    check("config.yaml", run.check_config if manifest else run.read_config_text)
    status = run.read_status()
    if status["state"] == "unknown":
        verdict.findings.append(Finding("warning", "status.json", status["message"]))
    check("environment.json", run.read_environment, "warning")
    check("tags.json", run.read_tags, "warning")
    check("links", lambda: refuse_links_out_of(run.path))
    if is_held(run.lock_path):
        verdict.findings.append(Finding("warning", ".lock", "a process is at work on this run: files may still change"))
    rows = _Rows.read(run.metrics_path)
    verdict.findings += rows.findings
    verdict.findings += check("files", lambda: _leftovers(run.path)) or []
    store = CheckpointStore(run.checkpoints_dir, identity=manifest.get("identity") if manifest else None)
    for path in check("checkpoints", store.paths) or []:
        findings, checkpoint = _verify_checkpoint(store, path, rows)
        verdict.findings += findings
        is_exact = not any(each.where in _NEEDED for each in verdict.findings if each.level == "error")
        purposes = tuple(each for each in checkpoint.usable_for if each != "exact" or is_exact)
        verdict.checkpoints.append(CheckpointVerdict(path.name, checkpoint.counts, purposes))
    verdict.findings += check("checkpoints", lambda: _dangling(run.checkpoints_dir)) or []
    return verdict


_NEEDED = ("manifest.json", "config.yaml", "links")


def _verify_checkpoint(store: CheckpointStore, path: Path, rows: _Rows) -> tuple[list[Finding], CheckpointVerdict]:
    """Each section by itself, so that damage to one does not hide that the others are whole."""
    where = f"checkpoints/{path.name}"
    findings: list[Finding] = []
    whole: set[str] = set()
    counts: dict[str, int] = {}
    try:
        manifest = read_manifest(path)
        counts = manifest["counts"]
        sections = {file.removesuffix(".pt") for file in manifest["sections"]}
    except RunError as error:
        return [Finding("error", where, _reason(error))], CheckpointVerdict(path.name, counts, ())
    try:
        store.refuse_foreign(path, manifest)
    except DamagedCheckpoint as error:
        findings.append(Finding("error", where, _reason(error)))
    for section in sorted(sections):
        try:
            loaded = store.load(path.absolute(), [section])
            whole.add(section)
            if section == "logger":
                findings += rows.compare(where, loaded.state["logger"], counts)
        except RunError as error:
            findings.append(Finding("error", where, _reason(error)))
    if counts.get("agent_steps") != int(path.name.removeprefix("step_").partition("-")[0]):
        findings.append(Finding("error", where, f"its name and its counts differ: {counts}"))
    with suppress(OSError):
        for extra in sorted({*os.listdir(path)} - {"manifest.json", *(f"{section}.pt" for section in sections)}):
            findings.append(Finding("warning", f"{where}/{extra}", "belongs to no section"))
    if not whole >= sections & POLICY:
        return findings, CheckpointVerdict(path.name, counts, ())
    purposes = ("warm_start_optimizer",) if whole >= OPTIMIZERS else ()
    exact = ("exact",) if not any(each.level == "error" for each in findings) else ()
    return findings, CheckpointVerdict(path.name, counts, (*exact, *purposes, "warm_start", "evaluate"))


def _leftovers(directory: Path) -> list[Finding]:
    names = sorted(os.path.relpath(each.path, directory) for each in entries_below(directory) if is_leftover(each.name))
    return [Finding("warning", name, "was left by a killed process; a later start removes it") for name in names]


def _dangling(directory: Path) -> list[Finding]:
    links = [directory / name for name in ("latest", "best")]
    return [
        Finding("warning", f"{directory.name}/{link.name}", f"names {os.readlink(link)}, which is missing")
        for link in links
        if link.is_symlink() and not link.exists()
    ]


def _reason(error: RunError) -> str:
    """What is wrong, without the name of the checkpoint, which stands before it."""
    return str(error).partition(" is damaged: ")[2] if isinstance(error, DamagedCheckpoint) else str(error)


@dataclass
class _Rows:
    """The rows of metrics.jsonl with the byte at which each ends."""

    ends: dict[int, int]  # byte behind a row -> its agent steps
    size: int
    findings: list[Finding]

    @classmethod
    def read(cls, path: Path) -> _Rows:
        rows = cls({0: 0}, 0, [])
        try:
            lines = read_bytes(path).splitlines(keepends=True)
        except FileNotFoundError:
            return rows
        except OSError as error:
            rows.findings.append(Finding("error", path.name, f"cannot be read ({error.strerror})"))
            return rows
        rows._take(lines, path.name)
        return rows

    def _take(self, lines: list[bytes], name: str) -> None:
        before = 0
        for number, line in enumerate(lines, start=1):
            self.size += len(line)
            row = parse_row(line)
            if not line.endswith(b"\n"):
                self.findings.append(Finding("warning", name, f"line {number} was cut short by a kill"))
                continue
            steps = row.get("agent_steps") if row else None
            if not isinstance(steps, int):
                self.findings.append(Finding("warning", name, f"line {number} is no row of metrics"))
                continue
            if steps < before:
                what = f"line {number} goes back from {before:,} to {steps:,} agent steps"
                self.findings.append(Finding("warning", name, what))
            before = self.ends[self.size] = steps

    def compare(self, where: str, logger: Any, counts: dict[str, int]) -> Iterator[Finding]:
        """Whether the rows up to a checkpoint are there, and none of them is newer than it."""
        with suppress(KeyError, TypeError):
            end, steps = int(logger["writers"]["jsonl"]["bytes"]), counts["agent_steps"]
            if end > self.size:
                yield Finding("error", where, f"metrics.jsonl has {self.size} bytes where the checkpoint needs {end}")
            elif end not in self.ends:
                yield Finding(
                    "error", where, f"metrics.jsonl has no row that ends at byte {end}, where the checkpoint stood"
                )
            elif self.ends[end] > steps:
                what = f"metrics.jsonl is at {self.ends[end]:,} agent steps where the checkpoint is at {steps:,}"
                yield Finding("error", where, what)
