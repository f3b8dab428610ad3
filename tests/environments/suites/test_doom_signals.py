"""VizDoom's engine is a process of its own: Ctrl-C reaches it too, and must not end it before the run is saved."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("vizdoom")

PROGRAM = """
import os, signal, time
from rl_lab.environments.suites.doom import Doom

heard = []
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: heard.append(number))
env = Doom("basic")
env.reset(seed=1)
for number in (signal.SIGINT, signal.SIGHUP):
    os.killpg(0, number)
time.sleep(0.2)
env.step(1)
env.close()
print(*map(int, heard))
"""


def test_the_engine_goes_on_after_ctrl_c_and_a_closed_terminal() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["2", "1"], done.stderr
