"""A run on disk -> its config and its trained agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_lab.collection.evaluator import Evaluator
from rl_lab.config.files import from_yaml
from rl_lab.config.phases import extend
from rl_lab.config.schema import read_settings
from rl_lab.environments.base import Blueprint
from rl_lab.environments.saved import from_plain
from rl_lab.experiment.build import POLICY, Agent, build_agent, build_environment, build_evaluator, build_runtime
from rl_lab.experiment.trust import check_consent
from rl_lab.runs.checkpoint import Checkpoint, CheckpointStore
from rl_lab.runs.manifest import continuations_of
from rl_lab.runs.migrate import migrate_config
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.training.runtime import import_triton_first
from rl_lab.utils.tree import leaves_with_paths

CHANGEABLE = tuple(  # at an exact resume: they change no number
    f"environment.{name}" for name in ("max_restarts", "worker_timeout_s", "worker_growth_mib", "prefetch_resets")
)


def load_config(run: RunDirectory) -> dict[str, Any]:
    """The saved config of a run, upgraded to this version's schema, with the durations it was continued with."""
    manifest = run.read_manifest()
    config = from_yaml(run.read_config_text(), place=str(run.config_path))
    config = migrate_config(config, int(manifest["config_schema_version"]))
    for changes in continuations_of(manifest):
        extend(config, changes)
    return config


def differences(run: Mapping[str, Any], asked: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """`seed: 1 in the run, 2 asked for`, for every setting of a run that differs from what is asked for now, those in
    CHANGEABLE and of `runs` apart. A setting that the run does not know counts only where an override names it: others
    are of a newer version."""
    theirs, ours = ({key: repr(value) for key, value in leaves_with_paths(config)} for config in (run, asked))
    named = tuple(word.lstrip("+~").partition("=")[0] + "." for word in overrides)
    keys = [*theirs, *(key for key in ours if key not in theirs and f"{key}.".startswith(named))]
    found = [(key, theirs.get(key, "nothing"), ours.get(key, "nothing")) for key in keys]
    return [
        f"{key}: {there} in the run, {here} asked for"
        for key, there, here in found
        if there != here and key not in CHANGEABLE and not key.startswith("runs.")
    ]


def open_config(run: RunDirectory, trust: Sequence[str]) -> dict[str, Any]:
    """The saved config of a run, to build it: packages it names need consent from outside the run."""
    config = load_config(run)
    check_consent(config, run.path, trust)
    return config


def load_checkpoint(run: RunDirectory, which: Any, *more: str) -> Checkpoint:
    """What a policy is made of, and further sections by name."""
    return CheckpointStore(run.checkpoints_dir).load(which, sections=(*POLICY, *more))


def load_actor(
    run: RunDirectory, config: Mapping[str, Any], which: Any, *, device: str | None = None
) -> tuple[Agent, Blueprint]:
    """A trained agent that only acts, and how to convert for it: from what the run keeps of its environment, which need
    not be installed. Runs of earlier versions keep nothing, so there one is built. `device` replaces the run's own."""
    if device is not None:
        settings = {**(config["runtime"] or {}), "device": device}
        if device == "cpu" and settings.get("precision") == "fp16":
            settings["precision"] = "fp32"  # CPUs have no fp16
        config = {**config, "runtime": settings}
    found, runtime = load_checkpoint(run, which), build_runtime(config)
    import_triton_first()  # the caller may draw
    saved = run.read_environment()
    if saved is not None:
        blueprint = from_plain(saved, place=str(run.environment_path))
    else:
        environment = build_environment(config, stream="play_environment", num_envs=1)
        environment.close()
        blueprint = environment.blueprint
    agent = build_agent(config, blueprint.spec, runtime=runtime)
    agent.restore(found, POLICY)
    return agent, blueprint


def load_agent(run: RunDirectory, config: Mapping[str, Any], which: Any) -> tuple[Agent, Evaluator]:
    """A trained agent with the environments it is evaluated in."""
    found = load_checkpoint(run, which)
    runtime = build_runtime(config)
    evaluator = build_evaluator(config, read_settings(config).evaluation, runtime)
    agent = build_agent(config, evaluator.environment.spec, runtime=runtime, evaluator=evaluator)
    agent.restore(found, POLICY)
    return agent, evaluator
