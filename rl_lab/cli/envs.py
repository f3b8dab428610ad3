"""Environments: search all that are installed, describe one, or check your own.

  envs [FILTER]     every id that contains FILTER
  envs show ID      observation, actions, time limit, solved threshold
  envs check ID     look for mistakes in an environment and say how to mend them

ID is a Gymnasium id; package:Env-v0 imports `package` first.

examples:
  rl-lab envs cart
  rl-lab envs show CartPole-v1
  rl-lab envs check my_package:MyEnv-v0
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from rl_lab.cli.parsing import JSON, UsageError, argument, quiet
from rl_lab.cli.printing import answer, fields, only_json_on_stdout, print_json, table

if TYPE_CHECKING:
    from rl_lab.types import ActionSpec, ArraySpec

ACTIONS = ("show", "check")

ARGUMENTS = (
    argument("words", nargs="*", metavar="FILTER | show ID | check ID", help="what to look at"),
    argument("--all-versions", action="store_true", help="also ids that a newer version replaces"),
    JSON,
    quiet("print the ids alone, one per line"),
)


def run(arguments: argparse.Namespace) -> int:
    words = arguments.words
    if words and words[0] in ACTIONS:
        if len(words) != 2:
            raise UsageError(f"`envs {words[0]}` takes one environment id: rl-lab envs {words[0]} CartPole-v1")
        return {"show": _show, "check": _check}[words[0]](words[1], arguments)
    if len(words) > 1:
        raise UsageError(f"`envs` takes one FILTER, or show ID, or check ID; got {' '.join(words)}")
    return _search(words[0] if words else "", arguments)


def _search(text: str, arguments: argparse.Namespace) -> int:
    with only_json_on_stdout(arguments.json):
        from rl_lab import api

        found = api.list_environments(text, all_versions=arguments.all_versions)
    headers = ("ENVIRONMENT", "SUITE", "TIME LIMIT", "SOLVED AT", "NATIVE VECTOR", "INSTALL")
    rows = [
        (info.id, info.suite, info.max_episode_steps, info.solved_return, info.has_native_vector, info.install)
        for info in found
    ]
    nothing = f"No environment matches '{text}'. Your own is written package:Env-v0; all of them: rl-lab envs"
    shown = table(headers, rows) if found else nothing
    answer(arguments, [asdict(info) for info in found], shown, brief=[info.id for info in found])
    return 0


def _show(env_id: str, arguments: argparse.Namespace) -> int:
    with only_json_on_stdout(arguments.json):
        from rl_lab import api

        spec = api.describe_environment(env_id)
    if arguments.json:
        print_json(asdict(spec))
        return 0
    observations = [(name, _array_line(array)) for name, array in spec.observation.items()]
    facts = [
        ("actions", _action_line(spec.action)),
        ("time limit", f"{spec.max_episode_steps:,} agent steps" if spec.max_episode_steps else "none"),
        ("solved at", spec.solved_return),
        ("frames per agent step", spec.frames_per_step),
    ]
    print("\n".join(line for line in (spec.id, spec.description and f"  {spec.description}") if line))
    print(f"\nobservation\n{fields(observations)}\n\n{fields(facts, indent=0)}")
    print(f"\ntrain on it: rl-lab train {env_id}:ppo")
    return 0


def _array_line(array: ArraySpec) -> str:
    shape = " x ".join(str(size) for size in array.shape) or "one number"
    if array.num_values:
        counts = sorted(set(array.num_values))
        return f"{array.dtype}, {shape}, {' or '.join(str(count) for count in counts)} values each"
    bounds = f", {min(array.low):.4g} to {max(array.high):.4g}" if array.low and array.high else ""
    return f"{array.dtype}, {shape}{' (image)' if array.is_image else ''}{bounds}"


def _action_line(action: ActionSpec) -> str:
    sizes = " x ".join(str(size) for size in action.sizes)
    labels = f": {', '.join(action.labels)}" if action.labels else ""
    if action.kind == "continuous":
        bounds = f", {min(action.low):.4g} to {max(action.high):.4g}" if action.low and action.high else ""
        return f"continuous, size {sizes}{bounds}{labels}"
    return f"{action.kind.replace('_', ' ')}, {sizes} choices{labels}"


def _check(env_id: str, arguments: argparse.Namespace) -> int:
    with only_json_on_stdout(arguments.json):
        from rl_lab import api

        findings = api.check_environment(env_id)
    failed = any(finding.level == "error" for finding in findings)
    if arguments.json:
        print_json({"id": env_id, "ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            print(f"{finding.level:<8} {finding.what}\n{'':<8} -> {finding.cure}")
        if not failed and not arguments.quiet:
            print(f"ok: {env_id} keeps the contract. Train on it: rl-lab train {env_id}:ppo")
    return 1 if failed else 0
