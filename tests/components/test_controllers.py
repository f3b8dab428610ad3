"""Actor, critic, and the random controller, for every kind of action."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.heads.actor_critic import Actor, Critic, RandomController, RepeatingRandomController
from rl_lab.components.heads.distributions import Categorical, DiagonalGaussian, MultiCategorical, SquashedGaussian
from rl_lab.types import ActionSpec, ConfigError, TimeStep

DISCRETE = ActionSpec("discrete", (3,))
MULTI = ActionSpec("multi_discrete", (3, 2))
CONTINUOUS = ActionSpec("continuous", (2,))


@pytest.mark.parametrize(
    ("action", "kind"), [(DISCRETE, Categorical), (MULTI, MultiCategorical), (CONTINUOUS, DiagonalGaussian)]
)
def test_an_actor_answers_in_the_spec_of_its_environment(action: ActionSpec, kind: type) -> None:
    policy = Actor(input_size=4, action=action, hidden_sizes=(8,))(torch.randn(2, 5, 4))
    assert isinstance(policy, kind)
    sample = policy.sample()
    assert sample.shape == (2, 5, *action.shape)
    assert str(sample.dtype) == f"torch.{action.dtype}"
    assert policy.log_prob(sample).shape == policy.entropy().shape == (2, 5)


def test_a_new_policy_is_nearly_uniform() -> None:
    torch.manual_seed(0)
    policy = Actor(input_size=4, action=DISCRETE)(torch.randn(100, 4))
    assert isinstance(policy, Categorical)
    torch.testing.assert_close(policy.probs, torch.full((100, 3), 1 / 3), rtol=0, atol=0.03)


def test_the_standard_deviation_is_learned_and_starts_as_told() -> None:
    actor = Actor(input_size=4, action=CONTINUOUS, initial_log_std=-0.5)
    assert actor.log_std.tolist() == [-0.5, -0.5]
    policy = actor(torch.randn(3, 4))
    policy.log_prob(torch.randn(3, 2)).sum().backward()
    assert actor.log_std.grad is not None


@pytest.mark.parametrize("action", [DISCRETE, MULTI])
def test_an_actor_obeys_the_mask(action: ActionSpec) -> None:
    mask = torch.zeros(40, sum(action.sizes), dtype=torch.bool)
    mask[:, 1] = mask[:, -1] = True
    samples = Actor(input_size=4, action=action)(torch.randn(40, 4), mask).sample()
    assert set(samples.reshape(40, -1)[:, 0].tolist()) <= {1, 2}


def test_a_critic_gives_one_value_per_row() -> None:
    assert Critic(input_size=4, hidden_sizes=(8,), activation="relu")(torch.randn(2, 5, 4)).shape == (2, 5)


def test_random_actions_cover_the_spec_evenly() -> None:
    torch.manual_seed(0)
    draws = RandomController(action=DISCRETE).sample(9000)
    torch.testing.assert_close(draws.bincount() / 9000, torch.full((3,), 1 / 3), rtol=0, atol=0.02)
    assert RandomController(action=MULTI).sample(500, "cpu").unique(dim=0).shape[0] == 6
    continuous = RandomController(action=CONTINUOUS).sample(9000)
    assert continuous.dtype == torch.float32
    assert continuous.min() >= -1.0
    assert continuous.max() <= 1.0
    torch.testing.assert_close(continuous.std(0), torch.full((2,), 3**-0.5), rtol=0, atol=0.02)


def test_random_actions_obey_the_mask() -> None:
    mask = torch.tensor([True, False, True]).expand(300, 3)
    assert RandomController(action=DISCRETE).sample(300, "cpu", mask).unique().tolist() == [0, 2]


@pytest.mark.parametrize("action", [DISCRETE, MULTI, CONTINUOUS])
def test_repeated_random_actions_last_but_not_into_the_next_episode(action: ActionSpec) -> None:
    torch.manual_seed(0)
    controller = RepeatingRandomController(action=action, repeat=0.75)
    no, is_first = torch.zeros(8000, dtype=torch.bool), torch.arange(8000) < 4000
    step = TimeStep({}, torch.zeros(8000), is_first, no, no)
    first = controller.answer(step, None)
    assert first.state is first.action and first.action.shape == (8000, *action.shape)
    before = torch.full_like(first.action, 7)
    taken = controller.answer(step, before).action.reshape(8000, -1)
    is_repeated = taken == 7
    assert not is_repeated[:4000].any()
    assert (is_repeated == is_repeated[:, :1]).all()  # all numbers of an action are repeated together
    assert float(is_repeated[4000:, 0].float().mean()) == pytest.approx(0.75, abs=0.03)
    if action.kind == "discrete":
        masked = TimeStep(
            {"action_mask": torch.tensor([[False, True, False]]).expand(8000, 3)}, step.reward, no, no, no
        )
        assert (controller.answer(masked, before).action == 1).all()


def test_a_random_action_that_lasts_for_ever_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"controllers.random.repeat is 1.0: write a probability from 0 to below 1"):
        RepeatingRandomController(action=DISCRETE, repeat=1.0)


@pytest.mark.parametrize("squashed", [False, True])
def test_a_std_from_the_network_differs_between_states_and_starts_as_given(squashed: bool) -> None:
    torch.manual_seed(0)
    action = ActionSpec("continuous", (2,))
    actor = Actor(input_size=3, action=action, initial_log_std=-1.0, std="state", squashed=squashed, output_gain=0.1)
    policy = actor(torch.randn(5, 3))
    assert isinstance(policy, SquashedGaussian if squashed else DiagonalGaussian)
    log_std = (policy.base if isinstance(policy, SquashedGaussian) else policy).log_std
    assert log_std.shape == (5, 2) and len(set(log_std.flatten().tolist())) == 10
    assert torch.allclose(log_std, torch.full((5, 2), -1.0), atol=0.5)
    policy.log_prob(policy.sample()).sum().backward()
    assert actor.network.output.weight.grad is not None
    assert bool((policy.sample().abs() <= 1.0).all()) or not squashed


def test_an_unknown_std_is_refused() -> None:
    with pytest.raises(ConfigError, match="controllers.actor.std: 'sate' is not known.*Did you mean 'state'"):
        Actor(input_size=3, action=ActionSpec("continuous", (2,)), std="sate")
