"""Film a world model: what happens in new episodes, what the model reconstructs while it looks, and what
it predicts once it sees only the actions. A png beside the video shows reward, continue and value. Of a
Diffusion Policy: its plans of actions, and how they come out of noise.

examples:
  rl-lab dream @last
  rl-lab dream @best --horizon 90 --sequences 6 --output dream.mp4
  rl-lab dream @last --context 200                                    let it watch 200 rows before it dreams
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.parsing import POLICY, RUN, argument, chosen, positive, quiet
from rl_lab.cli.printing import format_value
from rl_lab.cli.progress import progress_line

ARGUMENTS = (
    *RUN,
    argument("--horizon", type=positive, default=45, metavar="N", help="rows dreamt (default: %(default)s)"),
    argument("--context", type=positive, default=5, metavar="N", help="rows looked at before (default: %(default)s)"),
    argument("--sequences", type=positive, default=4, metavar="N", help="episodes side by side (default: %(default)s)"),
    argument("--output", type=Path, metavar="FILE", help="an mp4 (default: the run's videos/dream.mp4)"),
    *POLICY,
    quiet(),
)


def run(arguments: argparse.Namespace) -> int:
    from rl_lab import api

    options = chosen(arguments, "horizon", "context", "sequences", "output", "checkpoint", "seed", "runs_dir", "trust")
    with progress_line("playing", "rows", quiet=arguments.quiet, then="writing the film") as progress:
        written = api.dream(arguments.run, **options, progress=progress)
    if not arguments.quiet:
        print(f"video: {format_value(written.video)}\ncurves: {format_value(written.curves)}")
    return 0
