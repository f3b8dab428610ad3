"""Draw docs/images/learning.svg: the learning curves of docs/results.md beside the published ones, from learning.csv.

python docs/images/make_learning_picture.py [OUTPUT.svg]
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "rl_lab", "svg.fonttype": "none"}  # the same picture is the same small file
import matplotlib.pyplot as plt  # noqa: E402

OUTPUT = Path(__file__).parent / "learning.svg"
POINTS = Path(__file__).parent / "learning.csv"
GOALS = {  # env frames and return
    ("cartpole_swingup", "state"): [(100_000, 478), (250_000, 800)],
    ("walker_walk", "state"): [(100_000, 461)],
    ("reacher_easy", "state"): [(100_000, 700)],
    ("cartpole_swingup", "pixels"): [(100_000, 529)],
}
OURS = ("#0b6e99", "#d9730d", "#0f7b6c")
Curve = list[tuple[float, float, float]]


def read(path: Path) -> dict[tuple[str, str], dict[str, Curve]]:
    """Panels, their curves, and the points (env frames, return, std) of each."""
    panels: dict[tuple[str, str], dict[str, Curve]] = defaultdict(lambda: defaultdict(list))
    with path.open() as file:
        for row in csv.DictReader(file):
            point = (float(row["env_frames"]), float(row["return_mean"]), float(row["return_std"] or 0.0))
            panels[row["task"], row["observation"]][row["who"]].append(point)
    return panels


def draw(path: Path) -> None:
    panels = read(POINTS)
    figure, grid = plt.subplots(1, len(panels), figsize=(3.0 * len(panels), 2.9), sharey=True, layout="constrained")
    for axes, (panel, curves) in zip(grid, panels.items(), strict=True):
        colours = iter(OURS)
        for who, points in curves.items():
            frames, returns, stds = (list(each) for each in zip(*points, strict=True))
            thousands = [each / 1000 for each in frames]
            if who == "published":
                low, high = zip(*((r - d, r + d) for r, d in zip(returns, stds, strict=True)), strict=True)
                axes.fill_between(
                    thousands, low, high, color="#d3d3d3", linewidth=0, label="published (training), ± std"
                )
                axes.plot(thousands, returns, color="#808080", linewidth=1.2)
            else:
                axes.plot(thousands, returns, color=next(colours), linewidth=1.6, marker="o", markersize=3, label=who)
        for frames, goal in GOALS[panel]:
            axes.plot(frames / 1000, goal, marker="_", markersize=14, color="black", linewidth=0)
            axes.annotate("goal", (frames / 1000, goal), (0, -9), textcoords="offset points", fontsize=7, ha="center")
        axes.set_title(f"{panel[0]}, {panel[1]}", fontsize=9)
        axes.set_xlabel("thousand environment frames", fontsize=8)
        axes.set_ylim(0, 1000)
        axes.set_xlim(0, max(point[0] for points in curves.values() for point in points) / 1000 * 1.06)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=6.5, frameon=False, loc="upper left")
    grid[0].set_ylabel("return (ours: of evaluations)", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
