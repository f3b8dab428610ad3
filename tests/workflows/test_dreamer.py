"""Dreamer: its losses by hand, who learns from what, what rows keep, and one batch learnt by heart."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_lab.components.world_model.heads import Scalar
from rl_lab.config.compose import compose
from rl_lab.experiment.build import Agent, build, build_agent, build_runtime
from rl_lab.types import ActionSpec, ArraySpec, Batch, ConfigError, Counts, EnvSpec, Phase, Progress, TimeStep
from rl_lab.workflows.dreamer import Dreamer
from tests.tiny_dreamer import TINY_PARTS, random_rows

VECTOR = {"vector": ArraySpec((3,), "float32")}
IMAGE = {"image": ArraySpec((16, 16, 3), "uint8")}
DISCRETE, CONTINUOUS = ActionSpec("discrete", (3,)), ActionSpec("continuous", (2,))
MULTI = ActionSpec("multi_discrete", (2, 3))
TINY = [
    *TINY_PARTS,
    "algorithm.horizon=4",
    "components.dynamics.deter=16",
    "optimizers.agent.learning_rate=1e-3",
]
SEPARATE = [
    "optimizers.agent=null",
    *(
        f"+optimizers.{name}={{parts: {parts}, name: adam, learning_rate: 1e-3}}"
        for name, parts in {
            "world_model": "[encoder, dynamics, decoder, reward_head, continue_head]",
            "actor": "[actor]",
            "critic": "[critic]",
        }.items()
    ),
]
PHASE = Phase(name="train", buffer="replay", progress=Progress(run=Counts(updates=1)))
MODEL = ("encoder", "dynamics", "decoder", "reward_head", "continue_head")


@cache
def config_of(overrides: tuple[str, ...]) -> dict[str, Any]:
    return compose("rl_lab/Counter-v0:dreamer", list(overrides))


def make(
    observation: dict[str, ArraySpec] = VECTOR, action: ActionSpec = DISCRETE, *, overrides: tuple[str, ...] = ()
) -> tuple[Dreamer, Agent]:
    """A tiny Dreamer for an environment that need not exist."""
    config = config_of((*TINY, *overrides))
    agent = build_agent(config, EnvSpec("none", observation, action), runtime=build_runtime(config))
    assert isinstance(agent.workflow, Dreamer)
    return agent.workflow, agent


def make_batch(observation: dict[str, ArraySpec] = VECTOR, action: ActionSpec = DISCRETE) -> Batch:
    return random_rows(observation, action)


def with_blank_context(workflow: Dreamer, batch: Batch) -> Batch:
    size, length = batch["reward"].shape
    blank = workflow.dynamics.pack(workflow.dynamics.initial_state(size, torch.device("cpu")))
    return {**batch, **{key: value.unsqueeze(1).repeat(1, length, 1) for key, value in blank.items()}}


def time_step(observation: Batch, is_first: list[bool]) -> TimeStep:
    count = len(is_first)
    nothing = torch.zeros(count, dtype=torch.bool)
    return TimeStep(observation, torch.zeros(count), torch.tensor(is_first), nothing, nothing)


def changed(agent: Agent, before: dict[str, list[Tensor]]) -> set[str]:
    return {
        name
        for name, tensors in before.items()
        if any(not torch.equal(a, b) for a, b in zip(tensors, parts(agent)[name].parameters(), strict=True))
    }


def parts(agent: Agent) -> dict[str, nn.Module]:
    both = {**agent.components, **agent.controllers}
    return {name: part for name, part in both.items() if name in (*MODEL, "actor", "critic")}


def copies(agent: Agent) -> dict[str, list[Tensor]]:
    return {name: [p.detach().clone() for p in part.parameters()] for name, part in parts(agent).items()}


# --- the losses by hand ------------------------------------------------------------------------


def logits_with(probability: float) -> Tensor:
    """Latents of 4 groups of 4 classes whose first group holds `probability` for class 0, the others none better."""
    logits = torch.zeros(1, 1, 16)
    rest = (1.0 - probability) / 3.0
    logits[..., :4] = torch.tensor([probability, rest, rest, rest]).log()
    return logits


@pytest.mark.parametrize(("believed", "is_free"), [(0.5, True), (0.97, False)])
def test_divergence_teaches_prior_and_posterior_apart_and_only_beyond_the_free_nats(
    believed: float, is_free: bool
) -> None:
    workflow, _ = make(overrides=("components.dynamics.latent.unimix=0.0",))
    posterior = logits_with(believed).requires_grad_()
    prior = torch.zeros(1, 1, 16, requires_grad=True)  # uniform
    workflow.dynamics.prior = lambda deter: prior  # type: ignore[method-assign]
    rows = {key: value[:1, :1] for key, value in make_batch().items()}
    state = workflow.dynamics.initial_state(1, torch.device("cpu"))
    loss = workflow.model_loss(rows, {key: value.unsqueeze(1) for key, value in state.items()}, posterior)
    rest = (1.0 - believed) / 3.0
    divergence = believed * math.log(4.0 * believed) + 3.0 * rest * math.log(4.0 * rest)
    assert (divergence < 1.0) is is_free
    assert float(loss.metrics["train/model_kl"]) == pytest.approx(divergence, rel=1e-4)
    for name, learns, stays in (("dynamics", prior, posterior), ("representation", posterior, prior)):
        term = loss.terms[name]
        assert float(term.detach()) == pytest.approx(max(1.0, divergence), rel=1e-4)
        (gradient,) = torch.autograd.grad(term, [learns], retain_graph=True)
        assert bool(gradient.abs().sum() == 0.0) is is_free
        assert torch.autograd.grad(term, [stays], allow_unused=True) == (None,)


class FirstFeature(nn.Module):
    """A critic that reads its value off the first feature."""

    def forward(self, features: Tensor) -> Scalar:
        return Scalar(features[..., :1])


def fixed_dream(workflow: Dreamer, **told: list[float]) -> None:
    features = torch.zeros(1, 3, 32)
    features[0, :, 0] = torch.tensor(told["value"])
    dream = {"features": features, "action": torch.tensor([[0, 1]])}
    dream |= {name: torch.tensor([told[name]]) for name in ("reward", "continue")}
    workflow.dream = lambda behaviour, start: dream  # type: ignore[method-assign]
    workflow.critic = FirstFeature()  # type: ignore[assignment]
    workflow.slow_critic = FirstFeature()  # type: ignore[assignment]


def test_returns_values_and_policy_of_a_dream_by_hand() -> None:
    """Two steps: R1 = r2 + c2 v2; R0 = r1 + c1 (0.05 v1 + 0.95 R1)."""
    workflow, _ = make(overrides=("algorithm.slow_regularizer=0.0", "controllers.actor.output_scale=0.0"))
    fixed_dream(workflow, value=[2.0, 3.0, 4.0], reward=[9.0, 1.0, 0.5], **{"continue": [0.9, 0.8, 0.5]})
    rows = {key: value[:1, 1:2] for key, value in make_batch().items()}
    state = {key: value.unsqueeze(1) for key, value in workflow.dynamics.initial_state(1, torch.device("cpu")).items()}
    loss = workflow.controller_loss(rows, state)
    second = 0.5 + 0.5 * 4.0
    first = 1.0 + 0.8 * (0.05 * 3.0 + 0.95 * second)
    scale = max(1.0, 0.01 * (first - second) * 0.9)  # one update of the running percentiles
    advantages = [(first - 2.0) / scale, (second - 3.0) / scale]
    weights = [0.9, 0.9 * 0.8]
    policy = -sum(w * a * math.log(1.0 / 3.0) for w, a in zip(weights, advantages, strict=True)) / 2.0
    assert float(loss.terms["policy"].detach()) == pytest.approx(policy, rel=1e-5)
    assert float(loss.terms["entropy"].detach()) == pytest.approx(-sum(weights) / 2.0 * math.log(3.0), rel=1e-5)
    value = 0.9 * 0.5 * (first - 2.0) ** 2 + 0.72 * 0.5 * (second - 3.0) ** 2
    assert float(loss.terms["value"].detach()) == pytest.approx(value / 2.0, rel=1e-5)
    assert float(loss.metrics["controller/imagined_return"]) == pytest.approx((first + second) / 2.0, rel=1e-5)


def test_replayed_values_take_real_rewards_then_what_was_dreamt() -> None:
    workflow, _ = make(overrides=("algorithm.slow_regularizer=0.0",))
    workflow.critic = workflow.slow_critic = FirstFeature()  # type: ignore[assignment]
    flags = {"is_first": [[0, 0, 0, 1]], "is_last": [[0, 0, 1, 0]], "is_terminal": [[0, 0, 1, 0]]}
    rows = {name: torch.tensor(values, dtype=torch.bool) for name, values in flags.items()}
    rows["reward"] = torch.tensor([[0.0, 1.0, 2.0, 0.0]])
    state = {"deter": torch.zeros(1, 4, 16), "stoch": torch.zeros(1, 4, 16)}
    dreamt = torch.tensor([5.0, 6.0, 7.0, 8.0])
    second = 2.0  # the episode ends there
    first = 1.0 + 0.997 * (0.05 * 6.0 + 0.95 * second)
    expected = (0.5 * first**2 + 0.5 * second**2 + 0.0) / 3.0  # the row where it ended does not count
    assert float(workflow.replay_value_loss(rows, state, dreamt)) == pytest.approx(expected, rel=1e-5)


def test_dreams_may_begin_from_the_last_rows_alone() -> None:
    workflow, _ = make(overrides=("algorithm.dream_last=2",))
    starts = []
    dream = workflow.dream
    workflow.dream = lambda behaviour, start: (starts.append(start), dream(behaviour, start))[1]  # type: ignore[method-assign, func-returns-value]
    batch = with_blank_context(workflow, make_batch())
    workflow.update(batch, phase=PHASE)
    assert starts[0]["deter"].shape == (3 * 2, 16)
    assert torch.equal(starts[0]["deter"].half().view(3, 2, 16), batch["context_deter"][:, -2:])


# --- who learns from what ----------------------------------------------------------------------


@pytest.mark.parametrize("optimizers", [(), tuple(SEPARATE)], ids=["one optimiser", "three optimisers"])
def test_each_hook_changes_its_own_parts_and_no_others(optimizers: tuple[str, ...]) -> None:
    workflow, agent = make(overrides=optimizers)
    before = copies(agent)
    workflow.update_world_model(make_batch(), phase=PHASE)
    assert changed(agent, before) == set(MODEL)
    before = copies(agent)
    workflow.update_controller(make_batch(), phase=PHASE)
    assert changed(agent, before) == {"actor", "critic"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_fused_update_reaches_everything(precision: str) -> None:
    workflow, agent = make(overrides=(f"runtime.precision={precision}", "runtime.device=cpu"))
    before = copies(agent)
    metrics = workflow.update(make_batch(), phase=PHASE)
    assert changed(agent, before) == {*MODEL, "actor", "critic"}
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in metrics.values())
    names = {name.removeprefix("loss/") for name in metrics if name.startswith("loss/")}
    assert names == set(workflow.loss_scales)


def is_reached(loss: Tensor, module: nn.Module) -> bool:
    gradients = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True, allow_unused=True)
    return any(gradient is not None for gradient in gradients)


def test_policy_and_value_losses_leave_the_model_alone_but_for_replayed_values() -> None:
    workflow, agent = make()
    batch = make_batch()
    rows, start = workflow.dynamics.begin(batch)
    state, _ = workflow.dynamics.observe_sequence(
        workflow.encoder(rows), rows["previous_action"], rows["is_first"], start
    )
    with torch.no_grad():
        agent.controllers["critic"].output.weight.normal_()  # at its start, zero, it passes no gradient on
    terms = workflow.controller_loss(rows, state).terms
    reached = {
        name: {part for part, module in parts(agent).items() if is_reached(term, module)}
        for name, term in terms.items()
    }
    assert reached == {
        "policy": {"actor"},
        "entropy": {"actor"},
        "value": {"critic"},
        "replay_value": {"encoder", "dynamics", "critic"},
    }


def test_gradients_through_the_model_reach_the_actor_alone() -> None:
    workflow, agent = make(
        action=CONTINUOUS, overrides=("algorithm.policy_gradient=dynamics", "algorithm.slow_target=true", *SEPARATE)
    )
    batch = make_batch(action=CONTINUOUS)
    rows, start = workflow.dynamics.begin(batch)
    with torch.no_grad():
        agent.components["reward_head"].output.weight.normal_()
        state, _ = workflow.dynamics.observe_sequence(
            workflow.encoder(rows), rows["previous_action"], rows["is_first"], start
        )
    workflow.controller_loss(rows, state).terms["policy"].backward()
    assert {name for name, part in parts(agent).items() if any(p.grad is not None for p in part.parameters())} == {
        "actor"
    }


def test_the_gradient_of_an_advantage_is_that_of_the_return_less_that_of_the_value() -> None:
    """With lambda 0 and a horizon of 2 the sum of both advantages telescopes to r1 + r2 + v2 - v0, discounted."""
    overrides = ("algorithm.policy_gradient=advantage", "algorithm.lambda_=0.0", "algorithm.horizon=2", *SEPARATE)
    workflow, agent = make(action=CONTINUOUS, overrides=overrides)
    rows, start = workflow.dynamics.begin(make_batch(action=CONTINUOUS))
    torch.manual_seed(5)
    with torch.no_grad():
        for head in (agent.components["reward_head"], agent.controllers["critic"]):
            head.output.weight.normal_()
        state, _ = workflow.observe_rows(rows, start)
    dreams: list[Batch] = []
    dream = workflow.dream
    workflow.dream = lambda *arguments: dreams.append(dream(*arguments)) or dreams[-1]  # type: ignore[method-assign,func-returns-value]
    loss = workflow.controller_loss(rows, state).terms["policy"]
    reward, value, goes_on = (dreams[0][key] for key in ("reward", "value", "continue"))
    weight = goes_on.detach().cumprod(dim=1)
    advantages = [reward[:, t + 1] + goes_on[:, t + 1] * value[:, t + 1] - value[:, t] for t in range(2)]
    by_hand = -(torch.stack(advantages, 1) * weight[:, :2]).mean() / workflow.return_scale.scale()
    actor = list(agent.controllers["actor"].parameters())
    found, expected = (torch.autograd.grad(each, actor, retain_graph=True) for each in (loss, by_hand))
    assert max(float(gradient.abs().max()) for gradient in expected) > 1e-5
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-7)


def test_both_gradients_are_mixed_by_their_share() -> None:
    def gradients(kind: str) -> list[Tensor]:
        mixture = (f"algorithm.policy_gradient={kind}", "algorithm.dynamics_fraction=0.25", *SEPARATE)
        workflow, agent = make(action=CONTINUOUS, overrides=mixture)
        rows, start = workflow.dynamics.begin(make_batch(action=CONTINUOUS))
        torch.manual_seed(5)
        with torch.no_grad():
            agent.components["reward_head"].output.weight.normal_()
            state, _ = workflow.observe_rows(rows, start)
        loss = workflow.controller_loss(rows, state).terms["policy"]
        return list(torch.autograd.grad(loss, list(agent.controllers["actor"].parameters())))

    chance, model, both = (gradients(kind) for kind in ("reinforce", "dynamics", "both"))
    for likelier, through, mixed in zip(chance, model, both, strict=True):
        torch.testing.assert_close(mixed, 0.75 * likelier + 0.25 * through, rtol=1e-3, atol=1e-6)
    assert all(max(float(slope.abs().max()) for slope in kind) > 1e-4 for kind in (chance, model))


def test_a_batch_is_learnt_by_heart() -> None:
    workflow, _ = make(overrides=("optimizers.agent.learning_rate=1e-2",))
    batch = make_batch()
    losses = [workflow.update_world_model(dict(batch), phase=PHASE) for _ in range(150)]
    for name, share in (("loss/reconstruction", 0.2), ("loss/reward", 0.5), ("loss/continue", 0.3)):
        assert float(losses[-1][name]) < share * float(losses[0][name]), name


# --- acting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [DISCRETE, CONTINUOUS, MULTI], ids=lambda spec: spec.kind)
@pytest.mark.parametrize("observation", [VECTOR, IMAGE, {**VECTOR, **IMAGE}], ids=["state", "pixels", "both"])
def test_it_acts_and_learns_with_every_kind_of_action_and_observation(
    observation: dict[str, ArraySpec], action: ActionSpec
) -> None:
    workflow, _ = make(observation, action)
    seen = {key: rows[:, 0] for key, rows in make_batch(observation, action).items() if key in observation}
    answer = workflow.act(time_step(seen, [True] * 3), None, mode="train")
    assert answer.action.shape == (3, *action.shape)
    assert str(answer.action.dtype) == f"torch.{action.dtype}"
    again = workflow.act(time_step(seen, [False] * 3), answer.state, mode="train")
    assert again.extras["context_deter"].shape == (3, 16)
    metrics = workflow.update(make_batch(observation, action), phase=PHASE)
    assert math.isfinite(float(metrics["loss/policy"]))


def test_a_new_episode_forgets_and_an_old_one_goes_on() -> None:
    workflow, _ = make()
    seen = {"vector": torch.randn(1, 3)}
    first = workflow.act(time_step(seen, [True]), None, mode="eval")
    later = workflow.act(time_step(seen, [False]), first.state, mode="eval")
    anew = workflow.act(time_step(seen, [True]), later.state, mode="eval")
    assert torch.equal(anew.state["deter"], first.state["deter"])
    assert not torch.allclose(later.state["deter"], first.state["deter"])
    assert first.extras == {}


def test_exploration_noise_is_added_while_collecting_and_actions_stay_in_their_range() -> None:
    overrides = ("algorithm.exploration_noise=100.0",)
    workflow, _ = make(action=ActionSpec("continuous", (2,)), overrides=overrides)
    seen = time_step({"vector": torch.randn(50, 3)}, [True] * 50)
    noisy = workflow.act(seen, None, mode="train").action
    assert (noisy.abs() == 1.0).float().mean() > 0.9  # noise this large is nearly always cut at the edge
    assert (workflow.act(seen, None, mode="eval").action.abs() < 1.0).all()


def test_rows_of_another_controller_keep_a_blank_context() -> None:
    workflow, _ = make()
    random = workflow.policy("random")
    answer = random(time_step({"vector": torch.randn(2, 3)}, [True, True]), None, mode="train")
    assert answer.extras["context_deter"].tolist() == [[0.0] * 16] * 2
    assert workflow.policy(None) == workflow.act


# --- what rows keep ----------------------------------------------------------------------------


def test_learning_begins_with_the_context_of_row_0_and_writes_fresher_ones_back() -> None:
    workflow, _ = make()
    batch = with_blank_context(workflow, make_batch())
    old = {key: batch[key].clone() for key in ("context_deter", "context_stoch")}
    workflow.update(batch, phase=PHASE)
    for key, values in old.items():
        assert batch[key].shape == values.shape and batch[key].dtype == values.dtype
        assert torch.equal(batch[key][:, 0], values[:, 0])
    is_renewed = (batch["context_deter"][:, 1:] != 0).any(dim=-1)
    assert torch.equal(is_renewed, ~batch["is_first"][:, 1:])  # a first row of an untaught memory stays at zero


def test_the_context_written_back_is_what_observing_from_row_0_gives() -> None:
    workflow, _ = make()
    batch = with_blank_context(workflow, make_batch())
    batch["context_deter"][:, 0] = 0.5
    rows, before = workflow.dynamics.begin(batch)
    assert torch.equal(before["deter"], torch.full((3, 16), 0.5))
    assert torch.equal(rows["previous_action"], batch["action"][:, :-1])
    assert torch.equal(rows["reward"], batch["reward"][:, 1:])
    torch.manual_seed(3)
    state, _ = workflow.dynamics.observe_sequence(
        workflow.encoder(rows), rows["previous_action"], rows["is_first"], before
    )
    torch.manual_seed(3)
    workflow.update_world_model(batch, phase=PHASE)
    assert torch.equal(batch["context_deter"][:, 1:], state["deter"].detach().half())


def test_a_row_costs_what_act_keeps_with_it() -> None:
    workflow, _ = make()
    kept = workflow.act(time_step({"vector": torch.randn(1, 3)}, [True]), None, mode="train").extras
    assert workflow.extra_bytes_per_row == sum(value.nbytes for value in kept.values()) == 2 * 16 + 4


def test_rows_without_a_context_are_all_learnt_from() -> None:
    workflow, _ = make()
    batch = make_batch()
    rows, before = workflow.dynamics.begin(batch)
    assert rows["reward"].shape == (3, 7) and not bool(before["deter"].any())
    assert torch.equal(rows["previous_action"][:, 1:], batch["action"][:, :-1])
    workflow.update(batch, phase=PHASE)
    assert "context_deter" not in batch


# --- dreaming ----------------------------------------------------------------------------------


def test_imagine_tells_states_observations_rewards_and_values() -> None:
    workflow, _ = make({**VECTOR, **IMAGE})
    seen = {"vector": torch.randn(2, 3), "image": torch.zeros(2, 16, 16, 3, dtype=torch.uint8)}
    answer = workflow.act(time_step(seen, [True, True]), None, mode="eval")
    dream = workflow.imagine(answer.state, horizon=5)
    assert {key: tuple(value.shape[1:]) for key, value in dream.items()} == {
        "vector": (6, 3),
        "image": (6, 16, 16, 3),
        "deter": (6, 16),
        "stoch": (6, 16),
        "reward": (6,),
        "continue": (6,),
        "value": (6,),
        "action": (5,),
    }
    assert torch.equal(dream["deter"][:, 0], answer.state["deter"])
    assert not dream["value"].requires_grad


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.horizon=0", "algorithm.horizon is 0: dreams need at least 1 step"),
        ("algorithm.dream_last=1", "algorithm.dream_last is 1: write 2 rows or more, or null for all of them"),
        (
            "algorithm.free_nats=-1.0",
            "algorithm.free_nats is -1.0, slow_regularizer is 1.0 and exploration_noise is 0.0",
        ),
        ("algorithm.exploration_noise=-0.1", "exploration_noise is -0.1: write numbers from 0"),
        ("algorithm.exploration_noise=0.3", "exploration_noise is 0.3, but noise suits continuous actions alone"),
        ("algorithm.policy_gradient=dynamics", "policy_gradient is dynamics: that needs continuous actions, but"),
        ("algorithm.policy_gradient=both", "policy_gradient is both: that needs continuous actions, but those of none"),
        ("algorithm.dynamics_fraction=1.5", "algorithm.dynamics_fraction is 1.5: write a number from 0 to 1."),
        ("algorithm.lambda_=1.5", "algorithm.lambda_ is 1.5: write a number from 0 to 1"),
    ],
)
def test_impossible_settings_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(overrides=(override,))


@pytest.mark.parametrize("gradient", ["dynamics", "both", "auto"])
def test_gradients_through_the_model_need_an_optimizer_each(gradient: str) -> None:
    with pytest.raises(ConfigError, match="that needs optimizers world_model, actor and critic instead of agent"):
        make(action=CONTINUOUS, overrides=(f"algorithm.policy_gradient={gradient}",))


def test_the_gradient_suits_the_actions_if_it_is_left_open() -> None:
    config = compose("dreamer_v2", ["components.encoder.layers=1"])
    for action, expected in ((DISCRETE, "reinforce"), (MULTI, "reinforce"), (CONTINUOUS, "dynamics")):
        agent = build_agent(config, EnvSpec("none", VECTOR, action), runtime=build_runtime(config))
        assert isinstance(agent.workflow, Dreamer) and agent.workflow.policy_gradient == expected


@pytest.mark.parametrize("unimix", [-1.0, 1.0, 3.0])
def test_a_policy_with_an_impossible_share_of_chance_is_refused(unimix: float) -> None:
    with pytest.raises(ConfigError, match=f"actor: unimix is {unimix}; write a number from 0 to below 1"):
        make(overrides=(f"controllers.actor.unimix={unimix}",))


@pytest.mark.parametrize("scale", ["-1.0", "inf"])
def test_a_loss_that_counts_against_itself_is_refused(scale: str) -> None:
    with pytest.raises(ConfigError, match="algorithm.loss_scales.entropy is .*learning would run away from it"):
        make(overrides=(f"algorithm.loss_scales.entropy={scale}",))


def test_a_sequence_needs_a_row_to_begin_with_and_two_to_learn_from() -> None:
    workflow, _ = make()
    workflow.check_rows(3, buffer="replay")
    with pytest.raises(ConfigError, match="buffers.replay.sequence_length is 2: Dreamer needs 3 rows or more"):
        workflow.check_rows(2, buffer="replay")


def test_the_fused_hook_needs_one_optimiser() -> None:
    workflow, _ = make(overrides=tuple(SEPARATE))
    with pytest.raises(ConfigError, match="Phase 'train' lists update, which needs one optimizer `agent` for"):
        workflow.check_phase(Phase(name="train", buffer="replay", workflow_hooks=("update",)))
    workflow.check_phase(Phase(name="train", buffer="replay", workflow_hooks=("update_world_model",)))


# --- priorities, and evaluations that draw -----------------------------------------------------


@pytest.mark.parametrize(("hook", "precision"), [("update", "fp32"), ("update_world_model", "bf16")])
def test_the_priority_of_a_sequence_is_the_mean_of_its_rows_model_losses(hook: str, precision: str) -> None:
    workflow, _ = make(overrides=("algorithm.loss_scales.reward=3.0", f"runtime.precision={precision}"))
    batch = make_batch()
    batch["reward"][1] = 1e4  # nobody expected that
    metrics = getattr(workflow, hook)(batch, phase=PHASE)
    assert workflow.notes_priorities and batch["priority"].shape == (len(batch["reward"]),)
    assert not batch["priority"].requires_grad and batch["priority"].argmax() == 1
    assert batch["priority"].dtype is torch.float32  # in bf16 too, whose numbers are too coarse to draw by
    scales = {"reward": 3.0, "reconstruction": 1.0, "continue": 1.0, "dynamics": 1.0, "representation": 0.1}
    total = sum(scale * float(metrics[f"loss/{name}"]) for name, scale in scales.items())
    assert float(batch["priority"].mean()) == pytest.approx(total, rel=1e-4)


def test_a_replay_of_sequences_may_draw_by_priority() -> None:
    words = ["buffers.replay.uniform=0.5", "buffers.replay.priority=0.5", "evaluation.final_episodes=0"]
    short = ["environment.num_envs=2", "buffers.replay.batch_size=2", "buffers.replay.sequence_length=5"]
    phases = [
        "training.phases.prefill.duration_steps=40",
        "training.phases.train.duration_steps=null",
        "training.phases.train.duration_cycles=4",
        "training.phases.train.updates_per_step=1.0",
    ]
    trained = build(compose("rl_lab/Counter-v0:dreamer", [*TINY, *words, *short, *phases]), run=None, quiet=True)
    trained.orchestrator.run()
    assert trained.housekeeping.counts.updates >= 4
    trained.close()


@pytest.mark.parametrize("samples", [False, True])
def test_evaluations_take_the_likeliest_action_or_draw_one(samples: bool) -> None:
    workflow, _ = make(overrides=(f"algorithm.sample_in_evaluations={samples}",))
    seen = time_step({"vector": torch.zeros(64, *VECTOR["vector"].shape)}, [True] * 64)
    answer = workflow.act(seen, None, mode="eval")
    assert (len(set(answer.action.tolist())) > 1) is samples
    assert not answer.extras  # rows of an evaluation are not kept
