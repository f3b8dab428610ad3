"""Checkpoints that survive kill -9, power cuts, full disks and flipped bytes, and that cannot run code.

    checkpoints/step_000000123456/   <section>.pt ...  manifest.json (counts, score, size and sha256 of each file)
                latest -> step_000000123456
                best   -> step_000000098304

A checkpoint is written under a temporary name, flushed to the disk, and renamed: it exists whole or not at all.

What is too large to be written anew each time, the rows of a replay, lies in files of the run outside the checkpoint,
which only grow. The manifest names the blocks of each that the checkpoint needs (an `ExternalFile`).
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from rl_lab.runs.files import (
    UnreadableFile,
    appearing,
    check_types,
    read_bytes,
    read_json,
    readable_disk_errors,
    remove,
    remove_at_once,
    sync_directory,
    to_json,
    write_durably,
)
from rl_lab.runs.manifest import CHECKPOINT_SCHEMA_VERSION, check_schema_version
from rl_lab.runs.migrate import migrate_checkpoint
from rl_lab.runs.run_directory import CLEANED
from rl_lab.types import ConfigError, RunError, StateTree
from rl_lab.utils.file_blocks import DamagedFileError, FileBlocks
from rl_lab.utils.text import printable
from rl_lab.utils.tree import leaves_with_paths, map_leaves, numpy_to_tensors

_NAME = re.compile(r"step_(\d{12,})(?:-r(\d+))?")
_SECTION = re.compile(r"[A-Za-z0-9_]+")
_PLAIN_LEAVES = (str, int, float, bool, type(None))

# What torch.load raises for bytes that are no checkpoint of plain data; anything else is a bug of ours.
_LOAD_ERRORS = (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError)


class DamagedCheckpoint(RunError):
    """A checkpoint is incomplete, altered or not plain data; the message names the file and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"Checkpoint {path} is damaged: {reason}.")
        self.path = path


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint in memory; tensors are on the CPU."""

    path: Path
    manifest: dict[str, Any]
    state: dict[str, StateTree]

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.manifest["counts"])


class DamagedExternalFile(DamagedCheckpoint):
    """A file outside a checkpoint is damaged where the checkpoint needs it: a warm start does without."""

    def __init__(self, path: Path, reason: str) -> None:
        warm_start = f"`rl-lab resume {path.absolute().parents[1].name} --mode warm_start`"
        super().__init__(path, f"{reason}. Without the replay: {warm_start} begins a new run with the weights")


@dataclass(frozen=True)
class ExternalFile:
    """Blocks of a file, named relative to the run's directory, which a section of a checkpoint needs."""

    section: str
    path: str
    blocks: FileBlocks


class CheckpointStore:
    """The checkpoints of one run. Any number may read; the one that saves holds the run's lock."""

    def __init__(self, directory: Path, *, keep_recent: int = 3, identity: str | None = None) -> None:
        """`identity` is the run's own (see manifest.json): it is written into each checkpoint."""
        if keep_recent < 1:
            raise ConfigError(f"checkpoint.keep_recent is {keep_recent}; keep at least 1.")
        self.directory = Path(directory)
        self.keep_recent = keep_recent
        self.identity = identity

    # --- saving --------------------------------------------------------------------------------

    def save(
        self,
        state: Mapping[str, StateTree],
        *,
        agent_steps: int,
        counts: Mapping[str, int],
        score: float | None = None,
        is_best: bool = False,
        external: Sequence[ExternalFile] = (),
    ) -> Path:
        """Save every section of the state tree; when this returns, the checkpoint is on the disk.

        `external` names what the sections need outside the checkpoint; it is on the disk already.
        On a full disk the half-written checkpoint is removed, earlier ones stay, and a RunError says so.
        """
        with readable_disk_errors(self.directory, run_id=self.directory.absolute().parent.name):
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob("*.tmp-*"):  # of a kill or a failed save: nobody else may be saving
                remove(leftover)
            path = self._unused_path(agent_steps)
            with appearing(path) as temporary:
                temporary.mkdir()
                facts = {"run": self.identity, "counts": dict(counts), "score": score}
                _write_sections(temporary, state, facts, external)
            sync_directory(self.directory)
            for link in ("latest", "best") if is_best else ("latest",):
                self._point(link, path)
            self._retire(agent_steps)
        return path

    def _unused_path(self, agent_steps: int) -> Path:
        """A second save at the same count gets a `-r2` name, so that the first stays valid until the end."""
        taken = [revision for steps, revision, _ in self._entries() if steps == agent_steps]
        suffix = f"-r{max(taken) + 1}" if taken else ""
        return self.directory / f"step_{agent_steps:012d}{suffix}"

    def _point(self, link_name: str, path: Path) -> None:
        link = self.directory / link_name
        if link.is_dir() and not link.is_symlink():
            remove(link)  # a copy made by a tool that follows links; the new checkpoint is on disk already
        with appearing(link) as temporary:
            os.symlink(path.name, temporary)

    def _retire(self, agent_steps: int) -> None:
        """Keep the newest few and whatever `latest` and `best` name; a newer save of one count replaces an older.

        A run that went back to an earlier checkpoint finds later ones ahead of it: those neither count nor go.
        """
        entries = [entry for entry in self._entries() if entry[0] <= agent_steps]
        newest_of_each_count = {steps: path for steps, _, path in reversed(entries)}
        recent = sorted(newest_of_each_count, reverse=True)[: self.keep_recent]
        kept = {newest_of_each_count[steps] for steps in recent} | {self._target("latest"), self._target("best")}
        for _, _, path in entries:
            if path not in kept:
                remove_at_once(path)

    # --- looking -------------------------------------------------------------------------------

    def external_paths(self) -> set[str] | None:
        """The files outside that some checkpoint still needs, relative to the run; a damaged one needs nothing.

        None while a checkpoint cannot be read: it may be whole, so nobody may remove anything.
        """
        paths: set[str] = set()
        for checkpoint in self.paths():
            try:
                paths |= {file.path for file in _external_files(checkpoint, read_manifest(checkpoint))}
            except DamagedCheckpoint as damage:
                if isinstance(damage.__cause__, UnreadableFile):
                    return None
        return paths

    def paths(self) -> list[Path]:
        """Every checkpoint, newest (most agent steps) first."""
        return [path for _, _, path in self._entries()]

    def _entries(self) -> list[tuple[int, int, Path]]:
        try:
            found = [(_NAME.fullmatch(path.name), path) for path in self.directory.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise RunError(f"{self.directory} cannot be read: {error.strerror}.") from error
        entries = [(int(match[1]), int(match[2] or 1), path) for match, path in found if match]
        return sorted(entries, reverse=True)

    def _target(self, link_name: str) -> Path | None:
        """The checkpoint a link names, or None where the link is missing or dangling."""
        link = self.directory / link_name
        if not link.is_dir():
            return None
        return self.directory / os.readlink(link) if link.is_symlink() else link

    def _readable_target(self, link_name: str) -> Path | None:
        """For readers: the checkpoints may be readable where the link is not. Whoever removes some must know it."""
        with suppress(OSError):
            return self._target(link_name)
        return None

    def resolve(self, which: str | Path) -> Path:
        """The directory of `latest`, `best`, a name such as `step_000000123456`, or a path."""
        if which in ("latest", "best"):
            others = self.paths()
            linked = self._readable_target(str(which))
            if linked is not None:
                return linked
            if which == "latest" and others:  # a copy that left the links behind
                return others[0]
            cure = "no evaluation has chosen one yet, use 'latest'" if others else "the run has saved nothing yet"
            if not others and (self.directory.parent / CLEANED).exists():
                cure = "`rl-lab cleanup` has removed it; train it again with `rl-lab train` and its config.yaml"
            raise RunError(f"{self.directory} has no '{which}' checkpoint: {cure}.")
        for path in (self.directory / which, Path(which)):
            if os.path.isdir(path):
                return path
        names = ", ".join(path.name for path in self.paths()) or "none"
        raise RunError(f"There is no checkpoint '{which}' in {self.directory}: use latest, best or one of: {names}.")

    # --- loading -------------------------------------------------------------------------------

    def load(self, which: str | Path = "latest", sections: Sequence[str] | None = None) -> Checkpoint:
        """Load and verify a checkpoint, or only some sections of it. Never executes anything from the file."""
        return self._load(self.resolve(which), sections)

    def _load(self, path: Path, sections: Sequence[str] | None) -> Checkpoint:
        manifest = read_manifest(path)
        files = manifest["sections"]
        wanted = [f"{name}.pt" for name in sections] if sections is not None else list(files)
        for file in wanted:
            if file not in files:
                has = ", ".join(sorted(name.removesuffix(".pt") for name in files))
                raise RunError(f"Checkpoint {path} has no section '{file.removesuffix('.pt')}': it has {has}.")
        for external in _external_files(path, manifest):
            if f"{external.section}.pt" in wanted:
                _check_external(path, external)
        state = {file.removesuffix(".pt"): _read_section(path, file, files) for file in wanted}
        return Checkpoint(path, manifest, state)

    def load_newest_valid(
        self, report: Callable[[str], None], sections: Sequence[str] | None = None
    ) -> Checkpoint | None:
        """The newest checkpoint of this run that is whole, or None when there is none at all.

        `latest` comes first, then the others from the newest on. Each damaged one goes to `report` as a sentence.
        """
        damages: list[DamagedCheckpoint] = []
        for path in self._candidates():
            try:
                checkpoint = self._load(path, sections)
                self.refuse_foreign(path, checkpoint.manifest)
            except DamagedCheckpoint as damage:
                damages.append(damage)
                report(printable(str(damage)))
                continue
            if damages:
                report(f"Going on from {path.name} instead ({len(damages)} damaged checkpoint(s) passed over).")
            return checkpoint
        if damages:
            listing = "\n  ".join(map(str, damages))
            has_cure = any(isinstance(damage, DamagedExternalFile) for damage in damages)
            cure = "" if has_cure else "\nStart again with `rl-lab train`."
            raise RunError(f"Every checkpoint in {self.directory} is damaged:\n  {listing}{cure}")
        return None

    def _candidates(self) -> Iterator[Path]:
        latest = self._readable_target("latest")
        if latest is not None:
            yield latest
        yield from (path for path in self.paths() if path != latest)

    def refuse_foreign(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Damage, as far as this run is concerned: another run saved it."""
        owner = manifest.get("run")
        if self.identity is not None and owner not in (None, self.identity):
            raise DamagedCheckpoint(path, f"it was saved by another run ({owner}, this one is {self.identity})")


def _write_sections(
    directory: Path, state: Mapping[str, StateTree], facts: Mapping[str, Any], external: Sequence[ExternalFile]
) -> None:
    files: dict[str, dict[str, Any]] = {}
    for section, tree in state.items():
        assert _SECTION.fullmatch(section), f"section name '{section}' must be letters, digits and '_'"
        _check_plain(section, tree)
        content = io.BytesIO()
        torch.save(map_leaves(_compact, numpy_to_tensors(tree)), content)
        data = content.getbuffer()
        write_durably(directory / f"{section}.pt", data)
        files[f"{section}.pt"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {
        "schema_version": CHECKPOINT_SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(),
        **facts,
        "sections": files,
        **({"external": [asdict(file) for file in external]} if external else {}),
    }
    write_durably(directory / "manifest.json", to_json({**manifest, "sha256": _digest(manifest)}).encode())
    sync_directory(directory)


def _digest(manifest: Mapping[str, Any]) -> str:
    """Of everything in a checkpoint's manifest but the digest itself."""
    return hashlib.sha256(to_json({name: manifest[name] for name in manifest if name != "sha256"}).encode()).hexdigest()


def _compact(leaf: Any) -> Any:
    """A view would drag its whole storage into the file: a slice of a buffer is saved as the slice it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach()
    return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.numel() * leaf.element_size() else leaf


def _check_plain(section: str, tree: StateTree) -> None:
    """Refuse at the save what loading would refuse: only plain data can be read back without running code."""
    for path, leaf in leaves_with_paths(tree, section):
        is_array = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufc"
        if not (is_array or isinstance(leaf, torch.Tensor) or type(leaf) in _PLAIN_LEAVES):
            kind = f"array of {leaf.dtype}" if isinstance(leaf, np.ndarray | np.generic) else type(leaf).__name__
            raise RunError(
                f"State '{path}' is a {kind}, which cannot be checkpointed: get_state() may hold tensors, "
                "numeric arrays, numbers, strings, booleans and None in dicts, lists and tuples."
            )


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of one checkpoint, checked as far as it goes without the other files."""
    try:
        manifest = read_json(path / "manifest.json")
    except RunError as error:
        raise DamagedCheckpoint(path, str(error).rstrip(".")) from error
    if manifest.get("sha256", digest := _digest(manifest)) != digest:
        raise DamagedCheckpoint(path, "manifest.json has changed since it was written (sha256 differs)")
    if "schema_version" not in manifest:
        raise DamagedCheckpoint(path, "manifest.json has no 'schema_version'")
    check_schema_version(
        manifest["schema_version"], supported=CHECKPOINT_SCHEMA_VERSION, what="checkpoint", place=str(path)
    )
    entries = manifest.get("sections")
    if not isinstance(manifest.get("counts"), dict) or not isinstance(entries, dict):
        raise DamagedCheckpoint(path, "manifest.json has no 'counts' or no 'sections'")
    if not all(isinstance(count, int) for count in manifest["counts"].values()):
        raise DamagedCheckpoint(path, f"manifest.json counts {manifest['counts']}, which are no whole numbers")
    for file, entry in entries.items():
        if not _SECTION.fullmatch(file.removesuffix(".pt")) or not isinstance(entry, dict):
            raise DamagedCheckpoint(path, f"manifest.json lists '{file}', which is no section file")
        if not {"bytes", "sha256"} <= entry.keys():
            raise DamagedCheckpoint(path, f"manifest.json gives no size or checksum for {file}")
    return manifest


def _external_files(path: Path, manifest: Mapping[str, Any]) -> list[ExternalFile]:
    try:
        files = [_parse_external(entry) for entry in migrate_checkpoint(manifest).get("external", [])]
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, RunError) as error:
        raise DamagedCheckpoint(path, f"manifest.json names files outside in an unknown way ({error!r})") from error
    for file in files:
        place = PurePosixPath(file.path)
        if place.is_absolute() or ".." in place.parts:
            raise DamagedCheckpoint(path, f"manifest.json names '{file.path}', which is no file of this run")
    return files


def _parse_external(entry: Mapping[str, Any]) -> ExternalFile:
    check_types(entry, {"section": str, "path": str}, place="an entry")
    return ExternalFile(entry["section"], entry["path"], FileBlocks(**entry["blocks"]))


def _check_external(path: Path, external: ExternalFile) -> None:
    """Read the blocks that the checkpoint needs and compare their checksums."""
    try:
        for _ in external.blocks.read(path.absolute().parent.parent / external.path):
            pass
    except DamagedFileError as error:
        raise DamagedExternalFile(path, f"{external.path}: {error}") from error


def _read_section(path: Path, file: str, entries: Mapping[str, Mapping[str, Any]]) -> StateTree:
    try:
        data = read_bytes(path / file)
    except OSError as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise DamagedCheckpoint(path, f"{file} {what}") from error
    expected = entries[file]
    if len(data) != expected["bytes"]:
        raise DamagedCheckpoint(path, f"{file} has {len(data)} bytes where the manifest says {expected['bytes']}")
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise DamagedCheckpoint(path, f"{file} has changed since it was written (sha256 differs)")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except _LOAD_ERRORS as error:
        summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DamagedCheckpoint(path, f"{file} is not plain data and was refused ({summary})") from error
