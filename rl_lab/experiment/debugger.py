"""Under a debugger: one environment in this process, so that breakpoints stop where one looks."""

from __future__ import annotations

import bdb
import copy
import logging
import sys
from collections.abc import Sequence
from typing import Any

DEBUGGERS = ("pydevd", "_pydevd", "debugpy")  # the packages whose trace functions are a debugger's
SIMPLER = {"environment.num_envs": 1, "environment.vectorization": "sync", "evaluation.num_envs": 1}


def is_debugged() -> bool:
    """Whether a debugger follows this thread; a profiler or a coverage tool, which traces too, is none."""
    trace = sys.gettrace()
    if isinstance(getattr(trace, "__self__", None), bdb.Bdb):
        return True
    if str(getattr(trace, "__module__", "") or type(trace).__module__).startswith(DEBUGGERS):
        return True
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12 debuggers may use this instead
    return monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None


def simplified_if_debugged(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The config with one environment and no subprocesses under a debugger, said in one line; settings that the user
    named stay."""
    if not is_debugged():
        return config
    named = {word.lstrip("+").partition("=")[0] for word in overrides}
    simpler = {key: value for key, value in SIMPLER.items() if key not in named}
    result = copy.deepcopy(config)
    for key, value in simpler.items():
        block, _, name = key.partition(".")
        result[block][name] = value
    words = " ".join(f"{key}={value}" for key, value in simpler.items())
    if words:
        logging.getLogger("rl_lab").warning(
            f"A debugger is attached, so this run uses {words}; name them to keep yours."
        )
    return result
