"""Draw docs/images/live.svg, the README's picture of the live display, from a real run caught on its way.

python docs/images/make_live_picture.py [OUTPUT.svg]
"""

from __future__ import annotations

import sys
from pathlib import Path

from rl_lab.config.compose import compose
from rl_lab.experiment.build import build

OUTPUT = Path(__file__).parent / "live.svg"
CAUGHT_AT = 0.6  # of the run: late enough for curves, early enough for a progress bar


def draw(path: Path, overrides: list[str]) -> None:
    """Train without writing files until the picture shows something, then save it."""
    config = compose("ppo_cartpole", ["evaluation.every_steps=8000", "evaluation.final_episodes=0", *overrides])
    experiment = build(
        config, run=None, quiet=True, interrupted=lambda: experiment.display.view.run_fraction > CAUGHT_AT
    )
    try:
        experiment.orchestrator.run()
        experiment.display.export_svg(path)
    finally:
        experiment.close()


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT, [])
