"""The value table: states from digits, exact moves of repeated entries, epsilon-greedy by hand."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.heads.tables import ValueTable, epsilon_greedy
from rl_lab.types import ActionSpec, ArraySpec, ConfigError

TWO_ACTIONS = ActionSpec("discrete", (2,))
FIVE_STATES = {"discrete": ArraySpec((), "int64", num_values=(5,))}


def table_of(num_states: int = 3, *, initial_value: float = 0.0) -> ValueTable:
    observation = {"discrete": ArraySpec((), "int64", num_values=(num_states,))}
    return ValueTable(observation=observation, action=TWO_ACTIONS, initial_value=initial_value)


def test_a_lone_discrete_observation_is_the_state() -> None:
    table = table_of(5, initial_value=1.5)
    assert table.values.shape == (5, 2)
    assert table({"discrete": torch.tensor([[0, 4]])}).tolist() == [[[1.5, 1.5], [1.5, 1.5]]]
    assert list(table.state_dict()) == ["values"]


def test_several_observations_are_the_digits_of_the_state() -> None:
    observation = {
        "a": ArraySpec((), "int64", num_values=(3,)),
        "b": ArraySpec((2,), "int64", num_values=(4, 5)),
        "action_mask": ArraySpec((2,), "bool"),
    }
    table = ValueTable(observation=observation, action=TWO_ACTIONS)
    assert table.values.shape == (60, 2)
    rows = {"a": torch.tensor([0, 2]), "b": torch.tensor([[0, 1], [3, 4]])}
    assert table.state(rows).tolist() == [1, 2 * 20 + 3 * 5 + 4]
    chosen = ValueTable(observation=observation, action=TWO_ACTIONS, keys=["a"])
    assert chosen.state(rows).tolist() == [0, 2]


def test_an_entry_named_often_moves_as_if_its_targets_came_one_after_the_other() -> None:
    """Rate 1/2 from 0: target 4 gives 2, then target 8 gives 5. The invalid row and the other action stay out."""
    table = table_of()
    error = table.move(
        torch.tensor([1, 1, 1, 1, 2]),
        torch.tensor([0, 1, 0, 0, 1]),
        torch.tensor([4.0, 6.0, 100.0, 8.0, 2.0]),
        valid=torch.tensor([True, True, False, True, True]),
        rate=0.5,
    )
    assert table.values.tolist() == [[0.0, 0.0], [5.0, 3.0], [0.0, 1.0]]
    assert error.tolist() == [4.0, 6.0, 0.0, 8.0, 2.0]


def test_a_rate_of_one_ends_at_the_last_target_however_often_an_entry_is_named() -> None:
    table = table_of()
    rows = torch.zeros(3, dtype=torch.int64)
    table.move(rows, rows, torch.tensor([1.0, 2.0, 3.0]), valid=torch.ones(3, dtype=torch.bool), rate=1.0)
    assert table.values[0, 0] == 3.0


def test_epsilon_greedy_shares_ties_and_keeps_to_the_mask() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    torch.testing.assert_close(epsilon_greedy(values, 0.2), torch.tensor([[0.05, 0.45, 0.45, 0.05]]))
    mask = torch.tensor([[True, False, False, True]])
    torch.testing.assert_close(epsilon_greedy(values, 0.2, mask), torch.tensor([[0.9, 0.0, 0.0, 0.1]]))


def test_vectors_are_refused_with_what_to_use_instead() -> None:
    vector = {"vector": ArraySpec((4,), "float32")}
    with pytest.raises(ConfigError, match=r"'vector' is float32 of shape \(4,\)\. Learn with a network .*ID:ppo"):
        ValueTable(observation=vector, action=TWO_ACTIONS)
    with pytest.raises(ConfigError, match=r"Or name only discrete ones: components\.table\.keys=\[discrete\]"):
        ValueTable(observation={**vector, **FIVE_STATES}, action=TWO_ACTIONS)


@pytest.mark.parametrize("action", [ActionSpec("continuous", (2,)), ActionSpec("multi_discrete", (2, 3))])
def test_other_actions_are_refused(action: ActionSpec) -> None:
    with pytest.raises(ConfigError, match=rf"needs one discrete action, and this environment's is {action.kind}"):
        ValueTable(observation=FIVE_STATES, action=action)


def test_a_table_too_large_is_refused() -> None:
    observation = {"discrete": ArraySpec((10,), "int64", num_values=(10,) * 10)}
    with pytest.raises(
        ConfigError, match=r"10000000000 states times 2 actions, more than 50000000 entries\. Name fewer"
    ):
        ValueTable(observation=observation, action=TWO_ACTIONS)


def test_unknown_and_missing_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no observation 'discreet'; it has discrete\. Did you mean 'discrete'"):
        ValueTable(observation=FIVE_STATES, action=TWO_ACTIONS, keys=["discreet"])
    with pytest.raises(ConfigError, match=r"components\.table\.keys: no observation is left to look at"):
        ValueTable(observation=FIVE_STATES, action=TWO_ACTIONS, keys=[])


def test_a_value_to_start_from_is_finite() -> None:
    with pytest.raises(ConfigError, match=r"components\.table\.initial_value is nan: write a finite number"):
        ValueTable(observation=FIVE_STATES, action=TWO_ACTIONS, initial_value=float("nan"))
