"""A trained policy as one file that acts without this package: a torch.export program (.pt2), or ONNX (.onnx).

The file is `workflow.act` in mode "eval", traced through the plain formulas, as a function of named tensors:

    observations as the environment gives them [N, ...]   ┐     ┌  action [N, ...] as the environment takes it
    is_first [N], policy_state...                         ┘ ──► └  next_policy_state...

is_first and the states are there for policies with memory alone. docs/export.md shows how to use one.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn

from rl_lab.environments.actions import in_range
from rl_lab.environments.base import Blueprint
from rl_lab.experiment.export_check import Agreement, compare
from rl_lab.kernels.door import plain_formulas
from rl_lab.runs.files import readable_disk_errors, remove, temporary_name
from rl_lab.runs.manifest import machine
from rl_lab.types import Batch, ConfigError, EnvSpec, MissingExtraError, TimeStep
from rl_lab.utils.tree import leaves_with_paths, map_leaves
from rl_lab.workflows.base import Workflow

PolicyFormat = Literal["torch", "onnx"]
SUFFIXES: dict[PolicyFormat, tuple[str, ...]] = {"torch": (".pt2", ".pt"), "onnx": (".onnx",)}
PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # of the extra `export`
STATE, NEXT, ABOUT = "policy_state", "next_", "policy.json"
BATCH = 2  # rows of the example that is traced; the file takes any number


class Policy(Protocol):
    """What `rl_lab.load` returns."""

    workflow: Workflow
    blueprint: Blueprint
    spec: EnvSpec
    device: torch.device

    def reset(self) -> None: ...
    def act(self, observation: Any, *, deterministic: bool = True) -> Any: ...


@dataclass(frozen=True)
class PolicyFile:
    """A policy that was written, and how it compared with the original."""

    path: Path
    format: PolicyFormat
    size_bytes: int
    about: dict[str, Any]  # what the file says of itself
    agreement: Agreement

    @property
    def notes(self) -> list[str]:
        """What a user should know about this file."""
        return list(self.about["notes"])


def check_format(path: Path, format: PolicyFormat | None = None) -> PolicyFormat:
    """The format that a file's name says; `format`, where it is given, must agree with it."""
    of_name: PolicyFormat | None = next((name for name, ends in SUFFIXES.items() if path.suffix in ends), None)
    if format is not None and format not in get_args(PolicyFormat):
        raise ConfigError(f"format is {format!r}: write torch or onnx.")
    if of_name is None or (format is not None and of_name != format):
        allowed = SUFFIXES[format] if format is not None else sum(SUFFIXES.values(), ())
        raise ConfigError(f"A policy cannot be written to {path}: end the name with {' or '.join(allowed)}.")
    return of_name


def export_policy(policy: Policy, path: Path) -> PolicyFile:
    """Trace, write under a temporary name, compare with `policy.act`, and only then give the file its name."""
    format = check_format(path)
    _refuse(policy, format)
    with _plain_acting(policy.workflow) as notes:
        module = PolicyModule(policy.workflow, policy.blueprint)
        program = trace(module)
        about = describe(module, policy, notes)
        temporary = temporary_name(path)
        with readable_disk_errors(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                (write_torch if format == "torch" else write_onnx)(program, module, about, temporary)
                agreement = compare(policy, temporary, format, about)
                os.replace(temporary, path)
            finally:
                remove(temporary)
    return PolicyFile(path, format, path.stat().st_size, about, agreement)


def _refuse(policy: Policy, format: PolicyFormat) -> None:
    name = type(policy.workflow).__name__
    if policy.workflow.not_exportable:
        raise ConfigError(f"A policy of {name} cannot be written to a file: {policy.workflow.not_exportable}.")
    if policy.device.type != "cpu":
        raise ConfigError(
            f"This policy is on {policy.device}, and files are made on the CPU: load it with "
            'rl_lab.load(run, device="cpu").'
        )
    missing = [package for package in PACKAGES if find_spec(package) is None] if format == "onnx" else []
    if missing:
        raise MissingExtraError(
            f"Writing ONNX needs {', '.join(missing)}: install with `pip install 'rl-lab[export]'`, or write a .pt2 "
            "file, which needs nothing more."
        )


@contextmanager
def _plain_acting(workflow: Workflow) -> Iterator[list[str]]:
    """Inside, mode "eval" draws nothing and computes in float32; yields sentences about what that changes."""
    notes, runtime = [], workflow.context.runtime
    samples, precision = workflow.sample_in_evaluations, runtime.precision
    if samples:
        notes.append("In evaluations this policy draws its actions; the file takes the likeliest ones.")
    if precision != "fp32":
        notes.append(f"The run acts in {precision}; the file computes in float32.")
    try:
        if samples:
            workflow.sample_in_evaluations = False
        runtime.precision = "fp32"
        yield notes
    finally:
        if samples:
            workflow.sample_in_evaluations = True
        runtime.precision = precision


class PolicyModule(nn.Module):
    """`workflow.act` in mode "eval" as a function of named tensors, from native observations to native actions."""

    def __init__(self, workflow: Workflow, blueprint: Blueprint) -> None:
        super().__init__()
        parts = {**workflow.context.components, **workflow.context.controllers}
        self.parts = nn.ModuleDict({name: part for name, part in parts.items() if isinstance(part, nn.Module)})
        self.actions = NativeActions(blueprint)
        self.workflow, self.leaves = workflow, blueprint.observations.leaves
        self.example: Batch = {
            leaf.key: torch.zeros(BATCH, *leaf.source_shape, dtype=getattr(torch, leaf.spec.dtype))
            for leaf in self.leaves
        }
        with torch.no_grad():
            _, self.state_tree = self._act(self.example, torch.ones(BATCH, dtype=torch.bool), None)
        self.states: Batch = {
            f"{STATE}.{name}" if name else STATE: torch.zeros_like(value)
            for name, value in (leaves_with_paths(self.state_tree) if self.state_tree is not None else ())
        }
        for name, value in self.states.items():
            assert len(value) == BATCH, f"{name} has shape {tuple(value.shape)}: states begin with the batch axis"
        if self.states:
            self.example |= {"is_first": torch.ones(BATCH, dtype=torch.bool), **self.states}
        self.output_names = ["action", *(NEXT + name for name in self.states)]

    def forward(self, inputs: Batch) -> Batch:
        rows = next(iter(inputs.values()))
        is_first = inputs["is_first"] if self.states else torch.zeros(rows.shape[0], dtype=torch.bool)
        state = None
        if self.states:
            values = iter([inputs[name] for name in self.states])
            state = map_leaves(lambda leaf: next(values), self.state_tree)
        action, state = self._act(inputs, is_first, state)
        after = [] if state is None else [value for _, value in leaves_with_paths(state)]
        return dict(zip(self.output_names, [self.actions(action), *after], strict=True))

    def _act(self, inputs: Batch, is_first: Tensor, state: Any) -> tuple[Tensor, Any]:
        observation = {leaf.key: inputs[leaf.key].reshape(-1, *leaf.spec.shape) for leaf in self.leaves}
        for leaf in self.leaves:
            if leaf.spec.is_discrete:
                observation[leaf.key] = observation[leaf.key] - torch.as_tensor(leaf.start)
        nothing = torch.zeros_like(is_first)
        time_step = TimeStep(observation, nothing.to(torch.float32), is_first, nothing, nothing)
        answer = self.workflow.act(time_step, state, mode="eval")
        return answer.action, answer.state


class NativeActions(nn.Module):
    """A policy's actions as the environment takes them, in tensors: what `ActionConverter.batch` does in arrays."""

    _start: Tensor

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        converter = blueprint.actions
        self.shape, self.dtype = converter.shape, torch.from_numpy(np.zeros(0, converter.dtype)).dtype
        self.range_names = tuple(converter.range) if converter.spec.kind == "continuous" else ()
        constants = converter.range if self.range_names else {"start": np.asarray(converter.start)}
        for name, value in constants.items():
            self.register_buffer(f"_{name}", torch.from_numpy(np.array(value)))  # modules have a method `half`

    def forward(self, action: Tensor) -> Tensor:
        if self.range_names:
            values = in_range(
                action.flatten(1).double(), **{name: getattr(self, f"_{name}") for name in self.range_names}
            )
            return values.reshape(-1, *self.shape).to(self.dtype)
        return (action.reshape(-1, *self.shape) + self._start).to(self.dtype)


def trace(module: PolicyModule) -> torch.export.ExportedProgram:
    """The module as a graph for batches of any size, with the weights that it reads and no others."""
    batch = torch.export.Dim("batch", min=1)
    shapes = ({name: {0: batch} for name in module.example},)
    try:
        with plain_formulas(), torch.no_grad(), _quiet():
            program = torch.export.export(module, (module.example,), dynamic_shapes=shapes, strict=False)
    except torch._dynamo.exc.UserError as error:
        name = type(module.workflow).__name__
        if "specialized" not in str(error):
            raise
        raise ConfigError(
            f"{name}.act, or a part it uses, computes with the number of rows as a Python number, so a file would take "
            f"exactly {BATCH}: write x.shape[0] instead of len(x), or reshape with -1."
        ) from error
    drawn = [node for node in program.graph.nodes if _is_random(node)]
    if drawn:
        raise ConfigError(
            f'{type(module.workflow).__name__}.act draws at random in mode "eval" ({drawn[0].target}), so a file would '
            "not answer twice the same: take the mode of the distribution there."
        )
    return _without_unused(program)


def _is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _without_unused(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The same without the weights that nothing reads, such as a critic's, and with copies of the others."""
    signature = program.graph_signature
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    kept = []
    for spec in signature.input_specs:
        node = placeholders[spec.arg.name]  # type: ignore[union-attr]
        if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT or node.users:
            kept.append(spec)
        else:
            program.graph.erase_node(node)
    signature.input_specs = kept
    read = {spec.target for spec in kept}
    for name in [*program.state_dict]:
        value = program.state_dict.pop(name)
        if name in read:
            copy = value.detach().clone()
            is_parameter = isinstance(value, nn.Parameter)
            program.state_dict[name] = nn.Parameter(copy, requires_grad=False) if is_parameter else copy
    for name in [name for name in program.constants if name not in read]:
        del program.constants[name]
    program.graph_module.recompile()
    return program


# --- what a file says of itself ------------------------------------------------------------------


def describe(module: PolicyModule, policy: Policy, notes: list[str]) -> dict[str, Any]:
    """Everything a user needs to feed the file and to read its answers, as JSON data."""
    spec, converter = policy.spec, policy.blueprint.actions
    action: dict[str, Any] = {
        "kind": spec.action.kind,
        "shape": list(converter.shape),
        "dtype": str(converter.dtype),
        "labels": list(spec.action.labels),
    }
    if spec.action.kind == "continuous":
        finite = {"low": spec.action.low, "high": spec.action.high}
        action |= {end: [value if np.isfinite(value) else str(value) for value in finite[end]] for end in finite}
    else:
        action |= {"sizes": list(spec.action.sizes), "start": np.asarray(converter.start).tolist()}
    return {
        "rl_lab_version": machine()["rl_lab_version"],
        "algorithm": type(module.workflow).__name__,
        "environment": spec.id,
        "observation": {leaf.key: _array(leaf.source_shape, leaf.spec.dtype) for leaf in module.leaves},
        "state": {
            name: {**_array(value.shape[1:], str(value.dtype).removeprefix("torch.")), "initial": 0}
            for name, value in module.states.items()
        },
        "action": action,
        "inputs": list(module.example),
        "outputs": module.output_names,
        "notes": notes,
    }


def _array(shape: Any, dtype: str) -> dict[str, Any]:
    """Of one row, without the batch axis."""
    return {"shape": list(shape), "dtype": dtype}


# --- files ---------------------------------------------------------------------------------------


def write_torch(
    program: torch.export.ExportedProgram, module: PolicyModule, about: Mapping[str, Any], path: Path
) -> None:
    with open(path, "wb") as file, _quiet():
        torch.export.save(program, file, extra_files={ABOUT: json.dumps(about)})


def write_onnx(
    program: torch.export.ExportedProgram, module: PolicyModule, about: Mapping[str, Any], path: Path
) -> None:
    with _quiet():
        written = torch.onnx.export(
            program,
            dynamo=True,
            input_names=list(module.example),
            output_names=module.output_names,
            verbose=False,
        )
    assert written is not None
    written.model.metadata_props[ABOUT] = json.dumps(about)
    written.save(path, external_data=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' remarks about packages they could use and about their own insides."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
