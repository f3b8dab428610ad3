"""Runs go to a stand-in of the Hugging Face Hub and come back as policies; what goes is what a dry run says."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from hub_stand_in import TOKEN, Hub

import rl_lab
from rl_lab.cli.main import main
from rl_lab.runs import hub as hub_module
from rl_lab.runs.hub import is_hub_name
from rl_lab.types import ConfigError, MissingExtraError, RunError

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    stand_in = Hub()
    monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield stand_in
    stand_in.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rl_lab.Run:
    runs = tmp_path_factory.mktemp("publish") / "runs"
    overrides = ["preset=debug", "evaluation.num_envs=2", "evaluation.final_episodes=2", "logging.tensorboard=false"]
    return rl_lab.train("ppo_cartpole", overrides=[*overrides, "evaluation.video=true"], runs_dir=runs, quiet=True)


def test_what_is_published_is_what_the_dry_run_says_and_comes_back_as_the_same_policy(
    run: rl_lab.Run, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["publish", str(run.path), "--repo", "ada/cart", "--private"]
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert hub.asked == [] and "Nothing was uploaded (--dry-run)." in said
    planned = rl_lab.publish(run, repo="ada/cart", dry_run=True)
    assert all(f"{size / 1000:,.1f} kB  {name}\n" in said for name, size in planned.files.items())

    assert main(words) == 0
    assert f"published: {hub.url}/ada/cart" in capsys.readouterr().out
    there = {name: len(data) for name, data in hub.repos["ada/cart"].items() if name != ".gitattributes"}
    varying = [name for name in planned.files if name.endswith("manifest.json") and "/" in name]  # holds the time
    assert {n: s for n, s in there.items() if n not in varying} == {
        n: s for n, s in planned.files.items() if n not in varying
    }
    assert hub.private == {"ada/cart": True}
    assert {"README.md", "config.yaml", "learning_curve.png", "metrics.jsonl", "replay.mp4"} <= there.keys()

    policy, original = rl_lab.load("ada/cart"), rl_lab.load(run)
    for seed in range(5):
        observation = np.random.default_rng(seed).normal(size=4).astype(np.float32)
        assert policy.act(observation) == original.act(observation)
    assert rl_lab.load(f"ada/cart@{hub.sha('ada/cart')}").act(observation) == original.act(observation)


def test_a_published_policy_is_evaluated_and_played_by_its_name(
    run: rl_lab.Run, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rl_lab.publish(run, repo="ada/cart")
    assert main(["evaluate", "ada/cart", "--episodes", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"] == "ada/cart" and found["scores"] == rl_lab.evaluate(run, episodes=2)
    assert main(["play", "ada/cart", "--episodes", "1", "--output", "film.mp4", "-q"]) == 0
    assert (tmp_path / "film.mp4").stat().st_size > 1000


def test_nothing_but_the_policy_leaves_the_machine(run: rl_lab.Run, hub: Hub) -> None:
    rl_lab.publish(run, repo="ada/cart")
    files = hub.repos["ada/cart"]
    sections = {Path(name).name for name in files if name.endswith(".pt")}
    assert sections == {"components.pt", "controllers.pt"}
    assert not {"hostname", "command_line", "platform", "lineage"} & json.loads(files["manifest.json"]).keys()
    assert not {"host", "pid", "message"} & json.loads(files["status.json"]).keys()
    assert str(run.path.parent).encode() not in b"".join(
        data for name, data in files.items() if name.endswith(("md", "json"))
    )


def test_the_card_has_what_the_hub_and_a_reader_want(run: rl_lab.Run) -> None:
    card = rl_lab.publish(run, repo="ada/cart", dry_run=True, license="apache-2.0").card
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["license"] == "apache-2.0" and head["library_name"] == "rl-lab"
    result = head["model-index"][0]["results"][0]
    assert result["dataset"]["name"] == "CartPole-v1"
    assert result["metrics"][0]["value"] == pytest.approx(run.status["final_score"], abs=1e-4)
    for part in (
        "learning_curve.png",
        "replay.mp4",
        "rl-lab evaluate ada/cart",
        'rl_lab.load("ada/cart")',
        "discount:",
    ):
        assert part in card


def test_a_second_upload_replaces_the_first_ones_weights(run: rl_lab.Run, hub: Hub) -> None:
    rl_lab.publish(run, repo="ada/cart")
    hub.repos["ada/cart"]["checkpoints/step_000000000001/components.pt"] = b"old"
    rl_lab.publish(run, repo="ada/cart")
    assert "checkpoints/step_000000000001/components.pt" not in hub.repos["ada/cart"]


def test_a_published_config_needs_the_consent_that_any_strangers_run_needs(run: rl_lab.Run, hub: Hub) -> None:
    rl_lab.publish(run, repo="ada/cart")
    files = hub.repos["ada/cart"]
    files["config.yaml"] = files["config.yaml"].replace(b"plugins: []", b"plugins: [strangers_code]")
    with pytest.raises(
        ConfigError, match="names the package 'strangers_code' in plugins.*trust=\\['strangers_code'\\]"
    ):
        rl_lab.load("ada/cart")


def test_code_in_published_weights_is_refused(run: rl_lab.Run, hub: Hub) -> None:
    rl_lab.publish(run, repo="ada/cart")
    name = next(name for name in hub.repos["ada/cart"] if name.endswith("controllers.pt"))
    hub.repos["ada/cart"][name] = b"cos\nsystem\n(S'echo owned'\ntR."
    with pytest.raises(RunError, match="damaged"):
        rl_lab.load("ada/cart")


def test_without_a_connection_the_last_copy_is_used_and_otherwise_a_sentence_says_so(
    run: rl_lab.Run, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rl_lab.publish(run, repo="ada/cart")
    rl_lab.load("ada/cart")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, "rl_lab"):
        rl_lab.load("ada/cart")
    assert "The Hub cannot be reached: ada/cart as it was at" in caplog.text
    with pytest.raises(
        RunError, match=r"The Hub cannot be reached for ada/other: .*refused.*Try again with a connection"
    ):
        rl_lab.load("ada/other")
    with pytest.raises(RunError, match="The Hub cannot be reached for ada/cart"):
        rl_lab.publish(run, repo="ada/cart")


def test_what_the_hub_refuses_is_a_sentence(run: rl_lab.Run, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="There is no folder 'ada/nobody' here, and no such model"):
        rl_lab.load("ada/nobody")
    with pytest.raises(RunError, match=r"The Hub failed at ada/broken \(HTTP status 501\)\. Try again later"):
        rl_lab.load("ada/broken")
    hub.repos["ada/text"] = {"README.md": b"hello"}
    with pytest.raises(RunError, match=r"ada/text is on the Hub, but it is no run of RL Lab: it has no config\.yaml"):
        rl_lab.load("ada/text")
    with pytest.raises(ConfigError, match="--repo is 'cart': write USER/MODEL"):
        rl_lab.publish(run, repo="cart")
    with pytest.raises(ConfigError, match="'ada/a--b' is no name on the Hub"):
        rl_lab.publish(run, repo="ada/a--b")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(RunError, match="The Hub refuses ada/cart: .*`hf auth login`, or set HF_TOKEN"):
        rl_lab.publish(run, repo="ada/cart")


def test_a_missing_library_is_named_with_its_extra(run: rl_lab.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rl-lab\[hub\]'"):
        rl_lab.publish(run, repo="ada/cart")


def test_paths_are_never_taken_for_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert is_hub_name("ada/cart") and is_hub_name("ada/cart@main")
    assert not any(
        is_hub_name(text) for text in ("runs/gone", "ada/cart/more", "/ada/cart", "../cart", "cart", "@best")
    )
