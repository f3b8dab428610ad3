"""PPO's losses: by hand, and the one node that stands for networks and losses against autograd."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rl_lab.components.heads.actor_critic import Actor, Critic
from rl_lab.components.heads.distributions import Categorical, DiagonalGaussian
from rl_lab.kernels.surrogate import ActorCriticLoss, actor_critic_loss
from rl_lab.types import ActionSpec, Batch


def fixed(policy: object) -> Callable[..., object]:
    return lambda features, mask=None: policy


def sample_of(count: int, *, seed: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(4, count, generator=generator) * 0.5
    sample = dict(zip(("log_prob", "advantage", "return", "value"), numbers.unbind(), strict=True))
    return {
        **sample,
        "log_prob": sample["log_prob"] - 1.1,
        "action": torch.randint(0, 3, (count,), generator=generator),
    }


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
    logits, value = torch.zeros(1, 2, requires_grad=True), torch.tensor([3.0], requires_grad=True)
    sample = {
        "action": torch.tensor([1]),
        "log_prob": torch.tensor([math.log(0.5 / ratio)]),
        "advantage": torch.tensor([advantage]),
        "return": torch.tensor([1.0]),
        "value": torch.tensor([0.0]),
    }
    found = actor_critic_loss(fixed(Categorical(logits)), lambda _: value, torch.zeros(1, 1), sample, clip_range=0.2)
    assert found.policy.tolist() == pytest.approx(loss, rel=1e-6)
    assert found.value.tolist() == pytest.approx(4.0)
    assert found.entropy.tolist() == pytest.approx(-math.log(2.0))
    assert found.log_prob.tolist() == pytest.approx([math.log(0.5)])
    (found.policy + found.value).backward()
    assert logits.grad is not None and value.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-0.5 * slope, 0.5 * slope], rel=1e-6)  # 1[k = a] - p_k, p = 1/2
    assert value.grad.tolist() == pytest.approx([4.0])


def networks() -> tuple[Actor, Critic]:
    torch.manual_seed(0)
    action = ActionSpec(kind="discrete", sizes=(3,))
    return (
        Actor(input_size=5, action=action, hidden_sizes=(7, 6), output_gain=1.0),
        Critic(input_size=5, hidden_sizes=(8,)),
    )


def gradients(parts: tuple[Actor, Critic], loss: Tensor) -> list[Tensor | None]:
    loss.backward()
    return [parameter.grad for part in parts for parameter in part.parameters()]


def losses_of(parts: tuple[Actor, Critic], *, learns_entropy: bool, wants_entropy: bool = True) -> ActorCriticLoss:
    features = torch.randn(200, 5, generator=torch.Generator().manual_seed(4))
    told = {"clip_range": 0.2, "learns_entropy": learns_entropy, "wants_entropy": wants_entropy}
    return actor_critic_loss(*parts, features, sample_of(200), **told)  # type: ignore[arg-type]


def test_the_one_node_gives_the_losses_and_gradients_of_autograd() -> None:
    parts = networks()
    others = copy.deepcopy(parts)
    found, expected = losses_of(parts, learns_entropy=False), losses_of(others, learns_entropy=True)
    assert "OneNode" in str(found.policy.grad_fn) and "OneNode" not in str(expected.policy.grad_fn)
    for name in ("policy", "value", "entropy", "log_prob"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name).detach())
    got = gradients(parts, 3.0 * found.policy + 0.5 * found.value)
    wanted = gradients(others, 3.0 * expected.policy + 0.5 * expected.value)
    assert all(each is not None for each in wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_one_node_adds_to_gradients_that_are_there() -> None:
    parts = networks()
    found = losses_of(parts, learns_entropy=False)
    once = [g.clone() for g in gradients(parts, found.policy + found.value) if g is not None]
    again = losses_of(parts, learns_entropy=False)
    for twice, first in zip(gradients(parts, again.policy + again.value), once, strict=True):
        torch.testing.assert_close(twice, 2.0 * first)


@pytest.mark.parametrize("frozen", [0, 1])
def test_the_one_node_leaves_frozen_parameters_alone(frozen: int) -> None:
    parts = networks()
    parts[frozen].requires_grad_(False)
    found = losses_of(parts, learns_entropy=False)
    (found.policy + found.value).backward()
    assert all(parameter.grad is None for parameter in parts[frozen].parameters())
    assert all(parameter.grad is not None for parameter in parts[1 - frozen].parameters())


def test_the_entropy_is_not_computed_unless_wanted() -> None:
    assert losses_of(networks(), learns_entropy=False, wants_entropy=False).entropy == 0.0
    assert losses_of(networks(), learns_entropy=True, wants_entropy=False).entropy == 0.0


def test_samples_that_do_not_count_change_nothing() -> None:
    logits, value = torch.randn(6, 3), torch.randn(6)
    valid = torch.tensor([True, True, False, True, False, True])
    sample, features = sample_of(6), torch.zeros(6, 1)
    kept = {key: rows[valid] for key, rows in sample.items()}
    masked = actor_critic_loss(
        fixed(Categorical(logits)), lambda _: value, features, {**sample, "valid": valid}, clip_range=0.2
    )
    alone = actor_critic_loss(fixed(Categorical(logits[valid])), lambda _: value[valid], features, kept, clip_range=0.2)
    for name in ("policy", "value", "entropy"):
        torch.testing.assert_close(getattr(masked, name), getattr(alone, name))


def test_a_value_far_from_its_old_one_counts_with_the_larger_error() -> None:
    sample = {**sample_of(1), "value": torch.tensor([1.0]), "return": torch.tensor([4.0])}
    policy, value = Categorical(torch.zeros(1, 3)), torch.tensor([5.0])
    found = actor_critic_loss(
        fixed(policy), lambda _: value, torch.zeros(1, 1), sample, clip_range=0.2, value_clip_range=0.5
    )
    assert found.value.tolist() == pytest.approx(6.25)  # (1.5 - 4)^2 against (5 - 4)^2


def test_a_critic_with_features_of_its_own_reads_them() -> None:
    policy = DiagonalGaussian(torch.zeros(4, 2), torch.zeros(2))
    sample = {**sample_of(4), "action": torch.randn(4, 2), "return": torch.zeros(4)}
    seen = torch.full((4, 1), 3.0)
    found = actor_critic_loss(
        fixed(policy), lambda features: features[:, 0], torch.zeros(4, 1), sample, critic_features=seen, clip_range=0.2
    )
    assert found.value.tolist() == pytest.approx(9.0)
