"""Read every file of a run and compare it with its checksums and with each other: config and manifest,
each section of each checkpoint, the rows of the replay, metrics.jsonl against the checkpoints. Nothing is changed.

The exit code is 0 where everything is whole, 1 where something is damaged.

examples:
  rl-lab verify checkpoint @last
  rl-lab verify checkpoint runs/20260101-120000-ppo_cartpole-s1-ab12 --json
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from rl_lab.cli.parsing import JSON, RUN, argument, runs_dir_of
from rl_lab.cli.printing import answer, format_value, table

if TYPE_CHECKING:
    from rl_lab.runs.verify import Verdict

ARGUMENTS = (
    argument("what", choices=("checkpoint",), metavar="checkpoint", help="the checkpoints and all they need"),
    *RUN,
    JSON,
)


def run(arguments: argparse.Namespace) -> int:
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
