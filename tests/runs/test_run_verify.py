"""`verify_run`: every kind of damage is found, and what is still usable is said."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.runs.checkpoint import CheckpointStore, ExternalFile
from rl_lab.runs.lock import RunLock
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.verify import Verdict, verify_run
from rl_lab.utils.file_blocks import FileBlocks

ALL = ("exact", "warm_start_optimizer", "warm_start", "evaluate")
NAMES = ["step_000000000020", "step_000000000010"]
REPLAY = "replay/replay/rows_000001.bin"


@pytest.fixture
def run(make_run: Callable[..., RunDirectory]) -> RunDirectory:
    """Two checkpoints at 10 and 20 agent steps, rows of metrics up to 25, and a file of replay rows."""
    run = make_run("mine")
    store = CheckpointStore(run.checkpoints_dir, identity=run.identity())
    (run.path / REPLAY).parent.mkdir(parents=True)
    for steps in (10, 20):
        with open(run.metrics_path, "a") as file:
            file.write(json.dumps({"agent_steps": steps, "loss/policy": 0.5}) + "\n")
        with open(run.path / REPLAY, "ab") as file:
            file.write(bytes([steps]) * 100)
        data = (run.path / REPLAY).read_bytes()
        state = {
            name: {"weight": torch.full((4,), float(steps))} for name in ("components", "controllers", "optimizers")
        }
        logger = {"writers": {"jsonl": {"bytes": run.metrics_path.stat().st_size}}}
        store.save(
            {**state, "logger": logger, "buffers": {"rows": steps}},
            agent_steps=steps,
            counts={"agent_steps": steps},
            is_best=steps == 10,
            external=[ExternalFile("buffers", REPLAY, FileBlocks(row_bytes=1, block_rows=100).extended(data))],
        )
    with open(run.metrics_path, "a") as file:
        file.write(json.dumps({"agent_steps": 25}) + "\n")
    return run


def usable(verdict: Verdict) -> dict[str, tuple[str, ...]]:
    return {each.name: each.usable_for for each in verdict.checkpoints}


def findings(verdict: Verdict) -> str:
    return "\n".join(f"{each.level} {each.where}: {each.what}" for each in verdict.findings)


def test_a_whole_run_has_no_findings(run: RunDirectory) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*"))
    verdict = verify_run(run)
    assert verdict.findings == [] and verdict.is_whole
    assert usable(verdict) == dict.fromkeys(NAMES, ALL)
    assert verdict.checkpoints[0].counts == {"agent_steps": 20}
    assert sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*")) == before


def test_a_run_without_checkpoints_is_whole_too(make_run: Callable[..., RunDirectory]) -> None:
    verdict = verify_run(make_run("new"))
    assert verdict.is_whole and verdict.checkpoints == []


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at if at >= 0 else len(data) // 2] ^= 1
    path.write_bytes(data)


def newest(run: RunDirectory, file: str) -> Path:
    return run.checkpoints_dir / NAMES[0] / file


WARM = ALL[1:]
DAMAGES: dict[str, tuple[Callable[[RunDirectory], Any], str, dict[str, tuple[str, ...]]]] = {
    "weights": (
        lambda run: flip(newest(run, "components.pt")),
        f"error checkpoints/{NAMES[0]}: components.pt has changed since it was written (sha256 differs).",
        {NAMES[0]: (), NAMES[1]: ALL},
    ),
    "optimizers": (
        lambda run: newest(run, "optimizers.pt").unlink(),
        f"error checkpoints/{NAMES[0]}: optimizers.pt is missing.",
        {NAMES[0]: ("warm_start", "evaluate"), NAMES[1]: ALL},
    ),
    "counts": (
        lambda run: newest(run, "logger.pt").write_bytes(b""),
        f"error checkpoints/{NAMES[0]}: logger.pt has 0 bytes where the manifest says",
        {NAMES[0]: WARM, NAMES[1]: ALL},
    ),
    "checkpoint manifest": (
        lambda run: flip(newest(run, "manifest.json")),
        f"error checkpoints/{NAMES[0]}: manifest.json",
        {NAMES[0]: (), NAMES[1]: ALL},
    ),
    "rows of both": (
        lambda run: flip(run.path / REPLAY, 50),
        f"error checkpoints/{NAMES[1]}: {REPLAY}: block 0 (bytes 0 to 99) has changed since it was written",
        dict.fromkeys(NAMES, WARM),
    ),
    "rows of the newest": (
        lambda run: flip(run.path / REPLAY, 150),
        f"error checkpoints/{NAMES[0]}: {REPLAY}: block 1 (bytes 100 to 199) has changed since it was written",
        {NAMES[0]: WARM, NAMES[1]: ALL},
    ),
    "a pipe for the rows": (
        lambda run: (run.path / REPLAY).unlink() or os.mkfifo(run.path / REPLAY),
        f"error checkpoints/{NAMES[0]}: {REPLAY}: it has 0 bytes where 200 are needed",
        dict.fromkeys(NAMES, WARM),
    ),
    "replay": (
        lambda run: shutil.rmtree(run.path / "replay"),
        f"error checkpoints/{NAMES[0]}: {REPLAY}: it is missing.",
        dict.fromkeys(NAMES, WARM),
    ),
    "metrics shorter": (
        lambda run: os.truncate(run.metrics_path, 50),
        "metrics.jsonl has 50 bytes where the checkpoint needs",
        {NAMES[0]: WARM, NAMES[1]: ALL},
    ),
    "metrics of another length": (
        lambda run: run.metrics_path.write_text(" " + run.metrics_path.read_text()),
        "metrics.jsonl has no row that ends at byte",
        dict.fromkeys(NAMES, WARM),
    ),
    "metrics ahead": (
        lambda run: run.metrics_path.write_text(run.metrics_path.read_text().replace('s": 20', 's": 21')),
        "metrics.jsonl is at 21 agent steps where the checkpoint is at 20",
        {NAMES[0]: WARM, NAMES[1]: ALL},
    ),
    "config": (
        lambda run: run.config_path.write_text("seed: 2\n"),
        "error config.yaml: ",
        dict.fromkeys(NAMES, WARM),
    ),
    "run manifest": (
        lambda run: run.manifest_path.write_text("{"),
        "error manifest.json: ",
        dict.fromkeys(NAMES, WARM),
    ),
    "a checkpoint of another run": (
        lambda run: run.write_manifest(run.read_manifest() | {"identity": "other"}),
        "it was saved by another run",
        dict.fromkeys(NAMES, WARM),
    ),
    "a renamed checkpoint": (
        lambda run: os.rename(run.checkpoints_dir / NAMES[0], run.checkpoints_dir / "step_000000000030"),
        "its name and its counts differ: {'agent_steps': 20}",
        {"step_000000000030": WARM, NAMES[1]: ALL},
    ),
    "a link": (
        lambda run: (run.path / "videos").symlink_to("/tmp"),
        "error links: ",
        dict.fromkeys(NAMES, WARM),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_what_is_usable_is_said(run: RunDirectory, damage: str) -> None:
    spoil, words, expected = DAMAGES[damage]
    spoil(run)
    verdict = verify_run(run)
    assert not verdict.is_whole
    assert words in findings(verdict)
    assert usable(verdict) == expected


WARNINGS: dict[str, tuple[Callable[[RunDirectory], Any], str]] = {
    "status": (lambda run: run.status_path.write_text("{"), "warning status.json: "),
    "tags": (lambda run: run.tags_path.write_text("[]"), "warning tags.json: "),
    "environment": (lambda run: run.environment_path.write_text("[]"), "warning environment.json: "),
    "a cut line": (
        lambda run: run.metrics_path.write_bytes(run.metrics_path.read_bytes()[:-5]),
        "warning metrics.jsonl: line 3 was cut short by a kill",
    ),
    "a foreign line": (
        lambda run: run.metrics_path.write_text(run.metrics_path.read_text() + "hello\n"),
        "warning metrics.jsonl: line 4 is no row of metrics",
    ),
    "rows that go back": (
        lambda run: run.metrics_path.write_text(run.metrics_path.read_text() + '{"agent_steps": 5}\n'),
        "warning metrics.jsonl: line 4 goes back from 25 to 5 agent steps",
    ),
    "a leftover": (
        lambda run: (run.path / ".status.json.tmp-12-abcdef").touch(),
        "warning .status.json.tmp-12-abcdef: was left by a killed process",
    ),
    "an extra file": (
        lambda run: newest(run, "thesis.tex").touch(),
        f"warning checkpoints/{NAMES[0]}/thesis.tex: belongs to no section",
    ),
    "a dangling link": (
        lambda run: (run.checkpoints_dir / "best").unlink() or (run.checkpoints_dir / "best").symlink_to("step_7"),
        "warning checkpoints/best: names step_7, which is missing",
    ),
}


@pytest.mark.parametrize("oddity", WARNINGS)
def test_an_oddity_is_named_and_keeps_nothing_from_being_used(run: RunDirectory, oddity: str) -> None:
    spoil, words = WARNINGS[oddity]
    spoil(run)
    verdict = verify_run(run)
    assert verdict.is_whole
    assert words in findings(verdict)
    assert usable(verdict) == dict.fromkeys(NAMES, ALL)


def test_a_run_at_work_is_named(run: RunDirectory) -> None:
    with RunLock(run):
        assert "warning .lock: a process is at work on this run" in findings(verify_run(run))


def test_metrics_that_cannot_be_read_are_an_error(run: RunDirectory) -> None:
    run.metrics_path.unlink()
    os.mkfifo(run.metrics_path)
    assert "error metrics.jsonl: cannot be read (not an ordinary file)" in findings(verify_run(run))
