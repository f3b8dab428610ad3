"""A run that goes on longer than it was meant to: other durations and stop rules, the same run, its counters going on.

The continued run is the one that had these durations from the start, bit for bit; where a schedule follows the length
of its phase, it is not, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rl_lab.config.compose import apply_overrides
from rl_lab.config.groups import parse_values
from rl_lab.config.phases import is_extension
from rl_lab.config.schema import Settings, read_settings
from rl_lab.config.translate import translate
from rl_lab.experiment.load import CHANGEABLE, load_config
from rl_lab.orchestration.phase_scheduler import DURATIONS
from rl_lab.orchestration.stopping import Stopping, StopRules
from rl_lab.runs.checkpoint import Checkpoint, CheckpointStore
from rl_lab.runs.lineage import add_lineage, place_of
from rl_lab.runs.manifest import continuations_of
from rl_lab.runs.report import run_word
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.training.schedules import KINDS, Schedule, parse_number
from rl_lab.types import ConfigError, Counts, Phase, RunError, StateTree

Config = Mapping[str, Any]


def asked_for(run: RunDirectory, config: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], Config]:
    """The config to go on with, and which durations and stop rules of it are new."""
    changes: dict[str, Any] = {}
    words = translate(overrides, config)  # total_timesteps=1e5
    for item in parse_values(words):
        key = str(item.key_or_group)
        if is_extension(key):
            changes[key] = item.value()
        elif key not in CHANGEABLE:
            raise ConfigError(
                f"{item.input_line}: an exact resume goes on as the run was, so it changes only "
                f"{', '.join(CHANGEABLE)}, and how long it goes on: training.phases.NAME.duration_steps (_updates, "
                "_cycles) and training.stop.*. To go on with other settings, use --mode warm_start_optimizer, which "
                "starts a new run from these weights."
            )
        else:
            config["environment"].setdefault(key.partition(".")[2], None)  # a run of an earlier version may lack it
    return apply_overrides(config, words), changes


def check_extension(run: RunDirectory, config: Config) -> tuple[list[str], Checkpoint | None]:
    """Refuse durations and stop rules with which a run cannot go on; back comes how it will differ from one that had
    them from the start, and from where it goes on."""
    before, after = read_settings(load_config(run)), read_settings(config)
    if (before.phases, before.stop) == (after.phases, after.stop):
        limit = _limit_sentence(config)
        raise ConfigError(
            limit or f"Run {run.id} has these durations and stop rules already: there is nothing to change."
        )
    found = _end_of(run)
    if found is None:
        return [], None  # it starts from its beginning
    state, progress = found.state["phase_state"], found.state["progress"]
    is_finished = state["index"] >= len(before.phases)
    if (is_finished or progress.get("stop_reason")) and progress.get("before_end") is None:
        raise RunError(
            f"Run {run.id} was ended by an earlier version of RL Lab and keeps nothing to go on from. Use --mode "
            "warm_start_optimizer."
        )
    index = len(before.phases) - 1 if is_finished else state["index"]
    standing = state["ended"] if is_finished else state
    _refuse_phases_that_are_over(before.phases[:index], after.phases[:index])
    _refuse_too_short(after.phases[index], standing)
    if reason := _rule_that_holds(after, found):
        raise ConfigError(
            f"Run {run.id} would stop at once: {reason}. Raise that rule of training.stop, or write null for none."
        )
    has_begun = standing["cycles"] > 0 or standing.get("is_cycle_open")
    is_changed = before.phases[index] != after.phases[index]
    return _differences(config, after.phases[index]) if has_begun and is_changed else [], found


def stopped_from_outside(run: RunDirectory, config: Config) -> tuple[Checkpoint, str]:
    """Where a run that is done goes on with the durations it has, and who stopped it: a callback or a pruner, which are
    no part of it. Every other one is refused."""
    settings, found = read_settings(config), _end_of(run)
    if found is not None:
        progress = found.state["progress"]
        reason, is_kept = progress.get("stop_reason"), progress.get("before_end") is not None
        is_finished = found.state["phase_state"]["index"] >= len(settings.phases)
        if reason and is_kept and not is_finished and not _rule_that_holds(settings, found):
            return found, reason
    last, word = config["training"]["phases"][-1], run_word(run)  # as written: limit_cycles counts otherwise
    key = next((name for name in DURATIONS if last.get(name) is not None), "duration_steps")
    unit = key.removeprefix("duration_")
    more = f"go on with more {unit}: `rl-lab resume {word} training.phases.{settings.phases[-1].name}.{key}=N`"
    raise RunError(
        f"Run {run.id} has {run.read_status()['state']} already. Evaluate it with `rl-lab evaluate {word}`, start "
        f"anew from its weights with --mode warm_start, or {more}, N of them in all. {_limit_sentence(config)}".rstrip()
    )


def note_extension(run: RunDirectory, changes: Config, checkpoint: Checkpoint | None, *, stopped_by: str = "") -> None:
    """From here on the run has these durations; config.yaml stays what it began with."""
    said = ", ".join(f"{key}={'null' if value is None else value}" for key, value in changes.items())
    continuations = [*continuations_of(run.read_manifest()), dict(changes)]
    facts = {**place_of(checkpoint), "changes": said, **({"stopped_by": stopped_by} if stopped_by else {})}
    add_lineage(run, "continued", {"continuations": continuations}, source=run.id, **facts)


def _end_of(run: RunDirectory) -> Checkpoint | None:
    store = CheckpointStore(run.checkpoints_dir, identity=run.identity())
    return store.load_newest_valid(lambda sentence: None, ("phase_state", "progress"))


def _limit_sentence(config: Config) -> str:
    limit = config["training"].get("limit_cycles")
    if limit is None:
        return ""
    return (
        f"training.limit_cycles is {limit} (preset=debug sets it), which ends every phase after so many cycles, or "
        "updates where it learns, however long it is meant to be. Add training.limit_cycles=null."
    )


def _refuse_phases_that_are_over(before: Sequence[Phase], after: Sequence[Phase]) -> None:
    for was, now in zip(before, after, strict=True):
        if was != now:
            raise ConfigError(
                f"Phase '{was.name}' is over, and what came after it follows from it: make the phase under way, the "
                "last one that ran or a later one longer."
            )


def _refuse_too_short(phase: Phase, standing: StateTree) -> None:
    for name, unit in DURATIONS.items():
        duration = getattr(phase, name)
        if duration is None:
            continue
        done = standing["cycles"] if unit is None else standing["phase_counts"][unit]
        if done >= duration:
            what = "cycles" if unit is None else unit.replace("_", " ")
            raise ConfigError(
                f"training.phases.{phase.name}.{name} is {duration}, but that phase has {done} {what} already: write "
                "more than that."
            )


def _rule_that_holds(settings: Settings, checkpoint: Checkpoint) -> str | None:
    """Why a run that was stopped would stop again at once."""
    state, progress = checkpoint.state["phase_state"], checkpoint.state["progress"]
    if not progress.get("stop_reason"):
        return None
    stopping, end = Stopping(StopRules(**asdict(settings.stop))), progress["before_end"]
    stopping.set_state(end["stopping"])
    return stopping.reason(
        Counts(**state["run_counts"]),
        wall_s=progress["wall_s"],
        episode_return=end["latest"].get("collect/episode_return_mean"),
        eval_return=end["evaluated"].get("eval/episode_return_mean"),
    )


def _differences(config: Config, phase: Phase) -> list[str]:
    """Schedules that span the phase now go on otherwise than they would have."""
    blocks = {name: config[name] for name in ("algorithm", "optimizers", "buffers")}
    return [
        f"{place} runs over the phase '{phase.name}', which is longer now: from here on it is behind where it was, and "
        "this run differs from one that had this length from the start."
        for place, schedule in _schedules({**blocks, "set": phase.set})
        if schedule.unit == "fraction"
    ]


def _schedules(node: Any, place: str = "") -> Iterator[tuple[str, Schedule]]:
    if isinstance(node, Mapping) and ("start" not in node or "_target_" in node):
        for key, value in node.items():
            yield from _schedules(value, f"{place}.{key}" if place else str(key))
        return
    is_text = isinstance(node, str) and node.strip().startswith(tuple(f"{kind}(" for kind in KINDS))
    if is_text or isinstance(node, Mapping):
        number = parse_number(node, place)
        if isinstance(number, Schedule):
            yield place, number
