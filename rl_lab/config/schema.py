"""The blocks of a config that describe no `_target_`: their dataclasses and signatures are the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_lab.config.construct import call_checked
from rl_lab.config.phase_settings import settings_of
from rl_lab.config.phases import limited, make_phase
from rl_lab.config.words import BLOCKS
from rl_lab.types import ConfigError, Phase, did_you_mean

Config = Mapping[str, Any]
OPTIONAL_BLOCKS = ("debug",)  # runs of earlier versions lack them


@dataclass(frozen=True)
class ExperimentBlock:
    name: str
    description: str = ""
    tags: Sequence[str] = ()


@dataclass(frozen=True)
class CheckpointBlock:
    every_updates: int | None = None
    every_minutes: float | None = 2.0
    keep_recent: int = 3


@dataclass(frozen=True)
class StopBlock:
    episode_return: float | None = None
    eval_return: float | None = None
    env_frames: int | None = None
    wall_minutes: float | None = None
    plateau_evaluations: int | None = None


@dataclass(frozen=True)
class EvaluationBlock:
    every_steps: int | Literal["auto"] | None = "auto"
    every_updates: int | None = None
    warmup_steps: int = 0
    episodes: int = 10
    final_episodes: int = 100
    num_envs: int | Literal["auto"] = "auto"
    timeout_steps: int | None = None
    video: bool = True
    video_every: int | None = None
    dream_every_steps: int | None = None
    dream_every_updates: int | None = None

    def __post_init__(self) -> None:
        least = {"warmup_steps": 0, "episodes": 1, "final_episodes": 0, "timeout_steps": 1}
        least |= {"dream_every_steps": 1, "dream_every_updates": 1, "video_every": 1}
        least |= {"num_envs": 1} if self.num_envs != "auto" else {}
        for name, lowest in least.items():
            _at_least(lowest, getattr(self, name), place=f"evaluation.{name}")


@dataclass(frozen=True)
class LoggingBlock:
    every_steps: int | None = None
    every_updates: int | None = 1
    terminal: Literal["auto", "live", "plain", "quiet"] = "auto"
    tensorboard: bool = True
    writers: Sequence[Any] = field(default_factory=list)
    precision: int = 4
    highlight: Sequence[str] | None = None
    rules: Mapping[str, Any] | None = None
    stall_minutes: float | None = 10.0

    def __post_init__(self) -> None:
        _at_least(1, self.precision, place="logging.precision")
        if self.stall_minutes is not None and self.stall_minutes <= 0:
            raise ConfigError(
                f"logging.stall_minutes is {self.stall_minutes}: write minutes above 0, or null for never."
            )


@dataclass(frozen=True)
class DebugBlock:
    check_finite: bool = False
    check_gradients: bool = False
    histograms_every_updates: int | None = None
    profile_updates: int | None = None

    def __post_init__(self) -> None:
        _at_least(1, self.histograms_every_updates, place="debug.histograms_every_updates")
        _at_least(1, self.profile_updates, place="debug.profile_updates")


@dataclass(frozen=True)
class RunsBlock:
    directory: str = "runs"
    id: str | None = None


@dataclass(frozen=True)
class TrainingBlock:
    phases: Sequence[Mapping[str, Any]]
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    stop: Mapping[str, Any] = field(default_factory=dict)
    limit_cycles: int | None = None

    def __post_init__(self) -> None:
        _at_least(1, self.limit_cycles, place="training.limit_cycles")


def _at_least(lowest: int, value: int | None, *, place: str) -> None:
    if value is not None and value < lowest:
        raise ConfigError(f"{place} is {value}: write a whole number of at least {lowest}.")


@dataclass(frozen=True)
class Settings:
    """The checked small blocks of a config."""

    experiment: ExperimentBlock
    seed: int
    plugins: tuple[str, ...]
    phases: tuple[Phase, ...]
    checkpoint: CheckpointBlock
    stop: StopBlock
    evaluation: EvaluationBlock
    logging: LoggingBlock
    runs: RunsBlock
    debug: DebugBlock


def read_settings(config: Config) -> Settings:
    """Check every block that is not built from a `_target_`."""
    for key in config:
        if key not in BLOCKS:
            hint = did_you_mean(key, BLOCKS)
            raise ConfigError(f"{key} is not a block of a config.{hint} Blocks: {', '.join(BLOCKS)}.")
    for key in BLOCKS:
        if key not in config and key not in OPTIONAL_BLOCKS:
            raise ConfigError(f"The config lacks the block '{key}'. Blocks: {', '.join(BLOCKS)}.")
        if key not in ("seed", "plugins") and not isinstance(config.get(key), Mapping | None):
            raise ConfigError(f"{key} is {config[key]!r}: it is a block of settings, such as `{key}: {{...}}`.")
    if isinstance(config["seed"], bool) or not isinstance(config["seed"], int) or config["seed"] < 0:
        raise ConfigError(f"seed is {config['seed']!r}: write a whole number from 0 on.")
    if config["seed"] >= 2**63:
        raise ConfigError(f"seed is {config['seed']}: write a whole number below 2**63.")
    plugins = config["plugins"] or ()
    if not isinstance(plugins, list | tuple) or not all(isinstance(each, str) for each in plugins):
        raise ConfigError(f"plugins is {plugins!r}: write a list of packages, such as [my_package].")
    training: TrainingBlock = _block(TrainingBlock, config, "training")
    places = [f"training.phases.{index}" for index in range(len(training.phases))]
    phases = [make_phase(dict(phase), place=place) for phase, place in zip(training.phases, places, strict=True)]
    for phase in phases:
        settings_of(phase, config)
    return Settings(
        experiment=_block(ExperimentBlock, config, "experiment"),
        seed=config["seed"],
        plugins=tuple(plugins),
        phases=tuple(limited(phase, training.limit_cycles) for phase in phases),
        checkpoint=call_checked(CheckpointBlock, training.checkpoint, place="training.checkpoint"),
        stop=call_checked(StopBlock, training.stop, place="training.stop"),
        evaluation=_block(EvaluationBlock, config, "evaluation"),
        logging=_block(LoggingBlock, config, "logging"),
        runs=_block(RunsBlock, config, "runs"),
        debug=_block(DebugBlock, config, "debug"),
    )


def refuse_steps_that_never_come(settings: Settings) -> None:
    """For runs that begin: where phases learn and none collects, what is due after agent steps is never due."""
    types = {phase.type for phase in settings.phases}
    if "online" in types or "offline" not in types:
        return
    block = settings.evaluation
    if block.warmup_steps:
        raise ConfigError(f"evaluation.warmup_steps is {block.warmup_steps}, but no phase takes steps: write 0.")
    due: dict[str, tuple[int | None, int | None]] = {
        "logging.": (settings.logging.every_steps, settings.logging.every_updates),
        "evaluation.": (None if block.every_steps == "auto" else block.every_steps, block.every_updates),
        "evaluation.dream_": (block.dream_every_steps, block.dream_every_updates),
    }
    for place, (steps, updates) in due.items():
        if steps is not None and updates is None:
            raise ConfigError(
                f"{place}every_steps is {steps}, but no phase takes steps: write "
                f"`{place}every_steps: null` and `{place}every_updates: {steps}`."
            )


def _block(schema: type, config: Config, name: str) -> Any:
    return call_checked(schema, config.get(name) or {}, place=name)
