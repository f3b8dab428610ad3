"""`rl-lab wandb setup` makes one workspace per project, however often it is called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb_stand_in import KEY, Wandb

from rl_lab.cli.main import main
from rl_lab.experiment import wandb_workspace
from rl_lab.experiment.wandb_workspace import FILMS, SECTIONS, set_up_workspace
from rl_lab.metrics.names import meaning_of
from rl_lab.types import MissingExtraError, RunError

pytest.importorskip("wandb_workspaces")


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Wandb]:
    """A server, and a user who is logged in there."""
    server = Wandb()
    for name in ("WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_ENTITY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path))
    yield server
    server.close()


def spec(server: Wandb, place: str) -> dict[str, Any]:
    (view,) = server.views[place].values()
    found: dict[str, Any] = json.loads(view["spec"])["section"]
    return found


def test_a_workspace_is_made_once_and_found_again(account: Wandb, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wandb", "setup", "--project", "cartpole"]) == 0
    url = f"{account.url}/ada/cartpole?nw=rllab"
    assert capsys.readouterr().out == f"ada/cartpole: the workspace is made\n{url}\n"
    section = spec(account, "ada/cartpole")
    assert section["settings"]["xAxis"] == "agent_steps"
    shown = {each["name"]: each["panels"] for each in section["panelBankConfig"]["sections"]}
    assert list(shown) == ["returns", "episodes", *list(SECTIONS)[1:]]
    first = shown["returns"][0]["config"]
    assert (first["metrics"], first["xAxis"]) == (["eval/episode_return_mean"], "agent_steps")
    assert [each["config"]["mediaKeys"] for each in shown["episodes"]] == [[name] for name in FILMS]
    assert main(["wandb", "setup", "--project", "cartpole", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"entity": "ada", "project": "cartpole", "url": url, "done": "there"}
    assert account.writes == ["nw-rllab-v"], "the second call wrote nothing"


def test_panels_that_were_changed_stay_until_they_are_replaced(account: Wandb) -> None:
    assert set_up_workspace("cartpole", entity="team").done == "made"
    (view,) = account.views["team/cartpole"].values()
    changed = json.loads(view["spec"])
    del changed["section"]["panelBankConfig"]["sections"][0]["panels"][0]
    changed["section"]["runSets"][0]["search"]["query"] = "seed"
    view["spec"] = json.dumps(changed)
    with pytest.raises(RunError, match="has other panels than this version sets up, and was left alone.* --replace"):
        set_up_workspace("cartpole", entity="team")
    assert len(account.writes) == 1
    assert set_up_workspace("cartpole", entity="team", replace=True).done == "replaced"
    section = spec(account, "team/cartpole")
    assert len(section["panelBankConfig"]["sections"][0]["panels"]) == len(SECTIONS["returns"])
    assert section["runSets"][0]["search"]["query"] == "seed", "what is no panel stays"
    assert set_up_workspace("cartpole", entity="team").done == "there"


def test_every_panel_shows_a_metric_of_the_table() -> None:
    names = [
        name
        for panels in SECTIONS.values()
        for panel in panels
        for name in ([panel] if panel.__class__ is str else panel)
    ]
    assert [name for name in names if meaning_of(name) is None] == [] and len(names) == len({*names})


def test_what_is_missing_is_said_before_anything_is_asked(
    account: Wandb, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(RunError, match="W&B has no API key here: run `wandb login`"):
        set_up_workspace()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main(["wandb", "setup"]) == 1
    assert "WANDB_MODE is 'offline', and a workspace lies on W&B's server" in capsys.readouterr().err
    monkeypatch.setattr(wandb_workspace, "find_spec", lambda name: None if name == "wandb_workspaces" else name)
    with pytest.raises(
        MissingExtraError, match=r"'wandb_workspaces', which is not installed: run `pip install 'rl-lab\[wandb\]'`"
    ):
        set_up_workspace()
    assert account.views == {}


def test_a_refused_key_and_a_missing_connection_end_in_a_sentence(
    account: Wandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    with pytest.raises(RunError, match="W&B did not set up the workspace: .*wandb login --verify"):
        set_up_workspace()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(wandb_workspace, "TIMEOUT_S", 1)
    with pytest.raises(RunError, match="W&B did not set up the workspace"):
        set_up_workspace()
