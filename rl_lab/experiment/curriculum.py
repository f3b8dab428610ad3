"""What changes when a phase begins: the environment, numbers of the algorithm, learning rates, weights of another run.

    config ── set: of a phase ──► the config of that phase      every phase is built and checked before the first step

Settings of a phase hold while it runs; what it does not set is as in the config. So the whole state of a curriculum is
the index of the phase under way, and which environment the collector holds: both are in every checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rl_lab.buffers.base import Buffer
from rl_lab.collection.collector import Collector
from rl_lab.config.construct import construct
from rl_lab.config.phase_settings import config_of, settings_of
from rl_lab.environments.base import Environment
from rl_lab.runs.checkpoint import CheckpointStore
from rl_lab.runs.index import resolve_run
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.state import describe_mismatch
from rl_lab.training.schedules import Schedule, never_negative, parse_number
from rl_lab.training.target_network import TargetNetwork
from rl_lab.types import ArraySpec, ConfigError, EnvSpec, Phase, RunError, StateTree, did_you_mean
from rl_lab.utils.seeding import stream_seed
from rl_lab.utils.tree import equal
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import Parts

Config = Mapping[str, Any]
Numbers = dict[str, Any]  # attribute of the workflow (`clip_range`, `target.rate`) -> its value
SECTIONS = ("components", "controllers")


@dataclass(frozen=True)
class Borrowed:
    """Weights that a phase takes from another run."""

    run: str
    checkpoint: str
    counts: dict[str, int]  # of that run, when the checkpoint was taken
    states: dict[str, StateTree]  # `components.encoder` -> what that part holds

    @property
    def parts(self) -> str:
        return ", ".join(self.states)


class Curriculum:
    """Carries out what phases set and load. A run whose phases do neither never meets it."""

    def __init__(
        self,
        config: Config,
        phases: Sequence[Phase],
        *,
        workflow: Workflow,
        collector: Collector,
        buffers: Mapping[str, Buffer],
        make_environment: Callable[..., Environment],
        on_change: Callable[[], None] = lambda: None,
        on_load: Callable[[Phase, Borrowed], None] = lambda phase, borrowed: None,
    ) -> None:
        self.config, self.phases, self.workflow, self.collector = config, tuple(phases), workflow, collector
        self.buffers = buffers
        self.make_environment, self.on_change, self.on_load = make_environment, on_change, on_load
        self.parts = {f"{section}.{name}": part for section in SECTIONS for name, part in self._parts(section).items()}
        self._configs = [config_of(phase, config) if phase.set else dict(config) for phase in phases]
        self._stages, self._environments = self._plan_environments()
        self._check_environments()
        self._numbers = self._plan_numbers()
        self._rates = [self._rates_of(phase) for phase in phases]
        self._touched_rates = {name for rates in self._rates for name in rates}
        self._base_rates = {name: workflow.context.optimizers[name].learning_rate for name in self._touched_rates}
        self._borrowed: dict[int, Borrowed] = {}
        for phase in phases:
            self.parts_to_load(phase)  # a name that is no part of this run is refused here

    def _parts(self, section: str) -> dict[str, nn.Module]:
        parts = getattr(self.workflow.context, section)
        return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}

    # --- as the run goes on ---

    def begin(self, index: int, *, is_new: bool) -> None:
        """A phase begins (`is_new`), or a resumed run finds itself in it."""
        if self.collector.stage != self._stages[index]:
            self.hold_environment(self._stages[index])
            for buffer in self.buffers.values():
                buffer.cut()
            for part in self.parts.values():
                getattr(part, "forget_episodes", lambda: None)()
            self.on_change()
        self.set_numbers(index)
        if is_new and self.phases[index].load is not None:
            self._load(index)

    def hold_environment(self, stage: int) -> None:
        """Let the collector hold the environment of a stage, not yet reset."""
        if self.collector.stage != stage:
            self.collector.change_environment(self._make(stage), stage=stage)

    def set_numbers(self, index: int) -> None:
        """Numbers and learning rates as the phase has them; what it does not set is as in the config."""
        for name, value in self._numbers[index].items():
            attribute, _, inner = name.partition(".")
            owner = getattr(self.workflow, attribute) if inner else self.workflow
            setattr(owner, inner or attribute, copy.copy(value))
        for name, rate in {**self._base_rates, **self._rates[index]}.items():
            self.workflow.context.optimizers[name].learning_rate = rate

    # --- environments: phases in a row that have the same one share a stage; stage 0 is the config's own ---

    def _plan_environments(self) -> tuple[list[int], list[Any]]:
        stages, environments = [], [self.config["environment"]]
        for phase, config in zip(self.phases, self._configs, strict=True):
            if phase.type == "online" and config["environment"] != environments[-1]:
                environments.append(config["environment"])
            stages.append(len(environments) - 1)
        return stages, environments

    def _make(self, stage: int) -> Environment:
        seed = int(self.config["seed"])
        seed = stream_seed(seed, "phase_environment", stage) if stage else seed
        config = {**self.config, "environment": self._environments[stage], "seed": seed}
        return self.make_environment(config, stream="train_environment")

    def _check_environments(self) -> None:
        """Every environment of the curriculum can be made, and has the spaces that the networks are made for."""
        uncut = [name for name, buffer in self.buffers.items() if not hasattr(buffer, "cut")]
        if uncut and len(self._environments) > 1:
            raise ConfigError(
                f"buffers.{uncut[0]} has no method `cut`, by which episodes end where a phase changes the environment: "
                "add it (rl_lab.buffers.base.Buffer), or keep one environment."
            )
        for index, phase in enumerate(self.phases):
            stage = self._stages[index]
            if stage == 0 or stage in self._stages[:index]:
                continue
            with refused_in(phase):
                environment = self._make(stage)
                spec = environment.spec
                environment.close()
            refuse_other_spaces(phase.name, spec, self.workflow.context.spec)

    # --- numbers of the algorithm ---

    def _plan_numbers(self) -> list[Numbers]:
        """For each phase, all numbers that any phase changes. A workflow made of a phase's settings knows what follows
        from them; only what it has otherwise than one made of the config's is taken from it, so no counter is."""
        if not any(_is_of("algorithm", key) for phase in self.phases for key in settings_of(phase, self.config)):
            return [{} for _ in self.phases]
        base = _numbers(self._make_workflow(self.config))
        own = [base if config["algorithm"] == self.config["algorithm"] else None for config in self._configs]
        found: list[Numbers] = []
        for index, phase in enumerate(self.phases):
            numbers = own[index]
            if numbers is None:
                with refused_in(phase):
                    made = self._make_workflow(self._configs[index])
                    made.check_phase(phase)
                numbers = _numbers(made)
                self._refuse_what_changes_nothing(phase, base)
            found.append(numbers)
        touched = {name for numbers in found for name in numbers if not equal(numbers[name], base.get(name))}
        return [{name: numbers[name] for name in sorted(touched) if name in numbers} for numbers in found]

    def _make_workflow(self, config: Config) -> Workflow:
        """A workflow of the same parts, with copies of its own of what it makes itself."""
        made: Workflow = construct(config["algorithm"], place="algorithm", plugins=tuple(config["plugins"] or ()))
        context = self.workflow.context
        named = {name for name, block in (config["components"] or {}).items() if block is not None}
        components = Parts("components", {name: part for name, part in context.components.items() if name in named})
        made.initialize(replace(context, components=components))
        return made

    def _refuse_what_changes_nothing(self, phase: Phase, base: Numbers) -> None:
        """A setting that the algorithm reads only while it is built would be ignored: better to say so."""
        for key, value in settings_of(phase, self.config).items():
            if not _is_of("algorithm", key):
                continue
            alone = config_of(replace(phase, set={key: value}), self.config)
            if alone["algorithm"] != self.config["algorithm"] and equal(_numbers(self._make_workflow(alone)), base):
                raise ConfigError(
                    f"Phase '{phase.name}' sets {key}, which {type(self.workflow).__name__} reads only when it is "
                    "built, so a phase cannot change it: set it in the config, or train a run of its own."
                )

    # --- learning rates ---

    def _rates_of(self, phase: Phase) -> dict[str, Any]:
        found = {}
        for key, value in settings_of(phase, self.config).items():
            if _is_of("optimizers", key):
                with refused_in(phase):
                    found[key.split(".")[1]] = never_negative(parse_number(value, key), key)
        return found

    # --- weights of another run ---

    def parts_to_load(self, phase: Phase) -> list[str]:
        """`components.encoder`, ...: the parts of this run that a phase loads, groups spelt out."""
        groups: dict[str, list[str]] = {
            **{section: [name for name in self.parts if _is_of(section, name)] for section in SECTIONS},
            **{
                group: [f"components.{name}" for name in names if f"components.{name}" in self.parts]
                for group, names in self.workflow.part_groups.items()
            },
        }
        short = {name.partition(".")[2]: name for name in self.parts}
        found: dict[str, None] = {}
        for word in (phase.load or {}).get("parts", ()):
            names = groups.get(word) or [name for name in (word, short.get(word)) if name in self.parts]
            if not names:
                known = [*short, *(group for group, members in groups.items() if members)]
                raise ConfigError(
                    f"Phase '{phase.name}' loads '{word}', which is no part of this run.{did_you_mean(word, known)} "
                    f"There are: {', '.join(known)}."
                )
            found |= dict.fromkeys(name for name in names if name is not None)
        return list(found)

    def read_ahead(self, index: int, *, is_new: bool) -> None:
        """Read what the phases to come will load, so that what is missing or does not fit is refused now."""
        for ahead in range(index if is_new else index + 1, len(self.phases)):
            if self.phases[ahead].load is not None:
                self._borrow(ahead)

    def _borrow(self, index: int) -> Borrowed:
        if index not in self._borrowed:
            phase = self.phases[index]
            self._borrowed[index] = borrow(phase, self.parts_to_load(phase), self.config)
            _refuse_misfit(phase, self.parts, self._borrowed[index])
        return self._borrowed[index]

    def _load(self, index: int) -> None:
        borrowed = self._borrow(index)
        for name, state in borrowed.states.items():
            self.parts[name].load_state_dict(state)
        del self._borrowed[index]
        self.on_load(self.phases[index], borrowed)


def _is_of(block: str, key: str) -> bool:
    return key.startswith(f"{block}.")


@contextmanager
def refused_in(phase: Phase) -> Iterator[None]:
    """What is wrong with the settings of a phase names the phase."""
    try:
        yield
    except ConfigError as error:
        named = "" if str(error).startswith(f"Phase '{phase.name}'") else f"Phase '{phase.name}', set: "
        raise ConfigError(f"{named}{error}") from error


def _numbers(workflow: Workflow) -> Numbers:
    """Everything of a workflow that is a number, a choice, a schedule, or made of these."""
    numbers: Numbers = {}
    for name, value in vars(workflow).items():
        if isinstance(value, TargetNetwork):
            numbers |= {f"{name}.rate": value.rate, f"{name}.every": value.every}
        elif _is_plain(value):
            numbers[name] = value
    return numbers


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    is_number = value is None or isinstance(value, bool | int | float | str | Schedule)
    return is_number or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))


# --- spaces ---


def refuse_other_spaces(phase: str, here: EnvSpec, there: EnvSpec) -> None:
    """An environment of a phase has the spaces of the config's own: names, shapes and kinds, not bounds."""
    if _spaces(here) == _spaces(there):
        return
    raise ConfigError(
        f"Phase '{phase}' sets the environment {here.id}, whose spaces are not those the networks are made for:\n"
        f"  {here.id}: {_spelled(here)}\n  {there.id}: {_spelled(there)}\n"
        "Choose one with the same spaces, or map them: `environment.wrappers: [...]` in the phase's `set`."
    )


def _spaces(spec: EnvSpec) -> Any:
    arrays = {key: (each.shape, each.dtype, each.num_values) for key, each in spec.observation.items()}
    return arrays, spec.action.kind, spec.action.sizes


def _spelled(spec: EnvSpec) -> str:
    def array(each: ArraySpec) -> str:
        values = f" of {list(each.num_values)} values" if each.num_values else ""
        return f"{each.dtype} {list(each.shape)}{values}"

    seen = ", ".join(f"{key} {array(each)}" for key, each in spec.observation.items())
    return f"observation {seen}; action {spec.action.kind} {list(spec.action.sizes)}"


# --- other runs ---


def pin_sources(config: Config, runs_dir: Path) -> dict[str, Any]:
    """The config with every `load` naming one checkpoint of one directory, so that a resumed run finds the same."""
    pinned = copy.deepcopy(dict(config))
    for block in (pinned["training"] or {}).get("phases") or ():
        load = block.get("load")
        if load:
            with _explained(str(block.get("name")), load):
                run = resolve_run(load["from"], runs_dir)
                checkpoint = CheckpointStore(run.checkpoints_dir).resolve(load.get("checkpoint") or "latest")
            block["load"] = {**load, "from": str(run.path), "checkpoint": checkpoint.name}
    return pinned


def sources_of(config: Config) -> dict[str, Any]:
    """How each phase names the run it loads from: what the config says before it is pinned."""
    phases = (config["training"] or {}).get("phases") or ()
    return {str(block.get("name")): dict(block["load"]) for block in phases if block.get("load")}


def pinned_as(run: RunDirectory, theirs: Config, config: Config) -> dict[str, Any]:
    """A config asked for anew, its sources pinned as those of the run (whose config is `theirs`) where it names them by
    the same words, and looked up now where not; what is not there stays as it is written."""
    asked, pinned = run.read_manifest().get("sources") or {}, copy.deepcopy(dict(config))
    known = sources_of(theirs)
    for block in (pinned["training"] or {}).get("phases") or ():
        name, load = str(block.get("name")), block.get("load")
        if load and name in known:
            if load == asked.get(name):
                block["load"] = known[name]
            else:
                with suppress(ConfigError):
                    alone = {"training": {"phases": [block]}}
                    block["load"] = pin_sources(alone, run.path.parent)["training"]["phases"][0]["load"]
    return pinned


def borrow(phase: Phase, names: Sequence[str], config: Config) -> Borrowed:
    """The parts of another run's checkpoint. Nothing of that run is built, so none of its code is asked for."""
    assert phase.load is not None
    with _explained(phase.name, phase.load):
        run = resolve_run(phase.load["from"], Path(config["runs"]["directory"]))
        return _read(run, phase, names)


def _read(run: RunDirectory, phase: Phase, names: Sequence[str]) -> Borrowed:
    assert phase.load is not None
    found = CheckpointStore(run.checkpoints_dir).load(phase.load.get("checkpoint") or "latest", sections=SECTIONS)
    there = {f"{section}.{name}": state for section in SECTIONS for name, state in found.state[section].items()}
    for name in names:
        if name not in there:
            hint = did_you_mean(name, there)
            raise RunError(f"it has no {name}.{hint} It has: {', '.join(there)}.")
    return Borrowed(run.id, found.path.name, found.counts, {name: there[name] for name in names})


@contextmanager
def _explained(phase: str, load: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except RunError as error:
        key = f"training.phases.{phase}.load.checkpoint"
        hint = f" Write {key}=latest." if "There is no checkpoint" in str(error) else ""
        raise ConfigError(
            f"Phase '{phase}' loads from the run {load['from']}, which cannot be: {error}{hint}"
        ) from error


def _refuse_misfit(phase: Phase, parts: Mapping[str, nn.Module], borrowed: Borrowed) -> None:
    expected = {name: parts[name].state_dict() for name in borrowed.states}
    if mismatch := describe_mismatch(expected, borrowed.states):
        raise ConfigError(
            f"Phase '{phase.name}' loads from the run {borrowed.run} ({borrowed.checkpoint}) what does not fit:\n"
            f"{mismatch}"
        )
