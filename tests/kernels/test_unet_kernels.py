"""The fast version of the U-Net over plans equals its formula: on a CPU through Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; test_on_a_gpu.py compares on a GPU", allow_module_level=True)

from rl_lab.components.diffusion.schedule import DDIMSampler, SquaredCosineSchedule
from rl_lab.components.diffusion.unet import ConditionalUNet
from rl_lab.kernels import door, gpu
from rl_lab.kernels.triton import products, unet
from rl_lab.training.runtime import Runtime
from rl_lab.types import ActionSpec
from tests.kernels.kernel_harness import Call, Inputs, Variant, check

VARIANTS = [
    *(Variant(rows=rows) for rows in (1, 3)),
    *(Variant(rows=2, layout=layout) for layout in ("strided", "transposed")),
    *(Variant(rows=2, values=values) for values in ("saturated", "nan")),
]
FEW = [  # a backward pass through the interpreter takes seconds
    pytest.param(variant, id=str(variant), marks=() if variant.layout == "strided" else pytest.mark.slow)
    for variant in VARIANTS
]
PLAN = 6  # 6 and 3 steps: an odd number at the bottom


@pytest.fixture(autouse=True)
def everything_is_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu, "on_gpu", lambda tensor: True)
    yield
    door.open_door(True)


def make_unet(**settings: Any) -> ConditionalUNet:
    torch.manual_seed(0)
    shared: dict[str, Any] = {"channels": (4, 6), "groups": 2, "kernel_size": 3, "level_size": 4}
    network = ConditionalUNet(input_size=3, action=ActionSpec("continuous", (2,)), **{**shared, **settings})
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)  # biases and norms of their own
    return network


def unet_call(inputs: Inputs, *, learns: bool = True, length: int = PLAN, **settings: Any) -> Call:
    network = make_unet(**settings)
    plan, features = inputs.normal(length, 2, requires_grad=learns), inputs.normal(2, 3, requires_grad=learns)
    level = inputs.integers(100)
    return Call(network.forward, [plan, level, features], modules=[network], leaves=[plan, features])


compare = partial(check, "rl_lab.kernels.gpu:UNET_FORWARD")


@pytest.mark.parametrize("variant", FEW)
def test_learning(variant: Variant) -> None:
    compare(unet_call, variant, tolerance=2e-4 if variant.values == "saturated" else 5e-5)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_acting_with_few_rows(variant: Variant) -> None:
    compare(partial(unet_call, learns=False), variant, tolerance=5e-5)


@torch.no_grad()
def test_acting_with_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MOST_ROWS", 16)  # those of the plan are many, those at the bottom few
    compare(partial(unet_call, learns=False), Variant(rows=3), tolerance=5e-5)


@torch.no_grad()
def test_weights_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "INNER", 16)
    compare(partial(unet_call, learns=False, kernel_size=5), Variant(rows=2), tolerance=5e-5)


@pytest.mark.slow
def test_other_sizes() -> None:
    settings: dict[str, Any] = {"kernel_size": 5, "groups": 1, "channels": (3, 4, 5), "length": 4}
    compare(partial(unet_call, **settings), Variant(rows=2), tolerance=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("learns", [True, False])
def test_bf16_is_as_near_to_fp32_as_its_formula(learns: bool) -> None:
    errors = {"plain": 0.0, "fast": 0.0}
    for seed in range(2):
        exact = found_by(seed, learns=learns, plain=True, low=False)
        for name in errors:
            found = found_by(seed, learns=learns, plain=name == "plain", low=True)
            pairs = zip(found, exact, strict=True)
            errors[name] += sum(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)
    assert errors["fast"] < 1.3 * errors["plain"], errors


def found_by(seed: int, *, learns: bool, plain: bool, low: bool) -> list[Tensor]:
    """The result and, where it learns, all gradients."""
    call = unet_call(Inputs(Variant(rows=3), seed), learns=learns)
    door.open_door(not plain, takes_unmeasured=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low), torch.set_grad_enabled(learns):
        result = call.formula(*call.args).float()
    assert ("gpu:UNET_FORWARD" in door.in_use()) != plain
    return [result.detach(), *(torch.autograd.grad(result.square().sum(), call.learning()) if learns else ())]


@pytest.mark.slow
def test_a_frozen_network_passes_gradients_on() -> None:
    def make(inputs: Inputs) -> Call:
        call = unet_call(inputs)
        call.modules[0].requires_grad_(False)
        return call

    compare(make, Variant(rows=2), tolerance=5e-5)


def test_other_networks_run_as_they_are_written() -> None:
    def watch(network: Any) -> None:
        network.middle[0].second[1].register_forward_hook(lambda module, inputs, output: output * 2.0)

    def replace_norm(network: Any) -> None:
        network.last[1] = nn.Identity()

    def dilate(network: Any) -> None:
        network.last[0].dilation, network.last[0].padding = (2,), (2,)

    for change in (watch, replace_norm, dilate):

        def make(inputs: Inputs, change: Any = change) -> Call:
            call = unet_call(inputs)
            change(call.modules[0])
            return call

        compare(make, Variant(rows=1), is_used=False)


@torch.no_grad()
def test_a_recording_without_a_table_of_weights_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_capturing", lambda: True)
    compare(partial(unet_call, learns=False), Variant(rows=1), tolerance=5e-5)


@torch.no_grad()
def test_weights_that_moved_are_found() -> None:
    network, arguments = make_unet(), (torch.randn(1, PLAN, 2), torch.tensor([3]), torch.randn(1, 2, 3))
    door.open_door(True, takes_unmeasured=True)
    before = network(*arguments)
    for parameter in network.parameters():
        parameter.data = parameter.data * 1.5
    after = network(*arguments)
    with door.plain_formulas():
        torch.testing.assert_close(after, network(*arguments), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, after, atol=1e-2)


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_products_are_as_precise_as_convolutions(allowed: bool, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    multiply, matmul = torch.mm, torch.backends.cuda.matmul
    monkeypatch.setattr(torch, "mm", lambda *args: seen.append(matmul.allow_tf32) or multiply(*args))
    monkeypatch.setattr(products, "is_tf32", lambda: allowed)
    own = matmul.allow_tf32
    try:
        matmul.allow_tf32 = before
        products.product(torch.ones(2, 2), torch.ones(2, 2))
        assert seen == [allowed] and matmul.allow_tf32 is before
    finally:
        matmul.allow_tf32 = own


@pytest.mark.parametrize("taps", [(1, 1, 0), (3, 1, 1), (5, 1, 2), (3, 2, 1), (4, 2, 1)])
@pytest.mark.parametrize("length", [1, 4, 7])
def test_fold_is_the_transpose_of_unfold(taps: tuple[int, int, int], length: int) -> None:
    """<unfold(x), y> = <x, fold(y)>, and unfold shows what torch's does."""
    own = gpu.Taps(*taps)
    if own.after(length) < 1:
        return
    x = torch.randn(2, length, 3)
    unfolded = unet.unfold(x, own, torch.float32)
    padded = torch.nn.functional.pad(x, (0, 0, own.padding, own.padding))
    assert torch.equal(unfolded, padded.unfold(1, own.number, own.stride).reshape(unfolded.shape))
    y = torch.randn_like(unfolded)
    folded = unet.fold(y, None, 2, length, own)
    torch.testing.assert_close((unfolded * y).sum(), (x * folded).sum(), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(("level", "after"), [(90, 80), (0, -1)])
def test_a_step_of_the_sampler(variant: Variant, level: int, after: int) -> None:
    schedule, sampler = SquaredCosineSchedule(levels=100), DDIMSampler(steps=10)

    def make(inputs: Inputs) -> Call:
        return Call(sampler.step, [schedule, inputs.normal(4, 2), inputs.normal(4, 2), level, after])

    check("rl_lab.kernels.gpu:DDIM_STEP", make, variant)


def test_fast_paths_can_be_switched_off() -> None:
    Runtime(device="cpu", fast_paths=False)
    with torch.no_grad():
        make_unet()(torch.randn(1, PLAN, 2), torch.tensor([3]), torch.randn(1, 2, 3))
    assert not door.in_use()
