"""Find out where a number stopped being finite (docs/diagnose.md).

  debug find RUN        go on from its last checkpoint and look at every tensor; the first that is not finite is
                        named (module, operation, line), and a crash bundle is written into the run's folder
  debug replay BUNDLE   execute a crash bundle again: the collecting or the update that led there; of a RUN, its newest

`rl-lab train EXPERIMENT debug.check_finite=true` (preset=debug has it) looks from the beginning. The exit code of
`replay` is 0 where it comes to the same place, that of `find` where nothing was found; else 1.

examples:
  rl-lab debug find @last
  rl-lab debug replay @last
  rl-lab debug replay runs/20260101-120000-ppo_cartpole-s1-ab12/crash/step_000000001024
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_lab.cli.parsing import JSON, RUN, RUNS_DIR, TRUST, argument, quiet, runs_dir_of
from rl_lab.cli.printing import answer, fields, format_value, only_json_on_stdout
from rl_lab.cli.progress import progress_line

ACTIONS: dict[str, tuple[str, list[Any]]] = {
    "find": ("go on from a run's last checkpoint, looking at every tensor", [*RUN]),
    "replay": (
        "execute a crash bundle again",
        [argument("bundle", metavar="BUNDLE", help="a folder runs/RUN/crash/step_..., or a run"), RUNS_DIR],
    ),
}


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar=" | ".join(ACTIONS), required=True)
    for name, (summary, own) in ACTIONS.items():
        action = actions.add_parser(name, help=summary, arguments=[*own, TRUST, JSON, quiet("print only the place")])
        action.prog = f"{parser.prog} {name}"
        action.set_defaults(parser=action)


ARGUMENTS = (_add_actions,)


def run(arguments: argparse.Namespace) -> int:
    return {"find": _find, "replay": _replay}[arguments.action](arguments)


def _find(arguments: argparse.Namespace) -> int:
    is_quiet = arguments.quiet or arguments.json
    with only_json_on_stdout(arguments.json), progress_line("looking", "updates", quiet=is_quiet) as progress:
        from rl_lab.experiment.crash import find
        from rl_lab.runs.index import resolve_run

        directory = resolve_run(arguments.run, runs_dir_of(arguments))
        error = find(directory, trust=arguments.trust, progress=progress)
    if error is None:
        facts: dict[str, Any] = {"id": directory.id, "place": None, "bundle": None}
        answer(arguments, facts, f"{format_value(directory.id)} came to its end, and every number was finite")
        return 0
    facts = {"id": directory.id, "place": asdict(error.place), "bundle": error.bundle}
    answer(arguments, facts, format_value(str(error)), brief=[format_value(str(error.place))])
    return 1


def _replay(arguments: argparse.Namespace) -> int:
    with only_json_on_stdout(arguments.json):
        from rl_lab.experiment.crash import newest_bundle, replay
        from rl_lab.experiment.watch import CRASH
        from rl_lab.runs.index import resolve_run

        bundle = Path(arguments.bundle)
        if bundle.absolute().parent.name != CRASH:
            bundle = newest_bundle(resolve_run(arguments.bundle, runs_dir_of(arguments)))
        found = replay(bundle, trust=arguments.trust)
    verdict = "the same place" if found.is_same else "another place" if found.found else "every number was finite"
    text = f"{verdict}\n" + fields(
        [("during", found.during), ("recorded", _said(found.recorded)), ("found", found.found and _said(found.found))]
    )
    brief = [format_value(str(found.found or "finite"))]
    answer(arguments, {"is_same": found.is_same, **asdict(found)}, text, brief=brief)
    return 0 if found.is_same else 1


def _said(place: Any) -> str:
    return f"{place}, from {place.origin}" if place.origin else str(place)
