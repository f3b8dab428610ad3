"""The door for those who prefer a file: `python scripts/train.py +experiment=ppo_cartpole seed=1`."""

from __future__ import annotations

import sys

from rl_lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
