"""Minari opens what we write, and we read what Minari holds."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_lab.buffers.minari_format import open_minari, write_minari
from rl_lab.buffers.offline import OfflineBuffer, open_dataset
from rl_lab.types import ActionSpec, ArraySpec, ConfigError, EnvSpec, MissingExtraError

SPEC = EnvSpec(
    "toy",
    {
        "image": ArraySpec((4, 4, 3), "uint8"),
        "vector": ArraySpec((2,), "float32"),
        "room": ArraySpec((), "int64", num_values=(5,)),
        "keys": ArraySpec((2,), "int64", num_values=(3, 3)),
        "action_mask": ArraySpec((3,), "bool"),
    },
    ActionSpec("continuous", (2,), low=(-2.0, 0.0), high=(2.0, 1.0)),
)
LONE = EnvSpec("lone", {"vector": ArraySpec((2,), "float32", low=(-1, -1), high=(1, 1))}, ActionSpec("discrete", (3,)))
Arrays = dict[str, np.ndarray]


@pytest.fixture
def minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("h5py")
    module = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return module


def episode(length: int, *, spec: EnvSpec, seed: int, terminal: bool = True) -> Arrays:
    random = np.random.default_rng(seed)
    count, is_last = length + 1, np.arange(length + 1) == length
    observation = {
        key: random.integers(0, 2, (count, *each.shape)).astype(each.dtype) for key, each in spec.observation.items()
    }
    action = random.integers(0, 3, (count, *spec.action.shape)).astype(spec.action.dtype)
    if spec.action.kind == "continuous":
        action -= 1
    action[-1] = 0
    reward = random.integers(1, 9, count).astype(np.float32)
    reward[0] = 0
    flags = {"is_first": np.arange(count) == 0, "is_last": is_last, "is_terminal": is_last & terminal}
    return {**observation, "reward": reward, **flags, "action": action}


def to_env_actions(action: np.ndarray) -> np.ndarray:
    """Of SPEC: [-1, 1] stretched to [-2, 2] and [0, 1]."""
    return (action * [2.0, 0.5] + [0.0, 0.5]).astype(np.float32)


def action_space(spec: ActionSpec, actions: Any) -> spaces.Space:
    """Of an environment whose own actions are those of a policy after `actions`."""
    first = actions(np.zeros((1, *spec.shape), spec.dtype))[0]
    if spec.kind == "continuous":
        return spaces.Box(np.array(spec.low, np.float32), np.array(spec.high, np.float32))
    return (
        spaces.Discrete(spec.sizes[0], start=first) if not spec.shape else spaces.MultiDiscrete(spec.sizes, start=first)
    )


def write(episodes: list[Arrays], spec: EnvSpec, actions: Any = to_env_actions, name: str = "toy/test-v0") -> Path:
    settings: dict[str, Any] = {"gymnasium_spec": None, "algorithm": "random", "description": "a test"}
    settings["action_space"] = action_space(spec.action, actions)
    return write_minari(name, iter(episodes), spec=spec, to_env_actions=actions, **settings)


def test_minari_opens_what_is_written(minari: Any, tmp_path: Path) -> None:
    episodes = [episode(3, spec=SPEC, seed=0), episode(5, spec=SPEC, seed=1, terminal=False)]
    folder = write(episodes, SPEC)
    assert folder == tmp_path / "minari" / "toy" / "test-v0"
    dataset = minari.load_dataset("toy/test-v0")
    assert (dataset.total_episodes, dataset.total_steps) == (2, 8)
    assert dataset.action_space.low.tolist() == [-2.0, 0.0] and dataset.observation_space["image"].shape == (4, 4, 3)
    for number, found in enumerate(dataset.iterate_episodes()):
        length = (3, 5)[number]
        for key, each in SPEC.observation.items():
            assert found.observations[key].shape == (length + 1, *each.shape)
            assert np.array_equal(found.observations[key], episodes[number][key]), "images without loss"
            assert dataset.observation_space[key].contains(
                found.observations[key][0].astype(dataset.observation_space[key].dtype)
            )
        assert found.actions.shape == (length, 2) and all(dataset.action_space.contains(each) for each in found.actions)
        assert found.rewards.tolist() == episodes[number]["reward"][1:].tolist()
        assert found.terminations.tolist() == [False] * (length - 1) + [number == 0]
        assert found.truncations.tolist() == [False] * (length - 1) + [number == 1]


def test_what_is_written_is_read_back(minari: Any) -> None:
    episodes = [episode(3, spec=SPEC, seed=0), episode(5, spec=SPEC, seed=1, terminal=False)]
    write(episodes, SPEC)
    source = open_minari("toy/test-v0", SPEC)
    blocks = list(source.blocks())
    assert source.num_rows == 10 and len(blocks) == 2
    for read, written in zip(blocks, episodes, strict=True):
        for key in written:
            assert np.array_equal(read[key], written[key]) and read[key].dtype == written[key].dtype, key
    assert OfflineBuffer(spec=SPEC, dataset="minari:toy/test-v0", batch_size=4).sample()["image"].shape[:2] == (4, 2)


def test_a_lone_observation_and_actions_that_start_elsewhere(minari: Any) -> None:
    episodes = [episode(4, spec=LONE, seed=0)]
    write(episodes, LONE, lambda action: action + 5)
    dataset = minari.load_dataset("toy/test-v0")
    (found,) = dataset.iterate_episodes()
    assert found.observations.shape == (5, 2) and found.actions.tolist() == (episodes[0]["action"][:-1] + 5).tolist()
    assert (dataset.action_space.start, dataset.action_space.n) == (5, 3)
    (read,) = open_minari("toy/test-v0", LONE).blocks()
    assert np.array_equal(read["action"], episodes[0]["action"])


def test_several_discrete_actions(minari: Any) -> None:
    spec = EnvSpec("several", LONE.observation, ActionSpec("multi_discrete", (3, 3)))
    episodes = [episode(4, spec=spec, seed=0)]
    write(episodes, spec, lambda action: action + np.array([1, 0]))
    (read,) = open_minari("toy/test-v0", spec).blocks()
    assert np.array_equal(read["action"], episodes[0]["action"])


def test_the_fingerprint_follows_the_content(minari: Any) -> None:
    write([episode(4, spec=LONE, seed=0)], LONE, lambda action: action, name="a-v0")
    write([episode(4, spec=LONE, seed=1)], LONE, lambda action: action, name="b-v0")
    assert open_minari("a-v0", LONE).fingerprint == open_minari("a-v0", LONE).fingerprint
    assert open_minari("a-v0", LONE).fingerprint != open_minari("b-v0", LONE).fingerprint


def test_a_dataset_that_fails_half_way_leaves_nothing(minari: Any, tmp_path: Path) -> None:
    def failing() -> Any:
        yield episode(4, spec=LONE, seed=0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(failing(), LONE, lambda action: action)
    assert not list((tmp_path / "minari" / "toy").glob("test*"))


def test_a_dataset_bears_its_name_only_once_it_is_whole(minari: Any, tmp_path: Path) -> None:
    place = tmp_path / "minari" / "toy" / "test-v0"

    def watched() -> Any:
        yield episode(4, spec=LONE, seed=0)
        assert not place.exists()
        yield episode(4, spec=LONE, seed=1)

    write(watched(), LONE, lambda action: action)
    assert list(minari.list_local_datasets()) == ["toy/test-v0"]
    assert minari.load_dataset("toy/test-v0").spec.dataset_id == "toy/test-v0"


def test_what_a_killed_process_of_our_number_left_is_no_obstacle(minari: Any, tmp_path: Path) -> None:
    (tmp_path / "minari" / "toy" / f"test_partial_{os.getpid()}-v0" / "data").mkdir(parents=True)
    write([episode(4, spec=LONE, seed=0)], LONE, lambda action: action)
    assert list(minari.list_local_datasets()) == ["toy/test-v0"]


def test_the_dataset_before_stays_until_the_new_one_is_whole(minari: Any) -> None:
    def failing() -> Any:
        yield episode(4, spec=LONE, seed=0)
        raise KeyboardInterrupt

    write([episode(7, spec=LONE, seed=0)], LONE, lambda action: action)
    with pytest.raises(KeyboardInterrupt):
        write(failing(), LONE, lambda action: action)
    assert minari.load_dataset("toy/test-v0").total_steps == 7
    write([episode(2, spec=LONE, seed=0)], LONE, lambda action: action)
    assert minari.load_dataset("toy/test-v0").total_steps == 2


def test_unknown_and_misspelt_ids_are_refused(minari: Any) -> None:
    write([episode(4, spec=LONE, seed=0)], LONE, lambda action: action)
    with pytest.raises(
        ConfigError, match="Minari has no dataset 'toy/tset-v0'.*Did you mean 'toy/test-v0'?.*minari down"
    ):
        open_dataset("minari:toy/tset-v0", LONE)
    for malformed in ("cartpole", "cart pole-v0"):
        with pytest.raises(ConfigError, match=f"'{malformed}' is no Minari dataset id: write .namespace/.name-v0"):
            open_dataset(f"minari:{malformed}", LONE)


def test_a_dataset_of_another_environment_is_refused(minari: Any) -> None:
    write([episode(4, spec=LONE, seed=0)], LONE, lambda action: action)
    wider = EnvSpec("wider", {"vector": ArraySpec((3,), "float32")}, LONE.action)
    with pytest.raises(ConfigError, match=r"minari:toy/test-v0: vector is float32 \[2\], but environment 'wider' has"):
        OfflineBuffer(spec=wider, dataset="minari:toy/test-v0")
    with pytest.raises(
        ConfigError, match="the set of observation keys is observation, but environment 'toy' has image,"
    ):
        OfflineBuffer(spec=EnvSpec("toy", SPEC.observation, LONE.action), dataset="minari:toy/test-v0")


def test_a_damaged_dataset_is_refused(minari: Any) -> None:
    folder = write([episode(4, spec=LONE, seed=0)], LONE, lambda action: action)
    file = folder / "data" / "main_data.hdf5"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ConfigError, match="minari:toy/test-v0: its data in .* cannot be read .*cut off or damaged"):
        OfflineBuffer(spec=LONE, dataset="minari:toy/test-v0")
    (folder / "data" / "metadata.json").unlink()
    with pytest.raises(ConfigError, match="Minari cannot open dataset 'toy/test-v0' in .*Download or collect it again"):
        OfflineBuffer(spec=LONE, dataset="minari:toy/test-v0")


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fails(name: str, *rest: Any) -> Any:
        if name.split(".")[0] in ("minari", "h5py"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fails)
    with pytest.raises(MissingExtraError, match="Install it with: pip install 'rl-lab.offline.'"):
        open_dataset("minari:cartpole/random-v0", LONE)
