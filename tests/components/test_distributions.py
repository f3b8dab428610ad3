"""Distributions: by hand, against torch.distributions, and with forbidden actions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributions as reference

from rl_lab.components.heads.distributions import (
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    PeakedGaussian,
    SquashedGaussian,
    TruncatedGaussian,
)


def test_categorical_by_hand() -> None:
    policy = Categorical(torch.log(torch.tensor([[0.5, 0.25, 0.25]])))
    assert policy.log_prob(torch.tensor([1])).exp().item() == pytest.approx(0.25)
    assert policy.entropy().item() == pytest.approx(1.5 * math.log(2.0))
    assert policy.mode().tolist() == [0]


def test_categorical_agrees_with_torch() -> None:
    logits = torch.randn(4, 3, 5)
    ours, theirs = Categorical(logits), reference.Categorical(logits=logits)
    action = torch.randint(0, 5, (4, 3))
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())


def test_samples_come_as_often_as_their_probability() -> None:
    torch.manual_seed(0)
    probabilities = torch.tensor([0.1, 0.6, 0.3])
    draws = Categorical(probabilities.log().expand(20_000, 3)).sample()
    assert draws.dtype == torch.int64
    torch.testing.assert_close(draws.bincount(minlength=3) / 20_000, probabilities, rtol=0, atol=0.01)


def test_samples_repeat_with_the_seed() -> None:
    logits = torch.randn(64, 4)
    torch.manual_seed(3)
    first = Categorical(logits).sample()
    torch.manual_seed(3)
    assert torch.equal(first, Categorical(logits).sample())


def test_forbidden_actions_have_probability_zero_and_harm_nothing() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1000, 4, requires_grad=True)
    mask = torch.tensor([True, False, True, False]).expand(1000, 4)
    policy = Categorical(logits, mask)
    assert not policy.probs[:, [1, 3]].any()
    torch.testing.assert_close(policy.probs.sum(-1), torch.ones(1000))
    assert set(policy.sample().tolist()) == {0, 2}
    assert set(policy.mode().tolist()) <= {0, 2}
    torch.testing.assert_close(policy.entropy(), Categorical(logits[:, [0, 2]]).entropy())
    (policy.entropy().sum() + policy.log_prob(torch.zeros(1000, dtype=torch.int64)).sum()).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[:, [1, 3]].any()


def test_one_allowed_action_has_no_entropy() -> None:
    policy = Categorical(torch.randn(3, 4), torch.tensor([0, 0, 1, 0], dtype=torch.int64).expand(3, 4))
    assert policy.sample().tolist() == [2, 2, 2]
    assert policy.entropy().tolist() == [0.0, 0.0, 0.0]
    assert policy.log_prob(torch.tensor([2, 2, 2])).tolist() == [0.0, 0.0, 0.0]


def test_a_row_without_any_allowed_action_is_uniform_not_nan() -> None:
    policy = Categorical(torch.randn(1, 4), torch.zeros(1, 4, dtype=torch.bool))
    torch.testing.assert_close(policy.probs, torch.full((1, 4), 0.25))


def test_multi_categorical_is_the_sum_of_its_parts() -> None:
    logits = torch.randn(6, 5)
    policy, action = MultiCategorical(logits, (3, 2)), torch.tensor([[2, 1]]).expand(6, 2)
    left, right = Categorical(logits[:, :3]), Categorical(logits[:, 3:])
    torch.testing.assert_close(policy.log_prob(action), left.log_prob(action[:, 0]) + right.log_prob(action[:, 1]))
    torch.testing.assert_close(policy.entropy(), left.entropy() + right.entropy())
    assert torch.equal(policy.mode(), torch.stack((left.mode(), right.mode()), -1))
    assert policy.sample().shape == (6, 2)


def test_multi_categorical_masks_each_choice() -> None:
    mask = torch.tensor([0, 0, 1, 1, 0], dtype=torch.bool).expand(50, 5)
    assert MultiCategorical(torch.randn(50, 5), (3, 2), mask).sample().unique(dim=0).tolist() == [[2, 0]]


def test_gaussian_agrees_with_torch() -> None:
    mean, log_std = torch.randn(4, 3), torch.tensor([-0.5, 0.0, 0.7])
    ours = DiagonalGaussian(mean, log_std)
    theirs = reference.Independent(reference.Normal(mean, log_std.exp()), 1)
    action = torch.randn(4, 3)
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.mode(), mean)


def test_gaussian_samples_have_its_moments() -> None:
    torch.manual_seed(0)
    draws = DiagonalGaussian(torch.tensor([1.0, -2.0]).expand(20_000, 2), torch.tensor([0.0, -1.0])).sample()
    torch.testing.assert_close(draws.mean(0), torch.tensor([1.0, -2.0]), rtol=0, atol=0.03)
    torch.testing.assert_close(draws.std(0), torch.tensor([1.0, math.exp(-1.0)]), rtol=0, atol=0.03)


def test_gradients_flow_through_draw_only() -> None:
    mean = torch.zeros(2, 3, requires_grad=True)
    policy = DiagonalGaussian(mean, torch.zeros(3))
    assert policy.draw(torch.randn(2, 3)).requires_grad
    assert not policy.sample().requires_grad


def test_squashed_gaussian_agrees_with_torch() -> None:
    mean, log_std = torch.randn(5, 2, dtype=torch.float64), torch.tensor([-0.5, 0.2], dtype=torch.float64)
    theirs = reference.TransformedDistribution(
        reference.Independent(reference.Normal(mean, log_std.exp()), 1), [reference.transforms.TanhTransform()]
    )
    ours = SquashedGaussian(mean, log_std)
    action = torch.tanh(torch.randn(5, 2, dtype=torch.float64))
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    drawn, log_prob = ours.rsample_with_log_prob(torch.randn_like(ours.base.mean))
    torch.testing.assert_close(log_prob, theirs.log_prob(drawn))
    torch.testing.assert_close(ours.mode(), torch.tanh(mean))


def test_squashed_gaussian_is_finite_at_the_edge() -> None:
    policy = SquashedGaussian(torch.tensor([[20.0]]), torch.zeros(1))
    assert policy.sample().abs().max() <= 1.0
    assert torch.isfinite(policy.log_prob(torch.tensor([[1.0]]))).all()
    assert policy.draw(torch.zeros(1, 1)).tolist() == [[1.0]]


PLACES = torch.linspace(-1.0, 1.0, 20_001, dtype=torch.float64)  # the middle of each is one step of an integral
PARAMETERS = [(0.0, 0.3), (0.9, 0.5), (-1.0, 1.0), (0.2, 0.05)]  # mean and deviation, some of them mostly outside


def integral(values: torch.Tensor) -> float:
    return float(torch.trapezoid(values.double(), PLACES))


@pytest.mark.parametrize(("mean", "std"), PARAMETERS)
def test_a_truncated_normal_by_integrals(mean: float, std: float) -> None:
    policy = TruncatedGaussian(torch.tensor([mean]), torch.tensor([math.log(std)]))
    log_density = policy.log_prob(PLACES.float().unsqueeze(-1)).double()
    assert integral(log_density.exp()) == pytest.approx(1.0, abs=1e-4)
    assert policy.entropy().item() == pytest.approx(integral(-log_density.exp() * log_density), abs=1e-3)
    torch.manual_seed(0)
    many = TruncatedGaussian(torch.full((50_000, 1), mean), torch.full((50_000, 1), math.log(std)))
    draws = many.sample()
    assert float(draws.min()) >= -1.0 and float(draws.max()) <= 1.0
    expected = integral(log_density.exp() * PLACES)
    assert float(draws.mean()) == pytest.approx(expected, abs=0.01)
    assert float(draws.std()) == pytest.approx(
        math.sqrt(integral(log_density.exp() * (PLACES - expected) ** 2)), abs=0.01
    )
    assert policy.mode().item() == pytest.approx(mean)


@pytest.mark.parametrize("kind", [DiagonalGaussian, SquashedGaussian, TruncatedGaussian])
def test_draws_with_noise_from_outside_move_with_mean_and_deviation(kind: type) -> None:
    mean, log_std = torch.zeros(5, 2, requires_grad=True), torch.full((5, 2), -1.0, requires_grad=True)
    noise = torch.full((5, 2), 0.5)
    kind(mean, log_std).draw(noise).sum().backward()
    assert mean.grad is not None and (mean.grad > 0.0).all() and (mean.grad <= 1.0).all()
    assert log_std.grad is not None and (log_std.grad > 0.0).all()  # above the mean: a wider one draws further up
    assert kind(mean, log_std).draw(noise).tolist() == kind(mean, log_std).draw(noise).tolist()


@pytest.mark.parametrize(("mean", "std"), [(0.3, 0.2), (-0.8, 0.5), (0.4, 0.75), (0.5, 1.0), (-0.2, 2.0)])
def test_a_peaked_normal_prefers_the_action_with_the_largest_density(mean: float, std: float) -> None:
    policy = PeakedGaussian(torch.tensor([mean], dtype=torch.float64), torch.tensor([math.log(std)]).double())
    unsquashed = torch.linspace(-12.0, 12.0, 24_001, dtype=torch.float64)
    peak = unsquashed[policy.log_prob(torch.tanh(unsquashed.unsqueeze(-1))).argmax()]
    assert policy.mode().item() == pytest.approx(math.tanh(peak), abs=1e-3)
    assert SquashedGaussian(policy.base.mean, policy.base.log_std).mode().item() == pytest.approx(math.tanh(mean))


def test_a_very_wide_normal_prefers_an_edge() -> None:
    policy = PeakedGaussian(torch.tensor([0.01, -0.01]), torch.full((2,), math.log(5.0)))
    assert policy.mode().tolist() == pytest.approx([1.0, -1.0])


def test_the_entropy_of_a_squashed_normal_is_right_on_average() -> None:
    torch.manual_seed(0)
    policy = SquashedGaussian(torch.tensor([0.4]), torch.tensor([-0.5]))
    inside = PLACES[1:-1].float().unsqueeze(-1)
    log_density = policy.log_prob(inside).double()
    exact = float(torch.trapezoid(-log_density.exp() * log_density, PLACES[1:-1]))
    many = SquashedGaussian(torch.full((50_000, 1), 0.4), torch.full((50_000, 1), -0.5))
    assert float(many.entropy().mean()) == pytest.approx(exact, abs=0.02)
