"""PPO's whole update, with real parts: what it reads, what it changes, what it reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.buffers.rollout import RolloutBuffer
from rl_lab.collection.collector import Collector
from rl_lab.components.heads.actor_critic import Actor, Critic
from rl_lab.components.networks.encoders import ObservationEncoder
from rl_lab.components.networks.memory import GRUMemory, LSTMMemory
from rl_lab.components.networks.normalizers import ObservationNormalizer, RewardNormalizer
from rl_lab.environments.factory import make_environment
from rl_lab.training.optimizer import Optimizer
from rl_lab.types import Batch, ConfigError, EnvSpec, Phase, Progress
from rl_lab.utils.timing import Stopwatch
from rl_lab.workflows import ppo
from rl_lab.workflows.ppo import PPO
from tests.doubles import CPU, make_context

SCALES = {"policy": 1.0, "value": 0.5, "entropy": 0.0}
PHASE = Phase("train", collect_steps=8, duration_cycles=1)


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


def assert_evaluated_as_acted(workflow: PPO, collector: Collector, *, steps: int) -> Batch:
    """One pass over a rollout gives what acting row by row would have written down."""
    watched = workflow.actor = Watched(workflow.actor)  # type: ignore[arg-type]
    batch = collect(workflow, collector, steps=steps)
    acted = list(watched.given)
    with torch.no_grad():
        log_prob, value = workflow.evaluate_actions(batch)
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
    samples, _ = workflow.prepare(assert_evaluated_as_acted(workflow, collector, steps=32))
    metrics = workflow.loss(samples, clip_range=0.2, value_clip_range=None).metrics
    assert metrics["controller/clip_fraction"] == 0.0
    assert abs(float(metrics["controller/approx_kl"])) < 1e-6


@pytest.mark.parametrize("memory", [GRUMemory, LSTMMemory])
def test_memory_reproduces_what_it_answered_while_acting(memory: Any) -> None:
    """Across episode ends and from a state that began rollouts ago."""
    workflow, collector = make("rl_lab/Recall-v0", memory=memory)
    collect(workflow, collector, steps=7)
    batch = assert_evaluated_as_acted(workflow, collector, steps=33)
    assert bool(batch["is_first"][:, 1:].any())
    assert float(batch["memory_state"][:, 0].abs().sum()) > 0.0, "the rollout begins in mid-episode"
    samples, _ = workflow.prepare(batch)
    for part in workflow.minibatches(samples):
        assert part["advantage"].shape == (2, 33)
        policy, value = workflow.policy_and_value(part)
        torch.testing.assert_close(policy.log_prob(part["action"]), part["log_prob"], rtol=0.0, atol=2e-6)
        torch.testing.assert_close(value, part["value"], rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("memory", [GRUMemory, LSTMMemory])
def test_shorter_sequences_begin_with_the_memory_that_acted_their_first_row(memory: Any) -> None:
    workflow, collector = make("rl_lab/Recall-v0", memory=memory)
    workflow.sequence_length = 4
    batch = collect(workflow, collector, steps=12)
    samples, _ = workflow.prepare(batch)
    assert samples["advantage"].shape == (len(batch["reward"]) * 3, 4)
    assert torch.equal(samples["action"][1], batch["action"][0, 4:8]), "the second of environment 0"
    policy, value = workflow.policy_and_value(samples)
    torch.testing.assert_close(policy.log_prob(samples["action"]), samples["log_prob"], rtol=0.0, atol=2e-6)
    torch.testing.assert_close(value, samples["value"], rtol=0.0, atol=2e-6)
    assert workflow.update_controller(batch, phase=PHASE)


@pytest.mark.parametrize("length", [0, 5])
def test_a_sequence_length_that_does_not_fit_is_refused(length: int) -> None:
    workflow, _ = make("rl_lab/Recall-v0", memory=GRUMemory)
    workflow.sequence_length = length
    message = f"sequence_length is {length}: write a divisor of the 32 collect_steps of phase 'train', or null"
    with pytest.raises(ConfigError, match=message):
        workflow.check_phase(Phase("train", collect_steps=32, duration_cycles=1))


@pytest.mark.parametrize("memory", [None, GRUMemory])
def test_the_pending_row_is_evaluated_as_the_first_of_the_next_rollout(memory: Any) -> None:
    workflow, collector = make("rl_lab/Recall-v0", memory=memory)
    with torch.no_grad():
        pending = workflow.evaluate_actions(collect(workflow, collector))[1][:, -1]
        following = workflow.evaluate_actions(collect(workflow, collector, steps=1))[1][:, 0]
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
def test_a_large_rollout_is_evaluated_in_parts(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workflow, collector = make("rl_lab/Recall-v0", memory=memory)
    batch = collect(workflow, collector)
    with torch.no_grad():
        whole = workflow.evaluate_actions(batch)
        monkeypatch.setattr(ppo, "ROWS_AT_ONCE", 70)  # 33 rows of each of 4 environments: two at a time
        parts = workflow.evaluate_actions(batch)
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


def test_parts_of_gradient_steps_are_reported_too() -> None:
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
    apply, update = workflow.optimizer.apply, normalizer.update
    workflow.optimizer.apply = lambda *a, **k: events.append("learn") or apply(*a, **k)  # type: ignore[func-returns-value]
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


def test_the_same_seed_learns_the_same_to_the_bit() -> None:
    states = []
    for _ in range(2):
        workflow, collector = make(seed=3)
        for _ in range(2):
            workflow.update_controller(collect(workflow, collector), phase=PHASE)
        states.append(state_of(workflow.actor))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_memory_leaves_no_place_for_a_critic_encoder() -> None:
    with pytest.raises(
        ConfigError, match=r"both a memory and a critic_encoder.*Write `components.critic_encoder: null`"
    ):
        make(memory=GRUMemory, separate=True)
