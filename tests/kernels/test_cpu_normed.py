"""Mish, SimNorm and products on a CPU equal the formulas they stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_harness import VARIANTS, Call, Inputs, Variant, check, shaken
from torch import Tensor

from rl_lab.components.world_model.implicit import NormedMLP, mish, products, simnorm
from rl_lab.kernels import cpu_mlp, cpu_normed, door

NORMED = "rl_lab.kernels.cpu_normed:"


def values(formula: Callable[..., Tensor], *settings: int) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        numbers = inputs.normal(24, requires_grad=True, scale=4.0)
        return Call(formula, (numbers, *settings), leaves=[numbers])

    return make


def of_members(count: int) -> Callable[[Inputs], Call]:
    """Rows `[E, R, 6]`, laid out as the variant says, or the same ones for every member."""

    def make(inputs: Inputs) -> Call:
        rows = inputs.normal(6, requires_grad=True)
        weights = torch.randn(count, 6, 5, generator=inputs.generator).requires_grad_()
        biases = torch.randn(count, 1, 5, generator=inputs.generator).requires_grad_()
        leaves = [rows, weights, biases]
        return Call(lambda rows, *rest: products(rows.expand(count, -1, -1), *rest), tuple(leaves), leaves=leaves)

    return make


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("case", ["MISH", "SIMNORM"])
def test_an_activation_equals_its_formula(case: str, variant: Variant) -> None:
    make = values(mish) if case == "MISH" else values(simnorm, 8)
    is_used = variant.layout == "contiguous" or variant.rows == 1
    check(NORMED + case, make, variant, is_used=is_used)
    with torch.no_grad():
        check(NORMED + case, make, variant, is_used=is_used)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("members", [1, 3])
def test_products_equal_their_formula(members: int, variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """All count as large ones here."""
    monkeypatch.setattr(cpu_mlp, "MOST_PRODUCTS_OF_MKL", 0)
    is_used = variant.layout == "contiguous"
    check(f"{NORMED}PRODUCTS", of_members(members), variant, is_used=is_used)
    with torch.no_grad():
        check(f"{NORMED}PRODUCTS", of_members(members), variant, is_used=is_used)


def test_small_products_and_half_precision_run_as_they_are_written() -> None:
    check(f"{NORMED}PRODUCTS", of_members(2), Variant(), is_used=False)
    check(f"{NORMED}MISH", values(mish), Variant(dtype=torch.bfloat16), is_used=False)
    check(f"{NORMED}SIMNORM", values(simnorm, 8), Variant(dtype=torch.bfloat16), is_used=False)


def test_mish_is_exact_from_end_to_end() -> None:
    """Beside float64, in numbers and in gradients, in more than one piece of memory."""
    numbers = torch.linspace(-80.0, 80.0, 3 * cpu_normed.CHUNK + 1).requires_grad_()
    wide = numbers.detach().double().requires_grad_()
    door.open_door(True)
    ours, exact = mish(numbers), wide * torch.tanh(torch.nn.functional.softplus(wide))
    torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-30)
    by_ours, by_exact = (torch.autograd.grad(each.sum(), of)[0] for each, of in ((ours, numbers), (exact, wide)))
    torch.testing.assert_close(by_ours.double(), by_exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("style", [{"simplex_size": 8}, {"dropout": 0.3, "members": 3}])
@pytest.mark.parametrize("rows", [1, 64])
def test_a_whole_network_equals_its_formula(style: dict, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_mlp, "MOST_PRODUCTS_OF_MKL", 0)

    def make(inputs: Inputs) -> Call:
        torch.manual_seed(3)
        network, read = shaken(NormedMLP(5, [16, 24], 16, **style)), inputs.normal(5, requires_grad=True)
        return Call(network, (read,), {"drop": True}, modules=[network], leaves=[read])

    for name in ("MISH", "PRODUCTS", *(["SIMNORM"] if "simplex_size" in style else [])):
        check(NORMED + name, make, Variant(rows=rows))
