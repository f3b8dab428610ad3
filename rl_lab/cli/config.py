"""Find your way through the settings.

  config explain KEY [EXPERIMENT]         what a key means, its value, where it was set
  config check [EXPERIMENT ...] [--all]   build experiments without training; report what is wrong
  config diff A B                         what differs between two experiments or runs

examples:
  rl-lab config explain algorithm.clip_range
  rl-lab config explain training.phases ppo_cartpole
  rl-lab config check --all
  rl-lab config diff ppo_cartpole ppo_acrobot
  rl-lab config diff @last ppo_cartpole
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_lab.cli import parsing
from rl_lab.cli.parsing import CONFIG_DIR, JSON, RUNS_DIR, UsageError, argument, one_name, runs_dir_of, split_words
from rl_lab.cli.printing import fields, only_json_on_stdout, print_json, table

WORDS = argument("words", nargs="*", metavar="EXPERIMENT | key=value", help="(default: the default run)")
ACTIONS = {
    "explain": (
        "what a key means, its value, where it was set",
        [argument("key", metavar="KEY", help="a dotted path: algorithm.discount"), WORDS],
    ),
    "check": (
        "build experiments without training; report what is wrong",
        [WORDS, argument("--all", action="store_true", help="every experiment")],
    ),
    "diff": (
        "what differs between two experiments or runs",
        [
            argument("left", metavar="A", help="an experiment, ENV:ALGORITHM, or a run"),
            argument("right", metavar="B", help="the same"),
            RUNS_DIR,
        ],
    ),
}


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar=" | ".join(ACTIONS), required=True)
    for name, (summary, own) in ACTIONS.items():
        action = actions.add_parser(name, help=summary, arguments=[*own, CONFIG_DIR, JSON])
        action.prog = f"{parser.prog} {name}"
        action.set_defaults(parser=action)


ARGUMENTS = (_add_actions,)


def run(arguments: argparse.Namespace) -> int:
    return {"explain": _explain, "check": _check, "diff": _diff}[arguments.action](arguments)


def _explain(arguments: argparse.Namespace) -> int:
    experiment, overrides = one_name(arguments.words, "experiment")

    from rl_lab.config.explain import explain

    key = arguments.key.partition("=")[0]  # as a shell completes it: `algorithm.clip_range=`
    found = explain(key, experiment, overrides, config_dir=arguments.config_dir)
    if arguments.json:
        print_json(asdict(found))
        return 0
    print(found.key)
    if found.documentation:
        print(f"  {found.documentation}\n")
    value = None if found.children else ("null" if found.value is None else found.value)
    print(fields([("value", value), ("type", found.type), ("set in", found.source), ("keys", found.children)]))
    if not found.children:
        print(f"\nchange it: rl-lab train {experiment or ''} {found.key}=...".replace("  ", " "))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    names, overrides = split_words(arguments.words)
    if arguments.all and names:
        raise UsageError(f"--all checks every experiment; leave out '{names[0]}' or --all.")

    if arguments.all:
        from rl_lab.config.experiments import experiment_names

        names = experiment_names(arguments.config_dir)
    results = []
    chosen: list[str | None] = [*names] or [None]
    for name in chosen:
        with only_json_on_stdout(arguments.json):
            results.append(_check_one(name, overrides, arguments.config_dir))
        if not arguments.json:
            print("  ".join(results[-1][key] for key in ("state", "experiment", "message")).rstrip(), flush=True)
    if arguments.json:
        print_json(results)
    failed = [result for result in results if result["state"] == "fail"]
    if failed and len(results) > 1 and not arguments.json:
        print(f"{len(failed)} of {len(results)} failed")
    return 2 if failed else 0


def _check_one(name: str | None, overrides: list[str], config_dir: Path | None) -> dict[str, str]:
    from rl_lab.config.compose import compose
    from rl_lab.experiment import build as wiring
    from rl_lab.types import MissingDatasetError, MissingExtraError, RLLabError

    state, message = "ok", ""
    try:
        wiring.check(compose(name, overrides, config_dir=config_dir))
    except (MissingExtraError, MissingDatasetError) as error:  # nothing is wrong with it; it cannot be built here
        state, message = "skip", str(error)
    except RLLabError as error:
        state, message = "fail", str(error)
    return {"experiment": name or "(default run)", "state": state, "message": message}


def _diff(arguments: argparse.Namespace) -> int:
    left = flatten(_config_of(arguments.left, arguments))
    right = flatten(_config_of(arguments.right, arguments))
    keys = dict.fromkeys([*left, *right])
    differing = [key for key in keys if (key in left, left.get(key)) != (key in right, right.get(key))]
    if arguments.json:
        sides = (("a", left), ("b", right))
        print_json({key: {name: side[key] for name, side in sides if key in side} for key in differing})
    elif differing:
        rows = [(key, _shown(left, key), _shown(right, key)) for key in differing]
        print(table(("KEY", arguments.left, arguments.right), rows))
    else:
        print("no difference")
    return 0


def _shown(config: dict[str, Any], key: str) -> str:
    """A value as YAML would show it; `-` where the key does not exist."""
    if key not in config:
        return "-"
    return "null" if config[key] is None else str(config[key])


def _config_of(reference: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The config behind an experiment's name, ENV:ALGORITHM, or a run."""
    from rl_lab.config.compose import compose
    from rl_lab.config.experiments import experiment_names

    known = experiment_names(arguments.config_dir)
    if reference in known or (":" in reference and not Path(reference).exists()):
        return compose(reference, config_dir=arguments.config_dir)

    from rl_lab.runs.index import resolve_run
    from rl_lab.types import RunError

    try:
        directory = resolve_run(reference, runs_dir_of(arguments))
    except RunError as error:
        hint = parsing.nearest(reference, known)
        raise UsageError(f"'{reference}' is neither an experiment nor a run.{hint}\n  {error}") from error

    from rl_lab.experiment.load import load_config

    return load_config(directory)


def flatten(config: object, prefix: str = "") -> dict[str, Any]:
    """Dotted keys to values. Lists of numbers or words stay whole; lists of blocks are numbered."""
    if isinstance(config, dict) and config:
        children = config.items()
    elif isinstance(config, list) and any(isinstance(item, dict | list) for item in config):
        children = {str(index): item for index, item in enumerate(config)}.items()
    else:
        return {prefix: config}
    flat: dict[str, Any] = {}
    for key, value in children:
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
