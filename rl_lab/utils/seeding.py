"""Seeds everywhere, and the random state of a whole process as plain data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# Streams never overlap: each use of the run's seed draws from its own child of one SeedSequence.
STREAMS = {
    "process": 0,
    "train_environment": 1,
    "eval_environment": 2,
    "play_environment": 3,
    "buffer": 4,
    "dataset_environment": 5,
    "phase_environment": 6,
}


def stream_seed(seed: int, stream: str, index: int = 0) -> int:
    """A 31-bit seed for one use (`stream`) and one member (`index`) of a run's seed."""
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=(STREAMS[stream], index))
    return int(sequence.generate_state(1, dtype=np.uint32)[0] >> 1)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (CPU and every GPU) of this process."""
    process_seed = stream_seed(seed, "process")
    random.seed(process_seed)
    np.random.seed(process_seed)
    torch.manual_seed(process_seed)


def get_rng_state() -> dict[str, Any]:
    """The random state of Python, NumPy and torch as plain data."""
    version, internal, gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
        "numpy": {
            "algorithm": str(algorithm),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `get_rng_state` returned. GPU streams are restored where as many GPUs exist."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    keys = np.asarray(numpy_state["keys"]).astype(np.uint32)
    np.random.set_state(
        (numpy_state["algorithm"], keys, numpy_state["position"], numpy_state["has_gauss"], numpy_state["cached"])
    )
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Whatever is drawn inside, the process's random state is afterwards what it was before."""
    before = get_rng_state()
    try:
        yield
    finally:
        if not _is_same(before, get_rng_state()):  # GPU generators stay alone unless something was drawn
            set_rng_state(before)


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_is_same(first[key], second[key]) for key in first)
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, list) and first and isinstance(first[0], torch.Tensor):
        return len(first) == len(second) and all(map(torch.equal, first, second))
    return bool(first == second)
