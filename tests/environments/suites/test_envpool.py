"""EnvPool itself, where it is installed (`make test-apart`); what needs no EnvPool is in test_recorded_apis.py."""

from __future__ import annotations

from typing import Any

import pytest

from rl_lab.environments import make_environment
from rl_lab.types import ConfigError
from rl_lab.utils import tree

from ..helpers import as_tree, play
from ..test_snapshot import continues_identically
from .test_every_suite import check_rows

pytest.importorskip("envpool")
IDS = ("Pong-v5", "CartPole-v1", "CarRacing-v3", "MiniGrid-Empty-5x5-v0", "WalkerWalk-v1", "CoinrunHard-v0")


def make(env_id: str, **settings: Any) -> Any:
    settings = {"id": env_id, "num_envs": 3, "vectorization": "envpool", **settings}
    try:
        return make_environment(**settings)
    except ConfigError as error:
        if "requires the system Qt" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("env_id", IDS)
def test_rows_are_as_promised_and_follow_from_the_seed(env_id: str) -> None:
    first, second, other = make(env_id, seed=1), make(env_id, seed=1), make(env_id, seed=2)
    rows = play(first, steps=200, seed=0)
    check_rows(rows, first.spec, 3)
    assert tree.equal(as_tree(rows), as_tree(play(second, steps=200, seed=0)))
    assert not tree.equal(as_tree(rows), as_tree(play(other, steps=200, seed=0))) or env_id.startswith("MiniGrid")
    assert [*first.drain_events(), *second.drain_events()] == []


@pytest.mark.parametrize("env_id", IDS)
def test_a_checkpoint_continues_bit_for_bit(env_id: str) -> None:
    continues_identically(make(env_id), make(env_id), cut=40, steps=80)


def test_frames_of_games_are_counted() -> None:
    assert make("Pong-v5").spec.frames_per_step == 4
    assert make("Pong-v5", kwargs={"frame_skip": 2}).spec.frames_per_step == 2
    assert make("Ant-v4").spec.frames_per_step == 1


def test_what_it_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="'Pong-v6' is none of EnvPool's .* Did you mean 'Pong-v5'"):
        make("Pong-v6")
    with pytest.raises(ConfigError, match="EnvPool cannot make 'Pong-v5': .*no_such_setting"):
        make("Pong-v5", kwargs={"no_such_setting": 1})
