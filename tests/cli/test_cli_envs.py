"""`envs`, `envs show` and `envs check`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_fakes import Calls
from PIL import Image

from rl_lab.environments.catalog import Missing
from rl_lab.types import ActionSpec, ArraySpec, ConfigError, EnvSpec


@dataclass(frozen=True)
class Info:
    """Stands for the catalog's line."""

    id: str
    suite: str = "classic"
    is_installed: bool = True
    install: str = ""
    max_episode_steps: int | None = 500
    solved_return: float | None = 475.0
    has_native_vector: bool = True


@dataclass(frozen=True)
class Problem:
    """Stands for the checker's finding."""

    level: str
    what: str = "reward is nan"
    cure: str = "Find the division by zero."


@dataclass(frozen=True)
class Details:
    """Stands for what the catalog saw."""

    spec: EnvSpec
    vectorization: str = "native"
    snapshot: str = "its attributes, which are plain data"
    reward_range: tuple[float, float] | None = (0.0, 1.0)
    frame: np.ndarray | None = None
    why_no_frame: str = "Rendering failed."


CARTPOLE = EnvSpec(
    id="CartPole-v1",
    observation={"vector": ArraySpec((4,), "float32", low=(-4.8, -1.0, -0.4, -1.0), high=(4.8, 1.0, 0.4, 1.0))},
    action=ActionSpec("discrete", (2,), labels=("left", "right")),
    max_episode_steps=500,
    solved_return=475.0,
    description="Balance a pole.",
)


def test_search_as_table_ids_and_json(rl: Any, fake: Any) -> None:
    api = fake(
        "api",
        list_environments=Calls([Info("CartPole-v1"), Info("Taxi-v4", install="pip install x")]),
        missing_suites=Calls([Missing("atari", "pip install 'rl-lab[atari]'", "ALE/...")]),
    )
    lines = rl("envs", "c").out.splitlines()
    assert " ".join(lines[0].split()) == "ENVIRONMENT SUITE TIME LIMIT SOLVED AT NATIVE VECTOR INSTALL"
    assert lines[1].split() == ["CartPole-v1", "classic", "500", "475.0", "yes"]
    assert lines[2].endswith("pip install x")
    assert lines[3:] == ["", "not installed: atari (ALE/...): pip install 'rl-lab[atari]'"]
    assert rl("envs", "-q").out == "CartPole-v1\nTaxi-v4\n"
    assert [row["id"] for row in json.loads(rl("envs", "--json", "--all-versions").out)] == ["CartPole-v1", "Taxi-v4"]
    assert api.list_environments.seen == [
        *((("c",), {"all_versions": False}), (("",), {"all_versions": False}), (("",), {"all_versions": True}))
    ]


def test_search_without_result_says_how_to_name_ones_own(rl: Any, fake: Any) -> None:
    fake("api", list_environments=Calls([]), missing_suites=Calls([]))
    assert "No environment matches 'zelda'" in rl("envs", "zelda").out


def test_show_describes_observation_actions_and_limits(rl: Any, fake: Any) -> None:
    fake("api", look_at_environment=Calls(Details(CARTPOLE)))
    out = rl("envs", "show", "CartPole-v1").out
    for expected in (
        "Balance a pole.",
        "float32, 4, -4.8 to 4.8",
        "discrete, 2 choices: left, right",
        "500 agent steps",
        "475",
        "reward                 0 to 1",
        "vectorization          native",
        "exact resume           its attributes",
        "frame                  none. Rendering failed.",
    ):
        assert expected in out
    assert out.endswith("train on it: rl-lab train CartPole-v1:ppo\n")


@pytest.mark.parametrize(
    ("observation", "action", "expected"),
    [
        (ArraySpec((84, 84, 3), "uint8"), ActionSpec("continuous", (6,), (-1.0,), (1.0,)), "84 x 84 x 3 (image)"),
        (
            ArraySpec((84, 84, 3), "uint8"),
            ActionSpec("continuous", (6,), (-1.0,), (1.0,)),
            "continuous, size 6, -1 to 1",
        ),
        (ArraySpec((), "int64", num_values=(16,)), ActionSpec("multi_discrete", (3, 4)), "one number, 16 values each"),
        (
            ArraySpec((), "int64", num_values=(16,)),
            ActionSpec("multi_discrete", (3, 4)),
            "multi discrete, 3 x 4 choices",
        ),
    ],
)
def test_show_knows_every_kind(rl: Any, fake: Any, observation: ArraySpec, action: ActionSpec, expected: str) -> None:
    fake("api", look_at_environment=Calls(Details(EnvSpec("x", {"seen": observation}, action))))
    out = rl("envs", "show", "x").out
    assert expected in out and "none" in out


def test_show_writes_a_frame_and_says_where(rl: Any, fake: Any, tmp_path: Path) -> None:
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    fake("api", look_at_environment=Calls(Details(replace(CARTPOLE, id="dmc/walker_walk"), frame=image)))
    out = rl("envs", "show", "dmc/walker_walk", "--runs-dir", tmp_path).out
    path = tmp_path / "environments" / "dmc_walker_walk.png"
    assert str(path) in out
    np.testing.assert_array_equal(np.asarray(Image.open(path)), image)
    facts = json.loads(rl("envs", "show", "dmc/walker_walk", "--frame", tmp_path / "x.png", "--json").out)
    assert facts["frame"] == str(tmp_path / "x.png") and facts["snapshot"].startswith("its attributes")


def test_show_refuses_a_frame_that_is_no_picture_before_it_builds_anything(rl: Any, fake: Any) -> None:
    api = fake("api", look_at_environment=Calls(Details(CARTPOLE)))
    answer = rl("envs", "show", "CartPole-v1", "--frame", "pole.xyz")
    assert answer.code == 2 and "error: --frame pole.xyz ends in '.xyz': write .png or .jpg" in answer.err
    assert api.look_at_environment.seen == []


def test_show_json(rl: Any, fake: Any) -> None:
    fake("api", look_at_environment=Calls(Details(CARTPOLE)))
    facts = json.loads(rl("envs", "show", "CartPole-v1", "--json").out)
    assert facts["observation"]["vector"]["shape"] == [4] and facts["action"]["labels"] == ["left", "right"]


def test_check_praises_and_warns(rl: Any, fake: Any) -> None:
    api = fake("api", check_environment=Calls([Problem("warning")]))
    answer = rl("envs", "check", "my:Env-v0")
    assert answer.code == 0
    assert "warning  reward is nan\n         -> Find the division by zero." in answer.out
    assert "ok: my:Env-v0 keeps the contract" in answer.out
    assert api.check_environment.seen == [(("my:Env-v0",), {})]


def test_check_fails_on_an_error(rl: Any, fake: Any) -> None:
    fake("api", check_environment=Calls([Problem("error")]))
    answer = rl("envs", "check", "my:Env-v0")
    assert answer.code == 1 and "error    reward is nan" in answer.out and "ok:" not in answer.out
    facts = json.loads(rl("envs", "check", "my:Env-v0", "--json").out)
    assert facts["ok"] is False and facts["findings"][0]["level"] == "error"


def test_an_unknown_id_is_the_layers_own_message(rl: Any, fake: Any) -> None:
    fake("api", look_at_environment=Calls(ConfigError("no 'CartPol-v1'. Did you mean 'CartPole-v1'?")))
    answer = rl("envs", "show", "CartPol-v1")
    assert answer.code == 2 and "Did you mean 'CartPole-v1'?" in answer.err


@pytest.mark.parametrize("words", [["show"], ["check", "a", "b"]])
def test_an_action_takes_one_id(rl: Any, words: list[str]) -> None:
    answer = rl("envs", *words)
    assert answer.code == 2 and f"`envs {words[0]}` takes one environment id" in answer.err


def test_two_filters_are_refused(rl: Any) -> None:
    answer = rl("envs", "cart", "pole")
    assert answer.code == 2 and "`envs` takes one FILTER" in answer.err
