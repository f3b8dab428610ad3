"""Symlog and two-hot targets, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rl_lab.components.world_model.two_hot import (
    SymlogTwoHot,
    TwoHot,
    symexp,
    symexp_bins,
    symlog,
    symlog_bins,
    two_hot_weights,
)
from rl_lab.types import ConfigError


def test_symlog_is_the_signed_logarithm_of_one_plus_the_size() -> None:
    values = torch.tensor([-math.e + 1.0, 0.0, math.e - 1.0, 99.0])
    assert symlog(values).tolist() == pytest.approx([-1.0, 0.0, 1.0, math.log(100.0)])


def test_symexp_undoes_symlog() -> None:
    values = torch.tensor([-1234.5, -0.25, 0.0, 3.0, 1e6])
    assert symexp(symlog(values)).tolist() == pytest.approx(values.tolist(), rel=1e-5)


def test_bins_are_symexp_of_an_even_grid_from_minus_20_to_20_and_mirrored_exactly() -> None:
    bins = symexp_bins(255)
    assert len(bins) == 255
    assert bins[127] == 0.0
    assert float(bins[-1]) == pytest.approx(math.expm1(20.0), rel=1e-5)
    assert float(bins[128]) == pytest.approx(math.expm1(20.0 / 127), rel=1e-4)
    assert torch.equal(bins, -bins.flip(0))


@pytest.mark.parametrize("count", [1, 2, 254])
def test_bins_without_a_middle_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"bins is {count}: write an odd whole number from 3 on, such as 255"):
        symexp_bins(count)


def test_a_target_is_shared_by_its_two_neighbours_according_to_closeness() -> None:
    bins = torch.tensor([-10.0, -1.0, 0.0, 1.0, 10.0])
    target = torch.tensor([0.25, 1.0, -4.0, 100.0, -100.0])
    below, weight_above = two_hot_weights(target, bins)
    assert below.tolist() == [2, 3, 0, 3, 0]
    assert weight_above.tolist() == pytest.approx([0.25, 0.0, 2.0 / 3.0, 1.0, 0.0])


def test_the_mean_over_two_hot_probabilities_is_the_target() -> None:
    bins = symexp_bins(255)
    target = torch.tensor([-321.0, -0.7, 0.0, 0.01, 5.0, 12345.0])
    below, weight_above = two_hot_weights(target, bins)
    probs = torch.zeros(6, 255)
    rows = torch.arange(6)
    probs[rows, below] = 1.0 - weight_above
    probs[rows, below + 1] += weight_above
    assert TwoHot(probs.clamp(min=1e-30).log(), bins).mean().tolist() == pytest.approx(target.tolist(), rel=1e-4)


def test_equal_logits_mean_exactly_zero() -> None:
    assert TwoHot(torch.zeros(4, 255), symexp_bins(255)).mean().tolist() == [0.0] * 4


def test_the_loss_is_the_cross_entropy_to_the_two_neighbours() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.0, -1.0]])
    bins = torch.tensor([-10.0, -1.0, 0.0, 1.0, 10.0])
    log_probs = logits[0] - math.log(sum(math.exp(value) for value in logits[0].tolist()))
    expected = -(0.75 * log_probs[2] + 0.25 * log_probs[3])
    assert float(TwoHot(logits, bins).loss(torch.tensor([0.25]))) == pytest.approx(float(expected))


def test_the_loss_teaches_the_logits_and_not_the_target() -> None:
    logits = torch.zeros(3, 5, requires_grad=True)
    target = torch.ones(3, requires_grad=True)
    TwoHot(logits, torch.tensor([-10.0, -1.0, 0.0, 1.0, 10.0])).loss(target).sum().backward()
    assert logits.grad is not None and logits.grad[0].tolist() == pytest.approx([0.2, 0.2, 0.2, -0.8, 0.2])
    assert target.grad is None


def test_symlog_two_hot_averages_before_symexp() -> None:
    logits = torch.tensor([[-50.0, -50.0, 0.0, -50.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    bins = symlog_bins(5)
    assert bins.tolist() == [-20.0, -10.0, 0.0, 10.0, 20.0]
    prediction = SymlogTwoHot(logits, bins)
    assert prediction.mean().tolist() == pytest.approx([math.expm1(10.0), 0.0])  # TwoHot: half of symexp(20)
    assert isinstance(prediction, SymlogTwoHot)


def test_the_symlog_two_hot_loss_is_that_of_the_compressed_target() -> None:
    logits, target = torch.randn(4, 5), torch.tensor([-3.0, 0.0, 7.0, 1e6])
    bins = symlog_bins(5)
    torch.testing.assert_close(SymlogTwoHot(logits, bins).loss(target), TwoHot(logits, bins).loss(symlog(target)))
    assert isinstance(SymlogTwoHot(logits[None], bins).until_last(), SymlogTwoHot)


def test_all_rows_but_the_last() -> None:
    logits = torch.randn(2, 3, 5)
    short = TwoHot(logits, torch.arange(5.0)).until_last()
    assert torch.equal(short.logits, logits[:, :-1])
