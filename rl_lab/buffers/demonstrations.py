"""Demonstrations: windows of what was observed and of the actions taken, padded at both ends of an episode.

"Diffusion Policy" (Chi et al. 2023, arXiv:2303.04137): with observation_steps 2, prediction_steps 4 and action_steps 2,
an episode of 6 steps has these windows. A policy looks at `o`, plans every `a`, and executes those in brackets.

    step        -1   0   1   2   3   4   5   6
    the first    o   o
                 a  [a   a]  a                          step 0 also stands for -1
    the second       o   o
                     a  [a   a]  a
    the last                         o   o
                                     a  [a   a]  a      step 5 also stands for 6

A window begins at most observation_steps - 1 steps before its episode, and ends at most action_steps - 1 steps after
it. Of an episode too short for that, the windows that begin with it or before are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rl_lab.buffers.dataset import DESCRIPTION_FILE, RowSource
from rl_lab.buffers.minari_format import PREFIX
from rl_lab.buffers.offline import OfflineBuffer, open_dataset
from rl_lab.buffers.storage.rows import Arrays
from rl_lab.buffers.zarr_format import is_zarr, open_zarr
from rl_lab.types import Batch, ConfigError, EnvSpec, MissingDatasetError, Progress

OUTSIDE = 1e-3  # by so much of half its range an action may leave it: rounding of files in other units


class DemonstrationBuffer(OfflineBuffer):
    """Batches of observations `[B, observation_steps, ...]` and actions `[B, prediction_steps, ...]`.

    `action_range` and `<key>_range`, `[2, ...]`, say the lowest and the highest of all demonstrated numbers: policies
    learn on a scale from -1 to 1. `arrays` says which array of a zarr folder an observation key is.
    """

    def __init__(
        self,
        *,
        spec: EnvSpec,
        path: str,
        batch_size: int = 256,
        observation_steps: int = 2,
        prediction_steps: int = 16,
        action_steps: int = 8,
        arrays: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        if min(observation_steps, action_steps) < 1 or max(observation_steps, action_steps) > prediction_steps:
            raise ConfigError(
                f"Demonstrations: observation_steps is {observation_steps}, action_steps {action_steps} and "
                f"prediction_steps {prediction_steps}; the first two are whole numbers from 1 to prediction_steps."
            )
        self._arrays = arrays
        super().__init__(spec=spec, dataset=path, batch_size=batch_size, n_step=1, seed=seed)
        self.observation_keys = tuple(spec.observation)
        self.observation_steps, self.sequence_length = observation_steps, prediction_steps
        is_first, is_last = self._ring.view("is_first")[0], self._ring.view("is_last")[0]
        first, steps = np.flatnonzero(is_first), np.flatnonzero(is_last) - np.flatnonzero(is_first)
        first, steps = first[steps > 0], steps[steps > 0]
        earliest = 1 - observation_steps
        latest = np.maximum(steps - prediction_steps + action_steps - 1, 0)
        counts = latest - earliest + 1
        before = np.cumsum(counts) - counts
        self._begin_at = np.arange(counts.sum()) - np.repeat(before, counts) + earliest  # [windows], step of an episode
        self._first, self._last = np.repeat(first, counts), np.repeat(first + steps - 1, counts)
        self._ranges = self._find_ranges(spec, ~is_last)

    def _find_ranges(self, spec: EnvSpec, is_step: np.ndarray) -> Batch:
        keys = [key for key, each in spec.observation.items() if each.dtype.startswith("float")]
        ranges = {}
        for key in [*keys, *(["action"] if spec.action.kind == "continuous" else [])]:
            values = self._ring.view(key)[0][is_step]
            ranges[f"{key}_range"] = torch.from_numpy(np.stack([values.min(axis=0), values.max(axis=0)]))
        return ranges

    @property
    def num_windows(self) -> int:
        return len(self._begin_at)

    def open(self, dataset: str, spec: EnvSpec) -> RowSource:
        """Also zarr folders. What a policy of ours answered beyond the range was cut by the environment, and is here;
        in a file from elsewhere such an action means other units."""
        path = Path(dataset)
        if not path.exists() and not dataset.startswith(PREFIX):
            raise MissingDatasetError(
                f"There are no demonstrations at {path}. Record a policy that solves {spec.id} with "
                "`rl-lab collect RUN --mode eval --output DATA`, and set buffers.demonstrations.path=DATA; it may also "
                "be an npz file, a zarr folder or minari:ID (docs/imitation.md)."
            )
        source = open_zarr(path, spec, self._arrays) if is_zarr(path) else open_dataset(dataset, spec)
        is_ours = any((folder / DESCRIPTION_FILE).is_file() for folder in (path, path / "episodes"))
        low, high = (np.array(bound, np.float64) for bound in (spec.action.low, spec.action.high))
        is_bounded = np.isfinite(low) & np.isfinite(high)

        def blocks() -> Iterator[Arrays]:
            for block in source.blocks():
                if block["action"].shape[1:] != spec.action.shape:
                    yield block  # is refused with the other things that do not fit
                    continue
                within = np.where(is_bounded, np.clip(block["action"], -1.0, 1.0), block["action"]).astype(np.float32)
                if not is_ours and np.abs(block["action"] - within).max(initial=0.0) > OUTSIDE:
                    raise ConfigError(
                        f"Dataset {source.name}: actions leave the range of environment '{spec.id}', from "
                        f"{low.tolist()} to {high.tolist()}: they are of another environment or in other units."
                    )
                yield {**block, "action": within}

        is_continuous = spec.action.kind == "continuous" and len(low) > 0
        return replace(source, blocks=blocks) if is_continuous else source

    def ready(self) -> bool:
        return True

    def sample(self, progress: Progress | None = None) -> Batch:
        """Windows drawn uniformly, and the ranges."""
        drawn = self._random.integers(0, self.num_windows, self.batch_size)
        steps = self._begin_at[drawn, None] + np.arange(self.sequence_length)
        rows = np.clip(self._first[drawn, None] + steps, self._first[drawn, None], self._last[drawn, None])
        seen = rows[:, : self.observation_steps]
        batch = {key: torch.from_numpy(self._ring.view(key)[0][seen]) for key in self.observation_keys}
        return {**batch, "action": torch.from_numpy(self._ring.view("action")[0][rows]), **self._ranges}
