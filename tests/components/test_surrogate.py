"""PPO's two losses: by hand, and the written-out slopes as autograd finds them."""

from __future__ import annotations

import math

import pytest
import torch

from rl_lab.components.distributions import Categorical, DiagonalGaussian
from rl_lab.components.surrogate import ActorCriticLoss, actor_critic_loss
from rl_lab.types import Batch


def sample_of(count: int, *, seed: int = 3, **more: torch.Tensor) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(4, count, generator=generator) * 0.5
    sample = dict(zip(("log_prob", "advantage", "return", "value"), numbers.unbind(), strict=True))
    return {**sample, "action": torch.randint(0, 3, (count,), generator=generator), **more}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # inside the range: move
        (1.5, 2.0, -2.4, 0.0),  # good and already likelier than 1.2: no reward for more
        (1.5, -2.0, 3.0, 3.0),  # bad and likelier: move back
        (0.5, -2.0, 1.6, 0.0),  # bad and already less likely than 0.8: enough
        (0.5, 2.0, -1.0, -1.0),  # good and less likely: move back
    ],
)
def test_the_surrogate_and_its_slope_are_the_papers(ratio: float, advantage: float, loss: float, slope: float) -> None:
    logits = torch.zeros(1, 2, requires_grad=True)
    value = torch.tensor([3.0], requires_grad=True)
    sample = {
        "action": torch.tensor([1]),
        "log_prob": torch.tensor([math.log(0.5 / ratio)]),
        "advantage": torch.tensor([advantage]),
        "return": torch.tensor([1.0]),
        "value": torch.tensor([0.0]),
    }
    found = actor_critic_loss(Categorical(logits), value, sample, clip_range=0.2)
    assert found.policy.tolist() == pytest.approx(loss, rel=1e-6)
    assert found.value.tolist() == pytest.approx(4.0)
    assert found.log_prob.tolist() == pytest.approx([math.log(0.5)])
    (found.policy + found.value).backward()
    assert logits.grad is not None and value.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-0.5 * slope, 0.5 * slope], rel=1e-6)  # 1[k = a] - p_k, p = 1/2
    assert value.grad.tolist() == pytest.approx([4.0])


def losses_and_slopes(found: ActorCriticLoss, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    slopes = torch.autograd.grad(3.0 * found.policy + 0.5 * found.value, inputs)
    return [found.policy.detach(), found.value.detach(), found.log_prob, *slopes]


def test_the_written_out_slopes_are_those_of_autograd() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(200, 3, generator=generator, requires_grad=True)
    value = torch.randn(200, generator=generator, requires_grad=True)
    sample = sample_of(200)
    written = actor_critic_loss(Categorical(logits), value, sample, clip_range=0.2)
    assert "WrittenOut" in str(written.policy.grad_fn)
    everyone = {**sample, "valid": torch.ones(200, dtype=torch.bool)}
    by_autograd = actor_critic_loss(Categorical(logits), value, everyone, clip_range=0.2)
    assert "WrittenOut" not in str(by_autograd.policy.grad_fn)
    pairs = zip(*(losses_and_slopes(each, [logits, value]) for each in (written, by_autograd)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


def test_samples_that_do_not_count_change_nothing() -> None:
    logits, value = torch.randn(6, 3, requires_grad=True), torch.randn(6, requires_grad=True)
    valid = torch.tensor([True, True, False, True, False, True])
    sample = sample_of(6)
    kept = {key: rows[valid] for key, rows in sample.items()}
    masked = actor_critic_loss(Categorical(logits), value, {**sample, "valid": valid}, clip_range=0.2)
    alone = actor_critic_loss(Categorical(logits[valid]), value[valid], kept, clip_range=0.2)
    torch.testing.assert_close(masked.policy, alone.policy)
    torch.testing.assert_close(masked.value, alone.value)


def test_a_value_far_from_its_old_one_counts_with_the_larger_error() -> None:
    value = torch.tensor([5.0], requires_grad=True)
    sample = {**sample_of(1), "value": torch.tensor([1.0]), "return": torch.tensor([4.0])}
    policy = Categorical(torch.zeros(1, 3))
    found = actor_critic_loss(policy, value, sample, clip_range=0.2, value_clip_range=0.5)
    assert found.value.tolist() == pytest.approx(6.25)  # (1.5 - 4)^2 against (5 - 4)^2


def test_continuous_actions_go_by_autograd() -> None:
    mean = torch.zeros(4, 2, requires_grad=True)
    sample = {**sample_of(4), "action": torch.randn(4, 2)}
    found = actor_critic_loss(DiagonalGaussian(mean, torch.zeros(2)), torch.zeros(4), sample, clip_range=0.2)
    assert torch.autograd.grad(found.policy, mean)[0].abs().sum() > 0
