"""Running returns of N environments."""

from __future__ import annotations

import numpy as np
import pytest

from rl_lab.collection.episodes import EpisodeTracker, outcome_metrics
from rl_lab.types import EnvRows, Episode
from rl_lab.utils.tree import equal, numpy_to_tensors
from tests.doubles import env_rows


def test_a_return_adds_the_rewards_after_the_first_row() -> None:
    tracker = EpisodeTracker(2)
    assert tracker.track(env_rows([0, 0], reward=[1.0, 10.0])) == []
    finished = tracker.track(env_rows([0, 0], reward=[2.0, 20.0], last=[1, 0], terminal=[1, 0]))
    assert finished == [Episode(env_index=0, episode_return=3.0, length=2, is_terminal=True)]
    # Environment 0 begins anew: that row is no agent step. Environment 1 goes on.
    assert tracker.track(env_rows([0, 0], reward=[0.0, 30.0], first=[1, 0])) == []
    finished = tracker.track(env_rows([0, 0], reward=[5.0, 40.0], last=1, terminal=[1, 0]))
    assert finished == [Episode(0, 5.0, 1, True), Episode(1, 100.0, 4, False)]


def test_statistics_are_of_the_latest_episodes_only() -> None:
    tracker = EpisodeTracker(1, window=2)
    assert tracker.metrics() == {}
    for reward in (100.0, 1.0, 3.0):
        tracker.track(env_rows([0], reward=reward, last=1))
        tracker.track(env_rows([0], first=1))
    assert len(tracker.get_state()["recent"]) == 2
    assert tracker.metrics() == {
        "collect/episode_return_mean": 2.0,
        "collect/episode_return_min": 1.0,
        "collect/episode_return_max": 3.0,
        "collect/episode_length_mean": 1.0,
    }


@pytest.mark.parametrize("as_saved", [lambda state: state, numpy_to_tensors])
def test_the_state_continues_in_mid_episode(as_saved: object) -> None:
    tracker, fresh = EpisodeTracker(2), EpisodeTracker(2)
    tracker.track(env_rows([0, 0], reward=[1.0, 2.0], last=[1, 0]))
    fresh.set_state(as_saved(tracker.get_state()))  # type: ignore[operator]
    row = env_rows([0, 0], reward=[0.0, 4.0], first=[1, 0], last=[0, 1])
    assert fresh.track(row) == tracker.track(row) == [Episode(1, 6.0, 2, False)]
    assert equal(fresh.get_state(), tracker.get_state())
    assert fresh.metrics() == tracker.metrics()


def rows_with(outcome: dict[str, list[float]], *, is_last: list[bool]) -> EnvRows:
    zeros, flags = np.zeros(2, np.float32), np.array(is_last)
    arrays = {name: np.array(values, np.float32) for name, values in outcome.items()}
    return EnvRows({}, zeros, np.zeros(2, bool), flags, flags, arrays)


def test_outcomes_are_averaged_over_the_episodes_that_have_them() -> None:
    tracker = EpisodeTracker(2)
    (first, second) = tracker.track(rows_with({"success": [1.0, 0.0], "score": [np.nan, 7.0]}, is_last=[True, True]))
    assert first.outcome["success"] == 1.0 and second.outcome == {"success": 0.0, "score": 7.0}
    tracker.track(rows_with({"success": [1.0, 1.0], "score": [np.nan, np.nan]}, is_last=[True, False]))
    metrics = tracker.metrics()
    assert metrics["collect/outcome/success"] == pytest.approx(2 / 3) and metrics["collect/outcome/score"] == 7.0
    again = EpisodeTracker(2)
    again.set_state(tracker.get_state())
    assert again.metrics() == metrics


def test_the_score_of_achievements_is_crafters() -> None:
    outcomes = [{"achievement/wood": 1.0, "achievement/iron": 0.0}, {"achievement/wood": 1.0, "achievement/iron": 1.0}]
    expected = np.exp((np.log(1 + 100) + np.log(1 + 50)) / 2) - 1  # rates of 100 % and 50 %
    assert outcome_metrics(outcomes, prefix="eval")["eval/achievement_score"] == pytest.approx(expected)
