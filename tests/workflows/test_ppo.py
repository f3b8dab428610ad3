"""PPO: advantages by hand, the clipped surrogate by hand, minibatches, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.components.heads.distributions import Categorical
from rl_lab.components.networks.normalizers import ObservationNormalizer, RewardNormalizer
from rl_lab.types import Batch, ConfigError, LossOutput, Phase, Progress, TimeStep
from rl_lab.workflows.ppo import PPO
from tests.doubles import SPEC, batch_of, make_context

SCALES = {"policy": 1.0, "value": 0.5, "entropy": 0.0}
PHASE = Phase("train", collect_steps=8, duration_cycles=1)


# --- by hand: the observation is what actor and critic answer ----------------------------------


class Same(nn.Module):
    def forward(self, observation: Batch) -> Tensor:
        return observation["vector"]


class ValueIsObservation(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features[..., 0]


class LogitsAreObservation(nn.Module):
    def forward(self, features: Tensor, mask: Tensor | None = None) -> Categorical:
        return Categorical(features, mask)


class NoOptimizer:
    """Learns nothing; remembers the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def prepare(self, progress: Progress) -> dict[str, Any]:
        return {"learning_rate": 0.0}

    def apply(self, loss: Tensor) -> dict[str, Any]:
        self.losses.append(float(loss.detach()))
        return {"grad_norm": torch.tensor(0.0)}


def by_hand(**settings: Any) -> PPO:
    workflow = PPO(**{"advantage_normalization": "none", "loss_scales": SCALES, **settings})
    workflow.initialize(
        make_context(
            components={
                "encoder": Same(),
                "observation_normalizer": ObservationNormalizer(observation=SPEC.observation),
                "reward_normalizer": RewardNormalizer(num_envs=1),
            },
            controllers={"actor": LogitsAreObservation(), "critic": ValueIsObservation()},
            optimizers={"controller": NoOptimizer()},
        )
    )
    return workflow


def two_episodes(*, is_terminal: bool) -> Batch:
    """Five rows: an episode ends at row 2, the next goes on beyond the pending row 4, whose value is 4."""
    return batch_of(
        vector=[[[0.5], [1.0], [9.0], [2.0], [4.0]]],  # the critic's values
        reward=[[0.0, 1.0, 2.0, 0.0, 3.0]],
        action=[[0] * 5],
        is_first=[[1, 0, 0, 1, 0]],
        is_last=[[0, 0, 1, 0, 0]],
        is_terminal=[[0, 0, int(is_terminal), 0, 0]],
    )


@pytest.mark.parametrize(
    ("is_terminal", "advantage"),
    [
        # delta0 = 1 + .5*1 - .5 = 1    delta1 = 2 - 1 = 1             A1 = 1      A0 = 1 + .5*.25*1 = 1.125
        (True, [1.125, 1.0, 3.0]),
        # the same, but                 delta1 = 2 + .5*9 - 1 = 5.5    A1 = 5.5    A0 = 1 + .5*.25*5.5 = 1.6875
        (False, [1.6875, 5.5, 3.0]),
        # row 3: delta3 = 3 + .5*4 - 2 = 3 in both: the pending value bootstraps
    ],
)
def test_advantages_stop_at_terminations_and_bootstrap_at_time_limits(
    is_terminal: bool, advantage: list[float]
) -> None:
    samples, _ = by_hand(discount=0.5, gae_lambda=0.25).prepare(two_episodes(is_terminal=is_terminal))
    assert samples["advantage"].tolist() == advantage
    assert samples["return"].tolist() == [a + v for a, v in zip(advantage, [0.5, 1.0, 2.0], strict=True)]
    assert samples["value"].tolist() == [0.5, 1.0, 2.0], "the answer to an is_last row is no sample"


def test_returns_are_of_normalised_rewards() -> None:
    workflow = by_hand(discount=0.5, gae_lambda=0.0)
    workflow.reward_normalizer.mode, workflow.reward_normalizer.clip = "return_scale", 1.5
    workflow.reward_normalizer.update = lambda reward, is_first: workflow.reward_normalizer.factor.fill_(2.0)
    samples, _ = workflow.prepare(two_episodes(is_terminal=True))
    assert samples["return"].tolist() == [1.5 + 0.5 * 1.0, 1.5, 1.5 + 0.5 * 4.0], "2, 4 and 6, each clipped to 1.5"


def test_metrics_describe_the_rollout() -> None:
    _, metrics = by_hand(discount=0.5, gae_lambda=0.5).prepare(two_episodes(is_terminal=True))
    # returns 1.75, 2, 5 (mean 35/12), advantages 1.25, 1, 3
    returns = torch.tensor([1.75, 2.0, 5.0])
    residual = torch.tensor([1.25, 1.0, 3.0])
    assert metrics["train/explained_variance"] == 1.0 - residual.var() / returns.var()
    assert metrics["controller/advantage_std"] == residual.std()
    assert float(metrics["controller/value_mean"]) == pytest.approx(3.5 / 3)


def test_batch_normalisation_is_over_the_samples_that_count() -> None:
    workflow = by_hand(discount=0.5, gae_lambda=0.5, advantage_normalization="batch")
    samples, _ = workflow.prepare(two_episodes(is_terminal=True))
    deviation = math.sqrt((0.5**2 + 0.75**2 + 1.25**2) / 2)  # of 1.25, 1, 3 around 1.75
    assert samples["advantage"].tolist() == pytest.approx([-0.5 / deviation, -0.75 / deviation, 1.25 / deviation])
    assert samples["return"].tolist() == [1.75, 2.0, 5.0], "the value's target is not normalised"


def sample_with(*, log_ratio: list[float], advantage: list[float], **more: list[float]) -> Batch:
    """Samples of two actions, action 0 taken; the stored log-probability is off by `log_ratio`."""
    count = len(advantage)
    new = -math.log(2.0)
    defaults = {"value": [0.0] * count, "return": [0.0] * count}
    return batch_of(
        vector=[[0.0, 0.0]] * count,
        action=[0] * count,
        log_prob=[new - difference for difference in log_ratio],
        advantage=advantage,
        **{**defaults, **more},
    )


def terms(workflow: PPO, sample: Batch, *, clip_range: float = 0.2, value_clip_range: float | None = None) -> Any:
    return workflow.loss(sample, clip_range=clip_range, value_clip_range=value_clip_range)


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate"),
    [
        (1.5, 1.0, 1.2),  # enough: nothing is gained beyond 1.2
        (1.5, -1.0, -1.5),  # too far the wrong way: felt in full
        (0.5, -1.0, -0.8),  # enough
        (0.5, 1.0, 0.5),  # felt in full
        (1.1, 2.0, 2.2),  # inside
    ],
)
def test_the_surrogate_is_the_lesser_of_ratio_and_clipped_ratio(
    ratio: float, advantage: float, surrogate: float
) -> None:
    loss = terms(by_hand(), sample_with(log_ratio=[math.log(ratio)], advantage=[advantage]))
    assert loss.terms["policy"].item() == pytest.approx(-surrogate, rel=1e-6)
    assert loss.metrics["controller/clip_fraction"].item() == float(abs(ratio - 1.0) > 0.2)
    assert loss.metrics["controller/approx_kl"].item() == pytest.approx(ratio - 1.0 - math.log(ratio), abs=1e-7)


def test_the_entropy_term_is_minus_the_mean_entropy() -> None:
    loss = terms(by_hand(), sample_with(log_ratio=[0.0, 0.0], advantage=[1.0, 1.0]))
    assert loss.terms["entropy"].item() == pytest.approx(-math.log(2.0))


@pytest.mark.parametrize(("value_clip_range", "error"), [(None, 1.0), (0.5, 2.25), (5.0, 1.0)])
def test_value_clipping_takes_the_larger_error(value_clip_range: float | None, error: float) -> None:
    """The value moved from 1 to 2 on its way to 3; clipped at 0.5 it is 1.5, which is 1.5 short."""
    sample = sample_with(log_ratio=[0.0], advantage=[0.0], value=[1.0], **{"return": [3.0]})
    sample["vector"] = torch.tensor([[2.0, 2.0]])
    assert terms(by_hand(), sample, value_clip_range=value_clip_range).terms["value"].item() == error


def test_minibatch_normalisation_makes_the_policy_loss_independent_of_scale() -> None:
    losses = []
    for scale in (1.0, 1000.0):
        sample = sample_with(log_ratio=[0.1, -0.1, 0.0], advantage=[1.0 * scale, 2.0 * scale, 6.0 * scale])
        workflow = by_hand(advantage_normalization="minibatch")
        (minibatch,) = workflow.minibatches(sample)
        losses.append(terms(workflow, minibatch).terms["policy"].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # standardised: (-2, -1, 3) / sqrt(7) against ratios e^.1, e^-.1, 1
    expected = -(-2 * math.exp(0.1) - math.exp(-0.1) + 3) / math.sqrt(7) / 3
    assert losses[0] == pytest.approx(expected, rel=1e-5)


def test_invalid_samples_of_sequences_do_not_count() -> None:
    sample = sample_with(log_ratio=[0.0, 0.3], advantage=[1.0, 50.0], value=[0.0, 0.0], **{"return": [1.0, 99.0]})
    alone = terms(by_hand(), {key: value[:1] for key, value in sample.items()})
    masked = terms(by_hand(), {**sample, "valid": torch.tensor([True, False])})
    for name, term in alone.terms.items():
        assert term.item() == masked.terms[name].item()
    assert masked.metrics["controller/approx_kl"].item() == 0.0


# --- minibatches -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("minibatch_size", "sizes"),
    [
        (64, [25, 25, 25, 25]),
        (25, [25] * 4),
        (30, [34, 33, 33]),
        (0.25, [25] * 4),
        (0.5, [50, 50]),
        (1.0, [100]),
        (7, None),
    ],
)
def test_every_sample_is_in_exactly_one_minibatch(minibatch_size: float, sizes: list[int] | None) -> None:
    workflow = by_hand(minibatch_size=minibatch_size)
    samples = {"advantage": torch.arange(100.0), "other": torch.arange(100.0) * 2}
    if minibatch_size == 64:
        sizes = [50, 50]  # 100 / 64 is nearer to two than to one
    parts = list(workflow.minibatches(samples))
    if sizes is not None:
        assert [len(part["advantage"]) for part in parts] == sizes
    assert torch.equal(torch.cat([part["advantage"] for part in parts]).sort().values, samples["advantage"])
    assert all(torch.equal(part["other"], part["advantage"] * 2) for part in parts)


def test_minibatches_are_drawn_anew_each_time() -> None:
    workflow = by_hand(minibatch_size=10)
    samples = {"advantage": torch.arange(100.0)}
    first, second = (torch.cat([part["advantage"] for part in workflow.minibatches(samples)]) for _ in range(2))
    assert not torch.equal(first, second)


def test_sequences_stay_whole() -> None:
    samples = {"advantage": torch.arange(60.0).reshape(6, 10)}
    parts = list(by_hand(minibatch_size=20).minibatches(samples))
    assert [part["advantage"].shape for part in parts] == [(2, 10)] * 3
    rows = torch.cat([part["advantage"] for part in parts])
    assert torch.equal(rows[rows[:, 0].argsort()], samples["advantage"])


# --- refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, r"algorithm\.epochs is 0: PPO needs at least 1 pass over each rollout"),
        (
            {"minibatch_size": 0},
            r"algorithm\.minibatch_size is 0: write a whole number of samples \(64\) or a fraction",
        ),
        ({"clip_range": -0.2}, r"algorithm\.clip_range: -0\.2; allowed is a number from 0 on"),
        ({"value_clip_range": -0.2}, r"algorithm\.value_clip_range: -0\.2; allowed is a number from 0 on"),
        ({"minibatch_size": 1.5}, r"algorithm\.minibatch_size is 1\.5: write a whole number of samples"),
        (
            {"minibatch_size": 1},
            r"algorithm\.minibatch_size is 1, and the advantage of a single sample cannot be normalised: write",
        ),
        ({"loss_scales": {"policy": 1.0, "value": 0.5}}, r"algorithm\.loss_scales lacks 'entropy': PPO's terms are"),
        (
            {"loss_scales": {**SCALES, "entropie": 0.1}},
            r"algorithm\.loss_scales\.entropie is no loss of PPO\. Did you mean 'entropy'\? Its terms are: policy",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPO(**{"loss_scales": SCALES, **settings})


@pytest.mark.parametrize("target_kl", [0.0, -1.0])
def test_a_divergence_limit_that_is_not_above_0_is_refused(target_kl: float) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.target_kl is {target_kl}: write a number above 0"):
        by_hand(target_kl=target_kl)


def test_a_rollout_without_a_single_decision_teaches_nothing() -> None:
    batch = batch_of(
        vector=[[[0.5], [1.0]]], reward=[[0.0, 0.0]], action=[[0, 0]],
        is_first=[[0, 1]], is_last=[[1, 0]], is_terminal=[[1, 0]],
    )  # fmt: skip
    workflow = by_hand()
    assert workflow.update_controller(batch, phase=PHASE) == {}
    assert workflow.optimizer.losses == []


@pytest.mark.parametrize(("divergence", "epochs_done"), [(1.4, 3), (1.6, 1)])
def test_the_epochs_end_beyond_one_and_a_half_times_the_target(divergence: float, epochs_done: int) -> None:
    workflow = by_hand(target_kl=1.0, epochs=3)
    zero = torch.tensor(0.0)
    loss = LossOutput(
        {"policy": zero, "value": zero, "entropy": zero}, {"controller/approx_kl": torch.tensor(divergence)}
    )
    workflow.loss = lambda *arguments, **keywords: loss  # type: ignore[method-assign]
    assert workflow.update_controller(two_episodes(is_terminal=True), phase=PHASE)["train/epochs_done"] == epochs_done


def test_evaluation_takes_the_likeliest_action_and_keeps_nothing() -> None:
    workflow = by_hand()
    observation = {"vector": torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])}
    nothing = torch.zeros(2, dtype=torch.bool)
    step = workflow.act(TimeStep(observation, torch.zeros(2), nothing, nothing, nothing), None, mode="eval")
    assert step.action.tolist() == [1, 0]
    assert step.extras == {}
