"""Environments: search all that are installed, describe one, or check your own.

  envs [FILTER]     every id that contains FILTER, and suites that are not installed
  envs show ID      observation, actions, limits, how it is run and saved; writes a rendered frame
  envs check ID     look for mistakes in an environment and say how to mend them

ID is a Gymnasium id; package:Env-v0 imports `package` first.

examples:
  rl-lab envs cart
  rl-lab envs show CartPole-v1
  rl-lab envs check my_package:MyEnv-v0
"""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rl_lab.cli.parsing import JSON, RUNS_DIR, UsageError, argument, quiet, runs_dir_of
from rl_lab.cli.printing import answer, fields, only_json_on_stdout, print_json, table

if TYPE_CHECKING:
    from rl_lab.api import EnvDetails
    from rl_lab.types import ActionSpec, ArraySpec

ACTIONS = ("show", "check")
PICTURES = (".png", ".jpg")

ARGUMENTS = (
    argument("words", nargs="*", metavar="FILTER | show ID | check ID", help="what to look at"),
    argument("--all-versions", action="store_true", help="also ids that a newer version replaces"),
    argument(
        "--frame", type=Path, metavar="FILE", help="of show: where the frame goes (default: in the runs directory)"
    ),
    RUNS_DIR,
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
        missing = api.missing_suites(text)
    headers = ("ENVIRONMENT", "SUITE", "TIME LIMIT", "SOLVED AT", "NATIVE VECTOR", "INSTALL")
    rows = [
        (info.id, info.suite, info.max_episode_steps, info.solved_return, info.has_native_vector, info.install)
        for info in found
    ]
    nothing = f"No environment matches '{text}'. Your own is written package:Env-v0; all of them: rl-lab envs"
    absent = [f"not installed: {each.suite}{each.ids and f' ({each.ids})'}: {each.install}" for each in missing]
    shown = "\n".join([table(headers, rows) if found or missing else nothing, *([""] if absent else []), *absent])
    answer(arguments, [asdict(info) for info in found], shown, brief=[info.id for info in found])
    return 0


def _show(env_id: str, arguments: argparse.Namespace) -> int:
    if (file := arguments.frame) is not None and file.suffix.lower() not in PICTURES:
        raise UsageError(f"--frame {file} ends in '{file.suffix}': write {' or '.join(PICTURES)}.")
    with only_json_on_stdout(arguments.json):
        from rl_lab import api

        details = api.look_at_environment(env_id)
        spec, frame = details.spec, _write_frame(details, arguments)
    facts_of_it = {"vectorization": details.vectorization, "snapshot": details.snapshot}
    if arguments.json:
        more = {"reward_range": details.reward_range, "frame": frame}
        print_json({**asdict(spec), **facts_of_it, **more})
        return 0
    observations = [(name, _array_line(array)) for name, array in spec.observation.items()]
    facts = [
        ("actions", _action_line(spec.action)),
        ("time limit", f"{spec.max_episode_steps:,} agent steps" if spec.max_episode_steps else "none"),
        ("solved at", spec.solved_return),
        ("reward", f"{details.reward_range[0]:g} to {details.reward_range[1]:g}" if details.reward_range else None),
        ("frames per agent step", spec.frames_per_step),
        ("vectorization", details.vectorization),
        ("exact resume", details.snapshot),
        ("frame", frame or f"none. {details.why_no_frame}"),
    ]
    print("\n".join(line for line in (spec.id, spec.description and f"  {spec.description}") if line))
    print(f"\nobservation\n{fields(observations)}\n\n{fields(facts, indent=0)}")
    print(f"\ntrain on it: rl-lab train {env_id}:ppo")
    return 0


def _write_frame(details: EnvDetails, arguments: argparse.Namespace) -> Path | None:
    if details.frame is None:
        return None
    from PIL import Image

    name = re.sub(r"[^\w.-]+", "_", details.spec.id)
    path = arguments.frame or runs_dir_of(arguments) / "environments" / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(details.frame).save(path)
    return path


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
