"""A plain config -> a whole experiment, in one explicit order:

    environments -> logger -> runtime -> buffers -> collector, evaluator -> agent (components -> controllers
                 -> optimizers -> workflow) -> scheduler -> housekeeping -> orchestrator

No config object goes further than this file and agent.py: everything behind them gets numbers, names and things.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from zlib import crc32

import torch

from rl_lab.buffers.base import Buffer
from rl_lab.buffers.budget import predict
from rl_lab.collection.collector import Collector
from rl_lab.collection.evaluator import Evaluator
from rl_lab.config.construct import call_checked, construct, import_plugins
from rl_lab.config.schema import Config, EvaluationBlock, Settings, read_settings, refuse_steps_that_never_come
from rl_lab.environments.base import Environment
from rl_lab.environments.factory import make_environment
from rl_lab.experiment.agent import Agent, build_agent, build_runtime
from rl_lab.experiment.film import film_plan
from rl_lab.experiment.live import Probe, make_usage
from rl_lab.experiment.plans import make_plans
from rl_lab.experiment.saver import REPLAY, RandomState, make_saver
from rl_lab.kernels.door import listen
from rl_lab.metrics.logger import MetricLogger
from rl_lab.metrics.terminal import LiveDisplay
from rl_lab.metrics.time_split import TimeSplit
from rl_lab.metrics.writers import JsonlWriter, TensorBoardWriter, TextLogWriter, Writer
from rl_lab.orchestration.housekeeping import Housekeeping
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.orchestration.phase_scheduler import PhaseScheduler, total_steps
from rl_lab.runs.checkpoint import Checkpoint
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.state import apply_state
from rl_lab.training.runtime import Runtime, import_triton_first
from rl_lab.utils.seeding import stream_seed
from rl_lab.utils.timing import Stopwatch


@dataclass
class Experiment:
    """Everything one training process holds."""

    settings: Settings
    agent: Agent
    environment: Environment
    evaluator: Evaluator
    logger: MetricLogger
    display: LiveDisplay
    probe: Probe  # what the run is doing right now, for the display
    housekeeping: Housekeeping
    orchestrator: Orchestrator
    time_split: TimeSplit
    targets: dict[str, Any]  # section of a checkpoint -> the object whose state it holds

    WARM_SECTIONS: ClassVar[tuple[str, ...]] = ("components", "controllers", "optimizers")  # all a warm start reads

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue exactly where a checkpoint was taken; random generators last, since restoring may draw."""
        apply_state(self.targets, checkpoint.state)
        self.agent.runtime.forget_captures()

    def warm_start(self, checkpoint: Checkpoint, *, with_optimizers: bool) -> None:
        """Take over the weights (and the optimisers), not the counters, the schedules or the environments."""
        sections = self.WARM_SECTIONS if with_optimizers else self.WARM_SECTIONS[:2]
        targets = self.agent.state_targets()
        apply_state({name: targets[name] for name in sections}, {name: checkpoint.state[name] for name in sections})
        self.agent.runtime.forget_captures()

    def close(self) -> None:
        self.logger.close()
        self.environment.close()
        self.evaluator.close()


def build(
    config: Config,
    *,
    run: RunDirectory | None,
    quiet: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
    on_save: Callable[[Housekeeping], None] = lambda housekeeping: None,
) -> Experiment:
    """The whole experiment; with `run` None nothing is written (checks and dry runs)."""
    settings = read_settings(config)
    plans = make_plans(settings)
    with ExitStack() as opened:  # a config that is refused half-way leaves no worker and no open file behind
        environment = build_environment(config, stream="train_environment")
        opened.callback(environment.close)
        logger, display = build_logger(config, settings, run, quiet=quiet)
        opened.callback(logger.close)
        warn = partial(logger.message, level="warning")
        runtime, stopwatch = build_runtime(config), Stopwatch()
        buffers = build_buffers(config, settings, environment, runtime.device, run)
        collector = Collector(environment, buffers, device=runtime.device, stopwatch=stopwatch, report=warn)
        evaluator = build_evaluator(config, settings.evaluation, runtime)
        agent = build_agent(config, environment.spec, runtime=runtime, collector=collector, evaluator=evaluator)
        workflow, scheduler, time_split = agent.workflow, PhaseScheduler(settings.phases), TimeSplit(stopwatch)
        targets: dict[str, Any] = {}
        housekeeping = Housekeeping(
            scheduler=scheduler,
            logger=logger,
            evaluate=workflow.evaluate,
            save_checkpoint=make_saver(run, targets, keep_recent=settings.checkpoint.keep_recent),
            usage=make_usage(time_split, stopwatch, scheduler),
            display=display,
            stopwatch=stopwatch,
            log_cadence=plans.log,
            checkpoint_cadence=plans.checkpoint,
            evaluation=plans.evaluation,
            stop_rules=plans.stop,
            films=film_plan(run, settings.evaluation, plans.film, agent, evaluator),
            on_save=on_save,
        )
        targets |= {"progress": housekeeping, "phase_state": scheduler, **agent.state_targets(), "buffers": buffers}
        targets |= {"collector": collector, "workflow_custom": workflow, "logger": logger, "rng": RandomState()}
        orchestrator = Orchestrator(
            workflow=workflow,
            scheduler=scheduler,
            buffers=buffers,
            housekeeping=housekeeping,
            stopwatch=stopwatch,
            interrupted=interrupted,
        )
        for sentence in predict(buffers, environment.spec, extra_bytes_per_row=workflow.extra_bytes_per_row):
            logger.message(sentence)
        opened.pop_all()
    listen(logger.message)
    for remark in (*runtime.remarks(workflow), *workflow.remarks(), *agent.left_out()):
        warn(remark)
    probe = Probe(housekeeping, collector, evaluator, runtime)
    return Experiment(
        settings, agent, environment, evaluator, logger, display, probe, housekeeping, orchestrator, time_split, targets
    )


def check(config: Config) -> None:
    """Build everything a config describes and throw it away: whatever is wrong with it is refused here."""
    refuse_steps_that_never_come(read_settings(config))
    build(config, run=None, quiet=True).close()


def build_environment(config: Config, *, stream: str, num_envs: int | None = None, render: bool = False) -> Environment:
    """The environments of one use (`stream`): training, evaluation or play, each with seeds of its own."""
    import_plugins(tuple(config["plugins"] or ()))
    import_triton_first()
    settings = dict(config["environment"])
    if num_envs is not None:
        settings["num_envs"] = num_envs
    if render:
        settings["vectorization"] = "sync"  # frames come from single environments
    injected = {"seed": int(config["seed"]), "stream": stream, "render": render}
    return call_checked(make_environment, settings, place="environment", injected=injected)


def build_buffers(
    config: Config,
    settings: Settings,
    environment: Environment,
    device: torch.device,
    run: RunDirectory | None = None,
) -> dict[str, Buffer]:
    """Every buffer of the config; each draws from a random stream of its own and has a folder of the run."""
    buffers: dict[str, Buffer] = {}
    for name, block in (config["buffers"] or {}).items():
        if block is None:
            continue
        steps = [phase.collect_steps for phase in settings.phases if phase.buffer == name and phase.type == "online"]
        injected = {
            "num_envs": environment.num_envs,
            "spec": environment.spec,
            "capacity_steps": max(steps, default=1),
            "seed": stream_seed(int(config["seed"]), "buffer", crc32(name.encode())),
            "device": device,
            "directory": None if run is None else str(run.path / REPLAY / name),
        }
        buffers[name] = construct(block, place=f"buffers.{name}", injected=injected, plugins=settings.plugins)
    return buffers


def build_evaluator(config: Config, block: EvaluationBlock, runtime: Runtime) -> Evaluator:
    return Evaluator(
        lambda: build_environment(config, stream="eval_environment", num_envs=block.num_envs),
        make_render_environment=lambda: build_environment(config, stream="play_environment", num_envs=1, render=True),
        device=runtime.device,
        timeout_steps=block.timeout_steps,
    )


def build_logger(
    config: Config, settings: Settings, run: RunDirectory | None, *, quiet: bool
) -> tuple[MetricLogger, LiveDisplay]:
    title = f"{settings.experiment.name} · {config['environment']['id']} · seed {settings.seed}"
    mode = "quiet" if quiet else settings.logging.terminal
    block, total = settings.logging, total_steps(settings.phases)
    display = LiveDisplay(title=title, total=total, mode=mode, highlight=block.highlight or (), digits=block.precision)
    writers: list[Writer] = [display]
    if run is not None:
        log = TextLogWriter(run.log_path)
        display.on_failure = partial(log.message, level="warning")
        writers += [JsonlWriter(run.metrics_path), log]
        if settings.logging.tensorboard:
            writers.append(TensorBoardWriter(run.tensorboard_dir))
    return MetricLogger(writers), display
