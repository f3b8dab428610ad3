"""The door for those who prefer a file: `python scripts/analyze.py RUN_A RUN_B --metrics eval/return`."""

from __future__ import annotations

import sys

from rl_lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
