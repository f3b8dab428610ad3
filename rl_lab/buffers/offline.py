"""Replay from a dataset: rows that were collected before, drawn uniformly, never added to.

    dataset   data/cartpole          a folder that `rl-lab collect` wrote
              runs/ID                a run, whose episodes `rl-lab collect ID` recorded in runs/ID/episodes
              steps.npz              a plain file (see dataset.open_plain)
              minari:name-v0         a Minari dataset on this machine

A checkpoint holds the generator and the dataset's fingerprint, not the rows: a resume reads them again and refuses a
dataset that has changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from rl_lab.buffers.dataset import DESCRIPTION_FILE, RowSource, check_memory, check_rows, open_folder, open_plain
from rl_lab.buffers.minari_format import PREFIX, open_minari
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.storage.rows import row_bytes
from rl_lab.types import Batch, ConfigError, EnvSpec, MissingDatasetError, StateTree


class OfflineBuffer(ReplayBuffer):
    """Batches `[B, T, ...]` as ReplayBuffer gives them; T is `n_step + 1`, or `sequence_length` for sequence models.

    All episodes lie one after the other as the rows of one environment.
    """

    is_read_only: ClassVar[bool] = True  # the Orchestrator refuses phases that would collect into it

    def __init__(
        self,
        *,
        spec: EnvSpec,
        dataset: str,
        batch_size: int = 256,
        n_step: int | None = None,
        sequence_length: int | None = None,
        seed: int = 0,
    ) -> None:
        if n_step is not None and sequence_length is not None:
            raise ConfigError(
                f"Offline replay: n_step is {n_step} and sequence_length is {sequence_length}; keep one of them "
                "(sequence_length is n_step + 1)."
            )
        if sequence_length is not None and sequence_length < 2:
            raise ConfigError(
                f"Offline replay: sequence_length is {sequence_length}; write a whole number of at least 2."
            )
        steps = n_step if n_step is not None else (sequence_length or 2) - 1
        source = self.open(dataset, spec)
        if source.num_rows <= steps:
            raise ConfigError(
                f"Dataset {source.name} holds {source.num_rows} rows, but a sequence needs {steps + 1}: collect more, "
                "for example with `rl-lab collect random --steps 10000`."
            )
        check_memory(source.name, source.num_rows * row_bytes(spec))
        super().__init__(num_envs=1, capacity_rows=source.num_rows, batch_size=batch_size, n_step=steps, seed=seed)
        self.dataset, self.fingerprint = source.name, source.fingerprint
        self._load(source, spec)

    def open(self, dataset: str, spec: EnvSpec) -> RowSource:
        return open_dataset(dataset, spec)

    def _load(self, source: RowSource, spec: EnvSpec) -> None:
        """Block by block; each is checked before it is taken."""
        loaded = 0
        for block in source.blocks():
            check_rows(block, spec, name=source.name, first_row=loaded)
            if not loaded:
                self._ring.lay_out({key: (values.dtype.name, values.shape[1:]) for key, values in block.items()})
            self._ring.set_slots(loaded, {key: values[None] for key, values in block.items()})
            loaded += len(block["reward"])
        assert loaded == source.num_rows, f"{source.name} gave {loaded} rows instead of {source.num_rows}"
        self._answered = loaded
        _check_episodes(self._ring.view("is_first")[0], self._ring.view("is_last")[0], source.name)

    def add(self, row: Batch) -> None:
        raise ConfigError(
            f"The offline buffer holds the dataset {self.dataset} and takes no new rows: let the phase collect into "
            "another buffer, or write `type: offline`."
        )

    def set_pending(self, row: Batch) -> None:
        self.add(row)

    def clear(self) -> None:
        """A dataset is not what a phase collected: nothing of it is forgotten."""

    def get_state(self) -> StateTree:
        return {**super().get_state(), "fingerprint": self.fingerprint}

    def _get_rows(self) -> dict[str, StateTree]:
        return {}

    def set_state(self, state: StateTree) -> None:
        if state["fingerprint"] != self.fingerprint:
            raise ConfigError(
                f"Dataset {self.dataset} has changed since the checkpoint was taken (fingerprint "
                f"{self.fingerprint[:12]}, the checkpoint's {state['fingerprint'][:12]}), so that the run cannot be "
                "continued bit for bit. Put the dataset back, or start a new run with --mode warm_start."
            )
        super().set_state(state)

    def _set_rows(self, state: StateTree) -> None:
        """They are there already."""


def open_dataset(dataset: str, spec: EnvSpec) -> RowSource:
    """Whatever a `dataset:` key may name."""
    if dataset.startswith(PREFIX):
        return open_minari(dataset.removeprefix(PREFIX), spec)
    path = Path(dataset)
    for folder in (path, path / "episodes"):
        if (folder / DESCRIPTION_FILE).is_file():
            return open_folder(folder, spec)
    if path.is_file():
        return open_plain(path, spec)
    if (path / "config.yaml").is_file():
        raise MissingDatasetError(
            f"Run {path} has no recorded episodes: write them with `rl-lab collect {path} --steps 10000`."
        )
    if path.is_dir():
        raise ConfigError(
            f"Dataset {path} is a folder without {DESCRIPTION_FILE}: name a folder that `rl-lab collect` wrote, an npz "
            "file, or minari:ID."
        )
    raise MissingDatasetError(
        f"There is no dataset at {path}. Collect one with `rl-lab collect random --env {spec.id} --steps 10000 "
        f"--output {path}`, or with a run's id in place of `random --env {spec.id}` for what it has learnt, "
        "or name an npz file or minari:ID."
    )


def _check_episodes(is_first: np.ndarray, is_last: np.ndarray, name: str) -> None:
    """Episodes begin with is_first and end with is_last; otherwise rewards would be learnt across a seam."""
    bad = np.flatnonzero(is_first != np.concatenate([[True], is_last[:-1]]))
    if len(bad) or not is_last[-1]:
        row = int(bad[0]) if len(bad) else len(is_last) - 1
        raise ConfigError(
            f"Dataset {name}: around row {row} an episode does not end in is_last before the next one begins with "
            "is_first. Mark the last row of every episode, or collect again."
        )
    if is_last.all() or is_first.all():
        raise ConfigError(f"Dataset {name} holds no step at all: every row is the end of an episode. Collect again.")
