"""The door for those who prefer a file: `python scripts/sweep.py my_sweep.yaml --jobs 2`."""

from __future__ import annotations

import sys

from rl_lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["sweep", *sys.argv[1:]]))
