"""Losses in a decoder's place, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_lab.components.world_model.decoder_free import BarlowTwins, InfoNCE
from rl_lab.types import ConfigError


def exact(part: Any, size: int) -> Any:
    """Features are projected to themselves."""
    with torch.no_grad():
        part.project.weight.copy_(torch.eye(size))
        part.project.bias.zero_()
    return part


def test_a_state_names_its_row_among_all_of_the_batch() -> None:
    part = exact(InfoNCE(input_size=2, target_size=2), 2)
    features = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])  # [B, T, F]
    embedding = torch.tensor([[[3.0, 0.0], [0.0, 1.0]]])
    expected = [math.log(math.exp(3.0) + 1.0) - 3.0, math.log(1.0 + math.exp(2.0)) - 2.0]
    assert part.loss(features, {"embedding": embedding}).tolist() == [pytest.approx(expected)]


def test_a_state_that_knows_nothing_lacks_the_logarithm_of_the_rows() -> None:
    part = InfoNCE(input_size=3, target_size=2)
    nats = part.loss(torch.zeros(4, 5, 3), {"embedding": torch.randn(4, 5, 2)})
    torch.testing.assert_close(nats, torch.full((4, 5), math.log(20.0)))


SPREAD = [[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]  # two numbers that have nothing to do with each other


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (SPREAD, 0.0),  # each number tells its own
        ([[-a, b] for a, b in SPREAD], 4.0),  # the first tells the opposite: (-1 - 1)^2
        ([[b, a] for a, b in SPREAD], 2.0 + 0.5 * 2.0),  # each tells the other's: 2 (0 - 1)^2 and two of 1^2
    ],
    ids=["itself", "opposite", "exchanged"],
)
def test_numbers_are_told_once_each(told: list[list[float]], expected: float) -> None:
    part = exact(BarlowTwins(input_size=2, target_size=2, redundancy=0.5), 2)
    rows = torch.tensor(SPREAD).repeat(500, 1)  # many, so that dividing by N or N - 1 is the same
    loss = part.loss(7.0 * torch.tensor(told).repeat(500, 1).unsqueeze(0) + 3.0, {"embedding": rows.unsqueeze(0)})
    assert loss.shape == (1, 2000)
    assert loss.mean().item() == pytest.approx(expected, abs=0.01)  # whatever mean and deviation they have


def test_a_number_that_never_changes_leaves_the_loss_finite() -> None:
    part = BarlowTwins(input_size=3, target_size=2)
    features = torch.randn(2, 4, 3, requires_grad=True)
    loss = part.loss(features, {"embedding": torch.ones(2, 4, 2)}).mean()
    loss.backward()
    assert loss.isfinite() and features.grad is not None and features.grad.isfinite().all()


@pytest.mark.parametrize("kind", [InfoNCE, BarlowTwins])
def test_the_aim_stays_where_it_is(kind: Any) -> None:
    part = kind(input_size=3, target_size=2)
    features = torch.randn(2, 4, 3, requires_grad=True)
    embedding: Tensor = torch.randn(2, 4, 2, requires_grad=True)
    part.loss(features, {"embedding": embedding}).mean().backward()
    assert embedding.grad is None
    assert features.grad is not None and features.grad.abs().sum() > 0
    assert part.reconstruct(features) == {}


def test_a_redundancy_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="redundancy is -0.1: write a number from 0"):
        BarlowTwins(input_size=3, target_size=2, redundancy=-0.1)
