"""Seeds per use and member, and random states as plain data."""

from __future__ import annotations

import random

import numpy as np
import torch

from rl_lab.utils.seeding import STREAMS, get_rng_state, seed_everything, set_rng_state, stream_seed
from rl_lab.utils.tree import equal, leaves_with_paths


def draws() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0.0, 1.0), float(np.random.randn()), float(torch.randn(()))


def test_every_use_and_member_has_a_seed_of_its_own() -> None:
    seeds = [stream_seed(seed, stream, index) for seed in range(3) for stream in STREAMS for index in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_seeds_never_change_between_versions() -> None:
    """A saved run is repeated by its seed: these numbers are part of the format."""
    assert [stream_seed(0, "process"), stream_seed(1, "train_environment", 2)] == [2044266242, 579240235]


def test_the_same_seed_gives_the_same_draws() -> None:
    seed_everything(5)
    first = draws()
    seed_everything(5)
    assert draws() == first
    seed_everything(6)
    assert draws() != first


def test_a_saved_random_state_continues_every_generator() -> None:
    seed_everything(1)
    draws()  # leaves half a pair of normal numbers waiting in Python's and NumPy's generators
    state = get_rng_state()
    expected = [draws() for _ in range(3)]
    set_rng_state(state)
    assert [draws() for _ in range(3)] == expected


def test_the_random_state_is_plain_data() -> None:
    leaf_types = {type(leaf) for _, leaf in leaves_with_paths(get_rng_state())}
    assert leaf_types <= {torch.Tensor, int, float, str, type(None)}


def test_saving_draws_nothing() -> None:
    seed_everything(2)
    assert equal(get_rng_state(), get_rng_state())
