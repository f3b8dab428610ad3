"""A plain config -> a whole experiment, in one explicit order:

    runtime -> environments -> specs -> components -> controllers -> optimizers -> workflow
            -> buffers -> collector, evaluator -> logger -> scheduler -> housekeeping -> orchestrator

No config object goes further than this file: everything behind it gets numbers, names and things.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import nn

from rl_lab.buffers.base import Buffer
from rl_lab.buffers.budget import predict
from rl_lab.buffers.row_log import KeepsFiles
from rl_lab.collection.collector import Collector
from rl_lab.collection.evaluator import Evaluator
from rl_lab.config.construct import PART_KEYS, call_checked, construct, import_plugins
from rl_lab.config.schema import (
    CheckpointBlock,
    Config,
    EvaluationBlock,
    Settings,
    read_settings,
    refuse_steps_that_never_come,
)
from rl_lab.environments.base import Environment
from rl_lab.environments.factory import make_environment
from rl_lab.experiment.plans import make_plans
from rl_lab.kernels.door import listen
from rl_lab.metrics.logger import MetricLogger
from rl_lab.metrics.system import SystemUsage
from rl_lab.metrics.terminal import LiveDisplay
from rl_lab.metrics.time_split import TimeSplit
from rl_lab.metrics.writers import JsonlWriter, TensorBoardWriter, TextLogWriter, Writer
from rl_lab.orchestration.cadence import Cadence
from rl_lab.orchestration.housekeeping import FilmPlan, Housekeeping
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.orchestration.phase_scheduler import PhaseScheduler, total_steps
from rl_lab.runs.checkpoint import Checkpoint, CheckpointStore, ExternalFile
from rl_lab.runs.files import readable_disk_errors
from rl_lab.runs.film import FilmFiles, write_film
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.state import apply_state, gather_state
from rl_lab.training.optimizer import Optimizer
from rl_lab.training.runtime import Runtime, import_triton_first
from rl_lab.types import ConfigError, Counts, EnvSpec, Metrics, StateTree, did_you_mean
from rl_lab.utils.seeding import get_rng_state, seed_everything, set_rng_state, stream_seed
from rl_lab.utils.timing import Stopwatch
from rl_lab.utils.tree import map_leaves
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import Parts, WorkflowContext
from rl_lab.workflows.film import can_dream, make_film, while_anybody_plays

_REPLAY = "replay"  # the folder of a run in which buffers keep rows, each in one of its own

# --- the agent: everything that acts and learns ------------------------------------------------


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


def build_runtime(config: Config) -> Runtime:
    return call_checked(Runtime, config["runtime"] or {}, place="runtime")


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
    for parts in (components, optimizers):
        _refuse_unused(parts, workflow)
    runtime.compile_methods(workflow)
    runtime.capture_methods(workflow)
    return Agent(workflow, runtime, components, controllers, optimizers)


def _refuse_unused(parts: Parts, workflow: Workflow) -> None:
    """A part that the workflow never asks for would sit there and learn nothing."""
    unused = [name for name in parts if name not in parts.asked]
    if unused:
        raise ConfigError(
            f"{parts.kind}.{unused[0]} is not used by {type(workflow).__name__}.{did_you_mean(unused[0], parts.asked)} "
            f"It uses: {', '.join(sorted(parts.asked)) or 'none'}. "
            f"Write `{parts.kind}.{unused[0]}: null` to leave it out."
        )


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


# --- the experiment: an agent with its run -----------------------------------------------------


class RandomState:
    """The process's random generators as one part of the checkpoint."""

    def get_state(self) -> StateTree:
        return get_rng_state()

    def set_state(self, state: StateTree) -> None:
        set_rng_state(state)


@dataclass
class Experiment:
    """Everything one training process holds."""

    config: Config
    settings: Settings
    agent: Agent
    environment: Environment
    collector: Collector
    evaluator: Evaluator
    logger: MetricLogger
    display: LiveDisplay
    housekeeping: Housekeeping
    orchestrator: Orchestrator
    time_split: TimeSplit
    targets: dict[str, Any]

    WARM_SECTIONS: ClassVar[tuple[str, ...]] = ("components", "controllers", "optimizers")  # all a warm start reads

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue exactly where a checkpoint was taken; random generators last, since restoring may draw."""
        apply_state(self.targets, checkpoint.state)
        self.agent.runtime.forget_captures()

    def warm_start(self, checkpoint: Checkpoint, *, with_optimizers: bool) -> None:
        """Take over the weights (and the optimisers), not the counters, the schedules or the environments."""
        sections = ("components", "controllers", *(("optimizers",) if with_optimizers else ()))
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
    with ExitStack() as opened:  # a config that is refused half-way leaves no worker and no open file behind
        environment = build_environment(config, stream="train_environment")
        opened.callback(environment.close)
        logger, display = build_logger(settings, run, title=_title(config, settings), quiet=quiet)
        opened.callback(logger.close)
        experiment = _assemble(config, settings, environment, logger, display, run, interrupted, on_save)
        opened.pop_all()
    listen(logger.message)
    agent = experiment.agent
    for remark in (*agent.runtime.remarks(agent.workflow), *_left_out(agent)):
        logger.message(remark, "warning")
    return experiment


def _left_out(agent: Agent) -> list[str]:
    """Sentences about what could learn, but no optimizer changes."""
    learning = {id(each) for optimizer in agent.optimizers.values() for each in optimizer.parameters}
    return [
        f"{name} never learns: no optimizer names it in its `parts`."
        for name, part in {**agent.components, **agent.controllers}.items()
        if isinstance(part, nn.Module)
        and (own := [id(each) for each in part.parameters() if each.requires_grad])
        and learning.isdisjoint(own)
    ]


def _assemble(
    config: Config,
    settings: Settings,
    environment: Environment,
    logger: MetricLogger,
    display: LiveDisplay,
    run: RunDirectory | None,
    interrupted: Callable[[], bool],
    on_save: Callable[[Housekeeping], None],
) -> Experiment:
    runtime, stopwatch = build_runtime(config), Stopwatch()
    buffers = build_buffers(config, settings, environment, runtime.device, run)
    warn = partial(logger.message, level="warning")
    collector = Collector(environment, buffers, device=runtime.device, stopwatch=stopwatch, report=warn)
    evaluator = build_evaluator(config, settings.evaluation, runtime)
    agent = build_agent(config, environment.spec, runtime=runtime, collector=collector, evaluator=evaluator)
    for sentence in predict(buffers, environment.spec, extra_bytes_per_row=agent.workflow.extra_bytes_per_row):
        logger.message(sentence)
    scheduler = PhaseScheduler(settings.phases)
    time_split, plans = TimeSplit(stopwatch), make_plans(settings)
    targets: dict[str, Any] = {}
    housekeeping = Housekeeping(
        scheduler=scheduler,
        logger=logger,
        evaluate=agent.workflow.evaluate,
        save_checkpoint=_saver(run, settings.checkpoint, targets),
        usage=_usage(time_split, stopwatch, scheduler),
        display=display,
        stopwatch=stopwatch,
        log_cadence=plans.log,
        checkpoint_cadence=plans.checkpoint,
        evaluation=plans.evaluation,
        stop_rules=plans.stop,
        films=_film_plan(run, settings.evaluation, plans.film, agent, evaluator),
        on_save=on_save,
    )
    orchestrator = Orchestrator(
        workflow=agent.workflow,
        scheduler=scheduler,
        buffers=buffers,
        housekeeping=housekeeping,
        stopwatch=stopwatch,
        interrupted=interrupted,
    )
    targets |= {"progress": housekeeping, "phase_state": scheduler, **agent.state_targets(), "buffers": dict(buffers)}
    targets |= {"collector": collector, "workflow_custom": agent.workflow, "logger": logger, "rng": RandomState()}
    return Experiment(
        config=config,
        settings=settings,
        agent=agent,
        environment=environment,
        collector=collector,
        evaluator=evaluator,
        logger=logger,
        display=display,
        housekeeping=housekeeping,
        orchestrator=orchestrator,
        time_split=time_split,
        targets=targets,
    )


def check(config: Config) -> None:
    """Build everything a config describes and throw it away: whatever is wrong with it is refused here."""
    refuse_steps_that_never_come(read_settings(config))
    build(config, run=None, quiet=True).close()


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
            "directory": None if run is None else str(run.path / _REPLAY / name),
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
    settings: Settings, run: RunDirectory | None, *, title: str, quiet: bool
) -> tuple[MetricLogger, LiveDisplay]:
    mode = "quiet" if quiet else settings.logging.terminal
    display = LiveDisplay(title=title, total=total_steps(settings.phases), mode=mode)
    writers: list[Writer] = [display]
    if run is not None:
        writers += [JsonlWriter(run.metrics_path), TextLogWriter(run.log_path)]
        if settings.logging.tensorboard:
            writers.append(TensorBoardWriter(run.tensorboard_dir))
    return MetricLogger(writers), display


def _title(config: Config, settings: Settings) -> str:
    return f"{settings.experiment.name} · {config['environment']['id']} · seed {settings.seed}"


def _saver(run: RunDirectory | None, block: CheckpointBlock, targets: dict[str, Any]) -> Callable[..., Path | None]:
    if run is None:
        return lambda **_: None
    store = CheckpointStore(run.checkpoints_dir, keep_recent=block.keep_recent)

    def save(*, counts: Counts, score: float | None, is_best: bool) -> Path:
        buffers = {name: each for name, each in targets["buffers"].items() if isinstance(each, KeepsFiles)}
        with readable_disk_errors(run.path / _REPLAY, run_id=run.id):
            state = gather_state(targets)
        external = [
            ExternalFile("buffers", f"{_REPLAY}/{name}/{named.file}", named.bytes, named.crc32)
            for name, buffer in buffers.items()
            for named in buffer.named_files()
        ]
        path = store.save(
            state,
            agent_steps=counts.agent_steps,
            counts=counts.as_dict(),
            score=score,
            is_best=is_best,
            external=external,
        )
        needed = [PurePosixPath(each) for each in store.external_paths()]
        for name, buffer in buffers.items():
            folder = PurePosixPath(_REPLAY, name)
            buffer.remove_files_but({place.name for place in needed if place.parent == folder})
        return path

    return save


def film_dreams(
    agent: Agent, evaluator: Evaluator, path: Path, *, sequences: int = 4, context: int = 5, horizon: int = 45
) -> FilmFiles:
    """Play in the evaluation's environments, which no buffer holds, and film what the model makes of it."""
    rows = evaluator.play_rows(agent.workflow.act, length=context + horizon)
    assert can_dream(agent.workflow)
    some = {key: values[:sequences] for key, values in rows.items()}
    film = make_film(agent.workflow, while_anybody_plays(some, at_least=context + 1), context=context)
    return write_film(path, map_leaves(lambda values: values.cpu().numpy(), film), context=context)


def _film_plan(
    run: RunDirectory | None, block: EvaluationBlock, cadence: Cadence, agent: Agent, evaluator: Evaluator
) -> FilmPlan:
    for name in ("dream_every_steps", "dream_every_updates"):
        if (every := getattr(block, name)) is not None and not can_dream(agent.workflow):
            raise ConfigError(
                f"evaluation.{name} is {every}, but {type(agent.workflow).__name__} has no world model to dream with: "
                "write null, or train one, such as `rl-lab train dreamer_v3`."
            )
    if run is None:
        return FilmPlan()
    folder = run.videos_dir

    def film(counts: Counts) -> FilmFiles:
        by_updates = block.dream_every_steps is None
        name = f"dream_update_{counts.updates:012d}" if by_updates else f"dream_{counts.agent_steps:012d}"
        return film_dreams(agent, evaluator, folder / f"{name}.mp4")

    return FilmPlan(cadence, film)


def _usage(time_split: TimeSplit, stopwatch: Stopwatch, scheduler: PhaseScheduler) -> Callable[[float], Metrics]:
    """Speed, time left, the split of the wall clock and the machine's load since the last row."""
    system = SystemUsage()
    start = scheduler.run_counts
    before = {"wall": stopwatch.elapsed(), "steps": start.agent_steps, "updates": start.updates}
    first: dict[str, float] = {}

    def usage(run_fraction: float) -> Metrics:
        now, counts = stopwatch.elapsed(), scheduler.run_counts
        seconds = max(now - before["wall"], 1e-9)
        if first.get("phase") != scheduler.index:  # a phase that learns says nothing of one that only collects
            first.update(phase=scheduler.index, fraction=run_fraction, wall=now)
        gained = run_fraction - first["fraction"]
        eta = (now - first["wall"]) * (1.0 - run_fraction) / gained if gained > 0 else None
        metrics: Metrics = {
            "time/agent_steps_per_second": (counts.agent_steps - before["steps"]) / seconds,
            "time/updates_per_second": (counts.updates - before["updates"]) / seconds,
            **({} if eta is None else {"time/eta_s": eta}),
            **time_split.window(),
            **system.sample(),
        }
        before.update(wall=now, steps=counts.agent_steps, updates=counts.updates)
        return metrics

    return usage
