"""Windows of demonstrations and their padding by hand, from every kind of file; what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.buffers.dataset import spec_description, write_dataset
from rl_lab.buffers.demonstrations import DemonstrationBuffer
from rl_lab.buffers.offline import OfflineBuffer
from rl_lab.types import ActionSpec, ArraySpec, ConfigError, EnvSpec
from rl_lab.utils.tree import equal

SPEC = EnvSpec(
    "walk",
    {"vector": ArraySpec((2,), "float32")},
    ActionSpec("continuous", (1,), low=(-2.0,), high=(2.0,)),
)
PUSH_T = EnvSpec(
    "push",
    {"pixels": ArraySpec((4, 4, 3), "uint8"), "agent_pos": ArraySpec((2,), "float32")},
    ActionSpec("continuous", (2,), low=(0.0, 0.0), high=(512.0, 512.0)),
)
Arrays = dict[str, np.ndarray]


def episode(number: int, steps: int) -> Arrays:
    """Row r of episode n shows [n, r]; its action is (10 n + r) / 100."""
    rows = np.arange(steps + 1)
    return {
        "vector": np.stack([np.full(steps + 1, number), rows], axis=1).astype(np.float32),
        "reward": np.zeros(steps + 1, np.float32),
        "is_first": rows == 0,
        "is_last": rows == steps,
        "is_terminal": rows == steps,
        "action": ((10 * number + rows) / 100).astype(np.float32)[:, None],
    }


def folder(path: Path, *lengths: int) -> str:
    episodes = [episode(number, steps) for number, steps in enumerate(lengths)]
    write_dataset(path, iter(episodes), lambda: spec_description(SPEC))
    return str(path)


def windows(buffer: DemonstrationBuffer) -> set[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Episode, rows seen and rows acted in, of every window there is."""
    found = set()
    for _ in range(50):
        batch = buffer.sample()
        actions = (batch["action"].squeeze(-1) * 100).round().int()
        for seen, taken in zip(batch["vector"].int(), actions, strict=True):
            assert set(seen[:, 0].tolist()) == {int(taken[0]) // 10}
            found.add((int(seen[0, 0]), tuple(seen[:, 1].tolist()), tuple((taken % 10).tolist())))
    return found


def test_windows_and_their_padding_by_hand(tmp_path: Path) -> None:
    """The picture in the module: six steps, 2 observed, 4 planned, 2 executed."""
    steps = {"observation_steps": 2, "prediction_steps": 4, "action_steps": 2}
    buffer = DemonstrationBuffer(spec=SPEC, path=folder(tmp_path / "data", 6), **steps)
    assert windows(buffer) == {
        (0, (0, 0), (0, 0, 1, 2)),
        (0, (0, 1), (0, 1, 2, 3)),
        (0, (1, 2), (1, 2, 3, 4)),
        (0, (2, 3), (2, 3, 4, 5)),
        (0, (3, 4), (3, 4, 5, 5)),
    }
    assert buffer.num_windows == 5


def test_a_short_episode_keeps_the_windows_of_its_beginning(tmp_path: Path) -> None:
    steps = {"observation_steps": 2, "prediction_steps": 8, "action_steps": 2}
    buffer = DemonstrationBuffer(spec=SPEC, path=folder(tmp_path / "data", 3, 1), **steps)
    assert windows(buffer) == {
        (0, (0, 0), (0, 0, 1, 2, 2, 2, 2, 2)),
        (0, (0, 1), (0, 1, 2, 2, 2, 2, 2, 2)),
        (1, (0, 0), (0,) * 8),
    }


def test_single_steps_are_every_step_and_no_last_row(tmp_path: Path) -> None:
    steps = {"observation_steps": 1, "prediction_steps": 1, "action_steps": 1}
    buffer = DemonstrationBuffer(spec=SPEC, path=folder(tmp_path / "data", 3, 2), **steps)
    assert windows(buffer) == {(0, (row,), (row,)) for row in range(3)} | {(1, (row,), (row,)) for row in range(2)}


def test_windows_are_drawn_uniformly(tmp_path: Path) -> None:
    steps = {"observation_steps": 1, "prediction_steps": 1, "action_steps": 1}
    buffer = DemonstrationBuffer(spec=SPEC, path=folder(tmp_path / "data", 3, 2), batch_size=20_000, **steps)
    _, counts = buffer.sample()["action"].unique(return_counts=True)
    assert counts.tolist() == pytest.approx([4_000] * 5, rel=0.1)


def test_ranges_leave_out_what_no_action_answered(tmp_path: Path) -> None:
    batch = DemonstrationBuffer(spec=SPEC, path=folder(tmp_path / "data", 6, 3)).sample()
    assert batch["vector_range"].tolist() == [[0.0, 0.0], [1.0, 5.0]]
    assert batch["action_range"].flatten().tolist() == pytest.approx([0.0, 0.12])


def test_a_saved_buffer_draws_on_and_a_changed_dataset_is_refused(tmp_path: Path) -> None:
    first = DemonstrationBuffer(spec=SPEC, path=folder(tmp_path / "a", 6), seed=1)
    first.sample()
    state = first.get_state()
    second = DemonstrationBuffer(spec=SPEC, path=str(tmp_path / "a"), seed=2)
    second.set_state(state)
    assert equal(first.sample(), second.sample())
    with pytest.raises(ConfigError, match="b has changed since the checkpoint was taken"):
        DemonstrationBuffer(spec=SPEC, path=folder(tmp_path / "b", 7)).set_state(state)


def test_what_our_policies_answer_beyond_the_range_is_cut_as_the_environment_does(tmp_path: Path) -> None:
    rows = episode(0, 5)
    rows["action"] *= 100.0  # 0 to 5 where 1 is the edge
    write_dataset(tmp_path / "data", iter([rows]), lambda: spec_description(SPEC))
    batch = DemonstrationBuffer(spec=SPEC, path=str(tmp_path / "data")).sample()
    assert batch["action_range"].flatten().tolist() == [0.0, 1.0]


def plain(path: Path, actions: np.ndarray) -> str:
    count = len(actions)
    ends = np.arange(count) == count - 1
    np.savez(
        path,
        observations=np.zeros((count, 2)),
        actions=actions,
        rewards=np.zeros(count),
        terminations=ends,
        truncations=np.zeros(count, bool),
    )
    return str(path)


def test_a_plain_file_is_read_in_the_environments_units(tmp_path: Path) -> None:
    batch = DemonstrationBuffer(spec=SPEC, path=plain(tmp_path / "steps.npz", np.linspace(-2, 2, 30)[:, None])).sample()
    assert batch["action_range"].flatten().tolist() == [-1.0, 1.0]


def test_a_minari_dataset_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("minari")
    import rl_lab

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    written = rl_lab.collect("random", environment="Pendulum-v1", episodes=2, format="minari", output="pendulum/r-v0")
    spec = EnvSpec(
        "Pendulum-v1",
        {"vector": ArraySpec((3,), "float32")},
        ActionSpec("continuous", (1,), low=(-2.0,), high=(2.0,)),
    )
    buffer = DemonstrationBuffer(spec=spec, path=written.dataset, batch_size=4)
    assert buffer.sample()["action"].shape == (4, 16, 1)
    assert buffer.num_windows == 2 * (200 - 16 + 1 + 1 + 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"action_steps": 0}, "action_steps 0 and prediction_steps 16; the first two are whole numbers from 1 to"),
        ({"observation_steps": 17}, "observation_steps is 17, action_steps 8 and prediction_steps 16"),
    ],
)
def test_impossible_windows_are_refused(tmp_path: Path, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DemonstrationBuffer(spec=SPEC, path=folder(tmp_path / "data", 6), **settings)


def test_actions_in_other_units_are_refused(tmp_path: Path) -> None:
    path = plain(tmp_path / "steps.npz", np.linspace(-2, 2.1, 30)[:, None])
    with pytest.raises(ConfigError, match=r"actions leave the range of environment 'walk', from \[-2.0\] to \[2.0\]"):
        DemonstrationBuffer(spec=SPEC, path=path)
    with pytest.raises(ConfigError, match=r"action has shape \[3\], the environment's has \[1\]"):
        DemonstrationBuffer(spec=SPEC, path=plain(tmp_path / "wide.npz", np.zeros((9, 3))))


def test_demonstrations_without_images_are_refused_where_images_are_seen(tmp_path: Path) -> None:
    both = EnvSpec("walk", {**SPEC.observation, "image": ArraySpec((4, 4, 3), "uint8")}, SPEC.action)
    with pytest.raises(ConfigError, match="observation keys is vector, but environment 'walk' has vector, image. Use"):
        DemonstrationBuffer(spec=both, path=folder(tmp_path / "data", 6))


# --- zarr ----------------------------------------------------------------------------------------


def write_array(path: Path, values: np.ndarray, chunks: tuple[int, ...], compressor: Any = None, **about: Any) -> None:
    """zarr's version 2 by hand: a description, and a file per chunk, whole also at the edges."""
    path.mkdir(parents=True)
    described = {"zarr_format": 2, "shape": values.shape, "chunks": chunks, "dtype": values.dtype.str, "order": "C"}
    described |= {"fill_value": 0, "filters": None, "compressor": compressor and compressor.get_config(), **about}
    (path / ".zarray").write_text(json.dumps(described))
    for place in np.ndindex(*(-(-size // chunk) for size, chunk in zip(values.shape, chunks, strict=True))):
        whole = np.zeros(chunks, values.dtype)
        corner = tuple(slice(i * c, (i + 1) * c) for i, c in zip(place, chunks, strict=True))
        part = values[corner]
        whole[tuple(slice(size) for size in part.shape)] = part
        if whole.any():  # as zarr: what is all fill_value is not stored
            (path / ".".join(map(str, place))).write_bytes(compressor.encode(whole) if compressor else whole.tobytes())


def push_t(path: Path, *, compressor: Any = None, **changed: Any) -> Path:
    """Two episodes of 7 and 5 steps in the published layout: float32 images of whole numbers, actions in pixels."""
    steps = np.arange(12)
    state = np.stack([steps * 10.0 + column for column in range(5)], axis=1).astype(np.float32)
    image = np.broadcast_to(steps[:, None, None, None] * 20.0, (12, 4, 4, 3)).astype(np.float32)
    arrays = {"state": state, "action": state[:, :2] + 50.0, "img": image, **changed}
    ends = arrays.pop("episode_ends", np.array([7, 12]))
    for name, values in arrays.items():
        if values is not None:
            write_array(path / "data" / name, values, (5, *[3] * (values.ndim - 1)), compressor)
    write_array(path / "meta" / "episode_ends", ends, (max(len(ends), 1),))
    (path / ".zgroup").write_text('{"zarr_format": 2}')
    return path


def compressors() -> list[Any]:
    numcodecs = pytest.importorskip("numcodecs")
    return [None, numcodecs.Blosc(cname="zstd", clevel=5, shuffle=2), numcodecs.Zlib()]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["raw", "blosc", "zlib"])
def test_the_layout_of_push_t_is_read(tmp_path: Path, which: int) -> None:
    path = push_t(tmp_path / "push.zarr", compressor=compressors()[which])
    steps = {"observation_steps": 2, "prediction_steps": 4, "action_steps": 2}
    buffer = DemonstrationBuffer(spec=PUSH_T, path=str(path), batch_size=200, **steps)
    batch = buffer.sample()
    assert buffer.num_windows == (7 - 4 + 3) + (5 - 4 + 3)
    assert batch["pixels"].dtype == torch.uint8 and batch["pixels"].shape == (200, 2, 4, 4, 3)
    step = batch["agent_pos"][..., 0] / 10.0
    assert torch.equal(batch["agent_pos"][..., 1], step * 10.0 + 1.0)
    assert torch.equal(batch["pixels"][:, :, 0, 0, 0].float(), step * 20.0)
    assert set(batch["pixels"].unique().tolist()) <= {20 * number for number in range(12)}
    acted = ((batch["action"][..., 0] + 1.0) * 256.0 - 50.0) / 10.0
    assert torch.allclose(acted[:, :2], step, atol=1e-4)
    assert not ((acted <= 6.5).any(dim=1) & (acted >= 6.5).any(dim=1)).any(), "no window leads from episode to episode"


def test_a_state_is_read_where_the_environment_shows_one(tmp_path: Path) -> None:
    spec = EnvSpec("push", {"vector": ArraySpec((5,), "float32")}, PUSH_T.action)
    path = push_t(tmp_path / "push.zarr", img=None)
    assert DemonstrationBuffer(spec=spec, path=str(path)).sample()["vector"].shape == (256, 2, 5)
    renamed = EnvSpec("push", {"place": ArraySpec((2,), "float32")}, PUSH_T.action)
    buffer = DemonstrationBuffer(spec=renamed, path=str(path), arrays={"place": "state[:2]"})
    assert buffer.sample()["place"].shape == (256, 2, 2)


def test_what_zarr_itself_writes_is_read(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(tmp_path / "push.zarr"), mode="w", zarr_format=2)
    state = np.arange(60, dtype=np.float32).reshape(12, 5)
    columns = {"data/state": state, "data/action": state[:, :2], "meta/episode_ends": np.array([7, 12])}
    for name, values in columns.items():
        group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=(5, *values.shape[1:]))[...] = values
    spec = EnvSpec("push", {"vector": ArraySpec((5,), "float32")}, PUSH_T.action)
    buffer = DemonstrationBuffer(spec=spec, path=str(tmp_path / "push.zarr"))
    assert buffer.sample()["vector_range"].tolist() == [state[0].tolist(), state[-1].tolist()]


def test_a_changed_chunk_is_another_dataset(tmp_path: Path) -> None:
    first = DemonstrationBuffer(spec=PUSH_T, path=str(push_t(tmp_path / "a.zarr"))).fingerprint
    assert DemonstrationBuffer(spec=PUSH_T, path=str(push_t(tmp_path / "b.zarr"))).fingerprint == first
    image = np.ones((12, 4, 4, 3), np.uint8)
    assert DemonstrationBuffer(spec=PUSH_T, path=str(push_t(tmp_path / "c.zarr", img=image))).fingerprint != first


def damaged(path: Path) -> None:
    (path / "data" / "action" / "0.0").write_bytes(b"short")


def described(**about: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "data" / "action" / ".zarray"
        file.write_text(json.dumps({**json.loads(file.read_text()), **about}))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damaged, "action: chunk 0.0 is cut off or damaged .* Copy the folder again"),
        (lambda path: (path / "data/action/.zarray").write_text("{"), "action: .zarray cannot be read"),
        (lambda path: (path / "data/action/.zarray").unlink(), "has no data/action/.zarray: the layout is data/NAME"),
        (described(dtype="|O"), "action: .zarray cannot be read .*no plain array of numbers"),
        (described(filters=[{"id": "pickle"}]), "action: .zarray cannot be read .*no plain array of numbers"),
        (described(compressor={"id": "pickle"}), "compressor 'pickle', known are blosc, zlib"),
        (described(zarr_format=3), "no plain array of numbers in zarr's version 2"),
        (lambda path: (path / "zarr.json").touch(), "has zarr's version 3: write it with zarr_format=2"),
    ],
)
def test_folders_that_cannot_be_read_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = push_t(tmp_path / "push.zarr")
    change(path)
    with pytest.raises(ConfigError, match=message):
        DemonstrationBuffer(spec=PUSH_T, path=str(path))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"img": None}, r"has no data/img for the observation 'pixels'. It has: action, state. .* `arrays: {pixels: N"),
        (
            {"img": np.full((12, 4, 4, 3), 0.5, np.float32)},
            "img holds float32 from 0.5 to 0.5, but 'pixels' is an image",
        ),
        ({"img": np.zeros((12, 8, 8, 3), np.uint8)}, r"pixels is uint8 \[8, 8, 3\], but environment 'push' has uint8"),
        ({"action": np.full((12, 2), 900.0)}, "actions leave the range of environment 'push'"),
        ({"action": np.zeros((12, 3))}, r"action has shape \[3\], the environment's has \[2\]"),
        ({"episode_ends": np.array([7, 11])}, r"meta/episode_ends is \[7, 11\]; it holds the step after .* 12 steps"),
        ({"episode_ends": np.array([7, 7, 12])}, r"meta/episode_ends is \[7, 7, 12\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, changed: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DemonstrationBuffer(spec=PUSH_T, path=str(push_t(tmp_path / "push.zarr", **changed)))


def test_a_packed_file_is_to_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "push.zarr.zip").touch()
    with pytest.raises(ConfigError, match="is a packed file: unpack it with `unzip"):
        DemonstrationBuffer(spec=PUSH_T, path=str(tmp_path / "push.zarr.zip"))


def test_values_are_not_learnt_from_demonstrations_without_rewards(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="push.zarr is a folder without dataset.json"):
        OfflineBuffer(spec=PUSH_T, dataset=str(push_t(tmp_path / "push.zarr")))
