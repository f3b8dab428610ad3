"""A comparison as tables: scores with intervals, probabilities of improvement, settings side by side, runs, rows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rl_lab.runs.compare import Comparison
from rl_lab.runs.metrics_file import read_metrics
from rl_lab.runs.published import Published
from rl_lab.runs.statistics import Estimate
from rl_lab.runs.tables import Table, shown

_MOST_PAIRS = 10
_FACTS = ("name", "algorithm", "environment_id", "seed")
_COUNTS = ("agent_steps", "env_frames", "updates")


def score_tables(comparison: Comparison) -> list[Table]:
    """For each environment, and over all where every group has runs in each: the groups with their estimates."""
    tables = [_scores_in(comparison, task, comparison.published.get(task, ())) for task in comparison.tasks]
    tasks = comparison.shared_tasks()
    if tasks:
        title = f"{comparison.metrics[0]} over {len(tasks)} environments, scores as they are"
        tables.append(Table(title, _SCORES, [_score_row(comparison, group, tasks) for group in comparison.groups]))
    return tables


_SCORES = ("group", "runs", "IQM", "IQM 95 %", "mean", "mean 95 %", "median", "median 95 %")


def _scores_in(comparison: Comparison, task: str, published: Sequence[Published]) -> Table:
    metric = comparison.metrics[0]
    end = comparison.end(task, metric)
    rows = [_score_row(comparison, group, [task]) for group in comparison.groups if group.of(task)]
    for each in published:
        value = each.curve.until(end) if each.curve.x[0] <= end else None
        rows.append([each.label, each.seeds, None, "", value, "", None, ""])
    return Table(f"{task}: {metric} at {end:,.0f} {comparison.x.replace('_', ' ')}", _SCORES, rows)


def _score_row(comparison: Comparison, group: Any, tasks: Sequence[str]) -> list[Any]:
    estimates = comparison.estimates(group, tasks)
    row = [comparison.full_name(group.label), sum(len(comparison.scores(group, task)) for task in tasks)]
    for name in ("IQM", "mean", "median"):
        found = estimates.get(name)
        row += [None, ""] if found is None else [found.value, interval(found)]
    return row


def interval(found: Estimate) -> str:
    return "" if math.isnan(found.low) else f"{shown(found.low)} to {shown(found.high)}"


def improvement_tables(comparison: Comparison) -> list[Table]:
    """How probably a run of one group beats one of another, in each environment and over all where every group has runs
    in each. Of many pairs, those of the group with the highest IQM."""
    places = [[task] for task in comparison.tasks] + ([comparison.shared_tasks()] if comparison.shared_tasks() else [])
    tables = []
    for tasks in places:
        pairs = comparison.improvements(tasks)
        if len(pairs) > _MOST_PAIRS:
            scores = {group.label: comparison.estimates(group, tasks).get("IQM") for group in comparison.groups}
            best = max((found.value, label) for label, found in scores.items() if found is not None)[1]
            others = {pair[pair[0] == best]: (pair, found) for pair, found in pairs.items() if best in pair}
            pairs = {
                (best, other): found if pair[0] == best else found.turned() for other, (pair, found) in others.items()
            }
        where = tasks[0] if len(tasks) == 1 else f"{len(tasks)} environments"
        short = comparison.short_names()
        rows = [
            [f"{short[ours]} > {short[theirs]}", found.value, interval(found)]
            for (ours, theirs), found in pairs.items()
        ]
        if rows:
            tables.append(Table(f"{where}: probability of improvement", ("pair", "P", "95 %"), rows))
    return tables


def difference_table(comparison: Comparison) -> Table | None:
    """The settings in which groups differ, one column for each group; None where they differ in nothing."""
    keys = comparison.differences()
    if not keys or len(comparison.groups) < 2:
        return None
    labels = comparison.short_names().values()
    rows = [[key, *(_value(group.settings.get(key)) for group in comparison.groups)] for key in keys]
    return Table("settings that differ", ("setting", *labels), rows)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def run_table(comparison: Comparison) -> Table:
    """One row for each run: what it is, its score, and every setting."""
    members = [(group, member) for group in comparison.groups for member in group.members]
    keys = list(dict.fromkeys(key for _, member in members for key in member.settings if key != "seed"))
    metric = comparison.metrics[0]
    rows = []
    for group, member in members:
        status, curve = member.run.read_status(), member.curves[metric]
        end = comparison.end(member.task, metric)
        score = curve.until(min(end, curve.x[-1])) if len(curve) else None
        facts = [member.run.id, group.label, *(member.manifest.get(name) for name in _FACTS)]
        facts += [status["state"], *(status["counts"].get(name, 0) for name in _COUNTS)]
        facts += [status["wall_s"], status["best_score"], status["final_score"], score]
        rows.append([*facts, *(member.settings.get(key) for key in keys)])
    names = ("run", "group", "name", "algorithm", "environment", "seed", "state")
    return Table("runs", (*names, *_COUNTS, "wall_s", "best_score", "final_score", metric, *keys), rows)


def row_table(comparison: Comparison) -> Table:
    """Every logged row of every run, with the run in front: what pandas and other tools plot from."""
    rows_of = [
        (group, member, read_metrics(member.run.metrics_path))
        for group in comparison.groups
        for member in group.members
    ]
    names = list(dict.fromkeys(name for _, _, rows in rows_of for row in rows for name in row if name != "non_finite"))
    table = [
        [member.run.id, group.label, *(member.manifest.get(name) for name in _FACTS[1:]), *map(row.get, names)]
        for group, member, rows in rows_of
        for row in rows
    ]
    return Table("rows", ("run", "group", "algorithm", "environment", "seed", *names), table)


def all_tables(comparison: Comparison) -> list[Table]:
    """What a person reads: scores, probabilities, differences."""
    difference = difference_table(comparison)
    return [
        *score_tables(comparison),
        *improvement_tables(comparison),
        *([difference] if difference is not None else []),
    ]
