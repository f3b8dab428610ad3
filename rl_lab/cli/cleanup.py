"""Free disk space: remove the checkpoints and replays of runs that are done, and keep their configs, metrics, reports,
curves and videos. Kept whole are the best runs of each environment, recent ones, those tagged `keep`, those that an
unfinished run reads from, and every run that is under way. Runs that can still be resumed stay, unless --unfinished is
given. Killed in the middle, it leaves no run half-cleaned that the same command does not finish.

examples:
  rl-lab cleanup --dry-run
  rl-lab cleanup --keep-best 10 --keep-recent 30d --dry-run
  rl-lab cleanup --keep-best 3 --keep-recent 7d --also videos --yes
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rl_lab.cli.parsing import JSON, RUNS_DIR, YES, argument, runs_dir_of, whole
from rl_lab.cli.printing import confirm, format_size, format_value, print_json, say, table

if TYPE_CHECKING:
    from rl_lab.runs.cleanup import Plan

ON_REQUEST = ("videos", "tensorboard", "episodes")  # as rl_lab.runs.cleanup has them, which is not imported for --help
ARGUMENTS = (
    argument("--keep-best", type=whole, default=10, metavar="N", help="of each environment (default: 10)"),
    argument("--keep-recent", default="30d", metavar="AGE", help="such as 12h, 30d, 8w (default: 30d)"),
    argument("--also", action="append", default=[], choices=ON_REQUEST, help="remove these too; can be repeated"),
    argument("--unfinished", action="store_true", help="also runs that failed or were interrupted or killed"),
    argument("--dry-run", action="store_true", help="show what would go, and how much that frees"),
    YES,
    RUNS_DIR,
    JSON,
)


def run(arguments: argparse.Namespace) -> int:
    from rl_lab.runs.cleanup import clean, parse_age, plan_cleanup
    from rl_lab.types import RunError

    plan = plan_cleanup(
        runs_dir_of(arguments),
        keep_best=arguments.keep_best,
        keep_recent=parse_age(arguments.keep_recent),
        also=arguments.also,
        with_unfinished=arguments.unfinished,
    )
    if not arguments.json:
        print(_describe(plan))
    is_asked = plan.removals and not arguments.dry_run
    if is_asked and not confirm(arguments, f"Remove these folders of {len(plan.removals)} runs?"):
        return 1
    freed, left = 0, {}
    for removal in plan.removals if is_asked else ():
        try:
            freed += clean(removal)
        except RunError as error:  # it works again, or its disk refuses: the others are cleaned all the same
            left[removal.run.id] = str(error)
            say(f"left alone: {format_value(str(error))}")
    if arguments.json:
        removals = {each.run.id: dict(each.folders) for each in plan.removals}
        print_json({"removals": removals, "bytes": plan.size, "freed": freed, "kept": plan.kept, "left": left})
    elif is_asked:
        print(f"{format_size(freed)} freed")
    return 1 if left else 0


def _describe(plan: Plan) -> str:
    lines = []
    if plan.removals:
        rows = [
            (each.run.id, each.score, ", ".join(each.folders), format_size(each.size))
            for each in sorted(plan.removals, key=lambda removal: -removal.size)
        ]
        lines.append(table(("RUN", "SCORE", "GOES", "SIZE"), rows))
    reasons = list(plan.kept.values())
    for reason in sorted(set(reasons)):
        count = reasons.count(reason)
        lines.append(f"kept: {count:,}, {'each ' if count > 1 else ''}because {reason}")
    runs = "1 run" if len(plan.removals) == 1 else f"{len(plan.removals):,} runs"
    lines.append(f"{runs} would give back {format_size(plan.size)}")
    return "\n".join(lines)
