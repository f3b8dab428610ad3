"""The first number that is not finite, and wrong gradients: named by operation, module and line."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.training.finite import OperationWatch, Origin, Place, first_bad
from rl_lab.training.gradient_check import GradientCheck


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, values: Tensor) -> Tensor:
        return torch.log(values * self.scale)


def origin(watch: OperationWatch, value: str = "nan") -> Origin | None:
    return watch.origin_of(Place("loss", "x", (), value)).origin


def test_the_first_bad_number_of_named_trees_is_found() -> None:
    tree = {"a": torch.ones(2), "b": {"c": torch.tensor([[1.0, 2.0], [3.0, math.inf]])}, "d": torch.tensor([math.nan])}
    assert first_bad("batch", tree) == Place("batch", "b.c", (1, 1), "inf")
    assert first_bad("metric", {"loss/x": float("-inf"), "count": 3}) == Place("metric", "loss/x", (), "-inf")
    large = {
        "a": torch.full((2,), 3e38),
        "index": torch.tensor([1]),
        "name": "x",
        "none": None,
        "empty": torch.zeros(0),
    }
    assert first_bad("batch", large) is None  # their sum is infinite, but none of them is
    assert str(Place("gradient", "w", (0, 2), "nan")) == "gradient w[0, 2] is nan"
    assert str(Place("loss", "loss/policy", (), "inf")) == "loss/policy is inf"


def test_an_operation_is_named_with_its_line_and_module() -> None:
    network = nn.Sequential(nn.Linear(3, 3), Logarithm())
    watch = OperationWatch({f"actor.{name}".rstrip("."): module for name, module in network.named_modules()})
    with watch.watching():
        torch.empty(1000).mul(1.0)  # whatever lay there
        network[1](torch.tensor([1.0, -1.0, 2.0]))
    found = origin(watch)
    assert found is not None and (found.operation, found.module) == ("aten.log", "actor.1 (Logarithm)")
    assert found.line.startswith("test_finite.py:") and found.line.endswith(" in forward")
    assert str(found).startswith("aten.log at test_finite.py:") and str(found).endswith(", module actor.1 (Logarithm)")
    assert not network[1]._forward_hooks and not network[1]._forward_pre_hooks
    with watch.watching():
        torch.ones(2).log()
    assert origin(watch) is None


def test_a_backward_is_named_by_its_forward_line() -> None:
    watch = OperationWatch({})
    weight = torch.zeros(2, requires_grad=True)
    with watch.watching():
        loss = (weight * 0.0).sum().sqrt()
        loss.backward()
    found = origin(watch)
    assert found is not None and found.operation == "MulBackward0"
    assert found.line.endswith("in test_a_backward_is_named_by_its_forward_line")
    assert found.infinity.startswith("SqrtBackward0 at test_finite.py:")


def test_an_infinity_that_only_masks_is_not_blamed_for_a_nan() -> None:
    watch = OperationWatch({})
    with watch.watching():
        torch.full((2,), -math.inf).softmax(0).nan_to_num()
        torch.tensor([1.0, 2.0]).masked_fill(torch.tensor([True, False]), -math.inf).softmax(0)
        (torch.zeros(1) / torch.zeros(1)).sum()
    assert origin(watch, "inf") is not None
    found = origin(watch)
    assert found is not None and found.operation == "aten._softmax"  # the row that was masked altogether
    place = Place("gradient", "w", (1,), "nan", found)
    assert Place.from_dict(place.as_dict()) == place


# --- gradients against finite differences ---


class WrongCube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2.0 * ctx.saved_tensors[0] ** 2  # it should be 3


class Cube(nn.Module):
    def __init__(self, *, is_right: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.is_right = is_right

    def forward(self, values: Tensor) -> Tensor:
        product = values * self.weight
        return product**3 if self.is_right else WrongCube.apply(product)


class Whole(nn.Module):
    """Takes a word beside its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cubes = nn.ModuleDict({"right": Cube(is_right=True), "wrong": Cube(is_right=False)})

    def forward(self, values: Tensor, word: str) -> Tensor:
        return self.cubes["right"](values) + self.cubes["wrong"](values)


def test_a_wrong_backward_is_found_and_nothing_is_changed() -> None:
    whole = Whole()
    check = GradientCheck({"mine": whole})
    values, before = torch.tensor([[0.5, -0.7]]), torch.get_rng_state()
    with check.recording():
        whole(values, "x")
        whole(values * 2.0, "x")
    results = {result.module: result.is_right for result in check.results()}
    assert results == {"mine.cubes.right": True, "mine.cubes.wrong": False}
    assert check.skipped == ["mine"] and torch.equal(torch.get_rng_state(), before)
    assert whole.cubes["right"].weight.dtype == torch.float32 and whole.cubes["right"].weight.tolist() == [1.0, 2.0]
    assert torch.equal(values, torch.tensor([[0.5, -0.7]]))
