"""A plain config -> a whole experiment, in one explicit order:

    environments -> logger -> runtime -> buffers -> collector, evaluator -> agent (components -> controllers
                 -> optimizers -> workflow) -> scheduler -> housekeeping -> orchestrator

No config object goes further than this file: everything behind it gets numbers, names and things.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import nn

from rl_lab.buffers.base import Buffer
from rl_lab.buffers.budget import predict
from rl_lab.collection.collector import Collector
from rl_lab.collection.evaluator import Evaluator
from rl_lab.config.construct import PART_KEYS, READERS, call_checked, construct, import_plugins
from rl_lab.config.schema import Config, EvaluationBlock, Settings, read_settings, refuse_steps_that_never_come
from rl_lab.environments.base import Environment
from rl_lab.environments.factory import make_environment
from rl_lab.environments.vector import NativeEnvironment
from rl_lab.experiment.curriculum import Borrowed, Curriculum, pin_sources
from rl_lab.experiment.film import film_plan, showing_returns, video_plan
from rl_lab.experiment.instruments import Debugging, attach_debugging
from rl_lab.experiment.live import Probe, make_usage
from rl_lab.experiment.rules import build_monitor
from rl_lab.experiment.saver import REPLAY, RandomState, make_saver
from rl_lab.experiment.sinks import build_sinks
from rl_lab.kernels.door import listen
from rl_lab.metrics.logger import MetricLogger
from rl_lab.metrics.terminal import LiveDisplay
from rl_lab.metrics.time_split import TimeSplit
from rl_lab.metrics.writers import JsonlWriter, TextLogWriter, Writer
from rl_lab.orchestration.cadence import Cadence
from rl_lab.orchestration.callbacks import Callbacks
from rl_lab.orchestration.housekeeping import EvaluationPlan, Housekeeping, Prune, go_on
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.orchestration.phase_scheduler import PhaseScheduler, total_steps
from rl_lab.orchestration.stopping import StopRules
from rl_lab.runs.checkpoint import Checkpoint
from rl_lab.runs.lineage import add_lineage
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.state import apply_state
from rl_lab.training.optimizer import Optimizer
from rl_lab.training.runtime import Runtime, import_triton_first
from rl_lab.training.schedules import parse_number
from rl_lab.types import ConfigError, Counts, EnvSpec, Phase, ScheduledNumber, did_you_mean
from rl_lab.utils.seeding import seed_everything, stream_seed
from rl_lab.utils.timing import Stopwatch
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import Parts, WorkflowContext

EVALUATIONS, LEAST_EVALUATIONS = 10, 3  # of a run by default
EVALUATION_ENVS, MOST_EVALUATION_ENVS = 10, 100  # where `evaluation.num_envs` is auto
USUAL_EPISODE_STEPS = 1000  # where an environment has no limit
UPDATE_ROUNDS, ROW_ROUNDS = (
    4.0,
    0.125,
)  # what learning costs, in rounds of acting: a batch, a row of a rollout (ppo_cartpole)
POLICY = ("components", "controllers")  # the sections of a checkpoint that act
READERS[ScheduledNumber] = parse_number  # for buffers, which know no schedules


@dataclass(frozen=True)
class Agent:
    """A workflow with its parts, ready to act; it needs a spec but no environment."""

    workflow: Workflow
    runtime: Runtime
    components: Parts
    controllers: Parts
    optimizers: Parts

    def state_targets(self) -> dict[str, Any]:
        """What a policy is made of, as sections of a checkpoint."""
        return {
            "components": {name: part for name, part in self.components.items() if isinstance(part, nn.Module)},
            "controllers": {name: part for name, part in self.controllers.items() if isinstance(part, nn.Module)},
            "optimizers": dict(self.optimizers),
        }

    def restore(self, checkpoint: Checkpoint, sections: Sequence[str]) -> None:
        """Take over some sections of a checkpoint."""
        targets = self.state_targets()
        apply_state({name: targets[name] for name in sections}, {name: checkpoint.state[name] for name in sections})

    def left_out(self) -> list[str]:
        """Sentences about what could learn, but no optimizer changes."""
        learning = {id(each) for optimizer in self.optimizers.values() for each in optimizer.parameters}
        return [
            f"{name} never learns: no optimizer names it in its `parts`."
            for name, part in {**self.components, **self.controllers}.items()
            if isinstance(part, nn.Module)
            and (own := [id(each) for each in part.parameters() if each.requires_grad])
            and learning.isdisjoint(own)
        ]


@dataclass
class Experiment:
    """Everything one training process holds."""

    settings: Settings
    agent: Agent
    collector: Collector
    curriculum: Curriculum
    evaluator: Evaluator
    logger: MetricLogger
    display: LiveDisplay
    housekeeping: Housekeeping
    orchestrator: Orchestrator
    time_split: TimeSplit
    debugging: Debugging
    targets: dict[str, Any]  # section of a checkpoint -> the object whose state it holds

    WARM_SECTIONS: ClassVar[tuple[str, ...]] = (*POLICY, "optimizers")  # all a warm start reads

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue exactly where a checkpoint was taken; random generators last, since restoring may draw."""
        self.curriculum.hold_environment(checkpoint.state["collector"].get("stage", 0))
        apply_state(self.targets, checkpoint.state)
        scheduler = self.orchestrator.scheduler
        self.curriculum.set_numbers(min(scheduler.index, len(scheduler.phases) - 1))
        self.agent.runtime.forget_captures()

    def warm_start(self, checkpoint: Checkpoint, *, with_optimizers: bool) -> None:
        """Take over the weights (and the optimisers), not the counters, the schedules or the environments."""
        self.agent.restore(checkpoint, self.WARM_SECTIONS if with_optimizers else POLICY)
        self.agent.runtime.forget_captures()

    @property
    def probe(self) -> Probe:
        """What the run is doing right now, for the display."""
        return Probe(self.housekeeping, self.collector, self.evaluator, self.agent.runtime, self.time_split)

    def close(self) -> None:
        self.debugging.end()
        self.logger.close()
        self.collector.environment.close()
        self.evaluator.close()


def build(
    config: Config,
    *,
    run: RunDirectory | None,
    quiet: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
    on_save: Callable[[Housekeeping], None] = lambda housekeeping: None,
    prune: Prune = go_on,
    callbacks: Callbacks | None = None,
) -> Experiment:
    """The whole experiment; with `run` None nothing is written (checks and dry runs)."""
    settings = read_settings(config)
    make_plans(settings)  # refuses what is never due
    with ExitStack() as opened:  # a config that is refused half-way leaves no worker and no open file behind
        environment = build_environment(config, stream="train_environment")
        opened.callback(environment.close)
        logger, display = build_logger(config, settings, run, environment.spec, quiet=quiet)
        opened.callback(logger.close)
        warn, stopwatch = partial(logger.message, level="warning"), Stopwatch()
        runtime = build_runtime(config, is_watched=settings.debug.check_finite)
        buffers = build_buffers(config, settings, environment, runtime.device, run)
        collector = Collector(environment, buffers, device=runtime.device, stopwatch=stopwatch, report=warn)
        evaluator = build_evaluator(config, settings.evaluation, runtime, warn)
        agent = build_agent(config, environment.spec, runtime=runtime, collector=collector, evaluator=evaluator)
        workflow, scheduler, time_split = agent.workflow, PhaseScheduler(settings.phases), TimeSplit(stopwatch)
        targets: dict[str, Any] = {}
        plans, films = make_plans(settings, environment, video_plan(run, workflow, evaluator, logger))
        plans |= {"on_save": on_save, "prune": prune, "callbacks": callbacks or Callbacks(), "display": display}
        housekeeping = Housekeeping(
            run_id="RUN" if run is None else run.id,
            scheduler=scheduler,
            stopwatch=stopwatch,
            logger=logger,
            evaluate=showing_returns(workflow.evaluate, evaluator, logger, scheduler),
            save_checkpoint=make_saver(run, targets, keep_recent=settings.checkpoint.keep_recent),
            usage=make_usage(time_split, stopwatch, scheduler, None if run is None else run.path),
            films=film_plan(run, settings.evaluation, films, workflow, evaluator, logger),
            **plans,
        )
        targets |= {"progress": housekeeping, "phase_state": scheduler, **agent.state_targets(), "buffers": buffers}
        targets |= {"collector": collector, "workflow_custom": workflow, "logger": logger, "rng": RandomState()}
        curriculum = build_curriculum(config, settings, agent, collector, buffers, housekeeping, run)
        orchestrator = Orchestrator(
            workflow=workflow,
            scheduler=scheduler,
            buffers=buffers,
            housekeeping=housekeeping,
            stopwatch=stopwatch,
            interrupted=interrupted,
            begin_phase=curriculum.begin,
        )
        debugging = attach_debugging(settings.debug, orchestrator, targets, config, run)
        for sentence in predict(buffers, environment.spec, extra_bytes_per_row=workflow.extra_bytes_per_row):
            logger.message(sentence)
        opened.pop_all()
    listen(logger.message)
    for remark in (*runtime.remarks(workflow), *agent.left_out()):
        warn(remark)
    parts = settings, agent, collector, curriculum, evaluator, logger, display, housekeeping, orchestrator
    return Experiment(*parts, time_split, debugging, targets)


def make_plans(
    settings: Settings, environment: Environment | None = None, record: Callable[[Counts], object] = lambda counts: None
) -> tuple[dict[str, Any], Cadence]:
    """When housekeeping logs, saves, evaluates and stops, and when a world model is filmed."""
    log, save, look = settings.logging, settings.checkpoint, settings.evaluation
    if look.every_steps == "auto":
        cadence = automatic_cadence(settings, environment)
    else:
        cadence = Cadence(look.every_steps, look.every_updates, place="evaluation")
    plans = {
        "log_cadence": Cadence(log.every_steps, log.every_updates, place="logging"),
        "checkpoint_cadence": Cadence(None, save.every_updates, save.every_minutes, place="training.checkpoint"),
        "evaluation": EvaluationPlan(
            cadence, look.warmup_steps, look.episodes, look.final_episodes, look.video_every, record
        ),
        "stop_rules": StopRules(**asdict(settings.stop)),
    }
    return plans, Cadence(look.dream_every_steps, look.dream_every_updates, place="evaluation.dream")


def automatic_cadence(settings: Settings, environment: Environment | None) -> Cadence:
    """About ten evaluations in a run, the last one included; fewer, but three, where even the longest episodes would
    cost more than a quarter of what training does.

    It goes by the planned steps (or updates), never by the clock: a repeated run evaluates at the same steps.
    """
    look = settings.evaluation
    if environment is None or look.every_updates is not None or look.final_episodes == 0:
        return Cadence(None, look.every_updates, place="evaluation")
    total = total_steps(settings.phases)
    if total is None:
        updates = [phase.duration_updates for phase in settings.phases]
        whole = None if None in updates else sum(each or 0 for each in updates)
        return Cadence(None, whole // EVALUATIONS + 1 if whole and whole >= EVALUATIONS else None, place="evaluation")
    episode = look.timeout_steps or environment.spec.max_episode_steps or USUAL_EPISODE_STEPS
    own_rounds = episode * -(-look.episodes // evaluation_envs(look))
    rounds = sum(_rounds_of(phase, environment.num_envs) for phase in settings.phases)
    count = min(EVALUATIONS, max(LEAST_EVALUATIONS, ceil(rounds / (4 * own_rounds))))
    cycle = environment.num_envs * max(phase.collect_steps for phase in settings.phases)
    return Cadence(-(-(total + cycle) // count), None, place="evaluation")  # none at the end, where the last one is


def _rounds_of(phase: Phase, num_envs: int) -> float:
    """What a phase costs, counted in rounds of acting in all environments."""
    steps = phase.duration_steps or 0
    per_step = ROW_ROUNDS if phase.updates_per_step is None else UPDATE_ROUNDS * phase.updates_per_step
    return steps / num_envs + (steps * per_step if phase.workflow_hooks else 0.0)


def check(config: Config) -> None:
    """Build everything a config describes and throw it away: whatever is wrong with it is refused here."""
    refuse_steps_that_never_come(read_settings(config))
    experiment = build(pin_sources(config, Path(config["runs"]["directory"])), run=None, quiet=True)
    try:
        experiment.curriculum.read_ahead(0, is_new=True)
    finally:
        experiment.close()


def build_environment(config: Config, *, stream: str, num_envs: int | None = None, render: bool = False) -> Environment:
    """The environments of one use (`stream`): training, evaluation or play, each with seeds of its own."""
    import_plugins(tuple(config["plugins"] or ()))
    # Where tensors are watched, and where methods are compiled, torch imports its compiler, and that one Triton.
    import_triton_first(is_needed=any((config["debug"] or {}).values()) or bool(config["runtime"]["compile"]))
    settings = dict(config["environment"])
    if num_envs is not None:
        settings["num_envs"] = num_envs
    if render and settings["vectorization"] != "envpool":
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


def build_curriculum(
    config: Config,
    settings: Settings,
    agent: Agent,
    collector: Collector,
    buffers: Mapping[str, Buffer],
    housekeeping: Housekeeping,
    run: RunDirectory | None,
) -> Curriculum:
    """What phases change when they begin; whatever they load is noted in the run."""

    def note(phase: Phase, borrowed: Borrowed) -> None:
        housekeeping.logger.message(f"Phase {phase.name} begins with weights of {borrowed.run}: {borrowed.parts}.")
        if run is not None:
            counts = {"counts": housekeeping.counts.as_dict(), "source_counts": borrowed.counts}
            facts: dict[str, Any] = {"source": borrowed.run, "checkpoint": borrowed.checkpoint, **counts}
            add_lineage(run, "loaded", **facts, phase=phase.name, parts=borrowed.parts)

    return Curriculum(
        config,
        settings.phases,
        workflow=agent.workflow,
        collector=collector,
        buffers=buffers,
        make_environment=build_environment,
        on_change=housekeeping.environment_changed,
        on_load=note,
    )


def evaluation_envs(block: EvaluationBlock) -> int:
    return EVALUATION_ENVS if block.num_envs == "auto" else block.num_envs


def build_evaluator(
    config: Config, block: EvaluationBlock, runtime: Runtime, report: Callable[[str], None] = lambda sentence: None
) -> Evaluator:
    make = partial(build_environment, config, stream="eval_environment")

    def widen(environment: Environment, episodes: int) -> Environment:
        is_cheap = isinstance(environment, NativeEnvironment) and environment.is_one_array
        can_grow = is_cheap and block.num_envs == "auto"
        return make(num_envs=min(episodes, MOST_EVALUATION_ENVS)) if can_grow else environment

    return Evaluator(
        lambda: make(num_envs=evaluation_envs(block)),
        widen=widen,
        make_render_environment=lambda: build_environment(config, stream="play_environment", num_envs=1, render=True),
        device=runtime.device,
        timeout_steps=block.timeout_steps,
        report=report,
    )


def build_logger(
    config: Config, settings: Settings, run: RunDirectory | None, spec: EnvSpec, *, quiet: bool
) -> tuple[MetricLogger, LiveDisplay]:
    title = f"{settings.experiment.name} · {config['environment']['id']} · seed {settings.seed}"
    mode = "quiet" if quiet else settings.logging.terminal
    block, total = settings.logging, total_steps(settings.phases)
    display = LiveDisplay(title=title, total=total, mode=mode, highlight=block.highlight or (), digits=block.precision)
    writers: list[Writer] = [display]
    sinks = build_sinks(config, settings, run)
    if run is not None:
        log, rows = TextLogWriter(run.log_path), JsonlWriter(run.metrics_path)
        display.on_failure = partial(log.message, level="warning")
        writers += [rows, log, *sinks]
    monitor = build_monitor(config, block.rules, run, spec)
    logger = MetricLogger(writers, monitor=monitor)
    for sink in sinks:
        sink.report = partial(logger.message, level="warning")
        if run is not None:
            sink.earlier_rows = rows.last_rows
    return logger, display


# --- the agent: what acts and learns; it needs a spec but no environment ---


def build_runtime(config: Config, *, is_watched: bool = False) -> Runtime:
    """Debug mode looks at every operation, so that none may be compiled or captured."""
    plain = {"compile": False, "capture": False} if is_watched else {}
    return call_checked(Runtime, {**(config["runtime"] or {}), **plain}, place="runtime")


def build_agent(
    config: Config, spec: EnvSpec, *, runtime: Runtime, collector: Any = None, evaluator: Any = None
) -> Agent:
    """The workflow with its parts; seeded, so that the same config starts from the same weights."""
    import_plugins(tuple(config["plugins"] or ()))
    seed_everything(int(config["seed"]))
    components, controllers, optimizers = build_parts(config, spec, runtime)
    workflow = construct(config["algorithm"], place="algorithm", plugins=tuple(config["plugins"] or ()))
    if not isinstance(workflow, Workflow):
        raise ConfigError(f"algorithm._target_ builds a {type(workflow).__name__}, which is not a Workflow.")
    context = WorkflowContext(
        components=components,
        controllers=controllers,
        optimizers=optimizers,
        collector=collector,
        evaluator=evaluator,
        runtime=runtime,
        spec=spec,
        num_envs=int(config["environment"]["num_envs"]),
    )
    workflow.initialize(context)
    for parts in (components, controllers, optimizers):
        _refuse_unused(parts, workflow)
    runtime.compile_methods(workflow)
    runtime.capture_methods(workflow)
    return Agent(workflow, runtime, components, controllers, optimizers)


def build_parts(config: Config, spec: EnvSpec, runtime: Runtime) -> tuple[Parts, Parts, Parts]:
    """Components, then controllers, then optimizers; sizes flow from the spec and from part to part."""
    plugins = tuple(config["plugins"] or ())
    injected = {
        "observation": dict(spec.observation),
        "action": spec.action,
        "num_envs": int(config["environment"]["num_envs"]),
    }
    built: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {"components": {}, "controllers": {}}
    for group, parts in groups.items():
        for name in _in_build_order(config[group] or {}):
            block = config[group][name]
            part = construct(block, place=f"{group}.{name}", injected=injected, parts=built, plugins=plugins)
            parts[name] = built[name] = part.to(runtime.device) if isinstance(part, nn.Module) else part
    optimizers = {
        name: _build_optimizer(name, block, built, runtime)
        for name, block in (config["optimizers"] or {}).items()
        if block is not None
    }
    return (
        Parts("components", groups["components"]),
        Parts("controllers", groups["controllers"]),
        Parts("optimizers", optimizers),
    )


def _in_build_order(blocks: Mapping[str, Any]) -> list[str]:
    """Parts after the parts they take their input from; a block set to null is not there."""
    waiting = {name: block for name, block in blocks.items() if block is not None}
    order: list[str] = []
    while waiting:
        ready = [name for name, block in waiting.items() if not _inputs(block) & (waiting.keys() - {name})]
        if not ready:
            raise ConfigError(f"These blocks take their input from each other in a circle: {', '.join(waiting)}.")
        order += ready
        waiting = {name: block for name, block in waiting.items() if name not in ready}
    return order


def _inputs(block: Mapping[str, Any]) -> set[str]:
    named = [block[key] for key in PART_KEYS if key in block] if isinstance(block, Mapping) else []
    return {str(name) for each in named for name in (each if isinstance(each, list | tuple) else [each])}


def _build_optimizer(name: str, block: Mapping[str, Any], built: Mapping[str, Any], runtime: Runtime) -> Optimizer:
    place = f"optimizers.{name}"
    settings = {key: value for key, value in block.items() if key != "parts"}
    if "parts" not in block:
        raise ConfigError(f"{place} does not say what it trains: write `parts: [encoder, actor]`.")
    parts, known = block["parts"], f"There are: {', '.join(built)}."
    if not isinstance(parts, list | tuple):
        raise ConfigError(f"{place}.parts is {parts!r}: write a list, such as [encoder, actor].")
    for part in parts:  # one that is not there is left out, unless it looks like a slip
        hint = "" if part in built else did_you_mean(part, [name for name in built if name not in parts])
        if hint:
            raise ConfigError(f"{place}.parts names '{part}', which is no component.{hint} {known}")
    modules = {part: built[part] for part in parts if isinstance(built.get(part), nn.Module)}
    if not modules:
        raise ConfigError(f"{place}.parts is {parts}: none of them is a component. {known}")
    injected = {"parameters": modules, "precision": runtime.precision, "world": None}
    return call_checked(Optimizer, settings, place=place, injected=injected)


def _refuse_unused(parts: Parts, workflow: Workflow) -> None:
    """A part that the workflow never asks for would sit there and learn nothing; a phase may ask for one that acts."""
    unused = [name for name in parts if name not in parts.asked and not hasattr(parts.peek(name), "sample")]
    if unused:
        raise ConfigError(
            f"{parts.kind}.{unused[0]} is not used by {type(workflow).__name__}.{did_you_mean(unused[0], parts.asked)} "
            f"It uses: {', '.join(sorted(parts.asked)) or 'none'}. "
            f"Write `{parts.kind}.{unused[0]}: null` to leave it out."
        )
