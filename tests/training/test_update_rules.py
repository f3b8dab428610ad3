"""Update rules against torch.optim, and LaProp against its definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_lab.training.laprop import LaProp
from rl_lab.training.update_rules import SGD, Adam, AdamW, RMSprop, UpdateRule
from rl_lab.types import RunError
from rl_lab.utils import tree

SHAPES = [(4, 3), (5,), (2, 3, 3, 3), ()]
SETTINGS: dict[str, Any] = {"epsilon": 1e-5, "betas": (0.8, 0.9), "weight_decay": 0.0, "momentum": 0.0}


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def named(values: list[Tensor]) -> dict[str, Tensor]:
    return {f"p{index}": value for index, value in enumerate(values)}


@pytest.mark.parametrize(
    ("rule", "settings", "reference"),
    [
        (Adam, {}, lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9), eps=1e-5)),
        (
            Adam,
            {"weight_decay": 0.1},
            lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.1),
        ),
        (
            AdamW,
            {"weight_decay": 0.1},
            lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.1),
        ),
        (RMSprop, {}, lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-5)),
        (
            RMSprop,
            {"momentum": 0.7, "weight_decay": 0.1},
            lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-5, momentum=0.7, weight_decay=0.1),
        ),
        (SGD, {}, lambda p: torch.optim.SGD(p, lr=0.01)),
        (
            SGD,
            {"momentum": 0.7, "weight_decay": 0.1},
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.7, weight_decay=0.1),
        ),
    ],
)
@pytest.mark.parametrize("is_static", [False, True])
def test_rules_agree_with_torch(
    rule: type[UpdateRule],
    settings: dict[str, Any],
    reference: Callable[[list[Tensor]], torch.optim.Optimizer],
    is_static: bool,
) -> None:
    ours, theirs = tensors(0), [tensor.clone() for tensor in tensors(0)]
    update, optimizer = rule(named(ours), **{**SETTINGS, **settings}, is_static=is_static), reference(theirs)
    rate = torch.tensor(0.01) if is_static else 0.01
    for count in range(6):
        gradients = tensors(100 + count)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient / 2.0
        optimizer.step()
        update.apply([gradient.clone() for gradient in gradients], rate, torch.tensor(2.0))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_adam_follows_gradients_whose_memory_is_laid_out_channels_last() -> None:
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    other = weight.clone()
    rule = Adam({"w": weight}, **SETTINGS)
    optimizer = torch.optim.Adam([other], lr=0.01, betas=(0.8, 0.9), eps=1e-5, foreach=False, fused=False)
    for seed in range(3):
        gradient = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(seed))
        other.grad = gradient.clone()
        optimizer.step()
        rule.apply([gradient.to(memory_format=torch.channels_last)], 0.01)
    torch.testing.assert_close(weight, other)


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_laprop_equals_its_definition(weight_decay: float, is_static: bool) -> None:
    beta1, beta2, rate = 0.9, 0.99, 0.02
    ours = tensors(0)
    settings: dict[str, Any] = {"epsilon": 1e-8, "weight_decay": weight_decay, "momentum": 0.0}
    update = LaProp(named(ours), betas=(beta1, beta2), is_static=is_static, **settings)
    expected = [tensor.double().numpy().copy() for tensor in tensors(0)]
    mean, square = [np.zeros_like(p) for p in expected], [np.zeros_like(p) for p in expected]
    for count in range(1, 9):
        gradients = tensors(100 + count)
        for i, gradient in enumerate(gradients):
            g = gradient.double().numpy() / 4.0
            square[i] = beta2 * square[i] + (1 - beta2) * g**2
            unit = g / (np.sqrt(square[i] / (1 - beta2**count)) + 1e-8)
            mean[i] = beta1 * mean[i] + (1 - beta1) * unit
            expected[i] = expected[i] * (1 - rate * weight_decay) - rate * mean[i] / (1 - beta1**count)
        told = torch.tensor(rate) if is_static else rate
        update.apply([gradient.clone() for gradient in gradients], told, torch.tensor(4.0))
    for mine, reference in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine.numpy(), reference, rtol=1e-5, atol=1e-6)


def test_laprops_first_change_is_the_learning_rate() -> None:
    parameter = torch.zeros(2)
    rule = LaProp({"p": parameter}, epsilon=1e-20, betas=(0.9, 0.99), weight_decay=0.0, momentum=0.0)
    rule.apply([torch.tensor([1e-6, -1e6])], 0.25)
    torch.testing.assert_close(parameter, torch.tensor([-0.25, 0.25]))


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("rule", [Adam, LaProp, RMSprop, SGD])
def test_a_parameter_without_gradient_waits_and_its_count_with_it(rule: type[UpdateRule], is_static: bool) -> None:
    together, alone = tensors(0), tensors(0)
    rate = torch.tensor(0.01) if is_static else 0.01
    paused, single = (rule(p, **SETTINGS, is_static=is_static) for p in (named(together), {"p0": alone[0]}))
    for count in range(4):
        gradient = tensors(100 + count)
        paused.apply([gradient[0].clone() if count != 1 else None, *(g.clone() for g in gradient[1:])], rate)
        if count != 1:
            single.apply([gradient[0].clone()], rate)
    assert paused.counts == [3, 4, 4, 4]
    assert torch.equal(together[0], alone[0])


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("rule", [Adam, AdamW, LaProp, RMSprop, SGD])
def test_a_restored_rule_goes_on_bit_for_bit(rule: type[UpdateRule], is_static: bool) -> None:
    settings = {**SETTINGS, "momentum": 0.5, "is_static": is_static}
    rate = torch.tensor(0.01) if is_static else 0.01
    ours = tensors(0)
    update = rule(named(ours), **settings)
    update.apply(tensors(1), rate)
    twins = [tensor.clone() for tensor in ours]
    twin = rule(named(twins), **settings)
    twin.set_state(tree.map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, update.get_state()))
    for one in (update, twin):
        one.apply(tensors(2), rate)
    assert all(torch.equal(a, b) for a, b in zip(ours, twins, strict=True))
    assert tree.equal(update.get_state(), twin.get_state())


def test_a_state_of_other_parameters_is_refused_by_name() -> None:
    rule = Adam({"actor.weight": torch.zeros(2)}, **SETTINGS)
    with pytest.raises(RunError, match=r"optimizer parameters: 'actor.wight' is only in the checkpoint"):
        rule.set_state(Adam({"actor.wight": torch.zeros(2)}, **SETTINGS).get_state())
    with pytest.raises(RunError, match=r"optimizer slots: 'velocity' is only in the checkpoint"):
        rule.set_state(SGD({"actor.weight": torch.zeros(2)}, **SETTINGS).get_state())
    incomplete = rule.get_state()
    del incomplete["slots"]["mean"]["actor.weight"]
    with pytest.raises(RunError, match=r"optimizer slot 'mean': 'actor.weight' is missing from the checkpoint"):
        rule.set_state(incomplete)
