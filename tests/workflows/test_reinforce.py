"""REINFORCE: losses by hand, and padding that does not matter."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab import api
from rl_lab.components.heads.distributions import Categorical
from rl_lab.config.compose import compose
from rl_lab.experiment.build import build
from rl_lab.training.optimizer import Optimizer
from rl_lab.types import Batch, ConfigError, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.workflows.reinforce import Reinforce
from tests.doubles import batch_of, make_context

SCALES = {"policy": 1.0, "value": 0.5, "entropy": 0.01}
PHASE = Phase("train", collect_steps=8, duration_cycles=1)
LOG_HALF = math.log(0.5)


class Same(nn.Module):
    def forward(self, observation: Batch) -> Tensor:
        return observation["vector"]


class Logits(nn.Module):
    """The observation is the logits, less a number that can be learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Categorical:
        return Categorical(features + self.shift, mask)


class Value(nn.Module):
    """The observation's sum is the value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        return features.sum(-1) * self.scale


def make(*, has_critic: bool = True, **settings: Any) -> Reinforce:
    defaults = {"discount": 0.5, "standardize_targets": False, "loss_scales": SCALES}
    workflow = Reinforce(**{**defaults, **settings})
    controllers: dict[str, Any] = {"actor": Logits(), **({"critic": Value()} if has_critic else {})}
    optimizer = Optimizer(parameters=controllers, name="sgd", learning_rate=0.1)
    workflow.initialize(
        make_context(
            components={"encoder": Same()},
            controllers=controllers,
            optimizers={"controller": optimizer},
            collector=SimpleNamespace(restart=lambda: None),
        )
    )
    return workflow


def two_episodes(*, is_terminal: bool = True, more_padding: int = 0) -> Batch:
    """Episode 0: two actions, rewards 4 and 2. Episode 1: one action, reward 6, padded. Logits 0, values 1."""
    pad = more_padding
    return batch_of(
        vector=[[[0.5, 0.5]] * 3 + [[9.0, -9.0]] * pad, [[0.5, 0.5]] * 2 + [[9.0, -9.0]] * (1 + pad)],
        reward=[[0.0, 4.0, 2.0] + [0.0] * pad, [0.0, 6.0, 0.0] + [0.0] * pad],
        action=[[0, 1, 0] + [0] * pad, [1, 0, 0] + [0] * pad],
        is_first=[[1, 0, 0] + [0] * pad, [1, 0, 0] + [0] * pad],
        is_last=[[0, 0, 1] + [1] * pad, [0, 1, 1] + [1] * pad],
        is_terminal=[[0, 0, int(is_terminal)] + [1] * pad, [0, int(is_terminal), 1] + [1] * pad],
    )


def losses(workflow: Reinforce, batch: Batch) -> dict[str, float]:
    return {name: term.item() for name, term in workflow.loss(batch).terms.items()}


@pytest.mark.parametrize(
    ("settings", "targets"),
    [
        # reward to go, discount .5: 4 + .5*2 = 5 and 2 | 6; whole episode: 5 and 5 | 6; the baseline is 1 everywhere
        ({"target": "returns"}, [5.0, 2.0, 6.0]),
        ({"target": "advantages"}, [4.0, 1.0, 5.0]),
        ({"target": "returns", "returns": "whole_episode"}, [5.0, 5.0, 6.0]),
        ({"target": "advantages", "returns": "whole_episode"}, [4.0, 4.0, 5.0]),
    ],
)
def test_the_policy_loss_is_log_probability_times_target(settings: dict[str, Any], targets: list[float]) -> None:
    terms = losses(make(**settings), two_episodes())
    assert terms["policy"] == pytest.approx(-LOG_HALF * sum(targets) / 3)
    assert terms["entropy"] == pytest.approx(LOG_HALF)


def test_the_baseline_learns_the_returns() -> None:
    terms = losses(make(), two_episodes())
    assert terms["value"] == pytest.approx(((1 - 5) ** 2 + (1 - 2) ** 2 + (1 - 6) ** 2) / 3)


def test_a_time_limit_bootstraps_from_the_baseline() -> None:
    """Cut off, episode 0 is worth 4 + .5*(2 + .5*1) and 2 + .5*1; episode 1 is worth 6 + .5*1."""
    terms = losses(make(target="returns"), two_episodes(is_terminal=False))
    assert terms["policy"] == pytest.approx(-LOG_HALF * (5.25 + 2.5 + 6.5) / 3)


def test_a_baseline_in_lower_precision_does_not_round_the_discount(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = make(discount=0.99).loss(two_episodes()).terms
    forward = Value.forward
    monkeypatch.setattr(Value, "forward", lambda self, features: forward(self, features).bfloat16())
    rounded = make(discount=0.99).loss(two_episodes()).terms  # the values, 1, are the same in both
    assert {name: term.item() for name, term in rounded.items()} == {name: term.item() for name, term in exact.items()}


def test_without_a_critic_there_is_no_value_loss() -> None:
    workflow = make(has_critic=False, target="returns")
    terms = losses(workflow, two_episodes())
    assert terms.keys() == {"policy", "entropy"}
    assert terms["policy"] == pytest.approx(-LOG_HALF * 13.0 / 3)
    metrics = workflow.update_controller(two_episodes(), phase=PHASE)
    assert "loss/value" not in metrics


def test_standardised_targets_have_mean_zero_over_the_actions_that_count() -> None:
    """5, 2, 6 around 13/3; every log-probability is the same, so the loss vanishes."""
    terms = losses(make(target="returns", standardize_targets=True), two_episodes())
    assert terms["policy"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("returns", ["reward_to_go", "whole_episode"])
@pytest.mark.parametrize("standardize", [False, True])
def test_padding_does_not_matter(returns: str, standardize: bool) -> None:
    workflow = make(returns=returns, standardize_targets=standardize)
    assert losses(workflow, two_episodes(more_padding=5)) == pytest.approx(losses(workflow, two_episodes()))


def test_an_update_moves_the_policy_towards_what_was_worth_more() -> None:
    workflow = make(target="returns")
    metrics = workflow.update_controller(two_episodes(), phase=PHASE)
    # Action 0 earned 5, action 1 earned 2 and 6: dL/dlogit = -sum(target * (taken - 1/2)) / 3
    gradient = torch.tensor([-(5 * 0.5 - 2 * 0.5 - 6 * 0.5), -(-5 * 0.5 + 2 * 0.5 + 6 * 0.5)]) / 3
    torch.testing.assert_close(workflow.actor.shift.detach(), -0.1 * gradient)  # type: ignore[attr-defined]
    assert metrics["train/learning_rate"] == 0.1
    assert metrics["train/gradient_steps"] == 1
    assert metrics["train/grad_norm"] > 0


def test_the_policy_loss_does_not_teach_the_baseline() -> None:
    workflow = make(loss_scales={**SCALES, "value": 0.0, "entropy": 0.0})
    workflow.update_controller(two_episodes(), phase=PHASE)
    assert workflow.critic.scale.item() == 1.0  # type: ignore[union-attr]


def test_masks_reach_acting_and_learning() -> None:
    workflow = make()
    masked = {"vector": torch.zeros(4, 2), "action_mask": torch.tensor([[False, True]] * 4)}
    no = torch.zeros(4, dtype=torch.bool)
    for mode in ("train", "eval"):
        step = workflow.act(TimeStep(masked, torch.zeros(4), no, no, no), None, mode=mode)  # type: ignore[arg-type]
        assert step.action.tolist() == [1, 1, 1, 1]
    batch = two_episodes()
    batch["action_mask"] = torch.ones(2, 3, 2, dtype=torch.bool)
    batch["action_mask"][0, 0] = torch.tensor([True, False])  # the first action was the only one allowed
    assert losses(workflow, batch)["policy"] == pytest.approx(-LOG_HALF * (1.0 + 5.0) / 3)


def test_a_critic_encoder_serves_the_critic_alone() -> None:
    class Doubled(nn.Module):
        def forward(self, observation: Batch) -> Tensor:
            return observation["vector"] * 2

    workflow = make()
    workflow.critic_encoder = Doubled()
    assert losses(workflow, two_episodes())["value"] == pytest.approx(((2 - 5) ** 2 + 0 + (2 - 6) ** 2) / 3)


def test_advantages_need_a_baseline() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm\.target is 'advantages', which needs a baseline: add controllers"
    ):
        make(has_critic=False)


def test_a_misspelt_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss_scales\.polcy is no loss of REINFORCE\. Did you mean 'policy'"):
        Reinforce(loss_scales={"polcy": 1.0})


@pytest.mark.parametrize("running_episodes", ["finish", "discard"])
def test_every_row_was_acted_by_the_parameters_that_learn_from_it(
    running_episodes: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each row notes how many updates there had been when it was acted; a batch knows no other number than today's."""
    act, update, batches = Reinforce.act, Reinforce.update_controller, []

    def noting(self: Reinforce, time_step: TimeStep, state: Any, *, mode: Any) -> PolicyStep:
        step = act(self, time_step, state, mode=mode)
        return PolicyStep(step.action, step.state, {"updates": torch.full((time_step.num_envs,), len(batches))})

    def checking(self: Reinforce, batch: Batch, *, phase: Phase) -> Metrics:
        valid = ~batch["is_last"]
        assert set(batch["updates"][valid].tolist()) == {len(batches)}
        assert bool(batch["is_first"][:, 0].all()), "whole episodes"
        batches.append(len(batch["reward"]))
        return update(self, batch, phase=phase)

    monkeypatch.setattr(Reinforce, "act", noting)
    monkeypatch.setattr(Reinforce, "update_controller", checking)
    words = [f"buffers.episodes.running_episodes={running_episodes}", "training.phases.train.duration_steps=4000"]
    api.train("reinforce_cartpole", overrides=[*words, "evaluation.final_episodes=0"], runs_dir=tmp_path, quiet=True)
    assert len(batches) > 5
    if running_episodes == "finish":
        assert set(batches) == {8}, "one episode of each of 8 environments"


def test_observations_are_normalised_by_what_was_learnt_from() -> None:
    words = ["components.observation_normalizer.mode=rolling", "training.phases.train.duration_updates=2"]
    quick = ["training.phases.train.duration_steps=null", "evaluation.final_episodes=0"]
    trained = build(compose("reinforce_cartpole", [*words, *quick]), run=None, quiet=True)
    try:
        trained.orchestrator.run()
        workflow: Any = trained.agent.workflow
        moments = workflow.observation_normalizer.scales[0].moments
        assert 0 < float(moments.count) <= trained.housekeeping.counts.agent_steps, "each row once, padding not at all"
    finally:
        trained.close()
