"""docs/add_a_component.md is run as written; docs/shapes.md names only parts that exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

from rl_lab.components.heads import actor_critic as controllers
from rl_lab.components.heads import distributions
from rl_lab.components.networks import cnn, encoders, memory, normalizers
from rl_lab.components.returns import returns as return_computers
from rl_lab.config.construct import construct, import_plugins
from rl_lab.types import ArraySpec

DOCS = Path(__file__).parents[2] / "docs"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", (DOCS / "add_a_component.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_guides_component_is_found_and_encodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package.py").write_text(block("python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = yaml.safe_load(block("yaml"))
    import_plugins(config["plugins"])
    encoder = construct(
        config["components"]["encoder"],
        place="components.encoder",
        injected={"observation": {"vector": ArraySpec((3,), "float32")}},
        plugins=config["plugins"],
    )
    assert encoder({"vector": torch.randn(2, 5, 3)}).shape == (2, 5, encoder.output_size)
    monkeypatch.delitem(sys.modules, "my_package")


def test_every_part_of_the_shapes_page_exists() -> None:
    modules = (cnn, controllers, distributions, encoders, memory, normalizers, return_computers)
    known = {name for module in modules for name in vars(module)}
    table = (DOCS / "shapes.md").read_text().split("## Parts")[1].split("\n## ")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name.split(".")[0] for cell in first_cells for name in re.findall(r"`([\w.]+)`", cell)]
    assert len(names) > 10
    assert set(names) <= known
