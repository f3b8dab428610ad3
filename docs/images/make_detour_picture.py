"""Draw docs/images/detour.png: how demonstrators, behaviour cloning and a Diffusion Policy walk around the block.

python docs/images/make_detour_picture.py DEMONSTRATIONS.npz BC_RUN DIFFUSION_RUN [OUTPUT.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import rl_lab
from rl_lab.environments.suites.toy_drawn import Detour

OUTPUT = Path(__file__).parent / "detour.png"
WALKS = 50
FIRST_SEED = 1000  # of the walks
Walks = list[np.ndarray]  # places [steps, 2] each


def demonstrated(path: Path) -> Walks:
    steps = np.load(path)
    ends = np.flatnonzero(steps["terminations"] | steps["truncations"])[:WALKS]
    begins = [0, *(ends[:-1] + 1)]
    places, following = steps["observations"], steps["next_observations"]
    return [np.vstack((places[a : b + 1], following[b])) for a, b in zip(begins, ends, strict=True)]


def walked(run: str) -> Walks:
    """The first episode of each of some environments side by side."""
    policy = rl_lab.load(run)
    env = policy.environment(num_envs=WALKS)
    places, _ = env.reset(seed=FIRST_SEED)
    walks, is_over = [[place] for place in places], np.zeros(WALKS, bool)
    while not is_over.all():
        places, _, terminated, truncated, info = env.step(policy.act(places))
        ends = terminated | truncated
        for row in np.flatnonzero(~is_over):  # where an episode ends, `places` shows the next one
            walks[row].append(info["final_obs"][row] if ends[row] else places[row])
        policy.reset(ends)
        is_over |= ends
    env.close()
    return [np.array(walk) for walk in walks]


def draw(panels: dict[str, Walks], output: Path) -> None:
    figure, axes = plt.subplots(1, len(panels), figsize=(7.2, 3.0))
    for axis, (title, walks) in zip(axes, panels.items(), strict=True):
        axis.add_patch(plt.Rectangle((-Detour.block, -Detour.block), 2 * Detour.block, 2 * Detour.block, color="#c44"))
        axis.axhspan(Detour.far, 1.02, color="#4a4", alpha=0.4)
        for walk in walks:
            axis.plot(walk[:, 0], walk[:, 1], "-o", ms=1.2, lw=0.5, color="#247", alpha=0.45)
        arrived = sum(walk[-1, 1] >= Detour.far for walk in walks)
        axis.set_title(f"{title}\n{arrived} of {len(walks)} arrive", fontsize=8)
        axis.set(xlim=(-0.8, 0.8), ylim=(-1.04, 1.04), xticks=[], yticks=[])
    figure.tight_layout()
    figure.savefig(output, dpi=80)


def main(demonstrations: str, cloned: str, diffusion: str, output: str = str(OUTPUT)) -> None:
    panels = {
        "demonstrations": demonstrated(Path(demonstrations)),
        "behaviour cloning, one Gaussian": walked(cloned),
        "Diffusion Policy": walked(diffusion),
    }
    draw(panels, Path(output))


if __name__ == "__main__":
    main(*sys.argv[1:])
