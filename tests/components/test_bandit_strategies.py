"""Bandit strategies: indices, updates and posteriors by hand, and how often they find the best arm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_lab.components.heads.bandits import UCB, BernoulliThompson, EpsilonGreedy, GaussianThompson, GradientBandit
from rl_lab.types import ActionSpec, Batch, ConfigError

CPU = torch.device("cpu")


def arms(count: int) -> ActionSpec:
    return ActionSpec("discrete", (count,))


def after(strategy: Any, pulls: list[tuple[int, float]]) -> Batch:
    """The statistics of one bandit after these arms paid these rewards."""
    statistics = strategy.initial(1, device=CPU)
    for arm, reward in pulls:
        statistics = strategy.learn(statistics, torch.tensor([arm]), torch.tensor([reward]))
    return statistics


# --- by hand ---


def test_epsilon_greedy_keeps_the_mean_of_each_arm() -> None:
    statistics = after(EpsilonGreedy(action=arms(3)), [(0, 1.0), (2, 5.0), (0, 4.0)])
    assert statistics["pulls"].tolist() == [[2.0, 0.0, 1.0]]
    assert statistics["value"].tolist() == [[2.5, 0.0, 5.0]]


def test_a_step_size_makes_running_means_from_the_initial_value() -> None:
    """4 -> 4 + .5 (1 - 4) = 2.5 -> 2.5 + .5 (0 - 2.5) = 1.25."""
    statistics = after(EpsilonGreedy(action=arms(2), step_size=0.5, initial_value=4.0), [(1, 1.0), (1, 0.0)])
    assert statistics["value"].tolist() == [[4.0, 1.25]]


def test_the_ucb_index_is_the_mean_and_its_confidence() -> None:
    """Four pulls: arm 0 thrice with mean 1, arm 1 once with 2, arm 2 never."""
    strategy = UCB(action=arms(3))
    statistics = after(strategy, [(0, 0.0), (0, 1.0), (0, 2.0), (1, 2.0)])
    index = strategy.index(statistics)[0].tolist()
    assert index[0] == pytest.approx(1.0 + math.sqrt(2 * math.log(4) / 3))
    assert index[1] == pytest.approx(2.0 + math.sqrt(2 * math.log(4)))
    assert index[2] == math.inf
    assert strategy.choose(statistics).tolist() == [2]


def test_the_gradient_bandit_climbs_against_its_baseline() -> None:
    """First reward: the baseline is the reward itself, so nothing moves. Then 3 against a mean of 1, at 1/2 each:
    the pulled arm goes up by .1 * 2 * .5, the other goes down as much."""
    strategy = GradientBandit(action=arms(2))
    assert after(strategy, [(0, 1.0)])["preference"].tolist() == [[0.0, 0.0]]
    statistics = after(strategy, [(0, 1.0), (1, 3.0)])
    torch.testing.assert_close(statistics["preference"], torch.tensor([[-0.1, 0.1]]))
    assert statistics["reward_mean"].tolist() == [2.0]
    # softmax(-.1, .1) = (.450166, .549834); reward 0 against 2: H0 -= .1 * 2 * (1 - .450166)
    statistics = strategy.learn(statistics, torch.tensor([0]), torch.tensor([0.0]))
    moved = 0.2 * (1 - 1 / (1 + math.exp(0.2)))
    torch.testing.assert_close(statistics["preference"], torch.tensor([[-0.1 - moved, 0.1 + moved]]))


def test_without_a_baseline_rewards_count_as_they_are() -> None:
    statistics = after(GradientBandit(action=arms(2), step_size=0.5, baseline=False), [(0, 4.0)])
    assert statistics["preference"].tolist() == [[1.0, -1.0]]


def test_the_gaussian_posterior_weighs_prior_and_rewards_by_their_precision() -> None:
    """Prior N(1, 2^2): precision .25. Two rewards of deviation 1 that sum to 6: (.25 * 1 + 6) / 2.25."""
    strategy = GaussianThompson(action=arms(2), prior_mean=1.0, prior_std=2.0)
    mean, deviation = strategy.posterior(after(strategy, [(0, 2.0), (0, 4.0)]))
    torch.testing.assert_close(mean, torch.tensor([[6.25 / 2.25, 1.0]]))
    torch.testing.assert_close(deviation, torch.tensor([[2.25**-0.5, 2.0]]))


def test_the_beta_posterior_counts_successes_and_failures() -> None:
    strategy = BernoulliThompson(action=arms(2), prior_failures=3.0)
    successes, failures = strategy.posterior(after(strategy, [(0, 1.0), (0, 0.0), (0, 1.0)]))
    assert successes.tolist() == [[3.0, 1.0]]
    assert failures.tolist() == [[4.0, 3.0]]


def test_thompson_chooses_with_the_probability_that_an_arm_is_best() -> None:
    """Beliefs N(0, 1) and N(1/2, 1/2): their difference is N(1/2, 3/2), so arm 1 wins with Phi(.5 / sqrt 1.5).
    Beta(2, 1) against Beta(1, 1): 2/3."""
    torch.manual_seed(0)
    gaussian = GaussianThompson(action=arms(2))
    many = {name: value.expand(20_000, 2) for name, value in after(gaussian, [(1, 1.0)]).items()}
    expected = 0.5 * (1 + math.erf(0.5 / math.sqrt(1.5) / math.sqrt(2)))
    assert gaussian.choose(many).float().mean().item() == pytest.approx(expected, abs=0.012)
    bernoulli = BernoulliThompson(action=arms(2))
    many = {name: value.expand(20_000, 2) for name, value in after(bernoulli, [(1, 1.0)]).items()}
    assert bernoulli.choose(many).float().mean().item() == pytest.approx(2 / 3, abs=0.012)


# --- how often the best arm is found ---


def optimal_rate(strategy: Any, means: Tensor, *, pulls: int, last: int, is_bernoulli: bool = False) -> float:
    """Share of best arms among the last pulls of N bandits `[N, A]`."""
    statistics, hits = strategy.initial(len(means), device=CPU), 0.0
    best = means.argmax(1)
    for pull in range(pulls):
        arm = strategy.choose(statistics)
        mean = means.gather(1, arm.unsqueeze(1)).squeeze(1)
        reward = torch.bernoulli(mean) if is_bernoulli else mean + torch.randn_like(mean)
        statistics = strategy.learn(statistics, arm, reward)
        hits += (arm == best).float().mean().item() * (pull >= pulls - last)
    return hits / last


def test_epsilon_greedy_takes_the_obvious_arm_in_all_but_half_of_its_random_pulls() -> None:
    """Two arms 20 deviations apart are told apart at once: 1 - epsilon / 2."""
    torch.manual_seed(0)
    means = torch.tensor([[0.0, 20.0]]).expand(500, 2)
    rate = optimal_rate(EpsilonGreedy(action=arms(2), epsilon=0.2, initial_value=50.0), means, pulls=120, last=100)
    assert rate == pytest.approx(0.9, abs=0.006)


@pytest.mark.parametrize(
    ("strategy", "low", "high"),
    [
        # Sutton and Barto's testbed, figures 2.2 and 2.5, pulls 900 to 1000 of ten arms: epsilon .1 about 80 %,
        # .01 about 55 %, greedy about 35 %; gradient with baseline about 84 %. Optimism, UCB and Thompson do better.
        (EpsilonGreedy(action=arms(10), epsilon=0.1), 0.76, 0.84),
        (EpsilonGreedy(action=arms(10), epsilon=0.01), 0.45, 0.62),
        (EpsilonGreedy(action=arms(10), epsilon=0.0), 0.28, 0.42),
        (EpsilonGreedy(action=arms(10), epsilon=0.0, step_size=0.1, initial_value=5.0), 0.8, 0.9),
        (GradientBandit(action=arms(10)), 0.78, 0.9),
        (UCB(action=arms(10)), 0.84, 0.95),
        (GaussianThompson(action=arms(10)), 0.88, 0.97),
    ],
    ids=["epsilon .1", "epsilon .01", "greedy", "optimistic", "gradient", "ucb", "thompson"],
)
def test_the_testbed_gives_the_known_shares_of_best_arms(strategy: Any, low: float, high: float) -> None:
    torch.manual_seed(0)
    assert low < optimal_rate(strategy, torch.randn(500, 10), pulls=1000, last=100) < high


def test_bernoulli_thompson_finds_the_best_chance() -> None:
    torch.manual_seed(0)
    means = torch.tensor([[0.2, 0.8, 0.4]]).expand(300, 3)
    rate = optimal_rate(BernoulliThompson(action=arms(3)), means, pulls=200, last=50, is_bernoulli=True)
    assert rate > 0.98


# --- refusals ---


@pytest.mark.parametrize(
    ("strategy", "settings", "message"),
    [
        (EpsilonGreedy, {"epsilon": 1.5}, r"components\.strategy\.epsilon is 1\.5: write a number from 0 to 1"),
        (EpsilonGreedy, {"step_size": 0.0}, r"components\.strategy\.step_size is 0\.0: write a number above 0"),
        (
            EpsilonGreedy,
            {"step_size": 5.0},
            r"step_size is 5\.0: write a number above 0 and at most 1, or null for means",
        ),
        (EpsilonGreedy, {"step_size": math.nan}, r"step_size is nan: write a number above 0 and at most 1"),
        (EpsilonGreedy, {"initial_value": math.nan}, r"initial_value is nan: write a finite number"),
        (GaussianThompson, {"prior_mean": math.inf}, r"prior_mean is inf: write a finite number"),
        (GradientBandit, {"step_size": math.inf}, r"step_size is inf: write a finite number above 0"),
        (UCB, {"confidence": -1.0}, r"confidence is -1\.0: write a finite number above 0"),
        (GradientBandit, {"step_size": -0.1}, r"step_size is -0\.1: write a finite number above 0"),
        (GaussianThompson, {"prior_std": 0.0}, r"prior_std is 0\.0: write a finite number above 0"),
        (BernoulliThompson, {"prior_failures": 0.0}, r"prior_failures is 0\.0: write a finite number above 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(strategy: Any, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strategy(action=arms(2), **settings)


def test_a_bandit_needs_arms() -> None:
    with pytest.raises(ConfigError, match=r"action is continuous with sizes \(2,\)\. Choose a discrete environment"):
        UCB(action=ActionSpec("continuous", (2,)))
