"""LaProp as one kernel equals LaProp: on a GPU, or on a CPU through Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or IS_INTERPRETED):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from rl_lab.kernels import door, gpu  # noqa: E402
from rl_lab.kernels.triton import laprop  # noqa: E402
from rl_lab.kernels.triton.laprop import PIECE  # noqa: E402
from rl_lab.training.laprop import LaProp  # noqa: E402
from rl_lab.training.update_rules import Members  # noqa: E402

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# within a piece, beyond one, a single number, exactly one, a convolution's
SHAPES = [(3, 5), (PIECE + 7,), (1,), (PIECE,), (4, 3, 5, 5)]
BETAS, EPSILON, RATE = (0.9, 0.99), 1e-20, 0.01


def draw(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES]
    drawn[-1] = drawn[-1].to(memory_format=torch.channels_last)  # as convolutions on a GPU are
    return drawn


def make_rule(seed: int) -> LaProp:
    named = {f"p{index}": each for index, each in enumerate(draw(seed))}
    return LaProp(named, epsilon=EPSILON, betas=BETAS, weight_decay=0.0, momentum=0.0, is_static=True)


@pytest.fixture(autouse=True)
def everything_is_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "on_gpu", lambda tensor: True)


def test_three_changes_equal_those_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, plain = make_rule(0), make_rule(0)
    fast.gradients_stay = True
    gradients, rate, divisor = draw(9), torch.tensor(RATE, device=DEVICE), torch.tensor(2.0, device=DEVICE)
    for count in range(1, 4):
        for gradient, new in zip(gradients, draw(count), strict=True):
            gradient.copy_(new)
        gradients[0][0, 0] = 0.0  # never anything else: its average must stay 0, not become NaN
        with door.plain_formulas():
            plain.apply([each.clone() for each in gradients], rate, divisor)
        door.open_door(True)
        fast.apply(gradients, rate, divisor)
        assert "gpu:LAPROP" in door.in_use(), "a recording must find the table that was made before it"
        monkeypatch.setattr(laprop, "is_capturing", lambda: True)
    found, expected = ((*rule.parameters, *rule.state["mean"]) for rule in (fast, plain))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def table_of(lists: list[list[torch.Tensor]]) -> laprop.Table | None:
    parameters, gradients, means, squares = lists
    state = {"mean": means, "mean_square": squares}
    return laprop.table_of(make_rule(0), Members(parameters, gradients, state, count=1))


def test_a_tensor_of_another_kind_gets_no_table() -> None:
    lists = [draw(seed) for seed in range(4)]
    assert table_of(lists) is not None
    lists[0][0] = lists[0][0].double()
    assert table_of(lists) is None
    lists = [draw(seed) for seed in range(4)]
    lists[1][-1] = lists[1][-1].contiguous()  # a gradient that does not lie as its parameter does
    assert table_of(lists) is None


def test_a_recording_makes_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laprop, "is_capturing", lambda: True)
    assert table_of([draw(seed) for seed in range(4)]) is None


def test_gradients_that_move_and_weight_decay_take_the_formula() -> None:
    for stays, decay in ((False, 0.0), (True, 0.1)):
        door.open_door(True)
        rule = make_rule(0)
        rule.gradients_stay, rule.weight_decay = stays, decay
        rule.apply(list(draw(1)), torch.tensor(RATE, device=DEVICE))
        assert "gpu:LAPROP" not in door.in_use()
