"""n-step transitions, by hand: whole windows, terminations and time limits inside them."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.returns.transitions import n_step_transitions, rows_at
from rl_lab.types import Batch


def rows(*, last: list[int], terminal: list[int]) -> Batch:
    """One sequence of four rows with rewards 1, 2, 4 after the first."""
    return {
        "reward": torch.tensor([[9.0, 1.0, 2.0, 4.0]]),
        "is_last": torch.tensor([last]).bool(),
        "is_terminal": torch.tensor([terminal]).bool(),
    }


@pytest.mark.parametrize(
    ("last", "terminal", "reward", "discount", "next_row"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0], 1 + 0.5 * 2 + 0.25 * 4, 0.125, 3),
        ([0, 0, 0, 1], [0, 0, 0, 0], 3.0, 0.125, 3),  # a time limit at the last row bootstraps from it
        ([0, 0, 0, 1], [0, 0, 0, 1], 3.0, 0.0, 3),
        ([0, 0, 1, 0], [0, 0, 0, 0], 1 + 0.5 * 2, 0.25, 2),  # row 3 belongs to the next episode
        ([0, 0, 1, 0], [0, 0, 1, 0], 2.0, 0.0, 2),
        ([0, 1, 0, 0], [0, 0, 0, 0], 1.0, 0.5, 1),
        ([0, 1, 0, 0], [0, 1, 0, 0], 1.0, 0.0, 1),
    ],
)
def test_rewards_stop_where_the_episode_does(
    last: list[int], terminal: list[int], reward: float, discount: float, next_row: int
) -> None:
    transition = n_step_transitions(rows(last=last, terminal=terminal), 0.5)
    assert transition["reward"].tolist() == [reward]
    assert transition["discount"].tolist() == [discount]
    assert transition["next_row"].tolist() == [next_row]
    assert transition["is_valid"].tolist() == [True]


def test_nothing_was_decided_on_an_is_last_row() -> None:
    transition = n_step_transitions(rows(last=[1, 0, 0, 0], terminal=[0, 0, 0, 0]), 0.5)
    assert transition["is_valid"].tolist() == [False]
    assert transition["reward"].tolist() == [0.0]


def test_two_rows_are_the_one_step_transition() -> None:
    batch = {key: value[:, :2] for key, value in rows(last=[0, 1, 0, 0], terminal=[0, 1, 0, 0]).items()}
    transition = n_step_transitions(batch, 0.9)
    assert transition["reward"].tolist() == [1.0]
    assert transition["discount"].tolist() == [0.0]


def walked(batch: Batch, sequence: int) -> float:
    """The target of row 0 in plain Python, row by row: rewards until the episode or the rows end, then the value."""
    reward, value, is_last, is_terminal = (
        batch[key][sequence].tolist() for key in ("reward", "value", "is_last", "is_terminal")
    )
    total, weight = 0.0, 1.0
    for t in range(1, len(reward)):
        total += weight * reward[t]
        weight *= 0.0 if is_terminal[t] else 0.9
        if is_last[t]:
            break
    return total + weight * value[t]


@pytest.mark.parametrize("n", [1, 3, 5])
def test_targets_equal_a_walk_over_each_sequence(n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    is_last = torch.rand(200, n + 1, generator=generator) < 0.2
    batch = {
        "reward": torch.randn(200, n + 1, generator=generator),
        "is_last": is_last,
        "is_terminal": is_last & (torch.rand(200, n + 1, generator=generator) < 0.5),
    }
    value = torch.randn(200, n + 1, generator=generator)
    transition = n_step_transitions(batch, 0.9)
    target = transition["reward"] + transition["discount"] * rows_at(value, transition["next_row"])
    valid = transition["is_valid"]
    expected = torch.tensor([walked({**batch, "value": value}, row) for row in range(200)])
    assert bool(valid.any())
    assert torch.allclose(target[valid], expected[valid], atol=1e-6)


def test_rows_are_picked_one_for_each_sequence() -> None:
    values = torch.arange(12.0).reshape(2, 3, 2)
    assert rows_at(values, torch.tensor([2, 0])).tolist() == [[4.0, 5.0], [6.0, 7.0]]
