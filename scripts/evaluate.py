"""The door for those who prefer a file: `python scripts/evaluate.py @last --episodes 100`."""

from __future__ import annotations

import sys

from rl_lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
