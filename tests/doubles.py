"""Stand-ins that several test folders share: environments that play written rows, writers that remember."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.collection.collector import Collector
from rl_lab.environments.base import Environment
from rl_lab.environments.factory import make_environment
from rl_lab.metrics.logger import MetricLogger
from rl_lab.metrics.writers import Row
from rl_lab.orchestration.cadence import Cadence
from rl_lab.orchestration.housekeeping import EvaluationPlan, FilmPlan, Housekeeping
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.stopping import StopRules
from rl_lab.training.runtime import Runtime
from rl_lab.types import ActionSpec, ArraySpec, Batch, Counts, EnvRows, EnvSpec, Metrics, Phase, PolicyStep, TimeStep
from rl_lab.utils.timing import Stopwatch
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import Parts, WorkflowContext

CPU = torch.device("cpu")
SPEC = EnvSpec("scripted", {"vector": ArraySpec((1,), "float32")}, ActionSpec("discrete", (10,)))


def env_rows(
    vector: Sequence[float],
    *,
    reward: Sequence[float] | float = 0.0,
    first: Sequence[int] | int = 0,
    last: Sequence[int] | int = 0,
    terminal: Sequence[int] | int = 0,
) -> EnvRows:
    """One moment of `len(vector)` environments; a single number stands for all of them."""
    count = len(vector)

    def spread(values: Any, dtype: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(values, dtype), (count,)).copy()

    return EnvRows(
        {"vector": np.asarray(vector, np.float32).reshape(count, 1)},
        spread(reward, np.float32),
        spread(first, bool),
        spread(last, bool),
        spread(terminal, bool),
    )


class ScriptedEnvironment:
    """Plays the rows it was given, whatever the actions, and remembers the actions."""

    def __init__(self, script: Sequence[EnvRows], *, spec: EnvSpec = SPEC, frame: np.ndarray | None = None) -> None:
        self.script = list(script)
        self.spec = spec
        self.num_envs = len(script[0].reward)
        self.position = 0
        self.resets = 0
        self.actions: list[np.ndarray] = []
        self.events: list[str] = []
        self.frame = frame
        self.is_closed = False

    def reset(self) -> EnvRows:
        self.position, self.resets = 0, self.resets + 1
        return self.script[0]

    def step(self, action: np.ndarray) -> EnvRows:
        self.actions.append(np.asarray(action))
        self.position += 1
        return self.script[self.position % len(self.script)]

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def render(self) -> np.ndarray | None:
        return self.frame

    def drain_events(self) -> list[str]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        self.is_closed = True


def counter(num_envs: int = 2, *, vectorization: str = "sync", seed: int = 0, **settings: Any) -> Environment:
    """The toy that shows [episode, step in the episode, identity] and rewards with the last action."""
    return make_environment(
        id="rl_lab/Counter-v0", num_envs=num_envs, vectorization=vectorization, seed=seed, kwargs=settings
    )


def always(action: int) -> Callable[..., PolicyStep]:
    """A policy with one answer."""

    def act(time_step: TimeStep, state: Any, *, mode: str) -> PolicyStep:
        return PolicyStep(torch.full((time_step.num_envs,), action))

    return act


class MemoryWriter:
    """Keeps rows and sentences."""

    name = "memory"

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.messages: list[str] = []

    def write(self, row: Row) -> None:
        self.rows.append(row)

    def message(self, text: str, level: str) -> None:
        self.messages.append(text)

    def get_state(self) -> Any:
        return {}

    def set_state(self, state: Any) -> None:
        pass

    def restart(self) -> None:
        self.rows.clear()

    def deliver(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class NoDisplay:
    def update_progress(self, fraction: float, phase_name: str, phase_index: int, phase_count: int) -> None:
        pass


class Saves:
    """Stands for the checkpoint store: remembers what it was asked to save, and what `state` gave at that moment."""

    def __init__(self, state: Callable[[], Any] = lambda: None) -> None:
        self.calls: list[tuple[int, float | None, bool]] = []
        self.states: list[Any] = []
        self.state = state

    def __call__(self, *, counts: Counts, score: float | None, is_best: bool) -> None:
        self.calls.append((counts.agent_steps, score, is_best))
        self.states.append(self.state())


class Clock(Stopwatch):
    """A stopwatch whose time a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def elapsed(self) -> float:
        return self.now_s


def make_housekeeping(
    scheduler: PhaseScheduler,
    *,
    evaluate: Callable[..., Metrics] = lambda episodes: {},
    save: Saves | None = None,
    writer: MemoryWriter | None = None,
    clock: Clock | None = None,
    log: Cadence | None = None,
    checkpoint: Cadence | None = None,
    evaluation: EvaluationPlan | None = None,
    stop: StopRules | None = None,
    films: FilmPlan | None = None,
) -> Housekeeping:
    """Housekeeping around stand-ins: a row per update, no checkpoint but the last, no evaluation."""
    return Housekeeping(
        scheduler=scheduler,
        logger=MetricLogger([writer or MemoryWriter()]),
        evaluate=evaluate,
        save_checkpoint=save or Saves(),
        usage=lambda fraction: {},
        display=NoDisplay(),
        stopwatch=clock or Clock(),
        log_cadence=log or Cadence(every_updates=1),
        checkpoint_cadence=checkpoint or Cadence(),
        evaluation=evaluation or EvaluationPlan(final_episodes=0),
        stop_rules=stop or StopRules(),
        films=films,
    )


def make_context(
    *,
    components: Mapping[str, Any] | None = None,
    controllers: Mapping[str, Any] | None = None,
    optimizers: Mapping[str, Any] | None = None,
    collector: Any = None,
    evaluator: Any = None,
    spec: EnvSpec = SPEC,
    num_envs: int = 2,
    precision: str = "fp32",
) -> WorkflowContext:
    return WorkflowContext(
        components=Parts("components", components or {}),
        controllers=Parts("controllers", controllers or {}),
        optimizers=Parts("optimizers", optimizers or {}),
        collector=collector,
        evaluator=evaluator,
        runtime=Runtime(device="cpu", precision=precision),
        spec=spec,
        num_envs=num_envs,
    )


def make_orchestrator(
    workflow: Workflow,
    phases: Sequence[Phase],
    *,
    environment: Environment,
    buffers: Mapping[str, Any],
    interrupted: Callable[[], bool] = lambda: False,
    parts: Mapping[str, Mapping[str, Any]] | None = None,
    **housekeeping: Any,
) -> Orchestrator:
    """The real loop, scheduler and collector around a test's workflow, environment and buffers."""
    scheduler = PhaseScheduler(phases)
    stopwatch = Stopwatch()
    collector = Collector(environment, buffers, device=CPU, stopwatch=stopwatch)
    workflow.initialize(
        make_context(collector=collector, spec=environment.spec, num_envs=environment.num_envs, **(parts or {}))
    )
    return Orchestrator(
        workflow=workflow,
        scheduler=scheduler,
        buffers=buffers,
        housekeeping=make_housekeeping(scheduler, **housekeeping),
        stopwatch=stopwatch,
        interrupted=interrupted,
    )


def batch_of(**rows: Any) -> Batch:
    """Tensors from nested lists: flags as booleans, actions as int64, everything else as float32."""

    def tensor(key: str, values: Any) -> Tensor:
        if key.startswith("is_"):
            return torch.tensor(values, dtype=torch.bool)
        return torch.tensor(values, dtype=torch.int64 if key == "action" else torch.float32)

    return {key: tensor(key, values) for key, values in rows.items()}
