"""Prove that a run, or an experiment, keeps what RL Lab promises.

  verify checkpoint RUN               read every file of a run and compare it with its checksums and with each other
  verify run RUN                      run it again from its config and seed; compare every row and every saved number
  verify resume EXPERIMENT [k=v ...]  train shortly, cut it (kill -9 included), resume, compare with the uncut run

Nothing is changed. The exit code is 0 where everything is as it should be (`run`: identical, or within the tolerance),
1 where it is not.

examples:
  rl-lab verify checkpoint @last
  rl-lab verify run @last
  rl-lab verify run @last --steps 5000            only the beginning
  rl-lab verify run @last --tolerance 0 --json    nothing but the same bits will do
  rl-lab verify resume my_experiment --kills 5
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rl_lab.cli.parsing import (
    CONFIG_DIR,
    JSON,
    RUN,
    TRUST,
    argument,
    chosen,
    one_name,
    positive,
    quiet,
    runs_dir_of,
)
from rl_lab.cli.printing import answer, format_value, only_json_on_stdout, table
from rl_lab.cli.progress import progress_line

if TYPE_CHECKING:
    from rl_lab.experiment.identical import Difference
    from rl_lab.experiment.verify_resume import Cut
    from rl_lab.experiment.verify_run import RunVerdict
    from rl_lab.runs.verify import Verdict

SHOWN = 6  # differences


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 on")
    return number


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)


STEPS = "agent steps to repeat (updates, where a run takes none; default: all)"
ACTIONS: dict[str, tuple[str, list[Any]]] = {
    "checkpoint": ("the files of a run, checkpoints and all they need", [*RUN]),
    "run": (
        "run it again and compare",
        [
            *RUN,
            argument("--steps", type=positive, metavar="N", help=STEPS),
            argument("--tolerance", type=_number, default=1e-5, metavar="X", help="relative (default: %(default)s)"),
            TRUST,
            quiet("print only the verdict"),
        ],
    ),
    "resume": (
        "cut a short training, resume it and compare",
        [
            argument("words", nargs="*", metavar="EXPERIMENT | key=value", help="(default: the default run)"),
            argument("--updates", type=positive, default=8, metavar="N", help="of every phase (default: %(default)s)"),
            argument("--cuts", type=_count, default=3, metavar="N", help="stops after a cycle (default: %(default)s)"),
            argument("--kills", type=_count, default=2, metavar="N", help="kills by kill -9 (default: %(default)s)"),
            CONFIG_DIR,
            quiet("print only the verdict"),
        ],
    ),
}


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar=" | ".join(ACTIONS), required=True)
    for name, (summary, own) in ACTIONS.items():
        action = actions.add_parser(name, help=summary, arguments=[*own, JSON])
        action.prog = f"{parser.prog} {name}"
        action.set_defaults(parser=action)


ARGUMENTS = (_add_actions,)


def run(arguments: argparse.Namespace) -> int:
    return {"checkpoint": _checkpoint, "run": _run, "resume": _resume}[arguments.action](arguments)


# --- the files of a run ---


def _checkpoint(arguments: argparse.Namespace) -> int:
    from rl_lab.runs.index import resolve_run
    from rl_lab.runs.verify import verify_run

    directory = resolve_run(arguments.run, runs_dir_of(arguments))
    verdict = verify_run(directory)
    facts = {"id": directory.id, "is_whole": verdict.is_whole, **asdict(verdict)}
    answer(arguments, facts, describe(verdict, directory.id))
    return 0 if verdict.is_whole else 1


def describe(verdict: Verdict, run_id: str) -> str:
    blocks = []
    if verdict.checkpoints:
        rows = [
            (each.name, each.counts.get("agent_steps"), ", ".join(each.usable_for) or "nothing")
            for each in verdict.checkpoints
        ]
        blocks.append(table(("CHECKPOINT", "AGENT STEPS", "USABLE FOR"), rows))
    lines = [f"{each.level:<8} {format_value(each.where)}: {format_value(each.what)}" for each in verdict.findings]
    blocks += ["\n".join(lines)] if lines else []
    return "\n\n".join([*blocks, _conclusion(verdict, format_value(run_id))])


def _conclusion(verdict: Verdict, run_id: str) -> str:
    start = "whole" if verdict.is_whole else "damaged"
    if not verdict.checkpoints:
        return f"{start}, but nothing has been saved yet: `rl-lab resume {run_id}` begins at the beginning"
    if exact := verdict.usable_for("exact"):
        return f"{start}: `rl-lab resume {run_id}` goes on from {exact.name}"
    if warm := verdict.usable_for("warm_start"):
        return f"{start}: no exact resume, but `rl-lab resume {run_id} --mode warm_start` starts from {warm.name}"
    return f"{start}: no checkpoint is usable; start again with `rl-lab train`"


# --- a run, repeated ---


def _run(arguments: argparse.Namespace) -> int:
    is_quiet = arguments.quiet or arguments.json
    with only_json_on_stdout(arguments.json), progress_line("repeating", "steps", quiet=is_quiet) as progress:
        from rl_lab.experiment.verify_run import verify_run
        from rl_lab.runs.index import resolve_run

        directory = resolve_run(arguments.run, runs_dir_of(arguments))
        verdict = verify_run(directory, **chosen(arguments, "steps", "tolerance", "trust"), progress=progress)
    facts = {"id": directory.id, "outcome": verdict.outcome, **asdict(verdict)}
    answer(arguments, facts, describe_run(verdict, directory.id), brief=[verdict.outcome])
    return 1 if verdict.outcome == "different" else 0


def describe_run(verdict: RunVerdict, run_id: str) -> str:
    rows = f"{verdict.rows_compared:,} of {verdict.rows_recorded:,} rows"
    state = "no checkpoint was reached"
    if verdict.checkpoint is not None:
        state = f"every number of {verdict.checkpoint} ({', '.join(verdict.sections)})"
    if verdict.outcome == "identical":
        return f"bit-identical: {format_value(run_id)} repeats itself in {rows}; {state}"
    causes = "\n".join(["likely because of", *(f"  {format_value(each)}" for each in verdict.reasons)])
    if verdict.largest is not None and verdict.outcome == "within_tolerance":
        apart = f"within tolerance ({verdict.tolerance:g}): {verdict.rows_identical:,} of {rows} are bit-identical"
        return f"{apart}; furthest apart is {_said(verdict.largest)}\n{causes}"
    first = verdict.differences[0]
    if first.row is None:
        head = f"different: {rows} agree, the state in {verdict.checkpoint} does not"
    else:
        head = f"different: row {first.row:,}, at {format_value(first.agent_steps)} agent steps, is the first to differ"
    return "\n".join([head, *_listed(verdict.differences), causes])


def _listed(differences: Sequence[Difference]) -> list[str]:
    more = [f"  and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
    return [*(f"  {_said(each)}" for each in differences[:SHOWN]), *more]


def _said(each: Difference) -> str:
    apart = f" ({each.relative:.1g} apart)" if each.relative != float("inf") else ""
    there, here = (
        repr(value) if isinstance(value, float) else format_value(value) for value in (each.recorded, each.found)
    )
    return f"{format_value(each.key)}: {there} in the run, {here} now{apart}"


# --- an experiment, cut and resumed ---


def _resume(arguments: argparse.Namespace) -> int:
    experiment, overrides = one_name(arguments.words, "experiment")
    is_quiet = arguments.quiet or arguments.json
    with only_json_on_stdout(arguments.json), progress_line("training", "runs", quiet=is_quiet) as progress:
        from rl_lab.config.compose import compose
        from rl_lab.experiment.verify_resume import verify_resume

        config = compose(experiment, overrides, config_dir=arguments.config_dir)
        cuts = verify_resume(config, **chosen(arguments, "updates", "cuts", "kills"), progress=progress)
    is_exact = all(cut.is_exact for cut in cuts)
    facts = {"is_exact": is_exact, "cuts": [{**asdict(cut), "is_exact": cut.is_exact} for cut in cuts]}
    answer(arguments, facts, describe_resume(cuts), brief=["exact" if is_exact else "different"])
    return 0 if is_exact else 1


def describe_resume(cuts: Sequence[Cut]) -> str:
    headers = ("CUT BY", "AT STEPS", "UPDATES", "RESUMED AT STEPS", "ROWS", "RESULT")
    rows = [
        (cut.kind, cut.agent_steps, cut.updates, cut.resumed_at, cut.rows, "same" if cut.is_exact else "DIFFERENT")
        for cut in cuts
    ]
    blocks = [table(headers, rows)]
    wrong = [cut for cut in cuts if not cut.is_exact]
    for cut in wrong[:1]:
        where = "its state" if cut.differences[0].row is None else f"row {cut.differences[0].row}"
        head = f"cut by {cut.kind} at {cut.agent_steps:,} agent steps, {where} differs from the run that was not cut:"
        blocks.append("\n".join([head, *_listed(cut.differences)]))
    exact = f"exact: {len(cuts)} cut runs ended with the rows and the saved numbers of the run that was not cut"
    return "\n\n".join([*blocks, f"not exact: {len(wrong)} of {len(cuts)} cut runs differ" if wrong else exact])
