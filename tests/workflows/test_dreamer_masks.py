"""Dreamer under action masks: what the model predicts, what dreams are drawn from, and that a toy's mask is learnt."""

from __future__ import annotations

import math

import gymnasium
import pytest
import torch

from rl_lab.config.compose import compose
from rl_lab.experiment.build import Agent, build, build_agent, build_runtime
from rl_lab.types import ActionSpec, ArraySpec, Batch, Counts, EnvSpec, Phase, Progress, TimeStep
from rl_lab.workflows.dreamer import Dreamer
from tests.tiny_dreamer import TINY_DREAMER, TINY_OLDER_DREAMER, TINY_PARTS, random_rows

VECTOR = {"vector": ArraySpec((3,), "float32")}
MASKED = {**VECTOR, "action_mask": ArraySpec((3,), "bool")}
PHASE = Phase(name="train", buffer="replay", progress=Progress(run=Counts(updates=1)))
SIZE = ["algorithm.horizon=4", "environment.id=rl_lab/MaskedChain-v0"]
OLDER = [word for word in TINY_OLDER_DREAMER if word.startswith(("components.", "controllers."))]
VERSIONS = {
    "dreamer_v3": ["rl_lab/MaskedChain-v0:dreamer", *TINY_PARTS, *SIZE],
    "dreamer_v2": ["dreamer_v2", *OLDER, *SIZE],
    "dreamer_v1": ["dreamer_v1", *OLDER, *SIZE, "algorithm.exploration_noise=0.0"],
    "dreamer_v3_2023": ["dreamer_v3_2023", "environment=gymnasium", *OLDER, *SIZE, "algorithm.policy_gradient=auto"],
}


def make(
    observation: dict[str, ArraySpec],
    version: str = "dreamer_v3",
    *,
    action: ActionSpec,
    overrides: tuple[str, ...] = (),
    is_older: bool = False,
) -> tuple[Dreamer, Agent]:
    experiment, *own = VERSIONS[version]
    config = compose(experiment, [*own, *overrides])
    if is_older:  # than masks in dreams
        del config["components"]["action_mask_head"], config["algorithm"]["loss_scales"]["action_mask"]
    agent = build_agent(config, EnvSpec("none", observation, action), runtime=build_runtime(config))
    assert isinstance(agent.workflow, Dreamer)
    return agent.workflow, agent


def masked_rows(action: ActionSpec) -> Batch:
    """The first action of every choice is forbidden in every other row."""
    batch = random_rows(VECTOR, action)
    mask = torch.ones(*batch["reward"].shape, sum(action.sizes), dtype=torch.bool)
    mask[:, ::2, 0] = False
    return {**batch, "action_mask": mask}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_dreamer_learns_the_mask_and_dreams_under_it(version: str) -> None:
    workflow, agent = make(MASKED, version, action=ActionSpec("discrete", (3,)))
    before = [each.detach().clone() for each in agent.components["action_mask_head"].parameters()]
    hooks = ["update"] if version == "dreamer_v3" else ["update_world_model", "update_controller"]
    metrics = {}
    for hook in hooks:
        metrics |= getattr(workflow, hook)(masked_rows(ActionSpec("discrete", (3,))), phase=PHASE)
    assert 0.0 < float(metrics["loss/action_mask"]) < 10.0
    assert all(bool(torch.as_tensor(value).isfinite().all()) for value in metrics.values())
    after = agent.components["action_mask_head"].parameters()
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert not agent.left_out()


@pytest.mark.parametrize("action", [ActionSpec("discrete", (3,)), ActionSpec("multi_discrete", (2, 3))])
def test_imagined_actions_and_their_likelihoods_are_those_of_the_masked_policy(action: ActionSpec) -> None:
    size = sum(action.sizes)
    workflow, agent = make({**VECTOR, "action_mask": ArraySpec((size,), "bool")}, action=action)
    with torch.no_grad():  # never the first action
        agent.components["action_mask_head"].output.bias.copy_(torch.tensor([-100.0] + [100.0] * (size - 1)))
    dream = workflow.dream(workflow.task, workflow.dynamics.initial_state(500, torch.device("cpu")))
    assert not dream["action_mask"][..., 0].any() and dream["action_mask"][..., 1:].all()
    first = dream["action"] if action.kind == "discrete" else dream["action"][..., 0]
    assert dream["action"].shape[:2] == dream["action_mask"].shape[:2] == (500, workflow.horizon)
    assert first.min() == 1
    masked: list[torch.Tensor] = []
    actor = workflow.actor

    def watched(features: torch.Tensor, mask: torch.Tensor) -> object:
        masked.append(mask)
        return actor(features, mask)

    watched.noise, watched.decide = actor.noise, actor.decide  # type: ignore[attr-defined]
    workflow.actor = watched  # type: ignore[assignment]
    state = {key: value.unsqueeze(1) for key, value in workflow.dynamics.initial_state(3, torch.device("cpu")).items()}
    rows = {key: value[:, :1] for key, value in masked_rows(action).items()}
    loss = workflow.controller_loss(rows, state)
    [mask] = masked
    assert not mask[..., 0].any() and mask[..., 1:].all()
    # Nearly uniform over what is left: one of two; or the only one of the first choice and one of three.
    assert float(loss.metrics["controller/entropy"]) == pytest.approx(
        math.log(2 if action.kind == "discrete" else 3), rel=1e-2
    )


def test_imagine_tells_the_expected_masks() -> None:
    workflow, _ = make(MASKED, action=ActionSpec("discrete", (3,)))
    nothing = torch.zeros(2, dtype=torch.bool)
    seen = {"vector": torch.randn(2, 3), "action_mask": torch.tensor([[True, False, False], [False, True, True]])}
    answer = workflow.act(TimeStep(seen, torch.zeros(2), ~nothing, nothing, nothing), None, mode="eval")
    dream = workflow.imagine(answer.state, horizon=5)
    assert dream["action_mask"].shape == (2, 5, 3) and dream["action_mask"].dtype is torch.bool
    assert dream["action_mask"].gather(-1, dream["action"].unsqueeze(-1)).all()


def test_without_a_mask_there_is_no_head_no_loss_and_no_scale() -> None:
    workflow, agent = make(VECTOR, action=ActionSpec("discrete", (3,)))
    assert workflow.action_mask_head is None and "action_mask" not in workflow.loss_scales
    assert not agent.components["action_mask_head"].state_dict()
    metrics = workflow.update(random_rows(VECTOR, ActionSpec("discrete", (3,))), phase=PHASE)
    assert "loss/action_mask" not in metrics


def test_configs_of_older_runs_without_a_head_still_act_under_the_mask() -> None:
    workflow, _ = make(MASKED, action=ActionSpec("discrete", (3,)), is_older=True)
    metrics = workflow.update(masked_rows(ActionSpec("discrete", (3,))), phase=PHASE)
    assert "loss/action_mask" not in metrics


def test_a_learnt_mask_is_never_broken_in_a_dream() -> None:
    """The toy raises where a forbidden action is taken, so every dreamt action is also played there."""
    quick = [
        *("+environment.kwargs.length=3", "algorithm.discount=0.9", "algorithm.horizon=4"),
        *("buffers.replay.sequence_length=9", "training.phases.train.duration_steps=1000"),
        "evaluation.final_episodes=20",
    ]
    trained = build(compose("rl_lab/MaskedChain-v0:dreamer", [*TINY_DREAMER, *quick]), run=None, quiet=True)
    try:
        trained.orchestrator.run()
        workflow = trained.agent.workflow
        assert isinstance(workflow, Dreamer)
        assert trained.housekeeping.last_score is not None and trained.housekeeping.last_score > 0.9
        for _ in range(20):
            env = gymnasium.make("rl_lab/MaskedChain-v0", length=3).unwrapped
            seen, _ = env.reset(seed=0)
            rows = {key: torch.as_tensor(value)[None] for key, value in seen.items()}
            no, yes = torch.tensor([False]), torch.tensor([True])
            rows["action_mask"] = rows["action_mask"].bool()
            start = workflow.act(TimeStep(rows, torch.zeros(1), yes, no, no), None, mode="train").state
            dream = workflow.imagine(start, horizon=6)
            for step, action in enumerate(dream["action"][0].tolist()):
                assert dream["action_mask"][0, step].tolist() == [bool(each) for each in seen["action_mask"]]
                seen, _, is_over, _, _ = env.step(action)  # raises where the action is forbidden
                if is_over:
                    break
    finally:
        trained.close()
