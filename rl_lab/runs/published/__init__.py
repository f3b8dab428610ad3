"""Learning curves that others have published, to draw beside one's own: `dreamerv3:dmc_state`. Sources: README.md."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from rl_lab.runs.series import Curve
from rl_lab.types import ConfigError, did_you_mean

_SPELLINGS = {"cup_catch": "ball_in_cup_catch"}  # older papers' names of tasks


@dataclass(frozen=True)
class Published:
    """One method on one task, as its authors published it."""

    method: str
    suite: str
    task: str
    source: str
    seeds: str  # 5, or 4-5 where not all of them reach the end
    curve: Curve  # over env frames
    std: np.ndarray  # over seeds

    @property
    def label(self) -> str:
        return f"{self.method}, published ({self.seeds} seeds, {self.source})"


def published_curves(reference: str, environments: list[str]) -> dict[str, Published]:
    """Curves for `METHOD:SUITE`, such as `dreamerv3:dmc_state`, by environment; refused where it has none of them."""
    rows = _rows()
    known = sorted({(row["method"], f"{row['suite']}_{row['observation']}") for row in rows})
    method, _, suite = reference.partition(":")
    wanted = [each for each in known if each[0] == method and suite in (each[1], each[1].rpartition("_")[0])]
    names = [":".join(each) for each in known]
    if not wanted:
        raise ConfigError(
            f"--against {reference}: no such curves are here.{did_you_mean(reference, names)} There are: "
            f"{', '.join(names)}."
        )
    if len(wanted) > 1:
        raise ConfigError(
            f"--against {reference} is ambiguous: write {' or '.join(':'.join(each) for each in wanted)}."
        )
    of_one = [row for row in rows if (row["method"], f"{row['suite']}_{row['observation']}") == wanted[0]]
    by_task: dict[str, list[dict[str, str]]] = {}
    for row in of_one:
        by_task.setdefault(_SPELLINGS.get(row["task"], row["task"]), []).append(row)
    letters = {task.replace("_", ""): task for task in by_task}
    found = {each: _curve(by_task[letters[task]]) for each in environments if (task := task_of(each)) in letters}
    if not found:
        raise ConfigError(
            f"--against {reference} has no curve for {', '.join(environments)}. It has: {', '.join(sorted(by_task))}."
        )
    return found


def published_beside(references: Sequence[str], environments: list[str], *, x: str) -> dict[str, list[Published]]:
    """All that is asked for, by environment."""
    if references and x != "env_frames":
        raise ConfigError(f"--against needs --x env_frames, over which the curves were published; here it is {x}.")
    found: dict[str, list[Published]] = {}
    for reference in references:
        for environment, curve in published_curves(reference, environments).items():
            found.setdefault(environment, []).append(curve)
    return found


def task_of(environment: str) -> str:
    """The letters of a task: `dmc/walker_walk` -> walkerwalk, `ALE/MsPacman-v5` -> mspacman."""
    return re.sub(r"(NoFrameskip)?-v\d+$", "", environment.rpartition("/")[2]).replace("_", "").lower()


@cache
def _rows() -> list[dict[str, str]]:
    text = files("rl_lab.runs.published").joinpath("scores.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _curve(rows: list[dict[str, str]]) -> Published:
    names = ("env_frames", "return_mean", "return_std_over_seeds")
    points = np.asarray([[float(row[name]) for name in names] for row in rows])
    points = points[np.argsort(points[:, 0], kind="stable")]
    first = rows[0]
    curve = Curve(points[:, 0], points[:, 1])
    counts = sorted({int(row["seeds"]) for row in rows})
    seeds = "-".join(dict.fromkeys(str(each) for each in (counts[0], counts[-1])))
    return Published(first["method"], first["suite"], first["task"], first["source"], seeds, curve, points[:, 2])
