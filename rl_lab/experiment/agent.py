"""A plain config and an environment's spec -> everything that acts and learns: components, controllers, optimizers and
the workflow that uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rl_lab.config.construct import PART_KEYS, READERS, call_checked, construct, import_plugins
from rl_lab.config.schema import Config
from rl_lab.training.optimizer import Optimizer
from rl_lab.training.runtime import Runtime
from rl_lab.training.schedules import parse_number
from rl_lab.types import ConfigError, EnvSpec, ScheduledNumber, did_you_mean
from rl_lab.utils.seeding import seed_everything
from rl_lab.workflows.base import Workflow
from rl_lab.workflows.context import Parts, WorkflowContext

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
