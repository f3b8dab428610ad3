"""Checkpoints of a running experiment: the state of everything it holds, and the files its buffers keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rl_lab.buffers.ring_replay import Replay
from rl_lab.runs.checkpoint import CheckpointStore, ExternalFile
from rl_lab.runs.files import readable_disk_errors
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.state import gather_state
from rl_lab.types import Counts, StateTree
from rl_lab.utils.seeding import get_rng_state, set_rng_state

REPLAY = "replay"  # the folder of a run in which buffers keep rows, each in one of its own


class RandomState:
    """The process's random generators as one part of the checkpoint."""

    def get_state(self) -> StateTree:
        return get_rng_state()

    def set_state(self, state: StateTree) -> None:
        set_rng_state(state)


def make_saver(run: RunDirectory | None, targets: Mapping[str, Any], *, keep_recent: int) -> Callable[..., Path | None]:
    """What saves a checkpoint of `targets` as they are at that time; nothing without a run."""
    if run is None:
        return lambda **_: None
    store = CheckpointStore(run.checkpoints_dir, keep_recent=keep_recent, identity=run.identity())

    def save(*, counts: Counts, score: float | None, is_best: bool) -> Path:
        buffers = {name: each for name, each in targets["buffers"].items() if isinstance(each, Replay)}
        with readable_disk_errors(run.path / REPLAY, run_id=run.id):
            state = gather_state(targets)
        external = [
            ExternalFile("buffers", f"{REPLAY}/{name}/{named.file}", named.blocks)
            for name, buffer in buffers.items()
            for named in buffer.named_files()
        ]
        path = store.save(
            state,
            agent_steps=counts.agent_steps,
            counts=counts.as_dict(),
            score=score,
            is_best=is_best,
            external=external,
        )
        needed = store.external_paths()
        if needed is not None:
            for name, buffer in buffers.items():
                places = [PurePosixPath(each) for each in needed]
                buffer.remove_files_but({each.name for each in places if each.parent == PurePosixPath(REPLAY, name)})
        return path

    return save
