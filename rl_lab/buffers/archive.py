"""The rows of a ring on the disk: appended as they come, patched where they were written back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from rl_lab.buffers.row_log import Arrays, Layout, NamedFile, RowLog
from rl_lab.buffers.rows import RowRing
from rl_lab.types import Batch, StateTree


class Ring(Protocol):
    """Where a replay's rows lie: C slots for each of N environments, in memory or on the disk."""

    num_envs: int
    slots_per_env: int

    @property
    def columns(self) -> Mapping[str, Any]: ...  # by key

    @property
    def layout(self) -> Layout: ...

    @property
    def allocated_bytes(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    def write(self, slot: int, row: Batch) -> None: ...

    def write_rows(self, slot: int, rows: Sequence[Batch], known: Collection[str] = ()) -> None: ...

    def read(self, env_index: np.ndarray, slot: np.ndarray, length: int) -> Batch: ...

    def view(self, key: str) -> np.ndarray: ...

    def lay_out(self, layout: Layout) -> None: ...

    def get_slots(self, start: int, stop: int) -> Arrays: ...

    def set_slots(self, start: int, rows: Arrays) -> None: ...

    def get_values(self, key: str, env_index: np.ndarray, slot: np.ndarray) -> np.ndarray: ...

    def set_values(self, key: str, env_index: np.ndarray, slot: np.ndarray, values: np.ndarray | Tensor) -> None: ...

    def get_rows(self, used: int) -> Arrays: ...

    def set_rows(self, rows: Mapping[str, Tensor | np.ndarray]) -> None: ...


def rows_in_full(directory: Path, state: StateTree) -> StateTree:
    """A buffer's state with its rows in it rather than in files: what two runs that hold the same rows have alike."""
    if state.get("log") is None:
        return state
    ring = RowRing(num_envs=state["num_envs"], slots_per_env=state["slots_per_env"])
    end = state["answered"] + bool(state["pending_keys"])
    begin = max(state["forgotten"], end - ring.slots_per_env)
    RingArchive(ring, directory).load(state["log"], begin=begin, end=state["answered"])
    return {**state, "log": None, "rows": ring.get_rows(min(end, ring.slots_per_env))}


class RingArchive:
    """Keeps a ring's folder in step with it; times are the buffer's, slot = time % C."""

    def __init__(self, ring: Ring, directory: Path) -> None:
        self._ring = ring
        self._log = RowLog(directory, num_envs=ring.num_envs, slots_per_env=ring.slots_per_env)
        self._mutable_keys: list[str] = []  # what has been written back so far
        self._is_dirty = np.zeros((ring.num_envs, 0), bool)  # [N, C] once something is written back

    def written(self, key: str, env_index: np.ndarray, slot: np.ndarray) -> None:
        """Note that rows hold other values under `key` than they did when they were answered."""
        if key not in self._mutable_keys:
            self._mutable_keys.append(key)
        if not self._is_dirty.size:
            self._is_dirty = np.zeros((self._ring.num_envs, self._ring.slots_per_env), bool)
        self._is_dirty[env_index, slot] = True

    def save(self, *, begin: int, end: int) -> StateTree:
        """Bring the rows of times `begin` to `end` to the disk, as far as they are not there yet; says where they are.

        Rows that are already there are only patched.
        """
        if self._is_dirty.any():
            self._save_written(begin)
        self._append(begin=begin, end=end)
        self._is_dirty[...] = False
        return self._log.get_state()

    def _append(self, *, begin: int, end: int) -> None:
        self._log.append(self._rows_between, self._ring.layout, begin=begin, end=end)

    def _save_written(self, begin: int) -> None:
        count = self._ring.num_envs
        saved = np.arange(begin, self._log.saved_until)
        env_index, place = self._is_dirty[:, saved % self._ring.slots_per_env].nonzero()
        if not len(place):
            return
        index = np.sort(saved[place] * count + env_index)
        # Patches that outgrow the columns they patch are replaced by the columns themselves.
        is_whole = self._log.patched_rows + len(index) > len(saved) * count
        if is_whole:
            index = np.arange(begin * count, self._log.saved_until * count)
        layout = {key: self._ring.layout[key] for key in self._mutable_keys}
        self._log.patch(index, self._values_of, layout, replaces_all=is_whole)

    def _values_of(self, index: np.ndarray) -> Arrays:
        time, env_index = np.divmod(index, self._ring.num_envs)
        slot = time % self._ring.slots_per_env
        return {key: self._ring.get_values(key, env_index, slot) for key in self._mutable_keys}

    def _rows_between(self, start: int, stop: int) -> Arrays:
        slots = self._ring.slots_per_env
        first, count = start % slots, stop - start
        if first + count <= slots:
            return self._ring.get_slots(first, first + count)
        before, after = self._ring.get_slots(first, slots), self._ring.get_slots(0, first + count - slots)
        return {key: np.concatenate([before[key], after[key]], axis=1) for key in before}

    def load(self, state: StateTree, *, begin: int, end: int) -> None:
        """Fill the ring with the rows a state names, and go on from there."""
        self._log.set_state(state, saved_until=end)
        self._mutable_keys = list(dict.fromkeys(key for patch in self._log.patches for key in patch.keys))
        self._is_dirty[...] = False
        self._fill_ring(begin=begin, end=end)
        for times, env_index, values in self._log.read_patches(begin=begin):
            for key, value in values.items():
                self._ring.set_values(key, env_index, times % self._ring.slots_per_env, value)

    def _fill_ring(self, *, begin: int, end: int) -> None:
        ring = self._ring
        ring.lay_out(self._log.layouts[-1] if self._log.layouts else {})
        for time, rows in self._log.read_rows(begin=begin):
            first = time % ring.slots_per_env
            count = next(iter(rows.values())).shape[1]
            ahead = min(count, ring.slots_per_env - first)
            ring.set_slots(first, {key: values[:, :ahead] for key, values in rows.items()})
            if ahead < count:
                ring.set_slots(0, {key: values[:, ahead:] for key, values in rows.items()})

    def restart(self, *, begin: int) -> None:
        """The ring was filled from elsewhere: nothing that the folder holds is in it."""
        self._log.set_state({"layouts": [], "segments": [], "patches": []}, saved_until=begin)
        self._mutable_keys = []
        self._is_dirty[...] = False

    def named_files(self) -> list[NamedFile]:
        """Every file that the last saved state needs."""
        return self._log.named_files()

    def remove_all_but(self, named: set[str]) -> None:
        """Remove the files that neither the ring nor a checkpoint (`named`) needs."""
        self._log.folder.remove_all_but(named | {each.file for each in self._log.named_files()})
