"""The loop: which hook runs when, what is refused before the first step, and how a run ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rl_lab.buffers.episodes import EpisodeBuffer
from rl_lab.buffers.rollout import RolloutBuffer
from rl_lab.collection.collector import Collector
from rl_lab.components.heads.actor_critic import RandomController
from rl_lab.config.phases import make_phase
from rl_lab.orchestration.cadence import Cadence
from rl_lab.orchestration.housekeeping import EvaluationPlan
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.stopping import StopRules
from rl_lab.training.optimizer import Optimizer
from rl_lab.types import Batch, ConfigError, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.utils.timing import Stopwatch
from rl_lab.workflows.base import Workflow
from tests.doubles import CPU, MemoryWriter, Saves, counter, make_context, make_housekeeping, make_orchestrator


class Diary(Workflow):
    """Writes down which hook was called with which batch."""

    phase_options = ("temperature",)

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []  # hook, phase, identity of the batch

    def act(self, time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        return PolicyStep(torch.zeros(time_step.num_envs, dtype=torch.int64))

    def update_model(self, batch: Batch, *, phase: Phase) -> Metrics:
        self.calls.append(("model", phase.name, id(batch)))
        return {"loss/value": torch.tensor(1.0)}

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        self.calls.append(("controller", phase.name, id(batch)))
        return {"loss/policy": torch.tensor(2.0)}


def phase(name: str, **settings: Any) -> Phase:
    return make_phase({"name": name, "collect_steps": 4, **settings}, place=f"training.phases.{name}")


def rollout(steps: int = 4) -> dict[str, Any]:
    return {"rollout": RolloutBuffer(capacity_steps=steps)}


# --- cycles ------------------------------------------------------------------------------------


def test_one_batch_goes_through_every_hook_of_a_pass_in_order() -> None:
    workflow = Diary()
    hooks = ["update_model", "update_controller"]
    loop = make_orchestrator(
        workflow, [phase("train", duration_cycles=2, workflow_hooks=hooks)], environment=counter(), buffers=rollout()
    )
    assert loop.run() == "finished"
    assert [hook for hook, _, _ in workflow.calls] == ["model", "controller"] * 2
    assert workflow.calls[0][2] == workflow.calls[1][2]
    assert loop.scheduler.run_counts.updates == 2


def test_a_skipped_update_is_not_counted() -> None:
    """No episode of length 5 ends within the first four rows: the buffer has no batch to give."""
    workflow = Diary()
    buffers = {"episodes": EpisodeBuffer(num_envs=2, episodes_per_batch=2)}
    loop = make_orchestrator(
        workflow, [phase("train", buffer="episodes", duration_cycles=2)], environment=counter(), buffers=buffers
    )
    loop.run()
    assert len(workflow.calls) == 1
    assert loop.scheduler.run_counts.updates == 1


def test_a_phase_without_hooks_only_collects() -> None:
    workflow = Diary()
    loop = make_orchestrator(
        workflow, [phase("play", duration_cycles=3, workflow_hooks=[])], environment=counter(), buffers=rollout()
    )
    assert loop.run() == "finished"
    assert workflow.calls == []
    # Two environments and twelve rows each; an episode of five steps has six rows, its last row is no decision.
    assert loop.scheduler.run_counts.agent_steps == 2 * (12 - 1)


def test_a_rollout_nobody_learnt_from_gives_way_to_the_next_phase() -> None:
    workflow = Diary()
    phases = [
        phase("prefill", duration_cycles=1, workflow_hooks=[], collect_steps=3),
        phase("train", duration_cycles=1, collect_steps=4),
    ]
    loop = make_orchestrator(workflow, phases, environment=counter(), buffers=rollout())
    assert loop.run() == "finished"
    assert [name for _, name, _ in workflow.calls] == ["train"]


def test_an_offline_phase_learns_without_collecting() -> None:
    workflow = Diary()
    buffers = {"episodes": EpisodeBuffer(num_envs=2, episodes_per_batch=1)}
    phases = [
        phase("gather", buffer="episodes", duration_cycles=3, workflow_hooks=[]),
        phase("learn", buffer="episodes", type="offline", duration_updates=1),
    ]
    loop = make_orchestrator(workflow, phases, environment=counter(), buffers=buffers)
    loop.run()
    assert [name for _, name, _ in workflow.calls] == ["learn"]


def test_an_offline_phase_with_an_empty_buffer_says_what_to_do() -> None:
    loop = make_orchestrator(
        Diary(), [phase("learn", type="offline", duration_updates=1)], environment=counter(), buffers=rollout()
    )
    with pytest.raises(ConfigError, match="Phase 'learn' is offline, but buffer 'rollout' holds no batch: collect"):
        loop.run()


def test_an_eval_only_phase_evaluates_once_per_cycle_and_learns_nothing() -> None:
    workflow, writer = Diary(), MemoryWriter()
    loop = make_orchestrator(
        workflow,
        [phase("look", type="eval_only", duration_cycles=3)],
        environment=counter(),
        buffers=rollout(),
        writer=writer,
        evaluate=lambda episodes: {"eval/episode_return_mean": 4.0, "eval/episodes": episodes},
        evaluation=EvaluationPlan(episodes=7, final_episodes=0),
    )
    assert loop.run() == "finished"
    assert workflow.calls == []
    assert [row["eval/episodes"] for row in writer.rows] == [7, 7, 7]
    assert loop.scheduler.run_counts.agent_steps == 0


def test_the_train_ratio_is_kept_over_the_whole_run() -> None:
    workflow = Diary()
    buffers = {"episodes": EpisodeBuffer(num_envs=1, episodes_per_batch=1)}
    buffers["episodes"].ready = lambda: True  # type: ignore[method-assign]
    buffers["episodes"].sample = lambda progress: {}  # type: ignore[method-assign]
    phases = [phase("train", buffer="episodes", collect_steps=1, duration_steps=100, updates_per_step=0.3)]
    loop = make_orchestrator(workflow, phases, environment=counter(1), buffers=buffers)
    loop.run()
    assert loop.scheduler.run_counts.agent_steps == 100
    assert len(workflow.calls) == loop.scheduler.run_counts.updates == 30


# --- refused before step 0 ---------------------------------------------------------------------


def refused(match: str, **settings: Any) -> None:
    environment = counter()
    resets: list[int] = []
    environment.reset = lambda: resets.append(1)  # type: ignore[method-assign, assignment, func-returns-value, return-value]
    with pytest.raises(ConfigError, match=match):
        make_orchestrator(
            Diary(), [phase("train", duration_cycles=1, **settings)], environment=environment, buffers=rollout()
        )
    assert resets == []


def test_a_misspelt_hook_is_refused_before_the_first_step() -> None:
    refused(
        r"Phase 'train' lists the hook 'update_controler', which Diary does not have\. Did you mean "
        r"'update_controller'\? Its hooks: update_controller, update_model\.",
        workflow_hooks=["update_controler"],
    )


def test_a_method_that_is_no_hook_is_refused() -> None:
    refused("lists the hook 'act', which Diary does not have", workflow_hooks=["act"])


def test_a_buffer_that_is_not_there_is_refused() -> None:
    refused(
        r"Phase 'train' uses the buffer 'rolout', which is not configured\. Did you mean 'rollout'\? There are",
        buffer="rolout",
    )


def test_an_option_nobody_reads_is_refused() -> None:
    refused(
        r"sets the option 'temprature', which Diary does not read\. Did you mean 'temperature'\? "
        r"Its options: temperature\.",
        options={"temprature": 1},
    )


def test_freezing_what_is_not_there_is_refused() -> None:
    refused("Phase 'train' freezes 'encoder', which is no component or controller", freeze=["encoder"])


def test_an_acting_controller_that_is_not_there_is_refused() -> None:
    refused(r"The workflow needs controllers\.random, which the config does not have", controller="random")


# --- freezing ----------------------------------------------------------------------------------


class TwoParts(Workflow):
    """Pulls two numbers towards zero, through one optimiser."""

    def __init__(self) -> None:
        self.left, self.right = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.seen: list[tuple[str, float, float]] = []

    def act(self, time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        return PolicyStep(torch.zeros(time_step.num_envs, dtype=torch.int64))

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        loss = self.left.weight.square().sum() + self.right.weight.square().sum()
        self.context.optimizers["both"].step(loss)
        self.seen.append((phase.name, self.left.weight.item(), self.right.weight.item()))
        return {}


def test_a_frozen_part_does_not_change_and_learns_again_afterwards() -> None:
    workflow = TwoParts()
    nn.init.ones_(workflow.left.weight)
    nn.init.ones_(workflow.right.weight)
    optimizer = Optimizer(parameters=[workflow.left, workflow.right], name="sgd", learning_rate=0.25)
    phases = [
        phase("both", duration_cycles=1),
        phase("one", duration_cycles=1, freeze=["left"]),
        phase("other", duration_cycles=1, freeze=["right"]),
    ]
    loop = make_orchestrator(
        workflow,
        phases,
        environment=counter(),
        buffers=rollout(),
        parts={
            "components": {"left": workflow.left},
            "controllers": {"right": workflow.right},
            "optimizers": {"both": optimizer},
        },
    )
    loop.run()
    # w <- w - 0.25 * 2w = w / 2 wherever it learns
    assert workflow.seen == [("both", 0.5, 0.5), ("one", 0.5, 0.25), ("other", 0.25, 0.25)]


# --- how a run ends ----------------------------------------------------------------------------


def test_an_interruption_saves_between_cycles_and_can_be_continued() -> None:
    saves = Saves()
    asked = iter([False, True])
    loop = make_orchestrator(
        Diary(),
        [phase("train", duration_cycles=5)],
        environment=counter(),
        buffers=rollout(),
        interrupted=lambda: next(asked),
        save=saves,
    )
    assert loop.run() == "interrupted"
    assert loop.scheduler.cycles == 2
    assert len(saves.calls) == 1
    loop.interrupted = lambda: False
    assert loop.run() == "finished"
    assert loop.scheduler.run_counts.updates == 5


def test_an_interruption_in_the_last_cycle_leaves_the_end_to_a_resumed_run() -> None:
    asked = iter([True, False])
    loop = make_orchestrator(
        Diary(),
        [phase("train", duration_cycles=1)],
        environment=counter(),
        buffers=rollout(),
        interrupted=lambda: next(asked),
    )
    assert loop.run() == "interrupted"
    assert not loop.housekeeping.is_final
    assert loop.run() == "finished"
    assert loop.housekeeping.is_final


def test_a_stop_rule_ends_the_run() -> None:
    saves = Saves()
    loop = make_orchestrator(
        Diary(),
        [phase("train", duration_cycles=100)],
        environment=counter(),
        buffers=rollout(),
        save=saves,
        stop=StopRules(env_frames=30),
    )
    assert loop.run() == "stopped"
    assert loop.scheduler.run_counts.env_frames >= 30
    assert len(saves.calls) == 1


def test_a_run_that_was_stopped_is_not_continued_by_a_resume() -> None:
    """Killed after its last checkpoint but before its status said so, a stopped run must not learn on."""
    environment, buffers, workflow = counter(), rollout(), Diary()
    scheduler, stopwatch = PhaseScheduler([phase("train", duration_cycles=100)]), Stopwatch()
    workflow.initialize(make_context(collector=Collector(environment, buffers, device=CPU, stopwatch=stopwatch)))
    housekeeping = make_housekeeping(scheduler, checkpoint=Cadence(every_updates=1), stop=StopRules(env_frames=30))
    loop = Orchestrator(
        workflow=workflow, scheduler=scheduler, buffers=buffers, housekeeping=housekeeping, stopwatch=stopwatch
    )
    loop.run()
    updates = scheduler.run_counts.updates
    assert loop.run() == "stopped"
    assert scheduler.run_counts.updates == updates


def test_a_stopped_run_whose_final_evaluation_was_interrupted_only_evaluates_after_a_resume() -> None:
    scores: list[BaseException | Metrics] = [KeyboardInterrupt(), {"eval/episode_return_mean": 4.0}]

    def evaluate(episodes: int) -> Metrics:
        score = scores.pop(0)
        if isinstance(score, BaseException):
            raise score
        return score

    loop = make_orchestrator(
        Diary(),
        [phase("train", duration_cycles=100)],
        environment=counter(),
        buffers=rollout(),
        evaluate=evaluate,
        evaluation=EvaluationPlan(final_episodes=1),
        stop=StopRules(env_frames=30),
    )
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    updates = loop.scheduler.run_counts.updates
    assert loop.run() == "stopped"
    assert (loop.scheduler.run_counts.updates, loop.housekeeping.last_score) == (updates, 4.0)


class OnPolicyDiary(Diary):
    is_on_policy = True


@pytest.mark.parametrize(("workflow", "learns"), [(Diary(), True), (OnPolicyDiary(), False)])
def test_an_on_policy_workflow_forgets_what_another_controller_collected(workflow: Diary, learns: bool) -> None:
    """Twelve rows of prefill hold the whole first episode; the four rows of training hold no end of the second."""
    buffers = {"episodes": EpisodeBuffer(num_envs=2, episodes_per_batch=1)}
    phases = [
        phase("prefill", buffer="episodes", controller="random", duration_cycles=3, workflow_hooks=[]),
        phase("train", buffer="episodes", duration_cycles=1),
    ]
    environment = counter(length=9)
    parts = {"controllers": {"random": RandomController(action=environment.spec.action)}}
    make_orchestrator(workflow, phases, environment=environment, buffers=buffers, parts=parts).run()
    assert bool(workflow.calls) == learns


@pytest.mark.parametrize("between", [[], [{"name": "look", "type": "eval_only", "duration_cycles": 1}]])
def test_learning_later_from_what_would_be_forgotten_is_refused_at_once(between: list[dict[str, Any]]) -> None:
    buffers = {"episodes": EpisodeBuffer(num_envs=2, episodes_per_batch=1)}
    phases = [
        phase("prefill", buffer="episodes", controller="random", duration_cycles=3, workflow_hooks=[]),
        *(phase(**settings) for settings in between),
        phase("learn", buffer="episodes", type="offline", duration_updates=1),
    ]
    environment = counter()
    parts = {"controllers": {"random": RandomController(action=environment.spec.action)}}
    message = (
        "Phase 'learn' is offline, but OnPolicyDiary learns only from its own actions and forgets what 'random' "
        "collected in phase 'prefill': leave `controller` out there, or learn while collecting."
    )
    with pytest.raises(ConfigError, match=message):
        make_orchestrator(OnPolicyDiary(), phases, environment=environment, buffers=buffers, parts=parts)
    make_orchestrator(Diary(), phases, environment=environment, buffers=buffers, parts=parts)


def test_an_on_policy_workflow_may_learn_later_from_its_own_rows() -> None:
    workflow = OnPolicyDiary()
    buffers = {"episodes": EpisodeBuffer(num_envs=2, episodes_per_batch=1)}
    phases = [
        phase("gather", buffer="episodes", duration_cycles=3, workflow_hooks=[]),
        phase("learn", buffer="episodes", type="offline", duration_updates=1),
    ]
    make_orchestrator(workflow, phases, environment=counter(), buffers=buffers).run()
    assert [name for _, name, _ in workflow.calls] == ["learn"]
