"""Datasets: what is written is read back row for row, and what does not fit is refused by name before training."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.buffers import dataset as dataset_module
from rl_lab.buffers.dataset import open_folder, open_plain, spec_description, write_dataset
from rl_lab.buffers.offline import OfflineBuffer, open_dataset
from rl_lab.types import ActionSpec, ArraySpec, ConfigError, EnvSpec
from rl_lab.utils.tree import equal

SPEC = EnvSpec("toy", {"vector": ArraySpec((2,), "float32")}, ActionSpec("discrete", (10,)))
PIXELS = EnvSpec(
    "pixels",
    {"image": ArraySpec((4, 4, 3), "uint8"), "room": ArraySpec((), "int64", num_values=(5,))},
    ActionSpec("continuous", (2,), low=(-2.0, -2.0), high=(2.0, 2.0)),
)
Arrays = dict[str, np.ndarray]


def episode(number: int, length: int = 4, *, spec: EnvSpec = SPEC, terminal: bool = True) -> Arrays:
    """`length` steps; its numbers show the episode and the row."""
    rows = np.arange(length + 1)
    is_last = rows == length
    observation = {
        key: np.broadcast_to((number + rows).reshape(-1, *[1] * len(each.shape)) % 5, (length + 1, *each.shape)).astype(
            each.dtype
        )
        for key, each in spec.observation.items()
    }
    if "vector" in observation:
        observation["vector"][:, 0], observation["vector"][:, 1] = number, rows
    action = np.broadcast_to((rows % 3).reshape(-1, *[1] * len(spec.action.shape)), (length + 1, *spec.action.shape))
    action = (action / 4 if spec.action.kind == "continuous" else action).astype(spec.action.dtype)
    return {
        **observation,
        "reward": np.where(rows == 0, 0, 10 * number + rows).astype(np.float32),
        "is_first": rows == 0,
        "is_last": is_last,
        "is_terminal": is_last & terminal,
        "action": action,
    }


def write(path: Path, episodes: list[Arrays], *, spec: EnvSpec = SPEC) -> Path:
    write_dataset(path, iter(episodes), lambda: spec_description(spec))
    return path


def rows_of(source: Any) -> Arrays:
    blocks = list(source.blocks())
    return {key: np.concatenate([block[key] for block in blocks]) for key in blocks[0]}


# --- folders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, PIXELS], ids=lambda spec: spec.id)
def test_what_is_written_is_read_back(tmp_path: Path, spec: EnvSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "CHUNK_BYTES", 200)
    episodes = [episode(number, 3 + number, spec=spec) for number in range(4)]
    source = open_folder(write(tmp_path / "data", episodes, spec=spec), spec)
    assert len(list((tmp_path / "data").glob("chunk_*.npz"))) > 1
    read = rows_of(source)
    assert source.num_rows == len(read["reward"]) == sum(len(each["reward"]) for each in episodes)
    for key in episodes[0]:
        written = np.concatenate([each[key] for each in episodes])
        assert np.array_equal(read[key], written) and read[key].dtype == written.dtype, key


def test_the_same_episodes_make_the_same_bytes_and_another_place_the_same_dataset(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, [episode(0), episode(1)]) for name in "ab")
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()
    assert open_folder(first, SPEC).fingerprint == open_folder(second, SPEC).fingerprint
    other = write(tmp_path / "c", [episode(0), episode(2)])
    assert open_folder(first, SPEC).fingerprint != open_folder(other, SPEC).fingerprint


def test_a_dataset_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[Arrays]:
        yield episode(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path / "data", failing(), dict)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_of_our_number_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / f".data.partial-{os.getpid()}").mkdir()
    (tmp_path / f".data.partial-{os.getpid()}" / "chunk_00007.npz").touch()
    files = {file.name for file in write(tmp_path / "data", [episode(0)]).iterdir()}
    assert files == {"dataset.json", "chunk_00000.npz"} and len(list(tmp_path.iterdir())) == 1


# --- sampling ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "length"), [({"n_step": 1}, 2), ({"n_step": 3}, 4), ({"sequence_length": 5}, 5)])
def test_batches_hold_consecutive_rows_from_every_step(tmp_path: Path, settings: dict[str, int], length: int) -> None:
    path = write(tmp_path / "data", [episode(number) for number in range(3)])
    buffer = OfflineBuffer(spec=SPEC, dataset=str(path), batch_size=300, **settings)
    assert buffer.ready() and buffer.num_rows == 15
    batch = buffer.sample()
    assert batch["vector"].shape == (300, length, 2) and batch["action"].shape == (300, length)
    assert not batch["is_last"][:, 0].any()
    place = batch["vector"][..., 0] * 5 + batch["vector"][..., 1]
    assert torch.equal(place.diff(dim=1), torch.ones(300, length - 1)), "episodes follow each other"
    expected = [number * 5 + row for number in range(3) for row in range(4) if number * 5 + row + length <= 15]
    assert sorted(set(place[:, 0].int().tolist())) == expected
    follows = ~batch["is_last"][:, :-1]
    assert torch.equal(
        batch["reward"][:, 1:][follows], (10 * batch["vector"][..., 0] + batch["vector"][..., 1])[:, 1:][follows]
    )


def test_images_stay_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "data", [episode(0, spec=PIXELS), episode(1, spec=PIXELS)], spec=PIXELS)
    buffer = OfflineBuffer(spec=PIXELS, dataset=str(path), batch_size=3)
    batch = buffer.sample()
    assert batch["image"].dtype == torch.uint8 and batch["image"].shape == (3, 2, 4, 4, 3)
    assert batch["room"].dtype == torch.int64 and batch["action"].shape == (3, 2, 2)
    assert buffer.memory_bytes(PIXELS) == buffer._ring.allocated_bytes == 10 * (48 + 8 + 8 + 4 + 3)


def test_a_saved_buffer_draws_on_as_it_would_have(tmp_path: Path) -> None:
    path = str(write(tmp_path / "data", [episode(number) for number in range(3)]))
    first = OfflineBuffer(spec=SPEC, dataset=path, batch_size=8, seed=1)
    first.sample()
    state = first.get_state()
    assert "rows" not in state and "vector" not in str(state)
    second = OfflineBuffer(spec=SPEC, dataset=path, batch_size=8, seed=2)
    second.set_state(state)
    assert equal(first.sample(), second.sample())


def test_a_changed_dataset_is_refused_on_resume(tmp_path: Path) -> None:
    state = OfflineBuffer(spec=SPEC, dataset=str(write(tmp_path / "a", [episode(0)]))).get_state()
    changed = OfflineBuffer(spec=SPEC, dataset=str(write(tmp_path / "b", [episode(0), episode(1)])))
    with pytest.raises(ConfigError, match="b has changed since the checkpoint was taken.*Put the dataset back, or"):
        changed.set_state(state)


def test_nothing_is_added_and_nothing_forgotten(tmp_path: Path) -> None:
    buffer = OfflineBuffer(spec=SPEC, dataset=str(write(tmp_path / "data", [episode(0)])))
    for call in (buffer.add, buffer.set_pending):
        with pytest.raises(ConfigError, match="data and takes no new rows: let the phase collect into another buffer"):
            call({})
    buffer.clear()
    assert buffer.ready() and buffer.num_rows == 5


# --- what is refused ---------------------------------------------------------------------------


def change(key: str, function: Callable[[np.ndarray], np.ndarray]) -> Arrays:
    rows = episode(0)
    return {**rows, key: function(rows[key])}


def poke(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def poked(values: np.ndarray) -> np.ndarray:
        values = values.copy()
        values[2] = value
        return values

    return poked


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            change("vector", lambda v: v[:, :1]),
            r"data: vector is float32 \[1\], but environment 'toy' has float32 \[2\]",
        ),
        (change("vector", lambda v: v.astype(np.float64)), r"vector is float64 \[2\], but .* has float32 \[2\]. Use a"),
        (change("vector", poke(np.nan)), r"vector is not finite in 1 rows, first in row 2 \(\[nan nan\]\); finite"),
        (change("reward", poke(np.inf)), "reward is not finite in 1 rows, first in row 2"),
        (change("action", poke(10)), r"action is 10 in row 2; whole numbers from 0 to below \[10\] are expected. Use"),
        (change("action", poke(-1)), "action is -1 in row 2"),
        (change("is_last", lambda v: np.zeros_like(v)), "around row 4 an episode does not end in is_last before"),
        (change("is_first", poke(1)), "around row 2 an episode does not end in is_last"),
        ({key: value for key, value in episode(0).items() if key != "action"}, "data: rows lack 'action'. Rows have"),
        ({**episode(0), "extra": np.zeros(5, np.float32)}, "the set of observation keys is vector, extra, but"),
    ],
)
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, rows: Arrays, message: str) -> None:
    path = write(tmp_path / "data", [rows])
    with pytest.raises(ConfigError, match=message):
        OfflineBuffer(spec=SPEC, dataset=str(path))


def test_a_dataset_of_ends_alone_is_refused(tmp_path: Path) -> None:
    row = {key: value[:1] for key, value in episode(0).items()}
    path = write(tmp_path / "data", [{**row, "is_last": np.array([True])}] * 3)
    with pytest.raises(ConfigError, match="data holds no step at all"):
        OfflineBuffer(spec=SPEC, dataset=str(path))


def test_another_environment_is_refused_before_rows_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "data", [episode(0)])
    for chunk in path.glob("chunk_*"):
        chunk.write_bytes(b"")
    with pytest.raises(
        ConfigError, match="data: the set of observation keys is vector, but environment 'pixels' has im"
    ):
        open_dataset(str(path), PIXELS)
    wider = EnvSpec("wider", {"vector": ArraySpec((3,), "float32")}, SPEC.action)
    with pytest.raises(ConfigError, match=r"vector is float32 \[2\], but environment 'wider' has float32 \[3\]"):
        open_dataset(str(path), wider)
    fewer = EnvSpec("fewer", SPEC.observation, ActionSpec("discrete", (2,)))
    with pytest.raises(ConfigError, match=r"action is discrete \[10\], but environment 'fewer' has discrete \[2\]"):
        open_dataset(str(path), fewer)


def test_a_missing_a_cut_and_a_damaged_chunk_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "data", [episode(0)])
    chunk = path / "chunk_00000.npz"
    whole = chunk.read_bytes()
    for damaged in (whole[:-20], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        chunk.write_bytes(damaged)
        with pytest.raises(ConfigError, match="chunk_00000.npz is cut off or damaged: its checksum is not the one"):
            OfflineBuffer(spec=SPEC, dataset=str(path))
    chunk.unlink()
    with pytest.raises(ConfigError, match="data: chunk_00000.npz is missing, dataset.json lists 1 chunks. Copy the"):
        OfflineBuffer(spec=SPEC, dataset=str(path))


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 1}', '{"schema_version": 1, "chunks": 3}'])
def test_a_damaged_description_is_refused(tmp_path: Path, text: str) -> None:
    (write(tmp_path / "data", [episode(0)]) / "dataset.json").write_text(text)
    with pytest.raises(ConfigError, match=r"dataset.json is damaged \(.*Collect the dataset again"):
        open_dataset(str(tmp_path / "data"), SPEC)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "data", [episode(0)]) / "dataset.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": 2}))
    with pytest.raises(ConfigError, match="has schema version 2; this RL Lab reads version 1. Take a newer RL Lab"):
        open_dataset(str(tmp_path / "data"), SPEC)


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    short, empty = write(tmp_path / "data", [episode(0)]), write(tmp_path / "none", [])
    with pytest.raises(ConfigError, match="data holds 5 rows, but a sequence needs 6: collect more"):
        OfflineBuffer(spec=SPEC, dataset=str(short), n_step=5)
    with pytest.raises(ConfigError, match="none holds 0 rows"):
        OfflineBuffer(spec=SPEC, dataset=str(empty))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_step": 1, "sequence_length": 2}, "n_step is 1 and sequence_length is 2; keep one of them"),
        ({"sequence_length": 1}, "sequence_length is 1; write a whole number of at least 2."),
        ({"n_step": 0}, "n_step is 0; write a whole number of at least 1."),
        ({"batch_size": 0}, "batch_size is 0; write a whole number of at least 1."),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: dict[str, int], message: str) -> None:
    path = write(tmp_path / "data", [episode(0)])
    with pytest.raises(ConfigError, match=message):
        OfflineBuffer(spec=SPEC, dataset=str(path), **settings)


def test_places_without_a_dataset_say_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="There is no dataset at .*nowhere. Collect one with `rl-lab collect random --env"
    ):
        open_dataset(str(tmp_path / "nowhere"), SPEC)
    with pytest.raises(ConfigError, match="or with a run's id in place of `random --env"):  # for imitation
        open_dataset(str(tmp_path / "nowhere"), SPEC)
    with pytest.raises(
        ConfigError, match="is a folder without dataset.json: name a folder that `rl-lab collect` wrote"
    ):
        open_dataset(str(tmp_path), SPEC)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="has no recorded episodes: write them with `rl-lab collect"):
        open_dataset(str(tmp_path), SPEC)
    write(tmp_path / "episodes", [episode(0)])
    assert open_dataset(str(tmp_path), SPEC).num_rows == 5


# --- the plain layout --------------------------------------------------------------------------


def plain(tmp_path: Path, **changes: Any) -> Path:
    """Three steps to a terminal, two to a time limit, one that the file breaks off after."""
    arrays: dict[str, Any] = {
        "observations": np.array([[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0]], np.float64),
        "actions": np.array([1, 2, 3, 4, 5, 6]),
        "rewards": np.array([10.0, 20, 30, 40, 50, 60]),
        "terminations": np.array([0, 0, 1, 0, 0, 0], bool),
        "truncations": np.array([0, 0, 0, 0, 1, 0], bool),
    }
    arrays |= changes
    path = tmp_path / "steps.npz"
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def test_a_plain_file_without_next_observations(tmp_path: Path) -> None:
    rows = rows_of(open_plain(plain(tmp_path), SPEC))
    assert rows["vector"].tolist() == [[0, 0], [0, 1], [0, 2], [0, 2], [1, 0], [1, 1]]
    assert rows["reward"].tolist() == [0, 10, 20, 30, 0, 40]
    assert rows["is_first"].tolist() == [1, 0, 0, 0, 1, 0]
    assert rows["is_last"].tolist() == [0, 0, 0, 1, 0, 1]
    assert rows["is_terminal"].tolist() == [0, 0, 0, 1, 0, 0]
    assert rows["action"].tolist()[:3] == [1, 2, 3] and rows["action"][4] == 4
    assert rows["vector"].dtype == np.float32 and rows["action"].dtype == np.int64


def test_a_plain_file_with_next_observations_loses_no_step(tmp_path: Path) -> None:
    following = np.array([[0, 1], [0, 2], [0, 3], [1, 1], [1, 2], [2, 1]], np.float32)
    rows = rows_of(open_plain(plain(tmp_path, next_observations=following), SPEC))
    assert rows["vector"].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]
    assert rows["reward"].tolist() == [0, 10, 20, 30, 0, 40, 50, 0, 60]
    assert rows["is_last"].tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 1]
    assert rows["is_terminal"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert OfflineBuffer(spec=SPEC, dataset=str(tmp_path / "steps.npz")).num_rows == 9


def test_a_plain_file_of_many_blocks_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows_of(open_plain(plain(tmp_path), SPEC))
    monkeypatch.setattr(dataset_module, "_BLOCK_ROWS", 2)
    assert equal(rows_of(open_plain(tmp_path / "steps.npz", SPEC)), whole)


def test_a_plain_file_has_the_environments_own_actions(tmp_path: Path) -> None:
    action = np.array([[-2.0, 2.0], [0.0, 1.0]], np.float32)
    path = tmp_path / "steps.npz"
    images, rooms = np.zeros((2, 4, 4, 3), np.uint8), np.array([4, 0])
    named = {"observations.image": images, "observations.room": rooms, "actions": action, "rewards": np.zeros(2)}
    np.savez(path, **named, terminations=np.array([0, 1]), truncations=np.zeros(2, bool))
    rows = rows_of(open_plain(path, PIXELS))
    assert rows["action"].tolist() == [[-1.0, 1.0], [0.0, 0.5], [0.0, 0.5]]
    assert OfflineBuffer(spec=PIXELS, dataset=str(path)).sample()["image"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": None}, "steps.npz lacks 'rewards'.* It has: observations, actions, terminations, truncations. A"),
        ({"actions": None}, "steps.npz lacks 'actions'. It has: observations, rewards, "),
        ({"rewards": None, "rewards.first": np.zeros(6)}, "steps.npz lacks 'rewards'"),
        ({"observations": None, "observation": np.zeros(6)}, "lacks 'observations'. Did you mean 'observation'?"),
        ({"rewards": np.zeros(5)}, "arrays differ in length: .*'rewards': 5"),
        ({"observations": np.zeros((6, 3))}, r"vector is float32 \[3\], but environment 'toy' has float32 \[2\]"),
        ({"observations": np.full((6, 2), np.nan)}, "vector is not finite in 6 rows, first in row 0"),
        ({"actions": np.zeros((6, 2), int)}, r"action has shape \[2\], the environment's has \[\]. Use a dataset"),
        ({"actions": np.full(6, 0.5)}, r"action has dtype float64, the environment takes discrete \[10\]. Store whole"),
        ({"actions": np.full(6, 12)}, "action is 12 in row 0; whole numbers from 0 to below"),
        ({"terminations": np.full(6, 2)}, r"terminations and truncations hold true or false \(or 0 and 1\) per step."),
        ({"rewards": np.array([None] * 6)}, "steps.npz is no npz file that can be read .*holds Python objects"),
    ],
)
def test_plain_files_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = plain(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        OfflineBuffer(spec=SPEC, dataset=str(path))


def test_a_cut_plain_file_is_refused(tmp_path: Path) -> None:
    path = plain(tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ConfigError, match="steps.npz is no npz file that can be read .*cut off, damaged"):
        open_dataset(str(path), SPEC)


# --- hostile files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": np.float64(3.0)}, "steps.npz: 'rewards' is a single number; an array with one entry per step is"),
        ({"observations": np.int64(3)}, "steps.npz: 'observations' is a single number"),
        ({"rewards": np.zeros((6, 2))}, r"rewards is float64 \[2\] per step; one number per step is expected"),
        ({"rewards": np.array(list("abcdef"))}, r"rewards is str32 \[\] per step; one number per step is expected"),
        ({"terminations": np.zeros((6, 3), bool)}, r"terminations is bool \[3\] per step"),
        ({"next_observations": np.zeros((5, 2))}, "arrays differ in length: .*'next_observations.vector': 5"),
        (
            {"next_observations": np.zeros((6, 3))},
            r"have different 'vector' \(float32 \[2\] and float32 \[3\]\). Store the same keys",
        ),
        (
            {"next_observations.room": np.zeros((6, 2))},
            r"observations and next_observations have different '(room|vec)",
        ),
    ],
)
def test_plain_files_with_odd_arrays_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = plain(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        OfflineBuffer(spec=SPEC, dataset=str(path))


def test_continuous_actions_are_numbers(tmp_path: Path) -> None:
    spec = EnvSpec("toy", SPEC.observation, ActionSpec("continuous", (1,), low=(-1.0,), high=(1.0,)))
    with pytest.raises(
        ConfigError, match="steps.npz: action has dtype <U1, the environment takes continuous .*Store numbers"
    ):
        open_plain(plain(tmp_path, actions=np.array(list("abcdef"))), spec)


def test_a_file_that_unpacks_to_more_than_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plain(tmp_path)
    np.savez_compressed(path, **{**np.load(path), "bomb": np.zeros(4_000_000)})
    assert path.stat().st_size < 50_000
    monkeypatch.setattr(dataset_module, "free_memory_bytes", lambda: 30_000_000)
    reads: list[Any] = []
    monkeypatch.setattr(dataset_module.npy, "read_array", lambda *given, **_: reads.append(given))
    with pytest.raises(
        ConfigError, match="steps.npz would take 32.0 MB of memory, but 30.0 MB are free: use a smaller"
    ):
        open_plain(path, SPEC)
    assert not reads


def test_a_description_of_more_rows_than_memory_holds_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "data", [episode(0)]) / "dataset.json"
    content = json.loads(file.read_text())
    content["chunks"][0]["rows"] = 10**15
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"data would take .* GB of memory, but .* are free"):
        OfflineBuffer(spec=SPEC, dataset=str(tmp_path / "data"))
    content["chunks"][0]["rows"] = 4
    file.write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"chunk_00000.npz holds \{'vector': 5.* rows where dataset.json lists 4. Coll"
    ):
        OfflineBuffer(spec=SPEC, dataset=str(tmp_path / "data"))
    with open(file, "wb") as sparse:
        sparse.truncate(2**27)
    with pytest.raises(ConfigError, match=r"dataset.json is damaged \(ValueError\('it has 134.2 MB"):
        open_dataset(str(tmp_path / "data"), SPEC)


def member(header: dict[str, Any], data: bytes = b"") -> bytes:
    """An array's file whose header says anything."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"fortran_order": False, **header})
    return file.getvalue() + data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            member({"descr": "<f8", "shape": (10**15,)}),
            "'rewards' has 128 bytes where its header says 8000000000000128",
        ),
        (member({"descr": "<f8", "shape": (2,)}, b"1234"), "'rewards' has 132 bytes where its header says 144"),
        (member({"descr": "|O", "shape": (1,)}), "'rewards' holds Python objects"),
        (b"no array at all", "magic string"),
    ],
)
def test_arrays_that_are_not_what_they_say_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    with zipfile.ZipFile(tmp_path / "steps.npz", "w") as archive:
        archive.writestr("rewards.npy", content)
    with pytest.raises(ConfigError, match=f"steps.npz is no npz file that can be read .*{reason}"):
        open_plain(tmp_path / "steps.npz", SPEC)
    with zipfile.ZipFile(tmp_path / "steps.npz", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("rewards.npy", content)
    with pytest.raises(ConfigError, match="'rewards' is compressed in a way that numpy does not write"):
        open_plain(tmp_path / "steps.npz", SPEC)


@pytest.mark.parametrize("write_npz", [np.savez, np.savez_compressed])
def test_damaged_files_are_refused_with_a_sentence(tmp_path: Path, write_npz: Callable[..., None]) -> None:
    """Bytes changed anywhere: what loads has arrays that fit, and nothing but a ConfigError comes out."""
    chance, path = random.Random(0), plain(tmp_path)
    write_npz(path, **np.load(path))
    whole = path.read_bytes()
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(ConfigError):
            OfflineBuffer(spec=SPEC, dataset=str(path))


def test_arrays_of_any_shape_and_dtype_are_taken_or_refused_with_a_sentence(tmp_path: Path) -> None:
    chance = random.Random(1)
    keys = ["observations", "next_observations", "actions", "rewards", "terminations", "truncations"]
    for _ in range(300):
        shape = tuple(chance.choice([0, 1, 2, 6]) for _ in range(chance.randrange(4)))
        dtype = chance.choice(["float32", "int8", "uint64", "bool", "complex64", "U3", "S2", "M8[s]", "float16"])
        path = plain(tmp_path, **{chance.choice(keys): np.ones(shape, dtype)})
        with contextlib.suppress(ConfigError):
            OfflineBuffer(spec=SPEC, dataset=str(path))
