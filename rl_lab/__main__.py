"""`python -m rl_lab` equals `rl-lab`."""

from __future__ import annotations

import sys

from rl_lab.cli.main import main

if __name__ == "__main__":
    sys.argv[0] = "rl-lab"  # the name under which a run's manifest records its command
    sys.exit(main())
