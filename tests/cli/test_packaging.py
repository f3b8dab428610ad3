"""What a fresh machine relies on: pins for everything, data in the package, a Makefile that repeats nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import rl_lab
from rl_lab.cli.main import main

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ORDERED = ("train", "test", "check", "format", "bench", "clean")


def normal(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement.strip(), maxsplit=1)[0].lower().replace("_", "-")


def test_every_direct_dependency_is_pinned() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    extras = PROJECT["project"]["optional-dependencies"].values()
    direct = {normal(each) for group in [PROJECT["project"]["dependencies"], *extras] for each in group}
    direct -= {"rl-lab", "triton"}  # a GPU build of torch names the triton it needs: a pin here could contradict it
    assert direct <= {normal(line) for line in lines}
    assert {"torch==2.13.0", "mujoco==3.17.0"} <= set(lines)


def test_versions_agree() -> None:
    assert PROJECT["project"]["version"] == rl_lab.__version__
    assert f"## {rl_lab.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_command_exists() -> None:
    module, _, function = PROJECT["project"]["scripts"]["rl-lab"].partition(":")
    assert (module, function) == (main.__module__, main.__name__)


def test_configs_travel_in_the_wheel() -> None:
    build = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build == {"packages": ["rl_lab"]}  # takes every file that is not ignored
    ignored = (ROOT / ".gitignore").read_text()
    assert ".yaml" not in ignored and "configs" not in ignored and list((ROOT / "rl_lab" / "configs").rglob("*.yaml"))


def test_the_output_folder_is_ignored_and_the_code_of_the_same_name_is_not() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "/runs/" in ignored and "/.venv/" in ignored and "runs/" not in ignored and "runs" not in ignored


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_makefile_has_the_documented_targets_and_parses() -> None:
    answer = subprocess.run(["make", "-n", *ORDERED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "rl-lab train" in answer.stdout and '"not slow and not gpu"' in answer.stdout
    assert "PYTHONDONTWRITEBYTECODE" not in (ROOT / "Makefile").read_text()


def test_ci_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script and "make test" in script
