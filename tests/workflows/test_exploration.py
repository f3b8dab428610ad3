"""Exploring: who acts while collecting, disagreement by hand, and who learns from what with Plan2Explore."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.components.world_model.exploration import Disagreement, UniformActor
from rl_lab.config.compose import compose
from rl_lab.experiment.build import Agent, build, build_agent, build_runtime
from rl_lab.metrics.names import meaning_of
from rl_lab.types import ActionSpec, ArraySpec, ConfigError, Counts, EnvSpec, Phase, Progress, TimeStep
from rl_lab.workflows.dreamer import Dreamer
from rl_lab.workflows.exploration import mixed
from tests.tiny_dreamer import TINY_PARTS, random_rows

VECTOR = {"vector": ArraySpec((3,), "float32")}
DISCRETE, CONTINUOUS = ActionSpec("discrete", (3,)), ActionSpec("continuous", (2,))
MULTI = ActionSpec("multi_discrete", (2, 3))
MODES = ("greedy", "epsilon", "random", "plan2explore")
MODEL = ("encoder", "dynamics", "decoder", "reward_head", "continue_head")
EXPLORER = ("disagreement", "explorer", "explorer_critic")
PHASE = Phase(name="train", buffer="replay", progress=Progress(run=Counts(updates=1)))


@cache
def config_of(mode: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    words = [*TINY_PARTS, "algorithm.horizon=4", "components.dynamics.deter=16", "optimizers.agent.learning_rate=1e-3"]
    curious = ["components.disagreement.networks=3", "optimizers.exploration.learning_rate=1e-3"]
    own = curious if mode == "plan2explore" else []
    return compose("rl_lab/Counter-v0:dreamer", [f"exploration={mode}", *words, *own, *overrides])


def make(
    mode: str = "plan2explore",
    action: ActionSpec = DISCRETE,
    *overrides: str,
    observation: dict[str, ArraySpec] = VECTOR,
) -> tuple[Dreamer, Agent]:
    config = config_of(mode, overrides)
    agent = build_agent(config, EnvSpec("none", observation, action), runtime=build_runtime(config))
    assert isinstance(agent.workflow, Dreamer)
    return agent.workflow, agent


def parts(agent: Agent) -> dict[str, nn.Module]:
    both = {**agent.components, **agent.controllers}
    return {name: both[name] for name in (*MODEL, "actor", "critic", *EXPLORER) if name in both}


def copies(agent: Agent) -> dict[str, list[Tensor]]:
    return {name: [each.detach().clone() for each in part.parameters()] for name, part in parts(agent).items()}


def changed(agent: Agent, before: dict[str, list[Tensor]]) -> set[str]:
    now = copies(agent)
    return {name for name in now if any(not torch.equal(a, b) for a, b in zip(before[name], now[name], strict=True))}


def rows_seen(count: int) -> TimeStep:
    nothing = torch.zeros(count, dtype=torch.bool)
    observation = {"vector": torch.zeros(count, 3)}
    return TimeStep(observation, torch.zeros(count), torch.ones(count, dtype=torch.bool), nothing, nothing)


# --- who acts -----------------------------------------------------------------------------------


class Always(nn.Module):
    """An actor that has made up its mind."""

    def __init__(self, choice: int) -> None:
        super().__init__()
        self.choice = choice

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Any:
        logits = torch.full((len(features), 3), -100.0)
        logits[:, self.choice] = 100.0
        return torch.distributions.Categorical(logits=logits)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_lets_act_whom_it_says_and_evaluations_follow_the_task(mode: str) -> None:
    workflow, _ = make(mode)
    workflow.actor = Always(0)  # type: ignore[assignment]
    if mode == "plan2explore":
        workflow.explorer = Always(2)
    torch.manual_seed(0)
    train = torch.bincount(workflow.act(rows_seen(3000), None, mode="train").action, minlength=3) / 3000
    expected = {"greedy": [1, 0, 0], "epsilon": [0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3], "random": [1 / 3] * 3}
    torch.testing.assert_close(
        train, torch.tensor(expected.get(mode, [0, 0, 1]), dtype=torch.float32), atol=0.03, rtol=0
    )
    workflow.sample_in_evaluations = True
    assert workflow.act(rows_seen(50), None, mode="eval").action.tolist() == [0] * 50


def test_a_phase_may_hand_acting_back_to_the_task() -> None:
    workflow, _ = make("plan2explore")
    workflow.actor, workflow.explorer = Always(0), Always(2)  # type: ignore[assignment]
    workflow.explorer_fraction = 0.0  # as `set: {algorithm.explorer_fraction: 0.0}` does
    assert workflow.act(rows_seen(20), None, mode="train").action.tolist() == [0] * 20


@pytest.mark.parametrize("action", [DISCRETE, MULTI, CONTINUOUS], ids=lambda spec: spec.kind)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_acts_and_learns_with_every_kind_of_action(mode: str, action: ActionSpec) -> None:
    workflow, _ = make(mode, action)
    answer = workflow.act(rows_seen(3), None, mode="train")
    assert answer.action.shape == (3, *action.shape) and str(answer.action.dtype) == f"torch.{action.dtype}"
    metrics = workflow.update(random_rows(VECTOR, action), phase=PHASE)
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in metrics.values())
    undocumented = [name for name in metrics if meaning_of(name) is None]
    assert not undocumented
    names = {name.removeprefix("loss/") for name in metrics if name.startswith("loss/")}
    assert names == set(workflow.loss_scales)


def test_uniform_actions_obey_masks_and_fill_the_range() -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[True, False, True]]).expand(400, -1)
    drawn = UniformActor(action=DISCRETE)(torch.zeros(400, 5), mask).sample()
    assert set(drawn.tolist()) == {0, 2}
    numbers = UniformActor(action=CONTINUOUS)(torch.zeros(400, 5)).sample()
    assert numbers.shape == (400, 2) and -1.0 <= float(numbers.min()) < -0.9 and 0.9 < float(numbers.max()) <= 1.0


def test_of_two_actions_theirs_is_taken_by_its_fraction_environment_by_environment() -> None:
    theirs, ours = torch.ones(2000, 2), torch.zeros(2000, 2)
    torch.manual_seed(0)
    for fraction in (0.0, 0.25, 1.0):
        taken = mixed(theirs, ours, fraction)
        assert torch.equal(taken[:, 0], taken[:, 1])  # whole actions
        assert float(taken.mean()) == pytest.approx(fraction, abs=0.03)


# --- disagreement, by hand ----------------------------------------------------------------------


def double(networks: int = 3) -> Disagreement:
    """Three features, one continuous action and embeddings of two numbers."""
    torch.manual_seed(1)
    one = ActionSpec("continuous", (1,))
    return Disagreement(
        input_size=3, action=one, target_size=2, networks=networks, hidden_sizes=(4,), norm="none"
    ).double()


def by_hand(part: Disagreement, inputs: Tensor) -> list[Tensor]:
    """The prediction of each network `[Z]` for one row."""
    (first, last), (first_bias, last_bias) = part.ensemble.weights, part.ensemble.biases
    found = []
    for k in range(part.ensemble.size):
        hidden = first[k] @ inputs + first_bias[k, 0]
        found.append(last[k] @ (hidden * torch.sigmoid(hidden)) + last_bias[k, 0])
    return found


def test_the_reward_is_the_variance_over_the_ensemble_meant_over_the_embedding() -> None:
    part = double()
    features, action = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 4, 1, dtype=torch.float64)
    part.predictions = lambda f, a: part.ensemble(f.flatten(0, 1), a.flatten(0, 1)).unflatten(1, f.shape[:2])  # type: ignore[method-assign]
    reward = part(features, action).detach()
    for b in range(2):
        for t in range(4):
            predicted = torch.stack(by_hand(part, torch.cat((features[b, t], action[b, t]))))  # [K, Z]
            mean = predicted.sum(0) / 3
            variance = ((predicted - mean) ** 2).sum(0) / 3
            assert float(reward[b, t]) == pytest.approx(float(variance.detach().sum() / 2), rel=1e-12)


def test_the_ensemble_predicts_the_next_embedding_and_nothing_across_an_end() -> None:
    part = double(2)
    features, action = torch.randn(1, 3, 3, dtype=torch.float64), torch.randn(1, 3, 1, dtype=torch.float64)
    is_last, embedding = torch.tensor([[False, True, False]]), torch.randn(1, 3, 2, dtype=torch.float64)
    expected = 0.0
    for predicted in by_hand(part, torch.cat((features[0, 0], action[0, 0]))):
        expected += 0.5 * float((predicted - embedding[0, 1]).detach().square().sum())
    assert float(part.loss(features, action, embedding, is_last).detach()) == pytest.approx(expected, rel=1e-5)
    features.requires_grad_()
    embedding.requires_grad_()
    part.loss(features, action, embedding, is_last).backward()
    assert features.grad is None and embedding.grad is None and all(each.grad is not None for each in part.parameters())


def test_a_known_transition_earns_less_than_an_unknown_one() -> None:
    torch.manual_seed(0)
    part = Disagreement(input_size=3, action=DISCRETE, target_size=2, networks=5, hidden_sizes=(32,))
    known, unknown = torch.zeros(1, 2, 3), torch.ones(1, 1, 3)
    action = torch.nn.functional.one_hot(torch.tensor([[0, 0]]), 3).float()
    optimizer = torch.optim.Adam(part.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        part.loss(known, action, torch.ones(1, 2, 2), torch.zeros(1, 2, dtype=torch.bool)).backward()
        optimizer.step()
    assert float(part(known[:, :1], action[:, :1])) < 0.05 * float(part(unknown, action[:, :1]))


@pytest.mark.parametrize("has_context", [False, True])
def test_the_ensemble_reads_the_action_that_answers_a_row_and_predicts_what_the_next_row_showed(
    has_context: bool,
) -> None:
    """Row 0 with a context only tells where the model stood; actions must not move against states with it."""
    workflow, _ = make()
    assert workflow.plan2explore is not None
    batch = random_rows(VECTOR, DISCRETE)
    if has_context:
        blank = workflow.dynamics.initial_state(3, torch.device("cpu"))
        blank = {key: value.unsqueeze(1).expand(3, 7, *value.shape[1:]) for key, value in blank.items()}
        batch |= workflow.dynamics.pack(blank)
    with torch.no_grad():
        rows, before = workflow.dynamics.begin(batch)
        state, _ = workflow.observe_rows(rows, before)
        seen: list[Tensor] = []
        predictions = workflow.plan2explore.disagreement.predictions

        def noted(*inputs: Tensor) -> Tensor:
            seen.extend(inputs)
            return predictions(*inputs)

        workflow.plan2explore.disagreement.predictions = noted
        found = workflow.plan2explore.ensemble_loss(rows, state).terms["disagreement"]
        begin = int(has_context)
        shown = {"vector": batch["vector"][:, begin:]}
        features, action = workflow.dynamics.features(state), batch["action"][:, begin:]
        torch.testing.assert_close(seen[0], features[:, :-1])
        assert torch.equal(seen[1].argmax(-1), action[:, :-1])
        error = (predictions(*seen) - workflow.encoder(shown)[:, 1:]).square().sum(-1).sum(0) / 2.0
        valid = ~batch["is_last"][:, begin:-1]
        torch.testing.assert_close(found, error[valid].mean())


def test_a_dreams_reward_arrives_one_step_after_the_action_that_earned_it() -> None:
    workflow, agent = make()
    assert workflow.plan2explore is not None
    features, action = torch.randn(2, 5, 32), torch.randint(0, 3, (2, 4))
    agent.components["disagreement_scale"].decay = 1.0  # nothing is scaled but by the smallest scale
    reward = workflow.plan2explore.reward(features, action)
    expected = agent.components["disagreement"](features[:, :-1], workflow.dynamics.encode_action(action))
    assert reward.shape == (2, 5) and not reward[:, 0].any()
    torch.testing.assert_close(reward[:, 1:], expected / 1e-6)


def test_the_first_dreams_rewards_are_already_in_ranges_of_disagreement() -> None:
    workflow, agent = make()
    assert workflow.plan2explore is not None
    features, action = torch.randn(6, 9, 32), torch.randint(0, 3, (6, 8))
    reward = workflow.plan2explore.reward(features, action)[:, 1:]
    found = agent.components["disagreement"](features[:, :-1], workflow.dynamics.encode_action(action))
    low, high = (torch.quantile(found, fraction) for fraction in (0.05, 0.95))
    torch.testing.assert_close(reward, found / (high - low))


# --- who learns from what -----------------------------------------------------------------------


def test_each_hook_teaches_its_own_parts_and_no_others() -> None:
    workflow, agent = make()
    for hook, learns in {
        "update_world_model": {*MODEL},
        "update_explorer": {*EXPLORER},
        "update_controller": {"actor", "critic", *EXPLORER},
        "update": {*MODEL, "actor", "critic", *EXPLORER},
    }.items():
        before = copies(agent)
        getattr(workflow, hook)(random_rows(VECTOR, DISCRETE), phase=PHASE)
        assert changed(agent, before) == learns, hook
    workflow.explorer_fraction = 0.0  # an explorer that does not act is not taught by the task's hooks
    before = copies(agent)
    metrics = workflow.update(random_rows(VECTOR, DISCRETE), phase=PHASE)
    assert changed(agent, before) == {*MODEL, "actor", "critic"} and "loss/disagreement" not in metrics


@pytest.mark.parametrize("gradient", ["reinforce", "dynamics"])
def test_no_gradient_of_the_explorer_reaches_the_model_or_the_task(gradient: str) -> None:
    config = compose(
        "dreamer_v2",
        [
            *("exploration=plan2explore", f"algorithm.policy_gradient={gradient}", "algorithm.horizon=3"),
            *(f"components.{part}.units=16" for part in ("encoder", "decoder", "reward_head", "continue_head")),
            *("controllers.actor.units=16", "controllers.critic.units=16", "components.dynamics.deter=16"),
        ],
    )
    agent = build_agent(config, EnvSpec("none", VECTOR, CONTINUOUS), runtime=build_runtime(config))
    workflow: Any = agent.workflow
    rows, before = workflow.dynamics.begin(random_rows(VECTOR, CONTINUOUS))
    state, _ = workflow.observe_rows(rows, before)
    explorer = workflow.behaviour_loss(workflow.plan2explore.behaviour, state)
    terms = {**explorer.terms, **workflow.plan2explore.ensemble_loss(rows, state).terms}
    reached = {
        name: {
            part
            for part, module in parts(agent).items()
            if any(
                gradient is not None
                for gradient in torch.autograd.grad(
                    term, list(module.parameters()), retain_graph=True, allow_unused=True
                )
            )
        }
        for name, term in terms.items()
    }
    assert reached == {
        "explorer_policy": {"explorer"},
        "explorer_entropy": {"explorer"},
        "explorer_value": {"explorer_critic"},
        "disagreement": {"disagreement"},
    }


def test_the_task_never_sees_the_explorers_reward_nor_the_explorer_the_tasks() -> None:
    workflow, _ = make()
    assert workflow.plan2explore is not None
    rows, before = workflow.dynamics.begin(random_rows(VECTOR, DISCRETE))
    with torch.no_grad():
        state, _ = workflow.observe_rows(rows, before)

    def dreamt(behaviour: Any) -> Tensor:
        torch.manual_seed(0)
        return workflow.behaviour_loss(behaviour, state).aux["return"]

    def rewarded(behaviour: Any) -> Any:
        return replace(behaviour, reward=lambda features, action: behaviour.reward(features, action) + 100.0)

    task, explorer = workflow.task, workflow.plan2explore.behaviour
    assert task.reward(torch.zeros(1, 3, 32), torch.zeros(1, 2)).abs().max() == 0.0  # the reward head's, at its start
    own = dreamt(task)
    workflow.plan2explore.behaviour = rewarded(explorer)
    assert torch.equal(dreamt(workflow.task), own) and dreamt(rewarded(task)).min() > own.max() + 50.0
    workflow.reward_head = lambda features: pytest.fail("the explorer asked for the task's reward")  # type: ignore[assignment]
    assert torch.isfinite(dreamt(explorer)).all()


def test_both_slow_critics_follow_at_the_pace_that_a_phase_sets() -> None:
    workflow, _ = make("plan2explore", DISCRETE, "algorithm.slow_critic_rate=0.5")
    assert workflow.plan2explore is not None
    workflow.slow_critic.rate = 1.0
    workflow.update(random_rows(VECTOR, DISCRETE), phase=PHASE)
    slow = workflow.plan2explore.slow_critic.module.state_dict()
    for name, value in workflow.plan2explore.critic.state_dict().items():
        assert torch.equal(value, slow[name]), name


@pytest.mark.parametrize(
    ("experiment", "override", "rate"),
    [
        ("dreamer_v3_cartpole", "optimizers.agent.learning_rate=2e-4", 2e-4),
        ("dreamer_v2", "optimizers.actor.learning_rate=2e-4", 2e-4),  # an optimiser each
        ("dreamer_v3_cartpole", "optimizers.exploration.learning_rate=5e-4", 5e-4),
    ],
)
def test_the_explorer_learns_as_fast_as_the_tasks_policy_unless_it_is_told(
    experiment: str, override: str, rate: float
) -> None:
    config = compose(experiment, ["exploration=plan2explore", override])
    assert float(config["optimizers"]["exploration"]["learning_rate"]) == rate


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "override", "message"),
    [
        ("greedy", "algorithm.explorer_fraction=0.1", "explorer_fraction is 0.1, but there is no controllers.explorer"),
        ("epsilon", "algorithm.explorer_fraction=1.5", "explorer_fraction is 1.5: write a number from 0 to 1"),
        ("plan2explore", "components.disagreement.networks=1", "networks is 1: it takes two to disagree"),
        ("plan2explore", "controllers.explorer_critic=null", "parts names 'explorer_critic', which is no component"),
        ("plan2explore", "optimizers.exploration=null", "needs optimizers.exploration"),
        ("plan2explore", "algorithm.loss_scales.disagreement=-1.0", "loss_scales.disagreement is -1.0"),
        ("plan2explor", "seed=0", "exploration=plan2explor: there is no such choice. Did you mean 'plan2explore'"),
    ],
)
def test_impossible_settings_are_refused(mode: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(mode, DISCRETE, override)


def test_exploring_is_for_dreamer_alone() -> None:
    with pytest.raises(ConfigError, match="Where exploration= brought it: that is for Dreamer"):
        compose("ppo_cartpole", ["exploration=plan2explore"])
    with pytest.raises(ConfigError, match="algorithm.explorer_fraction is not a setting of PPO"):
        build(compose("ppo_cartpole", ["exploration=random"]), run=None, quiet=True)


def test_a_hook_for_an_explorer_that_is_not_there_is_refused() -> None:
    phase = replace(PHASE, workflow_hooks=("update_explorer",))
    with pytest.raises(ConfigError, match="lists update_explorer: that needs `exploration=plan2explore`"):
        make("random")[0].check_phase(phase)
    make("plan2explore")[0].check_phase(phase)
