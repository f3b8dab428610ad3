"""Every curriculum and experiment that a page shows in full is composed and run for a few cycles."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from docs_pages import ROOT, blocks

import rl_lab
from rl_lab.types import Phase

PHASES_PAGE = ROOT / "docs" / "phases.md"
EXPERIMENTS = {
    match[1]: block
    for page in (PHASES_PAGE, ROOT / "docs" / "configs.md", ROOT / "docs" / "exploration.md")
    for block in blocks(page, "yaml")
    if (match := re.search(r"^# configs/experiment/(\w+)\.yaml$", block, re.MULTILINE))
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_on_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "configs" / "experiment"
    folder.mkdir(parents=True)
    (folder / f"{name}.yaml").write_text(EXPERIMENTS[name])
    monkeypatch.chdir(tmp_path)
    # Small, but not watched: the debug preset's look at every operation of a GRU takes half a minute.
    run = rl_lab.train(name, preset="debug", quiet=True, **{"debug.check_finite": False, "runtime.fast_paths": "on"})
    assert run.status["state"] == "finished"
    assert run.config["experiment"]["name"] == name


def test_the_pages_show_what_they_promise() -> None:
    assert {
        "floor_then_learn",
        "freeze_and_finetune",
        "train_then_examine",
        "my_experiment",
        "easy_then_real",
        "explore_then_learn",
    } <= EXPERIMENTS.keys()


def test_the_phases_page_lists_every_key_with_its_default() -> None:
    table = PHASES_PAGE.read_text().partition("## Every key")[2].partition("Exactly one duration")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) \|", table, re.MULTILINE))
    known = [field.name for field in fields(Phase) if field.name != "progress"]
    assert list(rows) == known
    defaults = Phase("any")
    spelled = {None: "`null`", "online": "`online`", "rollout": "`rollout`", 0: "0", (): "`[]`"}
    spelled |= {("update_controller",): "`[update_controller]`"}
    assert (rows["set"], rows["options"]) == ("`{}`", "`{}`") and defaults.set == defaults.options == {}
    for key in known[1:-1]:
        if key == "set":
            continue
        assert rows[key] == spelled[getattr(defaults, key)], key
