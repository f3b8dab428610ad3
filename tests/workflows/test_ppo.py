"""PPO: advantages by hand, the clipped surrogate by hand, and what one update does to its parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.buffers.rollout import RolloutBuffer
from rl_lab.collection.collector import Collector
from rl_lab.components.controllers import Actor, Critic
from rl_lab.components.distributions import Categorical
from rl_lab.components.encoders import ObservationEncoder
from rl_lab.components.memory import GRUMemory, LSTMMemory
from rl_lab.components.normalizers import ObservationNormalizer, RewardNormalizer
from rl_lab.environments.factory import make_environment
from rl_lab.training.optimizer import Optimizer
from rl_lab.types import Batch, ConfigError, EnvSpec, LossOutput, Phase, Progress, TimeStep
from rl_lab.utils.timing import Stopwatch
from rl_lab.workflows import ppo
from rl_lab.workflows.ppo import PPO
from tests.doubles import CPU, SPEC, batch_of, make_context

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

    def step(self, loss: Tensor, progress: Progress) -> dict[str, Any]:
        self.losses.append(float(loss.detach()))
        return {"learning_rate": 0.0, "grad_norm": torch.tensor(0.0)}


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


# --- the whole update, with real parts ---------------------------------------------------------


def make(
    environment_id: str = "CartPole-v1",
    *,
    memory: Callable[..., nn.Module] | None = None,
    separate: bool = False,
    normalize: str = "off",
    learning_rate: float = 3e-3,
    seed: int = 0,
    accumulate: int = 1,
    precision: str = "fp32",
    **settings: Any,
) -> tuple[PPO, Collector]:
    """PPO on real environments with small real parts."""
    environment = make_environment(id=environment_id, num_envs=4, vectorization="sync", seed=seed)
    spec: EnvSpec = environment.spec
    torch.manual_seed(seed)
    encoder = ObservationEncoder(observation=spec.observation, hidden_sizes=(16,))
    components: dict[str, Any] = {
        "encoder": encoder,
        "observation_normalizer": ObservationNormalizer(observation=spec.observation, mode=normalize),
        "reward_normalizer": RewardNormalizer(num_envs=4),
    }
    size = encoder.output_size
    if memory is not None:
        components["memory"] = memory(input_size=size, hidden_size=8)
        size = 8
    if separate:
        components["critic_encoder"] = ObservationEncoder(observation=spec.observation, hidden_sizes=(16,))
    controllers = {
        "actor": Actor(input_size=size, action=spec.action, output_gain=1.0),
        "critic": Critic(input_size=size),
    }
    parts = {**components, **controllers}
    optimizer = Optimizer(parameters=parts, learning_rate=learning_rate, accumulate=accumulate) if parts else None
    workflow = PPO(**{"epochs": 2, "minibatch_size": 0.5, "loss_scales": SCALES, **settings})
    workflow.initialize(
        make_context(
            components=components,
            controllers=controllers,
            optimizers={"controller": optimizer},
            spec=spec,
            num_envs=4,
            precision=precision,
        )
    )
    buffers = {"rollout": RolloutBuffer(capacity_steps=64)}
    return workflow, Collector(environment, buffers, device=CPU, stopwatch=Stopwatch())


def collect(workflow: PPO, collector: Collector, *, steps: int = 32) -> Batch:
    collector.collect(workflow.act, phase=Phase("train", collect_steps=steps, duration_cycles=1))
    return collector.buffers["rollout"].sample()  # type: ignore[attr-defined]


def state_of(module: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(module: Any, before: dict[str, Tensor]) -> bool:
    return any(not torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Watched(nn.Module):
    """An actor that remembers the distributions it gave and the features it gave them for."""

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor
        self.given: list[tuple[Tensor, Any]] = []

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Any:
        self.given.append((features, self.actor(features, mask)))
        return self.given[-1][1]


def assert_judged_as_acted(workflow: PPO, collector: Collector, *, steps: int) -> Batch:
    """One pass over a rollout gives what acting row by row would have written down."""
    watched = workflow.actor = Watched(workflow.actor)  # type: ignore[arg-type]
    batch = collect(workflow, collector, steps=steps)
    acted = list(watched.given)
    with torch.no_grad():
        log_prob, value = workflow.judge(batch)
        for time, (features, distribution) in enumerate(acted):
            # One row and all rows take different paths through a matrix product: the last bits may differ.
            expected = distribution.log_prob(batch["action"][:, time])
            torch.testing.assert_close(log_prob[:, time], expected, rtol=0.0, atol=2e-6)
            row = {key: rows[:, time] for key, rows in workflow.observation_normalizer(batch).items()}
            read = features if workflow.critic_encoder is None else workflow.critic_encoder(row)
            expected = workflow.critic(read)
            torch.testing.assert_close(value[:, time], expected, rtol=0.0, atol=2e-6)
    assert len(acted) == steps
    return batch


@pytest.mark.parametrize(
    "environment_id", ["CartPole-v1", "Pendulum-v1", "rl_lab/MultiTarget-v0", "rl_lab/MaskedChain-v0"]
)
@pytest.mark.parametrize("separate", [False, True])
def test_before_the_first_gradient_step_the_policy_is_the_one_that_acted(environment_id: str, separate: bool) -> None:
    """Every ratio is 1: what is learnt from is what was done, for every kind of action and with masks."""
    workflow, collector = make(environment_id, separate=separate, normalize="rolling")
    workflow.update_controller(collect(workflow, collector), phase=PHASE)
    samples, _ = workflow.prepare(assert_judged_as_acted(workflow, collector, steps=32))
    metrics = workflow.loss(samples, clip_range=0.2, value_clip_range=None).metrics
    assert metrics["controller/clip_fraction"] == 0.0
    assert abs(float(metrics["controller/approx_kl"])) < 1e-6


@pytest.mark.parametrize("memory", [GRUMemory, LSTMMemory])
def test_memory_reproduces_what_it_answered_while_acting(memory: Any) -> None:
    """Across episode ends and from a state that began rollouts ago."""
    workflow, collector = make("rl_lab/Recall-v0", memory=memory)
    collect(workflow, collector, steps=7)
    batch = assert_judged_as_acted(workflow, collector, steps=33)
    assert bool(batch["is_first"][:, 1:].any())
    assert float(batch["memory_state"][:, 0].abs().sum()) > 0.0, "the rollout begins in mid-episode"
    samples, _ = workflow.prepare(batch)
    for part in workflow.minibatches(samples):
        assert part["advantage"].shape == (2, 33)
        policy, value = workflow.policy_and_value(part)
        torch.testing.assert_close(policy.log_prob(part["action"]), part["log_prob"], rtol=0.0, atol=2e-6)
        torch.testing.assert_close(value, part["value"], rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("memory", [None, GRUMemory])
def test_the_pending_row_is_judged_as_the_first_of_the_next_rollout(memory: Any) -> None:
    workflow, collector = make("rl_lab/Recall-v0", memory=memory)
    with torch.no_grad():
        pending = workflow.judge(collect(workflow, collector))[1][:, -1]
        following = workflow.judge(collect(workflow, collector, steps=1))[1][:, 0]
    torch.testing.assert_close(pending, following, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("memory", [None, GRUMemory])
def test_in_lower_precision_every_ratio_begins_at_one_too(memory: Any) -> None:
    """Judged in another precision than learnt, the policy would seem to have moved before it did."""
    workflow, collector = make("CartPole-v1", memory=memory, precision="bf16")
    samples, _ = workflow.prepare(collect(workflow, collector))
    with workflow.context.runtime.autocast():
        policy, _ = workflow.policy_and_value(samples)
    torch.testing.assert_close(policy.log_prob(samples["action"]), samples["log_prob"], rtol=0.0, atol=2e-6)
    assert samples["value"].dtype == torch.float32


@pytest.mark.parametrize("memory", [None, GRUMemory])
def test_a_large_rollout_is_judged_in_parts(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workflow, collector = make("rl_lab/Recall-v0", memory=memory)
    batch = collect(workflow, collector)
    with torch.no_grad():
        whole = workflow.judge(batch)
        monkeypatch.setattr(ppo, "ROWS_AT_ONCE", 70)  # 33 rows of each of 4 environments: two at a time
        parts = workflow.judge(batch)
    for left, right in zip(whole, parts, strict=True):
        torch.testing.assert_close(left, right, rtol=0.0, atol=2e-6)


def test_an_update_reports_what_it_did() -> None:
    workflow, collector = make(epochs=3, minibatch_size=0.25, clip_range=0.1)
    metrics = workflow.update_controller(collect(workflow, collector), phase=PHASE)
    assert metrics["train/epochs_done"] == 3
    assert metrics["train/gradient_steps"] == 12
    assert metrics["train/clip_range"] == 0.1
    assert {"loss/policy", "loss/value", "loss/entropy", "train/grad_norm", "train/learning_rate"} <= metrics.keys()
    assert all(not isinstance(value, Tensor) or not value.requires_grad for value in metrics.values())


def test_shares_of_gradient_steps_are_reported_too() -> None:
    """With accumulate 2 and three minibatches, gradient norms come with every other loss only."""
    workflow, collector = make(epochs=3, minibatch_size=1 / 3, accumulate=2)
    metrics = workflow.update_controller(collect(workflow, collector), phase=PHASE)
    assert math.isfinite(float(metrics["train/grad_norm"]))


def test_schedules_are_asked_at_the_progress_of_the_phase() -> None:
    from rl_lab.training.schedules import Schedule

    workflow, collector = make(clip_range=Schedule("linear", 0.2, 0.0), value_clip_range=Schedule("linear", 1.0, 0.5))
    halfway = Phase("train", collect_steps=8, duration_cycles=1, progress=Progress(fraction=0.5))
    assert workflow.update_controller(collect(workflow, collector), phase=halfway)["train/clip_range"] == 0.1


def test_a_policy_that_moved_too_far_ends_its_epochs_early() -> None:
    eager, collector = make(epochs=10, target_kl=1e-6, learning_rate=0.1)
    assert eager.update_controller(collect(eager, collector), phase=PHASE)["train/epochs_done"] == 1
    calm, collector = make(epochs=10, target_kl=1e6)
    assert calm.update_controller(collect(calm, collector), phase=PHASE)["train/epochs_done"] == 10


def test_observations_are_counted_after_learning_and_each_once() -> None:
    workflow, collector = make(normalize="rolling")
    normalizer = workflow.observation_normalizer
    events: list[str] = []
    step, update = workflow.optimizer.step, normalizer.update
    workflow.optimizer.step = lambda *a, **k: events.append("learn") or step(*a, **k)  # type: ignore[func-returns-value]
    normalizer.update = lambda rows: events.append(f"count {rows['vector'].shape[1]}") or update(rows)  # type: ignore[func-returns-value]
    batch = collect(workflow, collector, steps=20)
    workflow.update_controller(batch, phase=PHASE)
    assert events == ["learn"] * 4 + ["count 20"], "not 21: the pending row is counted with the next rollout"
    mean = batch["vector"][:, :-1].flatten(0, 1).mean(dim=0)
    torch.testing.assert_close(normalizer.scales[0].center, mean)


def test_rewards_of_row_zero_were_counted_with_the_rollout_before() -> None:
    workflow, collector = make()
    seen: list[tuple[Tensor, Tensor]] = []
    workflow.reward_normalizer.update = lambda reward, is_first: seen.append((reward, is_first))
    batch = collect(workflow, collector, steps=20)
    batch["reward"][:, 0] = 7.0
    workflow.prepare(batch)
    [(reward, is_first)] = seen
    assert torch.equal(reward, batch["reward"][:, 1:])
    assert torch.equal(is_first, batch["is_first"][:, 1:])


def test_a_frozen_encoder_stays_as_it_is_while_the_rest_learns() -> None:
    workflow, collector = make(separate=True)
    workflow.enter_phase(Phase("train", collect_steps=8, duration_cycles=1, freeze=("encoder",)))
    encoder, actor, critic = workflow.encoder, workflow.actor, workflow.critic
    before = [state_of(part) for part in (encoder, actor, critic)]
    workflow.update_controller(collect(workflow, collector), phase=PHASE)
    assert [changed(part, was) for part, was in zip((encoder, actor, critic), before, strict=True)] == [
        False,
        True,
        True,
    ]
    workflow.enter_phase(PHASE)
    workflow.update_controller(collect(workflow, collector), phase=PHASE)
    assert changed(encoder, before[0])


def test_masked_actions_are_never_taken_nor_learnt() -> None:
    """The environment raises on a forbidden action, which would count as a restart."""
    workflow, collector = make("rl_lab/MaskedChain-v0")
    for _ in range(3):
        batch = collect(workflow, collector)
        allowed = batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        assert bool(allowed[:, :-1].all())
        workflow.update_controller(batch, phase=PHASE)
    assert collector.restarts == 0


def test_evaluation_takes_the_likeliest_action_and_keeps_nothing() -> None:
    workflow = by_hand()
    observation = {"vector": torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])}
    nothing = torch.zeros(2, dtype=torch.bool)
    step = workflow.act(TimeStep(observation, torch.zeros(2), nothing, nothing, nothing), None, mode="eval")
    assert step.action.tolist() == [1, 0]
    assert step.extras == {}


def test_the_same_seed_learns_the_same_to_the_bit() -> None:
    states = []
    for _ in range(2):
        workflow, collector = make(seed=3)
        for _ in range(2):
            workflow.update_controller(collect(workflow, collector), phase=PHASE)
        states.append(state_of(workflow.actor))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


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


def test_a_memory_leaves_no_place_for_a_critic_encoder() -> None:
    with pytest.raises(
        ConfigError, match=r"both a memory and a critic_encoder.*Write `components.critic_encoder: null`"
    ):
        make(memory=GRUMemory, separate=True)


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
