"""Draw docs/images/live.svg, the README's picture of the live display, from a real run caught on its way.

python docs/images/make_live_picture.py [OUTPUT.svg]
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rl_lab.config.compose import compose
from rl_lab.experiment.build import build
from rl_lab.metrics.panel import render_panel
from rl_lab.metrics.view import RunView
from rl_lab.types import CollectResult

OUTPUT = Path(__file__).parent / "live.svg"
CAUGHT_AT = 0.6  # of the run: late enough for curves, early enough for a progress bar


def draw(path: Path, overrides: list[str]) -> None:
    """Train without writing files until the picture shows something, then save it."""
    config = compose("ppo_cartpole", ["evaluation.every_steps=8000", "evaluation.final_episodes=0", *overrides])
    experiment = build(
        config, run=None, quiet=True, interrupted=lambda: experiment.display.view.run_fraction > CAUGHT_AT
    )
    # A quiet display does not look at the run: here the loop itself does, once per cycle.
    collected = experiment.housekeeping.collected

    def look(result: CollectResult) -> None:
        collected(result)
        experiment.display.view.look(experiment.probe())

    experiment.housekeeping.collected = look  # type: ignore[method-assign]
    try:
        experiment.orchestrator.run()
        export_svg(experiment.display.view, path)
    finally:
        experiment.close()


def export_svg(view: RunView, path: Path) -> None:
    """The panel as it stands now, as a picture that asks no other host for its fonts."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi("\n".join(render_panel(view, columns=100, height=30))))
    picture = console.export_svg(title=view.title, unique_id="rl-lab")
    path.write_text(re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT, [])
