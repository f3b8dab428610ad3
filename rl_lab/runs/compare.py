"""Several runs side by side: which of them are seeds of one method, what they scored, and in what they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_lab.runs.published import Published, published_beside
from rl_lab.runs.query import metric_name, with_short_names
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.series import COUNTERS, WINDOW, Curve, metric_names, read_curves, shared_end
from rl_lab.runs.settings import Settings, differing, method_of, settings_of
from rl_lab.runs.statistics import AGGREGATES, Estimate, estimate, estimate_improvement
from rl_lab.types import ConfigError, RunError, did_you_mean

if TYPE_CHECKING:
    from rl_lab.runs.compare_figures import Band
    from rl_lab.runs.tables import Table

TASK = "environment.id"
X_AXIS, X_AXIS_WITHOUT_STEPS = "env_frames", "updates"  # what curves are drawn over where nothing was asked for
_LONGEST_LABEL = 3  # settings in the name of a group
_LONGEST_HEAD = 16  # letters of a label that heads a column


@dataclass(frozen=True)
class Member:
    """One run of a group, with the curves asked for."""

    run: RunDirectory
    manifest: Mapping[str, Any]
    settings: Settings
    curves: Mapping[str, Curve]

    @property
    def task(self) -> str:
        return str(self.manifest.get("environment_id"))

    @property
    def stands_still(self) -> bool:
        """Whether its curves are vertical lines: an offline run takes no steps while it learns."""
        found = [curve.x for curve in self.curves.values() if len(curve)]
        return bool(found) and all(x[0] == x[-1] and (len(x) > 1 or x[0] == 0) for x in found)


@dataclass
class Group:
    """Runs of one method: they differ in nothing but seed and environment."""

    label: str
    settings: Settings
    members: list[Member]

    def of(self, task: str) -> list[Member]:
        return [member for member in self.members if member.task == task]


@dataclass
class Comparison:
    """Groups of runs, and what can be said about them."""

    groups: list[Group]
    metrics: list[str]
    x: str
    at: float | None = None
    published: dict[str, list[Published]] = field(default_factory=dict)  # by environment
    notes: list[str] = field(default_factory=list)

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(member.task for group in self.groups for member in group.members))

    def end(self, task: str, metric: str) -> float:
        """Up to where the runs of a task are compared: what was asked for, or the end that all of them reach."""
        ends = [member.curves[metric].x[-1] for member in self.moving(task, metric)]
        return self.at if self.at is not None else shared_end(ends) if ends else 0.0

    def moving(self, task: str, metric: str) -> list[Member]:
        """The runs of a task that have a curve; those that stand still count with their last values, whatever the end,
        and are among these only where all do."""
        there = [each for group in self.groups for each in group.of(task) if len(each.curves[metric])]
        return [each for each in there if not each.stands_still] or there

    def scores(self, group: Group, task: str, metric: str | None = None) -> np.ndarray:
        """One number for each run: the mean of the metric's last tenth before the common end."""
        metric = metric or self.metrics[0]
        end = self.end(task, metric)
        curves = [member.curves[metric] for member in group.of(task)]
        return np.asarray([curve.until(min(end, curve.x[-1])) for curve in curves if len(curve)])

    def estimates(self, group: Group, tasks: Sequence[str], metric: str | None = None) -> dict[str, Estimate]:
        """IQM, mean and median of a group over some tasks; nothing where it has no runs in one of them."""
        scores = [self.scores(group, task, metric) for task in tasks]
        if not all(len(each) for each in scores):
            return {}
        return {name: estimate(aggregate, scores) for name, aggregate in AGGREGATES.items()}

    def improvements(self, tasks: Sequence[str]) -> dict[tuple[str, str], Estimate]:
        """How probably a run of one group beats one of another, for each pair with runs in all of these tasks."""
        scores = {group.label: [self.scores(group, task) for task in tasks] for group in self.groups}
        there = [label for label, arrays in scores.items() if all(len(each) for each in arrays)]
        return {
            (ours, theirs): estimate_improvement(scores[ours], scores[theirs])
            for index, ours in enumerate(there)
            for theirs in there[index + 1 :]
        }

    def tables(self) -> list[Table]:
        """What a person reads: scores, probabilities of improvement, settings that differ."""
        from rl_lab.runs.compare_tables import all_tables

        return all_tables(self)

    def plot(self, *, band: Band = "ci") -> Any:
        """The curves as a matplotlib figure; `band`: ci (95 % interval), std or range."""
        from rl_lab.runs.compare_figures import comparison_figure

        return comparison_figure(self, spread=band)

    def write(self, path: str | Path, *, band: Band = "ci") -> Path:
        """The comparison as a file, by its ending: .png, .html or .md (with its picture beside it)."""
        from rl_lab.runs.compare_report import write_comparison

        return write_comparison(Path(path), self, band)

    def _repr_html_(self) -> str:
        """A notebook's view: the picture and the tables."""
        from rl_lab.runs.compare_report import html_blocks

        return "".join(html_blocks(self, "ci"))

    def short_names(self) -> dict[str, str]:
        """Label -> label or, where labels are long, a letter: for pairs and for the heads of columns."""
        labels = [group.label for group in self.groups]
        if max(map(len, labels)) <= _LONGEST_HEAD or len(labels) > len(ascii_uppercase):
            return {label: label for label in labels}
        return dict(zip(labels, ascii_uppercase, strict=False))

    def full_name(self, label: str) -> str:
        """The label, with its letter where it has one."""
        short = self.short_names()[label]
        return label if short == label else f"{short}: {label}"

    def shared_tasks(self) -> list[str]:
        """Several tasks in which every group has runs: what an aggregate over tasks needs; else none."""
        everywhere = [task for task in self.tasks if all(group.of(task) for group in self.groups)]
        return everywhere if len(everywhere) > 1 and len(everywhere) == len(self.tasks) else []

    def differences(self) -> list[str]:
        """The settings in which the groups differ."""
        return [key for key in differing([group.settings for group in self.groups]) if key != TASK]


def compare_runs(
    runs: Sequence[RunDirectory],
    *,
    metrics: Sequence[str] = ("eval/return",),
    x: str | None = None,
    at: float | None = None,
    group_by: Sequence[str] = (),
    against: Sequence[str] = (),
    needs_metrics: bool = True,
) -> Comparison:
    """Read the runs and sort them into groups; `group_by` names settings that alone decide, in place of all of them,
    `against` published curves. Curves are over `x`: env_frames unless said, or updates where no run takes steps.
    Metrics that no run has are refused where `needs_metrics`."""
    if x is not None and x not in COUNTERS:
        raise ConfigError(f"x is '{x}'.{did_you_mean(x, COUNTERS)} Write one of {', '.join(COUNTERS)}.")
    if at is not None and not at > 0:
        raise ConfigError(f"at is {at}: write a number of {x or X_AXIS} above 0.")
    names = [metric_name(each) for each in metrics]
    members, x, notes = _over_what_moves(runs, names, x, has_published=bool(against))
    for name in names if needs_metrics else ():
        _refuse_unknown(name, members)
    comparison = Comparison(_groups(members, group_by), names, x, at)
    comparison.published |= published_beside(against, comparison.tasks, x=x)
    comparison.notes += [*notes, *_notes(comparison)]
    return comparison


def _over_what_moves(
    runs: Sequence[RunDirectory], names: Sequence[str], asked: str | None, *, has_published: bool
) -> tuple[list[Member], str, list[str]]:
    """The runs with their curves, what these are over, and what to say about it."""
    x = asked or X_AXIS
    members = [_member(run, x, names) for run in runs]
    still = [member for member in members if member.stands_still]
    there = [member for member in members if any(map(len, member.curves.values()))]
    if asked is None and not has_published and still and len(still) == len(there):
        over_updates = [_member(run, X_AXIS_WITHOUT_STEPS, names) for run in runs]
        if not all(member.stands_still for member in over_updates if any(map(len, member.curves.values()))):
            return over_updates, X_AXIS_WITHOUT_STEPS, [f"over updates: no {x} pass in these runs while they learn"]
    ids = ", ".join(member.run.id for member in still)
    notes = [f"no {x} pass while these learn, so that they count as they end (--x updates): {ids}"] if still else []
    return members, x, notes


def _member(run: RunDirectory, x: str, names: Sequence[str]) -> Member:
    manifest = run.read_manifest()
    return Member(run, manifest, settings_of(run, manifest), read_curves(run.metrics_path, x, names))


def _refuse_unknown(name: str, members: Sequence[Member]) -> None:
    if any(len(member.curves[name]) for member in members):
        return
    known = sorted({each for member in members for each in metric_names(member.run.metrics_path)})
    if not known:
        raise RunError(f"None of these runs has logged anything yet: {', '.join(each.run.id for each in members)}.")
    hint = did_you_mean(name, with_short_names(known))
    raise ConfigError(f"No row of these runs has '{name}'.{hint} They have: {', '.join(known)}.")


def _groups(members: Sequence[Member], group_by: Sequence[str]) -> list[Group]:
    known = {key for member in members for key in member.settings}
    for key in group_by:
        if key not in known:
            raise ConfigError(f"--group-by {key}: these runs have no such setting.{did_you_mean(key, known)}")
    found: dict[str, list[Member]] = {}
    for member in members:
        chosen = {key: member.settings.get(key) for key in group_by} if group_by else member.settings
        found.setdefault(method_of(chosen, ignore=(TASK,)), []).append(member)
    groups = [Group("", _shared([member.settings for member in each]), each) for each in found.values()]
    for group, label in zip(groups, _labels(groups, group_by), strict=True):
        group.label = label
    return groups


def _shared(settings: Sequence[Settings]) -> Settings:
    """The settings in which all agree."""
    return {key: value for key, value in settings[0].items() if all(each.get(key) == value for each in settings)}


def _labels(groups: Sequence[Group], group_by: Sequence[str]) -> list[str]:
    """The name of each group's experiment and, where others have the same, the settings that tell these apart."""
    names = [
        " / ".join(dict.fromkeys(str(each.manifest.get("name") or each.run.id) for each in group.members[:2]))
        for group in groups
    ]
    labels = []
    for name, group in zip(names, groups, strict=True):
        alike = [other for other, its_name in zip(groups, names, strict=True) if its_name == name]
        values = _telling_values(group, alike if not group_by else groups, group_by)
        labels.append(", ".join(values if len(set(names)) == 1 and values else [name, *values]))
    return [
        f"{label} #{labels[:place].count(label) + 1}" if labels.count(label) > 1 else label
        for place, label in enumerate(labels)
    ]


def _telling_values(group: Group, others: Sequence[Group], group_by: Sequence[str]) -> list[str]:
    """`discount=0.9`: the settings that were asked for, or in which a group differs from others; of several that go
    together the first."""
    keys = list(group_by) or [key for key in differing([each.settings for each in others]) if key != TASK]
    patterns = {key: repr([each.settings.get(key) for each in others]) for key in keys}
    keys = [key for key in keys if patterns[key] not in [patterns[each] for each in keys[: keys.index(key)]]]
    short = {key: key.rpartition(".")[2] for key in keys}
    if len(set(short.values())) < len(short):
        short = {key: key for key in keys}
    return [f"{short[key]}={_spelled(group.settings.get(key))}" for key in keys[:_LONGEST_LABEL]]


def _spelled(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _notes(comparison: Comparison) -> list[str]:
    """What a reader of the table must know."""
    notes, metric = [], comparison.metrics[0]
    for group in comparison.groups:
        commits = {str((each.manifest.get("git") or {}).get("commit"))[:12] for each in group.members}
        if len(commits) > 1:
            notes.append(f"{group.label}: its runs are of {len(commits)} commits: {', '.join(sorted(commits))}")
        seeds = [each.manifest.get("seed") for each in group.members]
        pairs = [(each.task, seed) for each, seed in zip(group.members, seeds, strict=True)]
        if len(set(pairs)) < len(pairs):
            notes.append(f"{group.label}: a seed occurs more than once, so its runs are not independent")
        empty = [each.run.id for each in group.members if not len(each.curves[metric])]
        if empty:
            notes.append(f"{group.label}: without {metric}, so left out: {', '.join(empty)}")
    for task in comparison.tasks:
        end = comparison.end(task, metric)
        members = comparison.moving(task, metric)
        longer = [each for each in members if each.curves[metric].x[-1] > end]
        shorter = [(each.run.id, each.curves[metric].x[-1]) for each in members]
        shorter = [(run, last) for run, last in shorter if last < (1.0 - WINDOW) * end]
        if shorter and comparison.at is not None:
            ends = ", ".join(f"{run} at {last:,.0f}" for run, last in shorter)
            notes.append(
                f"{task}: {len(shorter)} of {len(members)} runs end before {end:,.0f} {comparison.x} and count with "
                f"what they had: {ends}"
            )
        if longer and comparison.at is None:
            shortest = min(members, key=lambda each: each.curves[metric].x[-1])
            notes.append(
                f"{task}: compared up to {end:,.0f} {comparison.x}, a tenth beyond the end of the shortest run, "
                f"{shortest.run.id}; {len(longer)} of {len(members)} go on"
            )
    return notes
