"""Latents: unimix, divergences and straight-through gradients, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rl_lab.components.world_model.latents import CategoricalLatent, GaussianLatent, unimix
from rl_lab.types import ConfigError

CPU = torch.device("cpu")


def test_unimix_mixes_one_percent_of_uniform_into_the_softmax() -> None:
    logits = torch.tensor([math.log(3.0), 0.0])  # softmax: 3/4 and 1/4
    assert unimix(logits, 0.01).tolist() == pytest.approx([0.99 * 0.75 + 0.005, 0.99 * 0.25 + 0.005])
    assert unimix(logits, 0.0).tolist() == pytest.approx([0.75, 0.25])


def test_an_impossible_class_keeps_a_share_of_chance() -> None:
    assert unimix(torch.tensor([100.0, -100.0, -100.0, -100.0]), 0.01)[1] == pytest.approx(0.0025)


def test_categorical_divergence_and_entropy_are_sums_over_the_groups() -> None:
    latent = CategoricalLatent(groups=2, classes=2, unimix=0.0)
    ours = torch.tensor([[math.log(3.0), 0.0, 0.0, 0.0]])  # (3/4, 1/4), (1/2, 1/2)
    theirs = torch.zeros(1, 4)
    half = math.log(2.0)
    one = 0.75 * math.log(0.75) + 0.25 * math.log(0.25)
    assert float(latent.kl(ours, theirs)) == pytest.approx(one + half)
    assert float(latent.entropy(ours)) == pytest.approx(-one + half)
    assert float(latent.kl(ours, ours)) == pytest.approx(0.0, abs=1e-6)


def test_a_sample_is_one_hot_in_every_group_and_follows_its_probabilities() -> None:
    latent = CategoricalLatent(groups=2, classes=4, unimix=0.0)
    logits = torch.tensor([0.7, 0.1, 0.1, 0.1, 0.25, 0.25, 0.25, 0.25]).log().expand(20_000, 8)
    sample = latent.sample(logits, latent.noise(20_000, device=CPU))
    assert sample.shape == (20_000, 8)
    assert torch.equal(sample.view(-1, 2, 4).sum(dim=-1), torch.ones(20_000, 2))
    assert sample.mean(dim=0).tolist() == pytest.approx([0.7, 0.1, 0.1, 0.1, 0.25, 0.25, 0.25, 0.25], abs=0.015)


def test_without_noise_the_likeliest_class_is_taken() -> None:
    latent = CategoricalLatent(groups=1, classes=3)
    assert latent.sample(torch.tensor([[0.0, 2.0, 1.0]]), None).tolist() == [[0.0, 1.0, 0.0]]


def test_gradients_pass_straight_through_the_choice_to_the_mixed_probabilities() -> None:
    latent = CategoricalLatent(groups=1, classes=2, unimix=0.1)
    logits = torch.tensor([[math.log(3.0), 0.0]], requires_grad=True)
    sample = latent.sample(logits, None)
    assert sample.tolist() == [[1.0, 0.0]]
    (sample * torch.tensor([[2.0, 0.0]])).sum().backward()
    slope = 2.0 * 0.9 * 0.75 * 0.25  # d(2 p0)/d logit0 with p0 = 0.9 softmax + 0.05
    assert logits.grad is not None and logits.grad[0].tolist() == pytest.approx([slope, -slope])


def test_packing_keeps_one_byte_per_choice() -> None:
    latent = CategoricalLatent(groups=3, classes=5)
    sample = latent.sample(torch.randn(7, 15), latent.noise(7, device=CPU))
    packed = latent.pack(sample)
    assert packed.shape == (7, 3) and packed.dtype == torch.uint8
    assert torch.equal(latent.unpack(packed), sample)


def test_gaussian_divergence_and_entropy() -> None:
    latent = GaussianLatent(size=1, minimum_std=0.1)
    raw = math.log(math.expm1(0.9))  # softplus gives 0.9, so the deviation is 1
    wide = math.log(math.expm1(1.9))  # 2
    ours, theirs = torch.tensor([[3.0, raw]]), torch.tensor([[1.0, wide]])
    expected = math.log(2.0) + (1.0 + 4.0) / (2.0 * 4.0) - 0.5
    assert float(latent.kl(ours, theirs)) == pytest.approx(expected, rel=1e-5)
    assert float(latent.entropy(ours)) == pytest.approx(0.5 * math.log(2.0 * math.pi * math.e), rel=1e-5)


def test_gaussian_samples_are_mean_and_noise_times_deviation() -> None:
    latent = GaussianLatent(size=2, minimum_std=0.1)
    raw = math.log(math.expm1(0.4))
    parameters = torch.tensor([[1.0, -1.0, raw, raw]])
    assert latent.sample(parameters, None).tolist() == [[1.0, -1.0]]
    assert latent.sample(parameters, torch.tensor([[2.0, -2.0]]))[0].tolist() == pytest.approx([2.0, -2.0], rel=1e-5)
    assert latent.unpack(latent.pack(torch.tensor([0.5, 0.25]))).tolist() == [0.5, 0.25]
    assert latent.noise(3, 4, device=CPU).shape == (3, 4, 2)


def test_impossible_latents_are_refused() -> None:
    with pytest.raises(ConfigError, match="latent: groups is 0, classes is 1 and unimix is 1.0; allowed is groups"):
        CategoricalLatent(groups=0, classes=1, unimix=1.0)
    with pytest.raises(ConfigError, match="latent: size is 0 and minimum_std is 0.0; allowed is size from 1"):
        GaussianLatent(size=0, minimum_std=0.0)


def test_without_unimix_beliefs_may_be_as_sure_as_they_like() -> None:
    """A softmax that has underflowed has no logarithm, but its logits tell it."""
    latent = CategoricalLatent(groups=1, classes=2, unimix=0.0)
    sure = torch.tensor([[120.0, 0.0]], requires_grad=True)
    open_minded = torch.zeros(1, 2)
    towards = latent.kl(sure, open_minded)
    assert towards.tolist() == pytest.approx([math.log(2.0)])
    assert latent.kl(open_minded, sure).tolist() == pytest.approx([60.0 - math.log(2.0)])
    assert latent.entropy(sure).tolist() == pytest.approx([0.0], abs=1e-6)
    (slope,) = torch.autograd.grad(towards.sum(), sure)
    assert slope.isfinite().all()
