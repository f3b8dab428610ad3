"""LaProp as one kernel equals LaProp: on a GPU, or on a CPU through Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or IS_INTERPRETED):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from rl_lab.kernels.triton.laprop import PIECE, PiecesByAddress  # noqa: E402
from rl_lab.training.laprop import LaProp  # noqa: E402

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# within a piece, beyond one, a single number, exactly one, a convolution's
SHAPES = [(3, 5), (PIECE + 7,), (1,), (PIECE,), (4, 3, 5, 5)]
BETAS, EPSILON, RATE = (0.9, 0.99), 1e-20, 0.01


def draw(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES]
    drawn[-1] = drawn[-1].to(memory_format=torch.channels_last)  # as convolutions on a GPU are
    return drawn


def test_three_changes_equal_those_of_the_rule() -> None:
    ours, theirs = draw(0), draw(0)
    named = {f"p{index}": each for index, each in enumerate(theirs)}
    rule = LaProp(named, epsilon=EPSILON, betas=BETAS, weight_decay=0.0, momentum=0.0, is_static=True)
    means, squares = ([torch.zeros_like(each) for each in ours] for _ in range(2))
    gradients, tables = draw(9), PiecesByAddress()
    for count in range(1, 4):
        for gradient, new in zip(gradients, draw(count), strict=True):
            gradient.copy_(new)
        gradients[0][0, 0] = 0.0  # nothing has ever come here: it must stay, not become NaN
        rule.apply([each.clone() for each in gradients], torch.tensor(RATE, device=DEVICE))
        pieces = tables.of(ours, gradients, means, squares, may_make=count == 1)
        assert pieces is not None, "a recording must find the table that was made before it"
        told = torch.full((len(ours),), float(count), dtype=torch.float64)
        spreads, rates = (1.0 - BETAS[1] ** told).sqrt().float(), (RATE / (1.0 - BETAS[0] ** told)).float()
        pieces.change(spreads.to(DEVICE), rates.to(DEVICE), betas=BETAS, epsilon=EPSILON)
    for found, expected in zip((*ours, *means), (*theirs, *rule.state["mean"]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_tensor_of_another_kind_gets_no_table() -> None:
    lists = [draw(seed) for seed in range(4)]
    lists[0][0] = lists[0][0].double()
    assert PiecesByAddress().of(*lists, may_make=True) is None
    lists = [draw(seed) for seed in range(4)]
    lists[1][-1] = lists[1][-1].contiguous()  # a gradient that does not lie as its parameter does
    assert PiecesByAddress().of(*lists, may_make=True) is None


def test_a_recording_makes_no_table() -> None:
    tensors = [draw(seed) for seed in range(4)]
    assert PiecesByAddress().of(*tensors, may_make=False) is None
