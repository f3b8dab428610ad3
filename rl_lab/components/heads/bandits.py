"""Ways to choose among arms whose worth is unknown. Each keeps statistics `[N, A]` of N bandits side by side.

    initial   what is known before the first pull
    learn     the statistics after a pull and its reward
    choose    the arm to pull next

A strategy holds numbers only; the statistics are handed in and out, so that whoever asks decides where they live.
See Sutton and Barto, Reinforcement Learning, 2nd edition, chapter 2; UCB1 is Auer et al. 2002.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from rl_lab.components.heads.tables import draw, epsilon_greedy
from rl_lab.types import ActionSpec, Batch, ConfigError


class EpsilonGreedy:
    """The best arm so far, and with probability `epsilon` any arm. Estimates are means of the rewards, or with
    `step_size` running means, for arms that change. A high `initial_value` makes it try every arm early."""

    def __init__(
        self, *, action: ActionSpec, epsilon: float = 0.1, step_size: float | None = None, initial_value: float = 0.0
    ) -> None:
        self.num_arms = _num_arms(action)
        if not 0.0 <= epsilon <= 1.0:
            raise ConfigError(f"components.strategy.epsilon is {epsilon}: write a number from 0 to 1.")
        if step_size is not None and not 0.0 < step_size <= 1.0:  # beyond 1 estimates overshoot the rewards
            raise ConfigError(
                f"components.strategy.step_size is {step_size}: write a number above 0 and at most 1, or null for "
                "means of all rewards."
            )
        _finite("initial_value", initial_value)
        self.epsilon, self.step_size, self.initial_value = epsilon, step_size, initial_value

    def initial(self, num_bandits: int, *, device: torch.device) -> Batch:
        shape = num_bandits, self.num_arms
        return {
            "pulls": torch.zeros(shape, device=device),
            "value": torch.full(shape, float(self.initial_value), device=device),
        }

    def learn(self, statistics: Batch, arm: Tensor, reward: Tensor) -> Batch:
        pulled = one_hot(arm, self.num_arms)
        pulls = statistics["pulls"] + pulled
        rate = 1.0 / pulls.clamp(min=1.0) if self.step_size is None else self.step_size
        error = reward.unsqueeze(1) - statistics["value"]
        return {"pulls": pulls, "value": statistics["value"] + rate * pulled * error}

    def choose(self, statistics: Batch) -> Tensor:
        return draw(epsilon_greedy(statistics["value"], self.epsilon))


class RewardSums:
    """Strategies whose statistics are how often each arm was pulled, and the sum of its rewards."""

    num_arms: int

    def initial(self, num_bandits: int, *, device: torch.device) -> Batch:
        return {name: torch.zeros(num_bandits, self.num_arms, device=device) for name in ("pulls", "reward_sum")}

    def learn(self, statistics: Batch, arm: Tensor, reward: Tensor) -> Batch:
        pulled = one_hot(arm, self.num_arms)
        return {
            "pulls": statistics["pulls"] + pulled,
            "reward_sum": statistics["reward_sum"] + pulled * reward.unsqueeze(1),
        }


class UCB(RewardSums):
    """UCB1: the arm whose value could be highest, mean + confidence * sqrt(ln t / n), untried arms first. The
    square root of two is the paper's confidence for rewards in [0, 1]."""

    def __init__(self, *, action: ActionSpec, confidence: float = 2.0**0.5) -> None:
        self.num_arms = _num_arms(action)
        _above_zero("confidence", confidence)
        self.confidence = confidence

    def index(self, statistics: Batch) -> Tensor:
        """`[N, A]`; infinite where an arm was never pulled."""
        pulls = statistics["pulls"]
        time = pulls.sum(1, keepdim=True).clamp(min=1.0)
        known = statistics["reward_sum"] / pulls + self.confidence * (time.log() / pulls).sqrt()
        return torch.where(pulls > 0, known, torch.inf)

    def choose(self, statistics: Batch) -> Tensor:
        return draw(epsilon_greedy(self.index(statistics), 0.0))


class GradientBandit:
    """Preferences that become probabilities by softmax and climb the expected reward:

        preference <- preference + step_size * (reward - baseline) * (pulled - probability)

    The baseline is the mean of the rewards before this one, or of the first reward itself; without it, 0.
    """

    def __init__(self, *, action: ActionSpec, step_size: float = 0.1, baseline: bool = True) -> None:
        self.num_arms = _num_arms(action)
        _above_zero("step_size", step_size)
        self.step_size, self.baseline = step_size, baseline

    def initial(self, num_bandits: int, *, device: torch.device) -> Batch:
        zeros = torch.zeros(num_bandits, device=device)
        preference = torch.zeros(num_bandits, self.num_arms, device=device)
        return {"preference": preference, "pulls": zeros, "reward_mean": zeros.clone()}

    def learn(self, statistics: Batch, arm: Tensor, reward: Tensor) -> Batch:
        preference, before = statistics["preference"], statistics["reward_mean"]
        baseline = torch.where(statistics["pulls"] > 0, before, reward) if self.baseline else 0.0
        direction = one_hot(arm, self.num_arms) - preference.softmax(1)
        pulls = statistics["pulls"] + 1.0
        return {
            "preference": preference + self.step_size * (reward - baseline).unsqueeze(1) * direction,
            "pulls": pulls,
            "reward_mean": before + (reward - before) / pulls,
        }

    def choose(self, statistics: Batch) -> Tensor:
        return draw(statistics["preference"].softmax(1))


class GaussianThompson(RewardSums):
    """Thompson sampling: the best arm of one draw from the posterior. Rewards are normal with a known std
    `reward_std`; each arm's mean has a normal prior with mean `prior_mean` and std `prior_std`."""

    def __init__(
        self, *, action: ActionSpec, prior_mean: float = 0.0, prior_std: float = 1.0, reward_std: float = 1.0
    ) -> None:
        self.num_arms = _num_arms(action)
        _above_zero("prior_std", prior_std)
        _above_zero("reward_std", reward_std)
        _finite("prior_mean", prior_mean)
        self.prior_mean, self.prior_std, self.reward_std = prior_mean, prior_std, reward_std

    def posterior(self, statistics: Batch) -> tuple[Tensor, Tensor]:
        """Mean and std of the posterior of every arm, `[N, A]`."""
        prior, noise = self.prior_std**-2, self.reward_std**-2
        precision = prior + statistics["pulls"] * noise
        mean = (prior * self.prior_mean + noise * statistics["reward_sum"]) / precision
        return mean, precision.rsqrt()

    def choose(self, statistics: Batch) -> Tensor:
        mean, std = self.posterior(statistics)
        return (mean + std * torch.randn_like(mean)).argmax(1)


class BernoulliThompson(RewardSums):
    """Thompson sampling: the best arm of one draw from the posterior. Rewards are 0 or 1; each arm's chance has the
    prior Beta(`prior_successes`, `prior_failures`)."""

    def __init__(self, *, action: ActionSpec, prior_successes: float = 1.0, prior_failures: float = 1.0) -> None:
        self.num_arms = _num_arms(action)
        _above_zero("prior_successes", prior_successes)
        _above_zero("prior_failures", prior_failures)
        self.prior_successes, self.prior_failures = prior_successes, prior_failures

    def posterior(self, statistics: Batch) -> tuple[Tensor, Tensor]:
        """Both parameters of the Beta posterior of every arm, `[N, A]`."""
        successes = statistics["reward_sum"]
        failures = (statistics["pulls"] - successes).clamp(min=0.0)
        return self.prior_successes + successes, self.prior_failures + failures

    def choose(self, statistics: Batch) -> Tensor:
        return torch.distributions.Beta(*self.posterior(statistics), validate_args=False).sample().argmax(1)


def _num_arms(action: ActionSpec) -> int:
    if action.kind != "discrete":
        raise ConfigError(
            f"components.strategy: a bandit pulls one of several arms, and this environment's action is {action.kind} "
            f"with sizes {action.sizes}. Choose a discrete environment such as rl_lab/BanditGaussian-v0."
        )
    return action.sizes[0]


def _above_zero(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise ConfigError(f"components.strategy.{name} is {value}: write a finite number above 0.")


def _finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"components.strategy.{name} is {value}: write a finite number.")
