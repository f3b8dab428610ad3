"""What the workers of test_pool.py do: a task names the answer it wants."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def work(task: dict[str, Any], report: Callable[[Any], Any]) -> Any:
    kind = task["kind"]
    if kind == "facts":
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        print("a library prints")
        return {
            "pid": os.getpid(),
            "threads": os.environ["OMP_NUM_THREADS"],
            "cores": cores,
            "torch": "torch" in sys.modules,
        }
    if kind == "ask":
        return [report(value) for value in (1, 2)]
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "save":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
        Path(task["mark"]).touch()
        try:
            time.sleep(60)
        except SystemExit:
            return "saved"
    if kind == "sleep":
        Path(task["mark"]).write_text(str(os.getpid()))
        time.sleep(60)
    return None
