"""Stand-ins for the layers below the command line, so that each test sees exactly what a command passes on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cli_fakes import Answer

from rl_lab.cli.main import main


@pytest.fixture
def rl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """`rl("train", "seed=1")` runs one command line in this process."""
    monkeypatch.delenv("RL_LAB_DEBUG", raising=False)

    def run(*words: str | Path) -> Answer:
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """`fake("api", train=Calls(...))` replaces rl_lab.api for the test."""

    def replace(name: str, **attributes: Any) -> SimpleNamespace:
        module = ModuleType(f"rl_lab.{name}")
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, f"rl_lab.{name}", module)
        package, _, last = f"rl_lab.{name}".rpartition(".")
        monkeypatch.setattr(importlib.import_module(package), last, module, raising=False)
        return SimpleNamespace(**attributes)

    return replace
