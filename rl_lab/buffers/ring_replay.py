"""What every replay is: the newest rows of every environment, drawn again and again.

    time       ... 17    18    19    20    21             rows of an environment since the run began
    slot            1     2     3     0     1     = time % C; C slots for each environment
                   gone  begin             pending        the row that is not answered yet is learnt from as well:
                                                          the newest transition ends in it
    starts               18    19                         T = 3: a sequence never crosses the write head

A batch `[B, T, ...]` holds T consecutive rows from each of B starts. One-step learners take T = 2, n-step learners
T = n + 1. A start is never an is_last row: no action was taken there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rl_lab.buffers.priorities import StartPriorities, split
from rl_lab.buffers.storage.archive import RingArchive
from rl_lab.buffers.storage.compressed import CompressedRing, frame_bytes
from rl_lab.buffers.storage.disk import DiskArchive, DiskRing
from rl_lab.buffers.storage.row_log import NamedFile
from rl_lab.buffers.storage.rows import DeviceRing, RowRing, as_array, row_bytes
from rl_lab.types import Batch, ConfigError, EnvSpec, RunError, StateTree, did_you_mean

_CPU = torch.device("cpu")
STORAGES = ("cpu", "pinned", "gpu", "disk")
_MOST_WAITING_ROWS, _MOST_WAITING_BYTES = 128, 2**20
_STARTS_LOOKED_AT = 16  # by ready(): no environment has as many consecutive ends


@dataclass(kw_only=True, eq=False, repr=False)
class Replay:
    """A ring of `capacity_rows // num_envs` slots per environment, allocated at the first row and never again.

    The fields are the settings of every kind of replay; a kind adds its own, and its rule of drawing.
    """

    num_envs: int
    capacity_rows: int = 1_000_000
    batch_size: int = 256
    minimum_rows: int = 1
    storage: str = "cpu"
    compress_frames: float | None = None  # fraction of their raw size that compressed image frames may take
    seed: int = 0
    device: torch.device = _CPU
    directory: str | None = None  # where checkpoints keep the rows; without it they hold them in full

    sequence_length: int = field(default=2, init=False)
    starts_at_ends: ClassVar[bool] = False  # whether an is_last row may begin a batch's sequence

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("sequence_length", 2), ("minimum_rows", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"Replay: {name} is {getattr(self, name)}; write a whole number of at least {least}.")
        self.slots_per_env = self.capacity_rows // self.num_envs
        if self.slots_per_env < self.sequence_length:
            raise ConfigError(
                f"Replay: capacity_rows is {self.capacity_rows}, which leaves {self.slots_per_env} rows to each of "
                f"{self.num_envs} environments, but a sequence needs {self.sequence_length}. Write capacity_rows of at "
                f"least {self.num_envs * self.sequence_length}."
            )
        held = self.slots_per_env * self.num_envs
        if self.minimum_rows > held:
            raise ConfigError(
                f"Replay: minimum_rows is {self.minimum_rows}, more than the {held} rows that capacity_rows "
                f"({self.capacity_rows}) holds, so that nothing would ever be learnt. Write a smaller minimum_rows."
            )
        directory = None if self.directory is None else Path(self.directory)
        self._ring = ring = self._make_ring(directory)
        self._archive: RingArchive | None = None  # saves rows in the folder, where there is one
        if directory is not None:
            self._archive = DiskArchive(ring, directory) if isinstance(ring, DiskRing) else RingArchive(ring, directory)
        self._priorities: StartPriorities | None = None  # of kinds that draw by them
        self._random = np.random.default_rng(self.seed)
        self._answered = 0  # the time of the next row to be answered
        self._forgotten = 0  # rows before this time have been cleared
        self._registered = 0  # `_rows_stored` was called with the rows before this time
        self._ready_while: tuple[int, int] | None = (
            None  # `_forgotten` then, and the last `_begin` that still has a start
        )
        self._waiting: list[Batch] = []  # answered rows that are not in the ring yet, oldest first
        self._most_waiting = 1
        self._pending: Batch = {}  # the pending row; empty when there is none
        self._is_pending_stored = False  # whether the ring holds the pending row
        self._bfloat16_keys: set[str] = set()  # numpy has no such numbers: the ring holds their bits

    def _make_ring(self, directory: Path | None) -> RowRing:
        sizes: dict[str, Any] = {"num_envs": self.num_envs, "slots_per_env": self.slots_per_env}
        if self.compress_frames is not None:
            return CompressedRing(**sizes, device=self.device, budget_fraction=self._checked_fraction())
        if self.storage == "disk":
            return DiskRing(**sizes, directory=directory)
        if self.storage not in STORAGES:
            raise ConfigError(
                f"Replay: storage is '{self.storage}'.{did_you_mean(self.storage, STORAGES)} "
                f"Allowed: {', '.join(STORAGES)}."
            )
        if self.storage != "cpu" and self.device.type == "cpu":
            raise ConfigError(
                f"Replay: storage is {self.storage}, which needs a GPU, but this run's device is cpu. Write storage: "
                "cpu (or disk), or runtime.device: cuda."
            )
        if self.storage == "gpu":
            return DeviceRing(**sizes, device=self.device)
        return RowRing(**sizes, device=self.device, is_pinned=self.storage == "pinned")

    def _checked_fraction(self) -> float:
        fraction = self.compress_frames or 0.0
        if not 0.0 < fraction <= 1.0:
            raise ConfigError(
                f"Replay: compress_frames is {fraction:g}; write the fraction of their raw size that frames may take, "
                "above 0 and at most 1, such as 0.5, or null for no compression."
            )
        if self.storage != "cpu":
            raise ConfigError(
                f"Replay: compress_frames is for storage: cpu, but storage is {self.storage}. Write compress_frames: "
                "null, or storage: cpu."
            )
        rows = int(self.slots_per_env * fraction * 0.98)  # that stay even if no frame shrinks
        if rows < self.sequence_length or rows * self.num_envs < self.minimum_rows:
            raise ConfigError(
                f"Replay: compress_frames is {fraction:g}: if frames do not shrink, {rows * self.num_envs} rows stay, "
                f"too few for minimum_rows ({self.minimum_rows}) or for sequences of {self.sequence_length} rows. "
                "Write a larger fraction or more capacity_rows."
            )
        return fraction

    # --- rows in -------------------------------------------------------------------------------

    def add(self, row: Batch) -> None:
        """The row waits until it is needed, or until many wait: storing them at once takes a third of the time."""
        if self._pending:
            if not self._is_pending(row):
                row = self._break_off(row)
            self._pending = {}
        self._waiting.append(row)
        self._answered += 1
        if len(self._waiting) >= self._most_waiting:
            self._store_waiting()

    def set_pending(self, row: Batch) -> None:
        if not self._ring.layout and not self._waiting:
            return  # the first row brings every key when it is answered
        self._pending, self._is_pending_stored = row, False

    def _is_pending(self, row: Batch) -> bool:
        """Whether this row is the pending one, now answered; the Collector's has the same tensors."""
        if row["reward"] is self._pending["reward"]:
            return True
        return all(torch.equal(value, row[key].to(value.device)) for key, value in self._pending.items())

    def _break_off(self, row: Batch) -> Batch:
        """Rows in between went to another buffer: here the episodes end as at a time limit, and new ones begin."""
        Replay.cut(self)
        return {**row, "is_first": torch.ones_like(row["is_first"]), "reward": torch.zeros_like(row["reward"])}

    def cut(self) -> None:
        """Episodes under way end with the pending row, as at a time limit."""
        if self._pending:
            self._waiting.append({**self._pending, "is_last": torch.ones_like(self._pending["is_last"])})
            self._answered += 1
            self._pending = {}

    def _store_waiting(self) -> None:
        """Bring the rows that wait, and the pending one, into the ring."""
        rows, self._waiting = self._waiting, []
        if rows:
            self._ring.write_rows((self._answered - len(rows)) % self.slots_per_env, self._as_bits(rows))
            if self._most_waiting == 1 and self.storage != "disk":
                affordable = _MOST_WAITING_BYTES // (self._ring.row_bytes * self.num_envs)
                self._most_waiting = max(1, min(_MOST_WAITING_ROWS, self.slots_per_env - 1, affordable))
        if self._pending and not self._is_pending_stored:
            self._ring.write(self._answered % self.slots_per_env, self._as_bits([self._pending])[0])
            self._is_pending_stored = True
        if self._end > self._registered:
            self._rows_stored(self._registered, self._end)
            self._registered = self._end
            if isinstance(self._ring, CompressedRing):
                self._keep_budget(self._ring)

    def _keep_budget(self, ring: CompressedRing) -> None:
        """Forget the oldest rows while the frames take more than they may."""
        begin = self._begin
        while ring.is_over_budget:
            ring.drop(self._begin % self.slots_per_env)
            self._forgotten = self._begin + 1
        if self._begin > begin and self._priorities is not None:
            self._priorities.rows_stored(range(begin, self._begin), starts=range(0))

    def _as_bits(self, rows: list[Batch]) -> list[Batch]:
        """The rows with int16 in place of bfloat16."""
        keys = [key for key, value in rows[0].items() if value.dtype is torch.bfloat16]
        if not keys:
            return rows
        self._bfloat16_keys.update(keys)
        return [{**row, **{key: row[key].view(torch.int16) for key in keys}} for row in rows]

    def _rows_stored(self, begin: int, end: int) -> None:
        """The rows of times `begin` to `end` have taken their slots."""
        if self._priorities is not None:
            is_last = None if self.starts_at_ends else self._ring.view("is_last")
            self._priorities.rows_stored(range(begin, end), starts=self._completed_by(begin, end), is_last=is_last)

    def _completed_by(self, begin: int, end: int) -> range:
        """Starts, still there, of the sequences that the rows of these times complete."""
        earlier = self.sequence_length - 1
        return range(max(begin - earlier, self._begin), max(end - earlier, self._begin))

    def clear(self) -> None:
        """Forget every row. Time goes on, so that an index given before never names a row stored after."""
        self._forgotten = self._registered = self._answered
        self._waiting, self._pending = [], {}
        if self._priorities is not None:
            self._priorities.clear()

    # --- batches out ---------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        return self._answered + bool(self._pending)

    @property
    def _begin(self) -> int:
        """The time of the oldest row that is still there."""
        return max(self._forgotten, self._end - self.slots_per_env)

    @property
    def wants_priorities(self) -> bool:
        return self._priorities is not None

    @property
    def num_rows(self) -> int:
        return (self._end - self._begin) * self.num_envs

    @property
    def _num_starts(self) -> int:
        """Starts of each environment, is_last rows included."""
        return self._end - self._begin - self.sequence_length + 1

    def ready(self) -> bool:
        self._store_waiting()
        known, begin = self._ready_while, self._begin
        if (
            known is not None and known[0] == self._forgotten and begin <= known[1]
        ):  # rows only came since the last answer
            return True
        is_ready = self.num_rows >= self.minimum_rows and self._num_starts > 0 and self._has_start()
        oldest_start = max(begin, begin + self._num_starts - _STARTS_LOOKED_AT)
        self._ready_while = (self._forgotten, oldest_start) if is_ready else None
        return is_ready

    def _has_start(self) -> bool:
        if self.starts_at_ends:
            return True
        newest = self._begin + self._num_starts
        times = np.arange(max(self._begin, newest - _STARTS_LOOKED_AT), newest)
        return not self._ring.view("is_last")[:, times % self.slots_per_env].all()

    def learned(self, batch: Batch) -> None:
        """Take over the priorities `[B]` that learning noted in the batch, where there are priorities."""
        if self._priorities is None:
            return
        if "priority" not in batch:
            raise ConfigError(
                "Replay: the batch came back without batch['priority']: this workflow gives no priorities. Draw "
                "uniformly (buffer rl_lab.buffers.replay.ReplayBuffer, or priority: 0.0 of a sequence replay), or let "
                "an update hook set batch['priority'] to the size of each start's error, [B]."
            )
        self.update_priorities(batch["index"], batch["priority"])

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Set the priorities of a batch's starts; rows that have been overwritten since are passed over."""
        if self._priorities is not None:
            self._store_waiting()
            env_index, slot, is_there = self._places_of(index)
            leaf = env_index * self.slots_per_env + slot
            self._priorities.update(leaf, is_there, as_array(priority.detach().float()))

    def _draw_uniform(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Environments and times of `count` starts."""
        env_index, offset = self._draw_any(count)
        begin = self._begin
        if not self.starts_at_ends:
            is_last = self._ring.view("is_last").reshape(-1)  # in place: environments follow each other
            slots = self.slots_per_env
            slot = (offset + begin) % slots if begin else offset
            bad = is_last[env_index * slots + slot].nonzero()[0]
            assert len(bad) < count or self._has_start(), "too few rows to sample"
            while len(bad):
                new_env, new_offset = env_index[bad], offset[bad] = self._draw_any(len(bad))
                bad = bad[is_last[new_env * slots + (new_offset + begin) % slots]]
        return env_index, offset + begin if begin else offset

    def _draw_any(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        num_starts = self._num_starts
        flat = self._random.integers(0, self.num_envs * num_starts, count)
        if self.num_envs == 1:
            return np.zeros_like(flat), flat
        return split(flat, num_starts)

    def _read(self, env_index: np.ndarray, slot: np.ndarray, length: int) -> Batch:
        batch = self._ring.read(env_index, slot, length)
        for key in self._bfloat16_keys:
            batch[key] = batch[key].view(torch.bfloat16)
        return batch

    def _time_at(self, slot: np.ndarray) -> np.ndarray:
        return slot if self._begin == 0 else self._begin + (slot - self._begin) % self.slots_per_env

    def _index_of(self, env_index: np.ndarray, time: np.ndarray) -> Tensor:
        """One number per row, never given twice: a batch's `index [B]` names its rows also after the ring moved on."""
        return torch.from_numpy(time * self.num_envs + env_index)

    def _places_of(self, index: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Environments and slots of starts, and whether they are still there."""
        time, env_index = split(as_array(index), self.num_envs)
        return env_index, time % self.slots_per_env, time >= self._begin

    # --- memory and state ----------------------------------------------------------------------

    def memory_bytes(self, spec: EnvSpec, *, extra_bytes_per_row: int = 0) -> int:
        """What this buffer will take where its rows lie, once rows of `spec` arrive; nothing is taken to find out."""
        rows = self.num_envs * self.slots_per_env
        saved = 0 if self.compress_frames is None else int(rows * frame_bytes(spec) * (1.0 - self.compress_frames))
        beside = self.priority_bytes if self.storage in ("cpu", "pinned") else 0
        return rows * (row_bytes(spec) + extra_bytes_per_row) - saved + beside

    @property
    def priority_bytes(self) -> int:
        """What priorities take: main memory, wherever the rows lie."""
        return 0 if self._priorities is None else self._priorities.tree.allocated_bytes

    @property
    def allocated_bytes(self) -> int:
        """What the rows take now: nothing before the first one, and never more than `memory_bytes` said."""
        return self._ring.allocated_bytes

    def get_state(self) -> StateTree:
        self._store_waiting()
        return {
            "num_envs": self.num_envs,
            "slots_per_env": self.slots_per_env,
            "answered": self._answered,
            "forgotten": self._forgotten,
            "pending_keys": list(self._pending),
            "bfloat16_keys": sorted(self._bfloat16_keys),
            **self._get_rows(),
            "random": plain_random_state(self._random.bit_generator.state),
            **({} if self._priorities is None else {"priorities": self._priorities.get_state()}),
        }

    def _get_rows(self) -> dict[str, StateTree]:
        """The rows in full; or, where there is a folder for them, which rows of its files they are."""
        if self._archive is None:
            return {"rows": self._ring.get_rows(min(self._end, self.slots_per_env)), "log": None, "pending": {}}
        slot = self._answered % self.slots_per_env
        pending = self._ring.get_slots(slot, slot + 1) if self._pending else {}
        return {
            "rows": {},
            "log": self._archive.save(begin=self._begin, end=self._answered),
            "pending": {key: value[:, 0].copy() for key, value in pending.items()},
        }

    def set_state(self, state: StateTree) -> None:
        stored, here = (state["num_envs"], state["slots_per_env"]), (self.num_envs, self.slots_per_env)
        if stored != here:
            raise ConfigError(
                f"The saved replay holds {stored[0]} environments of {stored[1]} rows each, this one {here[0]} of "
                f"{here[1]}: continue with num_envs {stored[0]} and capacity_rows {stored[0] * stored[1]}."
            )
        self._answered, self._forgotten = state["answered"], state["forgotten"]
        self._pending = dict.fromkeys(state["pending_keys"], torch.empty(0))  # read from the ring once it is there
        self._waiting, self._registered, self._ready_while = [], self._end, None
        self._bfloat16_keys = set(state["bfloat16_keys"])
        self._set_rows(state)
        if self._pending:
            slot = np.full(self.num_envs, self._answered % self.slots_per_env)
            rows = self._read(np.arange(self.num_envs), slot, 1)
            self._pending, self._is_pending_stored = {key: rows[key][:, 0] for key in self._pending}, True
        self._random.bit_generator.state = _as_numpy(state["random"])
        if self._priorities is not None:
            self._priorities.set_state(state["priorities"])

    def _set_rows(self, state: StateTree) -> None:
        if state["log"] is None:
            self._ring.set_rows(state["rows"])
            if self._archive is not None:
                self._archive.restart(begin=self._begin)
            return
        if self._archive is None:
            raise RunError(
                "This replay has no directory, but the saved rows lie in files of one: build it with `directory`, the "
                "folder replay/<name> of the run."
            )
        self._archive.load(state["log"], begin=self._begin, end=self._answered)
        if state["pending"]:
            slot = self._answered % self.slots_per_env
            self._ring.write(slot, {key: torch.as_tensor(value) for key, value in state["pending"].items()})

    def named_files(self) -> list[NamedFile]:
        """The files in the folder that the last state given needs."""
        return [] if self._archive is None else self._archive.named_files()

    def remove_files_but(self, named: set[str]) -> None:
        """Remove the files in the folder that neither this replay nor a checkpoint (`named`) needs."""
        if self._archive is not None:
            self._archive.remove_all_but(named)


def plain_random_state(state: Any) -> StateTree:
    """The state of numpy's generator as a checkpoint holds it."""
    words = {name: str(value) for name, value in state["state"].items()}  # 128 bits: more than a tensor's number holds
    return {**words, "has_uint32": state["has_uint32"], "uinteger": state["uinteger"]}


def _as_numpy(state: StateTree) -> Any:
    words = {"state": int(state["state"]), "inc": int(state["inc"])}
    rest = {"has_uint32": int(state["has_uint32"]), "uinteger": int(state["uinteger"])}
    return {"bit_generator": "PCG64", "state": words, **rest}
