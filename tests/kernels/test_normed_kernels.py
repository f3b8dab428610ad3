"""The kernels of TD-MPC2's networks equal their formulas, on a CPU through Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; test_on_a_gpu.py compares on a GPU", allow_module_level=True)

from rl_lab.components.world_model.implicit import NormedMLP
from rl_lab.components.world_model.two_hot import SymlogTwoHot, symlog_bins
from rl_lab.kernels import door, gpu
from tests.kernels.kernel_harness import Call, Inputs, Variant
from tests.kernels.test_gpu_paths import compare, made

VARIANTS = [
    *(Variant(rows=rows) for rows in (1, 2, 7)),
    *(Variant(rows=5, layout=layout) for layout in ("strided", "transposed")),
    *(Variant(rows=5, values=values) for values in ("saturated", "nan")),
]
STYLES = {
    "simplices": {"simplex_size": 4, "output_size": 12},  # widths that are no powers of 2
    "ensemble": {"members": 3, "output_size": 5},
    "ensemble with dropout": {"members": 2, "output_size": 5, "dropout": 0.3},
}
BINS = symlog_bins(101, largest=10.0)


@pytest.fixture(autouse=True)
def everything_is_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu, "on_gpu", lambda tensor: True)
    yield
    door.open_door(True)


def mlp_call(inputs: Inputs, *, style: str, members: Tensor | None = None) -> Call:
    mlp = made(NormedMLP, 6, hidden_sizes=[10, 8], **STYLES[style])
    features = inputs.normal(2, 6, requires_grad=True)
    keywords = {"drop": mlp.dropout > 0.0, "members": members}
    return Call(mlp.forward, [features], keywords, modules=[mlp], leaves=[features])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_normed_networks(variant: Variant, style: str) -> None:
    compare("NORMED_MLP", partial(mlp_call, style=style), variant, "fp32", tolerance=1e-4)


@pytest.mark.parametrize("style", STYLES)
def test_normed_networks_in_bf16(style: str) -> None:
    compare("NORMED_MLP", partial(mlp_call, style=style), Variant(rows=5), "bf16")


def test_some_members() -> None:
    make = partial(mlp_call, style="ensemble", members=torch.tensor([2, 0]))
    compare("NORMED_MLP", make, Variant(rows=3), "fp32", tolerance=1e-4)


def test_simplices_of_three_run_as_they_are_written() -> None:
    make = lambda inputs: Call(made(NormedMLP, 6, [8], 12, simplex_size=3).forward, [inputs.normal(6)])  # noqa: E731
    compare("NORMED_MLP", make, Variant(rows=2), "fp32", is_used=False)


def test_frozen_networks_pass_gradients_on() -> None:
    def make(inputs: Inputs) -> Call:
        call = mlp_call(inputs, style="simplices")
        call.modules[0].requires_grad_(False)
        return call

    compare("NORMED_MLP", make, Variant(rows=3), "fp32", tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_means_of_symlog(variant: Variant, learns: bool, dtype: torch.dtype) -> None:
    def make(inputs: Inputs) -> Call:
        logits = (inputs.normal(2, 101) * 2.0).to(dtype).detach().requires_grad_(learns)
        return Call(lambda logits: SymlogTwoHot(logits, BINS).mean(), [logits], leaves=[logits])

    compare("SYMLOG_TWO_HOT_MEAN", make, variant, "fp32" if dtype is torch.float32 else "bf16", tolerance=1e-4)


def test_a_mean_of_exactly_zero_has_no_gradient_as_in_the_formula() -> None:
    logits = torch.zeros(3, 101, requires_grad=True)
    make = lambda inputs: Call(lambda each: SymlogTwoHot(each, BINS).mean(), [logits], leaves=[logits])  # noqa: E731
    compare("SYMLOG_TWO_HOT_MEAN", make, Variant(rows=3), "fp32")
    mean = SymlogTwoHot(logits, BINS).mean()
    assert mean.tolist() == [0.0] * 3 and not torch.autograd.grad(mean.sum(), logits)[0].any()


def test_small_means_keep_their_digits() -> None:
    logits = torch.zeros(40, 101).index_fill(1, torch.tensor([51]), 0.0)
    logits[:, 51] = torch.logspace(-6, 0.7, 40)
    make = lambda inputs: Call(lambda each: SymlogTwoHot(each, BINS).mean(), [logits])  # noqa: E731
    compare("SYMLOG_TWO_HOT_MEAN", make, Variant(rows=40), "fp32", tolerance=1e-6)
