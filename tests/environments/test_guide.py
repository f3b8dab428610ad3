"""The code of docs/add_an_environment.md runs as written."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import yaml

from rl_lab.environments import make_environment
from rl_lab.environments.checker import check_environment
from rl_lab.environments.wrappers import WRAPPERS

GUIDE = Path(__file__).parents[2] / "docs" / "add_an_environment.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


def test_the_guides_package_passes_the_checker_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment_code, wrapper_code = blocks("python")
    sys.modules.pop("my_package", None)  # another guide's package of the same name
    (tmp_path / "my_package.py").write_text(environment_code + "\n\n" + wrapper_code)
    monkeypatch.syspath_prepend(tmp_path)
    (settings,) = (yaml.safe_load(block)["environment"] for block in blocks("yaml"))
    settings["wrappers"].append({"id": "halve_reward"})
    environment = make_environment(**settings)
    environment.reset()
    rows = environment.step(np.zeros(8, np.int64))
    assert set(rows.reward.tolist()) <= {0.0, 0.5} and environment.spec.action.labels == ("minus", "plus")
    assert check_environment(lambda: gym.make("MyEnv-v0")) == []
    del sys.modules["my_package"], WRAPPERS["halve_reward"], gym.registry["MyEnv-v0"]


def test_the_guide_names_every_wrapper() -> None:
    table = GUIDE.read_text()
    shipped = [name for name in WRAPPERS if not name.startswith("test_")]  # other tests of this process have their own
    assert [name for name in shipped if f"`{name}`" not in table] == []
