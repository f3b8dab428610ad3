from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rl_lab.runs.state import apply_state, describe_mismatch, gather_state
from rl_lab.types import RunError
from rl_lab.utils.tree import equal


class Counter:
    """The smallest thing with state."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def get_state(self) -> dict[str, int]:
        return {"value": self.value}

    def set_state(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def targets(seed: int, *, hidden: int = 4) -> dict[str, Any]:
    torch.manual_seed(seed)
    actor, critic = nn.Linear(3, hidden), nn.Sequential(nn.Linear(3, 1), nn.Tanh())
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()])
    return {
        "controllers": {"actor": actor, "critic": critic, "activation": nn.Tanh()},
        "optimizers": {"policy": optimizer},
        "collector": Counter(seed),
    }


def learn(parts: dict[str, Any]) -> None:
    controllers = parts["controllers"]
    rows = torch.ones(2, 3)
    (controllers["actor"](rows).sum() + controllers["critic"](rows).sum()).backward()
    parts["optimizers"]["policy"].step()


def test_gathered_state_applied_elsewhere_is_the_same_state() -> None:
    source, target = targets(1), targets(2)
    learn(source)
    apply_state(target, gather_state(source))
    assert equal(gather_state(target), gather_state(source))
    assert target["collector"].value == 1


def test_a_module_of_another_shape_is_refused_before_anything_changes() -> None:
    source, target = targets(1, hidden=4), targets(2, hidden=2)
    before = {name: value.clone() for name, value in target["controllers"]["critic"].state_dict().items()}
    with pytest.raises(RunError) as caught:
        apply_state(target, gather_state(source))
    assert "The checkpoint does not fit this run:" in str(caught.value)
    assert "controllers.actor.weight: checkpoint [4, 3], this run [2, 3]" in str(caught.value)
    assert "controllers.actor.bias: checkpoint [4], this run [2]" in str(caught.value)
    assert equal(dict(target["controllers"]["critic"].state_dict()), before)
    assert target["collector"].value == 2


def test_missing_and_extra_parts_are_named() -> None:
    state = gather_state(targets(1))
    state["colector"] = state.pop("collector")
    with pytest.raises(RunError) as caught:
        apply_state(targets(2), state)
    assert "collector: missing in the checkpoint (nearest: colector.value)" in str(caught.value)
    assert "colector.value: only in the checkpoint (nearest: collector)" in str(caught.value)


def test_a_module_without_parameters_needs_no_state() -> None:
    state = gather_state(targets(1))
    del state["controllers"]["activation"]
    apply_state(targets(2), state)


def test_an_optimizer_with_other_groups_is_refused() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    state = gather_state({"optimizers": {"policy": torch.optim.SGD(weights, lr=0.1)}})
    with pytest.raises(RunError, match=r"does not fit this run:\n  optimizers\.policy: loaded state dict"):
        apply_state({"optimizers": {"policy": torch.optim.SGD(weights[:1], lr=0.1)}}, state)


def test_a_thing_without_state_is_named() -> None:
    with pytest.raises(TypeError, match=r"'collector\.clock' is a object, which has neither state_dict"):
        gather_state({"collector": {"clock": object()}})


def test_fitting_trees_have_no_mismatch_whatever_their_values() -> None:
    here = {"a": torch.zeros(2), "n": 1, "s": "x", "l": [np.zeros(3, dtype=np.float32), None]}
    there = {"a": torch.ones(2), "n": 2, "s": "y", "l": [torch.ones(3), None]}
    assert describe_mismatch(here, there) == ""


def test_each_kind_of_difference_has_its_line() -> None:
    here = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2), "encoder": torch.zeros(1)}
    there = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64), "c": 1.0, "encodr": torch.zeros(1)}
    assert describe_mismatch(here, there).splitlines() == [
        "  a: checkpoint [3], this run [2]",
        "  b: checkpoint float64, this run float32",
        "  c: checkpoint a plain float, this run a tensor [2]",
        "  encoder: missing in the checkpoint (nearest: encodr)",
        "  encodr: only in the checkpoint (nearest: encoder)",
    ]


def test_a_long_list_of_differences_is_cut_with_a_count() -> None:
    here = {f"layer_{index}": torch.zeros(1) for index in range(40)}
    lines = describe_mismatch(here, {}).splitlines()
    assert len(lines) == 13
    assert lines[0] == "  layer_0: missing in the checkpoint"
    assert lines[-1] == "  ... and 28 more differences"
