"""Minari's datasets, read and written through Minari itself; needs the extra `offline`.

Observations are stored as our algorithms see them (a lone key is stored bare, several as a Dict space), images
lossless. Actions are what `env.step` takes. Writing whole episodes needs no jax: only Minari's own step-by-step
collection does.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf, prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rl_lab.buffers.dataset import RowSource, as_spec, file_digest, to_policy_actions, written_beside
from rl_lab.buffers.storage.rows import Arrays
from rl_lab.types import (
    ArraySpec,
    ConfigError,
    EnvSpec,
    MissingDatasetError,
    MissingExtraError,
    did_you_mean,
)

PREFIX = "minari:"


def import_minari() -> ModuleType:
    """Minari with its HDF5 storage, or the command that installs both."""
    try:
        import h5py  # noqa: F401
        import minari
    except ImportError as error:
        raise MissingExtraError(
            f"Minari datasets need an extra that is not installed ({error}). "
            "Install it with: pip install 'rl-lab[offline]'"
        ) from error
    return minari


def dataset_folder(dataset_id: str) -> Path:
    """Where Minari keeps a dataset: below MINARI_DATASETS_PATH, else ~/.minari/datasets."""
    import_minari()
    from minari.dataset.minari_dataset import DATASET_ID_RE
    from minari.storage import get_dataset_path

    match = DATASET_ID_RE.fullmatch(dataset_id)
    if match is None or match.group("version") is None:
        raise ConfigError(
            f"'{dataset_id}' is no Minari dataset id: write (namespace/)name-v0, such as cartpole/random-v0."
        )
    return get_dataset_path(dataset_id)


# --- reading -----------------------------------------------------------------------------------


def open_minari(dataset_id: str, spec: EnvSpec) -> RowSource:
    """A dataset that Minari has on this machine."""
    minari = import_minari()
    folder = dataset_folder(dataset_id)
    if not (folder / "data").is_dir():
        known = minari.list_local_datasets()
        raise MissingDatasetError(
            f"Minari has no dataset '{dataset_id}' in {folder}.{did_you_mean(dataset_id, known)} Local ones: "
            f"{', '.join(known) or 'none'}. Download it with `minari download {dataset_id}`, or collect it with "
            f"`rl-lab collect random --format minari --output {dataset_id}`."
        )
    try:
        dataset = minari.load_dataset(dataset_id)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"Minari cannot open dataset '{dataset_id}' in {folder}: {error}. Download or collect it again."
        ) from error
    name = f"{PREFIX}{dataset_id}"

    def blocks() -> Iterator[Arrays]:
        try:
            for episode in dataset.iterate_episodes():
                yield _rows_of(episode, dataset, spec, name)
        except (OSError, KeyError) as error:
            raise ConfigError(
                f"Dataset {name}: its data in {folder} cannot be read ({error}): it is cut off or damaged. "
                "Download or collect it again."
            ) from error

    digests = "".join(file_digest(file) for file in sorted((folder / "data").iterdir()) if file.suffix != ".json")
    return RowSource(name, int(dataset.total_steps) + int(dataset.total_episodes), blocks, digests)


def _rows_of(episode: Any, dataset: Any, spec: EnvSpec, name: str) -> Arrays:
    """The L steps and L + 1 observations of an episode as L + 1 rows."""
    length = len(episode.rewards)
    observations = {
        key: as_spec(np.asarray(values) - start if start is not None else np.asarray(values), key, spec)
        for key, values, start in _leaves(episode.observations, dataset.observation_space, spec)
    }
    start = getattr(dataset.action_space, "start", 0)
    action = to_policy_actions(np.asarray(episode.actions), spec.action, name=name, start=start)
    ends = np.arange(length + 1) == length
    return {
        **observations,
        "reward": np.concatenate([[0.0], np.asarray(episode.rewards).reshape(-1)]).astype(np.float32),
        "is_first": ends[::-1].copy(),
        "is_last": ends,
        "is_terminal": ends & bool(episode.terminations[-1]),
        "action": np.concatenate([action, np.zeros_like(action[:1])]),
    }


def _leaves(values: Any, space: Any, spec: EnvSpec, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every array of an observation with our name for it, and where its counting starts if it counts."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _leaves(value, space[key], spec, f"{path}.{key}" if path else key)
    elif isinstance(values, tuple):
        for index, value in enumerate(values):
            yield from _leaves(value, space[index], spec, f"{path}.item_{index}" if path else f"item_{index}")
    else:
        lone = next(iter(spec.observation)) if len(spec.observation) == 1 else "observation"
        yield path or lone, values, getattr(space, "start", None)


# --- writing -----------------------------------------------------------------------------------


def write_minari(
    dataset_id: str,
    episodes: Iterable[Arrays],
    *,
    spec: EnvSpec,
    to_env_actions: Callable[[np.ndarray], np.ndarray],
    action_space: Any,
    gymnasium_spec: Any | None,
    algorithm: str,
    description: str,
) -> Path:
    """Write episodes as they come, under another name until all are there: a killed collection leaves no half dataset.

    `action_space` is the environment's own; `gymnasium_spec` lets Minari recover it, None where it could not.
    """
    minari = import_minari()
    folder = dataset_folder(dataset_id)
    name, _, version = dataset_id.rpartition("-v")
    partial_id = f"{name}_partial_{os.getpid()}-v{version}"  # Minari's ids have no dot to hide behind
    partial = dataset_folder(partial_id)
    subspaces = {key: _array_space(each) for key, each in spec.observation.items()}
    is_lone = len(subspaces) == 1
    space = next(iter(subspaces.values())) if is_lone else {"type": "Dict", "subspaces": subspaces}
    from minari.data_collector import EpisodeBuffer
    from minari.serialization import deserialize_space

    def buffers() -> Iterator[Any]:
        for episode in episodes:
            observations = {key: episode[key] for key in spec.observation}
            yield EpisodeBuffer(
                observations=next(iter(observations.values())) if is_lone else observations,
                actions=to_env_actions(episode["action"][:-1]),
                rewards=episode["reward"][1:],
                terminations=episode["is_terminal"][1:],
                truncations=(episode["is_last"] & ~episode["is_terminal"])[1:],
            )

    with written_beside(folder, partial):
        with warnings.catch_warnings():  # of Minari, about an unknown author, code and e-mail
            warnings.simplefilter("ignore", UserWarning)
            minari.create_dataset_from_buffers(
                partial_id,
                buffer=buffers(),
                env=gymnasium_spec,
                observation_space=deserialize_space(json.dumps(space)),
                action_space=action_space,
                algorithm_name=algorithm,
                description=description,
                jpeg_encoding=False,  # uint8 images stay what they were
            )
        metadata = partial / "data" / "metadata.json"  # Minari has no way to rename a dataset
        metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "dataset_id": dataset_id}))
    return folder


def _array_space(spec: ArraySpec) -> dict[str, Any]:
    if spec.is_discrete and not spec.shape:
        return {"type": "Discrete", "dtype": "int64", "start": 0, "n": spec.num_values[0]}
    if spec.is_discrete:
        start = [0] * len(spec.num_values)
        return {"type": "MultiDiscrete", "dtype": "int64", "nvec": list(spec.num_values), "start": start}
    if spec.dtype == "bool":
        return {"type": "MultiBinary", "n": list(spec.shape)}
    is_image, count = spec.dtype == "uint8", prod(spec.shape)
    low = spec.low or [0 if is_image else -inf] * count
    high = spec.high or [255 if is_image else inf] * count
    bounds = {"low": np.reshape(low, spec.shape).tolist(), "high": np.reshape(high, spec.shape).tolist()}
    return {"type": "Box", "dtype": spec.dtype, "shape": list(spec.shape), **bounds}
