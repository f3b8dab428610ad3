"""A wrapper that breaks its process when a file asks it to; a module of its own, since workers import it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym

from rl_lab.environments import register_wrapper

KEPT: list[bytearray] = []
LEAK_MIB = 200


def exit_here() -> None:
    os._exit(3)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(10_000)


def leak() -> None:
    KEPT.append(bytearray(os.urandom(2**20)) * LEAK_MIB)


FAULTS = {"exit": exit_here, "kill": kill, "hang": hang, "leak": leak}


@register_wrapper("test_faults_in_turn")
class FaultsInTurn(gym.Wrapper):
    """Does once what each file in `folder` is named."""

    def __init__(self, env: gym.Env, *, folder: str) -> None:
        super().__init__(env)
        self.folder = folder

    def step(self, action: Any) -> Any:
        for asked in list(Path(self.folder).iterdir()):
            asked.unlink()
            FAULTS[asked.name]()
        return self.env.step(action)
