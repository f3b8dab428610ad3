"""TD-MPC2 with several tasks: embeddings, masks and discounts by hand, and whole runs online and offline."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rl_lab
from rl_lab.components.world_model.heads import Scalar
from rl_lab.components.world_model.implicit import LatentDynamics, TaskEmbedding
from rl_lab.config.compose import compose
from rl_lab.experiment.build import build, build_agent, build_runtime
from rl_lab.types import ActionSpec, ArraySpec, Counts, EnvSpec, Phase, Progress, TaskSpec, TimeStep
from rl_lab.workflows.tdmpc2 import TDMPC2
from tests.tiny_tdmpc2 import TINY_TDMPC2, TINY_TDMPC2_MODEL

OBSERVATION = {"vector": ArraySpec((3,), "float32"), "task": ArraySpec((), "int64", num_values=(2,))}
TASKS = (TaskSpec("narrow", 1, 100), TaskSpec("wide", 2, 500))
PHASE = Phase(name="train", buffer="replay", progress=Progress(run=Counts(updates=1)))


def make(*words: str) -> Any:
    model = [word for word in TINY_TDMPC2_MODEL if "planner=none" not in words or "controllers.planner" not in word]
    config = compose("rl_lab/PointMass-v0:tdmpc2", [*model, "components.encoder.task_size=5", *words])
    spec = EnvSpec("both", OBSERVATION, ActionSpec("continuous", (2,)), max_episode_steps=500, tasks=TASKS)
    workflow = build_agent(config, spec, runtime=build_runtime(config)).workflow
    assert isinstance(workflow, TDMPC2)
    return workflow


def time_step() -> TimeStep:
    nothing = torch.zeros(2, dtype=torch.bool)
    seen = {"vector": torch.ones(2, 3), "task": torch.tensor([0, 1])}
    return TimeStep(seen, torch.zeros(2), ~nothing, nothing, nothing)


def rows_of(size: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    nothing = torch.zeros(size, 4, dtype=torch.bool)
    task = torch.arange(size).remainder(2).unsqueeze(1).expand(size, 4)
    rows = {"vector": torch.randn(size, 4, 3), "task": task.clone(), "action": torch.rand(size, 4, 2)}
    return rows | {"reward": torch.randn(size, 4), "is_last": nothing, "is_terminal": nothing}


def test_embeddings_are_at_most_of_length_one() -> None:
    embedding = TaskEmbedding(2, 2)
    embedding.weight.data = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    assert embedding(torch.tensor([0, 1])).flatten().tolist() == pytest.approx([0.6, 0.8, 0.3, 0.4])
    assert embedding(torch.zeros(4, 3, dtype=torch.int64)).shape == (4, 3, 2)


def test_a_latent_keeps_its_tasks_embedding() -> None:
    workflow = make()
    latent = workflow.encoder(time_step().observation)
    assert latent.shape == (2, 16 + 5) and workflow.latent_size == 16
    after = workflow.dynamics(latent, torch.zeros(2, 2))
    assert torch.equal(after[:, 16:], latent[:, 16:]) and not torch.equal(after[:, :16], latent[:, :16])
    assert not torch.equal(latent[0, 16:], latent[1, 16:])
    alone = LatentDynamics(input_size=16, action=ActionSpec("continuous", (2,)), units=8)
    assert alone(latent[:, :16], torch.zeros(2, 2)).shape == (2, 16)


@pytest.mark.parametrize("planner", ["mppi", "cem", "none"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_numbers_that_a_task_does_not_take_are_zero(planner: str, mode: str) -> None:
    workflow = make(f"planner={planner}")
    answer = workflow.act(time_step(), None, mode=mode)
    assert answer.action[0, 1] == 0.0 and (answer.action[1] != 0.0).all() and answer.action[0, 0] != 0.0


def test_discounts_and_masks_by_hand() -> None:
    """0.95 for 100 steps, 0.99 for 500; rewards 1, 1 and a value of 10: 1 + g + 10 g^2."""
    workflow = make()
    assert workflow.task_discounts.tolist() == pytest.approx([0.95, 0.99])
    assert workflow.action_masks.tolist() == [[1.0, 0.0], [1.0, 1.0]]
    assert workflow.masked(torch.ones(2, 3, 2), torch.tensor([0, 1]))[:, 2].tolist() == [[1.0, 0.0], [1.0, 1.0]]
    workflow.continue_head = None
    workflow.dynamics = lambda latent, action: latent
    workflow.reward_head = lambda latent, action: Scalar(latent)
    workflow.actor = lambda latent: SimpleNamespace(sample=lambda: torch.ones(*latent.shape[:-1], 2))
    workflow.critic = SimpleNamespace(value=lambda latent, action, of_two: 5.0 * action.sum(dim=-1))
    found = workflow.value_of_plans(torch.ones(2, 1), torch.zeros(2, 1, 2, 2), torch.tensor([0, 1]))
    assert found.flatten().tolist() == pytest.approx([1.95 + 5.0 * 0.95**2, 1.99 + 10.0 * 0.99**2])
    workflow.slow_critic = SimpleNamespace(module=workflow.critic)
    task, never = torch.tensor([[0], [1]]), torch.zeros(2, 1, dtype=torch.bool)
    target = workflow.td_target(torch.ones(2, 1, 1), torch.ones(2, 1), never, task)
    assert target.flatten().tolist() == pytest.approx([1.0 + 0.95 * 5.0, 1.0 + 0.99 * 10.0])
    assert workflow.td_target(torch.ones(2, 1, 1), torch.ones(2, 1), ~never, task).flatten().tolist() == [1.0, 1.0]


def test_consistency_leaves_the_embedding_out() -> None:
    workflow = make()
    latent, seen = torch.zeros(1, 1, 21), torch.zeros(1, 1, 21)
    latent[..., :16], latent[..., 16:] = 2.0, 9.0
    assert float(workflow.inconsistency(latent, torch.zeros(1, 1, 2), latent, seen)) == 4.0


def test_what_stands_in_padding_teaches_nothing() -> None:
    """Random controllers act in numbers that a task does not take; the model must not see them."""

    def learnt(noise: float) -> list[torch.Tensor]:
        workflow, rows = make("seed=3"), rows_of()
        rows["action"][::2, :, 1] = noise
        torch.manual_seed(1)
        workflow.update(rows, phase=PHASE)
        return [each.detach().clone() for each in workflow.dynamics.parameters()]

    for one, other in zip(learnt(0.3), learnt(-0.9), strict=True):
        assert torch.equal(one, other)


def test_an_update_teaches_the_embeddings() -> None:
    workflow = make()
    before = workflow.encoder.task.weight.detach().clone()
    for _ in range(2):
        metrics = workflow.update(rows_of(), phase=PHASE)
    assert not torch.equal(before, workflow.encoder.task.weight)
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in metrics.values())


RUN = ["evaluation.video=false", "logging.tensorboard=false", "runtime.device=cpu", "components.encoder.task_size=5"]


def test_runs_of_two_tasks_online_and_from_their_dataset(tmp_path: Path) -> None:
    """Both returns are in the rows of collecting and of the evaluation; a dataset of both is learnt from."""
    words = [word for word in TINY_TDMPC2 if "continue_head" not in word]
    small = ["buffers.replay.batch_size=8", "evaluation.every_steps=null", "evaluation.num_envs=2"]
    phases = [f"training.phases.{word}" for word in ("prefill.duration_steps=420", "pretrain.duration_updates=2")]
    phases += ["training.phases.train.duration_steps=16"]
    tasks = "environment.tasks=[rl_lab/PointMass-v0, {id: rl_lab/PointMass-v0, time_limit: 20}]"
    words += [*RUN, *small, *phases, tasks, "environment.num_envs=4", "evaluation.final_episodes=4"]
    run = rl_lab.train("tdmpc2_tasks", overrides=words, run_id="both", runs_dir=tmp_path, quiet=True)
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    names = [f"outcome/return/rl_lab/PointMass-v0_{index}" for index in (0, 1)]
    for prefix in ("collect", "eval"):
        assert any(all(f"{prefix}/{name}" in row for name in names) for row in rows), prefix
    rl_lab.dream("both", horizon=4, context=2, sequences=2, runs_dir=tmp_path)
    rl_lab.collect("both", steps=80, output=tmp_path / "data", runs_dir=tmp_path)
    config = compose("tdmpc2_tasks", [word for word in words if "training" not in word])
    config["buffers"]["replay"] = {
        "_target_": "rl_lab.buffers.offline.OfflineBuffer",
        "dataset": str(tmp_path / "data"),
        "batch_size": 8,
        "n_step": 3,
    }
    offline = {"name": "train", "type": "offline", "buffer": "replay", "workflow_hooks": ["update"]}
    config["training"]["phases"] = [{**offline, "duration_updates": 2}]
    config["logging"] |= {"every_steps": None, "every_updates": 1}
    experiment = build(config, run=None, quiet=True)
    try:
        experiment.orchestrator.run()
        assert experiment.housekeeping.counts.updates == 2
    finally:
        experiment.close()
