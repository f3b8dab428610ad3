"""Whole sequences and dreams as one kernel equal their formulas, row by row.

On a GPU, or on a CPU through Triton's interpreter, where every program that meets others is a process of its own.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or IS_INTERPRETED):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from rl_lab.components.world_model.heads import LatentActor  # noqa: E402
from rl_lab.components.world_model.latents import CategoricalLatent  # noqa: E402
from rl_lab.components.world_model.rssm import RSSM, Decisions, State  # noqa: E402
from rl_lab.kernels import door  # noqa: E402
from rl_lab.kernels import gpu as gpu_paths  # noqa: E402
from rl_lab.kernels.triton import dream as dream_kernel  # noqa: E402
from rl_lab.kernels.triton import recurrence as unroll  # noqa: E402
from rl_lab.kernels.triton import sequence as sequence_kernels  # noqa: E402
from rl_lab.kernels.triton import wide_sequence as wide_sequence_kernels  # noqa: E402
from rl_lab.types import ActionSpec  # noqa: E402
from tests.kernels.kernel_harness import trusted_formulas  # noqa: E402

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
ROWS, LENGTH, EMBEDDING, HORIZON = 32, 3, 7, 2
CONTINUOUS = ActionSpec(kind="continuous", sizes=(3,))


def first_of_nan(values: Any, **keywords: Any) -> Any:
    """A GPU finds some index among NaN alone; numpy, by which newer interpreters compute it, raises."""
    return np.argmax(np.where(np.isnan(values), -np.inf, values), **keywords)


class Processes:
    """A kernel whose programs wait for each other: the interpreter runs one after the other, so each gets a process."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            for each in arguments:
                if isinstance(each, Tensor):
                    each.share_memory_()
            programs = [(x, y) for x in range(grid[0]) for y in range(grid[1])]
            children = [self.start(program, arguments, constants) for program in programs]
            ends = [os.waitpid(child, 0)[1] for child in children]
            assert not any(ends), ends

        return launch

    def start(self, program: tuple[int, int], arguments: Any, constants: Any) -> int:
        from triton.runtime import interpreter

        child = os.fork()
        if child:
            return child
        try:
            builder = interpreter.interpreter_builder
            builder.set_grid_idx = lambda *_: setattr(builder, "grid_idx", (*program, 0))
            interpreter.GridExecutor._restore_args_dev = lambda *_: None  # memory is shared: nothing to bring back
            np.nanargmax = first_of_nan  # type: ignore[assignment]
            self.kernel[(1, 1)](*arguments, **constants)
            os._exit(0)
        finally:  # never back into the test: this is a copy of it
            traceback.print_exc()
            os._exit(1)


SMALL: dict[str, Any] = {"rows": 32, "deter": 32, "groups": 4, "classes": 4}
WIDE: dict[str, Any] = {"rows": 32, "deter": 128, "groups": 2, "classes": 16}  # four programs, two of which choose
KERNELS = pytest.mark.parametrize(
    ("kernels", "sizes"), [(sequence_kernels, SMALL), (wide_sequence_kernels, WIDE)], ids=["small", "wide"]
)


@contextmanager
def whole(kernels: Any) -> Iterator[None]:
    """Sequences take the kernels here, though they are in float32."""
    with pytest.MonkeyPatch.context() as patch:
        if IS_INTERPRETED:
            patch.setattr(kernels, "_forward", Processes(kernels._forward))
            patch.setattr(kernels, "_backward", Processes(kernels._backward))
        patch.setattr(gpu_paths, "on_gpu", lambda tensor: True)
        patch.setattr(unroll, "whole_sequence_for", lambda shape, device: kernels)
        yield


def make_rssm(
    action: ActionSpec = CONTINUOUS, deter: int = 32, groups: int = 4, classes: int = 4, rows: int = 0
) -> RSSM:
    torch.manual_seed(0)
    latent = CategoricalLatent(groups=groups, classes=classes)
    return shaken(RSSM(input_size=EMBEDDING, action=action, latent=latent, deter=deter, hidden=16, blocks=2))


def shaken(part: Any) -> Any:
    """With biases and norms of their own, so that each one matters."""
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return part.to(DEVICE)


def make_start(rows: int, deter: int = 32, groups: int = 4, classes: int = 4) -> State:
    chosen = torch.nn.functional.one_hot(torch.randint(0, classes, (rows, groups)), classes).float().flatten(1)
    return {"deter": (torch.randn(rows, deter) * 0.3).to(DEVICE), "stoch": chosen.to(DEVICE)}


def observe(sizes: dict[str, Any], length: int = LENGTH) -> tuple[State, Tensor, RSSM, Tensor, Tensor]:
    """States and posterior of a sequence, with the model and the inputs that made them."""
    rssm, rows = make_rssm(**sizes), sizes["rows"]
    torch.manual_seed(4)
    embedding = torch.randn(rows, length, EMBEDDING, device=DEVICE).requires_grad_()
    action = torch.randn(rows, length, 3, device=DEVICE).requires_grad_()
    is_first = torch.rand(rows, length, device=DEVICE) < 0.3
    states, posterior = rssm.observe_sequence(embedding, action, is_first, make_start(**sizes))
    return states, posterior, rssm, embedding, action


def learn(sizes: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs, and the gradients of a loss that reads all of them with weights of their own."""
    states, posterior, rssm, embedding, action = observe(sizes)
    outputs = {**states, "posterior": posterior}
    loss = torch.stack([(value * torch.randn(value.shape, device=DEVICE)).sum() for value in outputs.values()]).sum()
    loss.backward()
    learned = {name: each.grad for name, each in rssm.named_parameters() if each.grad is not None}
    assert {"cell.from_action.linear.weight", "cell.mix.weight", "posterior_output.bias"} <= learned.keys()
    return {**outputs, **learned, "embedding": embedding.grad, "action": action.grad}  # type: ignore[dict-item]


@KERNELS
def test_a_sequence_and_its_gradients_equal_those_of_the_formula(kernels: Any, sizes: dict[str, Any]) -> None:
    with door.plain_formulas():
        expected = learn(sizes)
    with whole(kernels):
        found = learn(sizes)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=3e-5, atol=3e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.gpu  # the interpreter finds no largest of NaNs
@KERNELS
def test_what_was_nan_does_not_outlive_the_end_of_an_episode(kernels: Any, sizes: dict[str, Any]) -> None:
    """Of a row that was NaN, the next one starts anew; those beside it never notice."""
    rssm, rows = make_rssm(**sizes), sizes["rows"]
    embedding = torch.randn(rows, 2, EMBEDDING, device=DEVICE)
    embedding[0, 0] = torch.nan
    is_first = torch.tensor([[False, True]], device=DEVICE).expand(rows, 2)
    with whole(kernels), torch.no_grad():
        states, _ = rssm.observe_sequence(embedding, embedding[..., :3].nan_to_num(), is_first, make_start(**sizes))
    assert all(value[:, 1].isfinite().all() for value in states.values())


def test_a_model_may_refuse_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(gpu_paths, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(unroll, "whole_sequence_for", lambda shape, device: asked.append(True))
    for one_kernel in (True, False):
        rssm = make_rssm()
        rssm.one_kernel = one_kernel
        row = torch.zeros(2, 1, EMBEDDING, device=DEVICE)
        rssm.observe_sequence(row, row[..., :3], row[..., 0] > 0, make_start(2))
    assert asked == [True]


@KERNELS
def test_without_noise_the_likeliest_is_chosen(
    kernels: Any, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = CategoricalLatent.noise
    monkeypatch.setattr(
        CategoricalLatent, "noise", lambda self, *sizes, device: torch.ones_like(drawn(self, *sizes, device=device))
    )
    with torch.no_grad(), door.plain_formulas():
        expected = observe(sizes, length=2)[0]["stoch"]
    monkeypatch.setattr(CategoricalLatent, "noise", lambda self, *sizes, device: None)
    with torch.no_grad(), whole(kernels), trusted_formulas():
        assert torch.equal(observe(sizes, length=2)[0]["stoch"], expected.round())


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_a_dream_equals_the_formula(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    action = ActionSpec(kind=kind, sizes=(3,))  # type: ignore[arg-type]
    rssm = make_rssm(action)
    actor = shaken(LatentActor(input_size=48, action=action, layers=3, units=16, output_scale=1.0))
    start, decisions = make_start(ROWS), Decisions(actor, actor.noise(HORIZON, ROWS, device=DEVICE))
    monkeypatch.setattr(gpu_paths, "on_gpu", lambda tensor: True)
    found = []
    for is_whole in (None, False, True):
        torch.manual_seed(3)
        monkeypatch.setattr(dream_kernel, "fits_whole", lambda shape, rssm, policy, is_whole=is_whole: is_whole)
        with torch.no_grad(), door.plain_formulas() if is_whole is None else nullcontext():
            states, chosen = rssm.imagine(start, decisions, HORIZON)
            found.append((chosen, rssm.features(states)))
    for action_found, states_found in found[1:]:
        torch.testing.assert_close(action_found, found[0][0])
        torch.testing.assert_close(states_found, found[0][1], rtol=3e-5, atol=3e-5)


H200 = {"multiprocessor_count": 132, "max_shared_mem": 232_448}
RTX_4090 = {"multiprocessor_count": 128, "max_shared_mem": 101_376}
SLICE = {"multiprocessor_count": 14, "max_shared_mem": 232_448}  # of a GPU that several people share


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, int]], None]:
    def pretend(properties: dict[str, int]) -> None:
        utils = SimpleNamespace(get_device_properties=lambda index: properties)
        driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
        monkeypatch.setattr(sequence_kernels.triton.runtime, "driver", driver)

    return pretend


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"batch": 20}, False),  # rows come in sixteens
        ({"batch": 1024}, False),  # more programs than can wait for each other
        ({"deter": 2048, "hidden": 256}, False),  # a block's weights are more than a multiprocessor holds
        ({"hidden": 48}, False),
        ({"low": torch.float32}, False),
    ],
)
def test_only_small_models_in_half_precision_take_the_kernels(
    change: dict[str, Any], fits: bool, gpu: Callable[[dict[str, int]], None]
) -> None:
    gpu(H200)
    of_1m: dict[str, Any] = {"batch": 16, "deter": 512, "hidden": 64, "low": torch.bfloat16}
    rest = {"length": 64, "stoch": 128, "blocks": 8, "groups": 32, "unimix": 0.01}
    shape = unroll.Shape(**rest, **(of_1m | change))
    assert sequence_kernels.fits(shape, torch.device("cuda:0")) is fits
    assert unroll.whole_sequence_for(shape, torch.device("cuda:0")) is (sequence_kernels if fits else None)
    for smaller in (RTX_4090, SLICE):  # too little memory per program, too few programs at a time
        gpu(smaller)
        assert not sequence_kernels.fits(shape, torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"batch": 32}, False),  # twice the programs
        ({"stoch": 1024}, False),  # 32 classes: more memory than a program may have
        ({"deter": 4096, "hidden": 512, "stoch": 1024}, False),  # 50m
        ({"deter": 512, "hidden": 64, "stoch": 128}, False),  # 1m: its classes are too few
        ({"low": torch.float32}, False),
    ],
)
def test_only_models_of_size_12m_take_the_wide_kernels(
    change: dict[str, Any], fits: bool, gpu: Callable[[dict[str, int]], None]
) -> None:
    gpu(H200)
    of_12m: dict[str, Any] = {"batch": 16, "deter": 2048, "hidden": 256, "stoch": 512, "low": torch.bfloat16}
    rest: dict[str, Any] = {"length": 64, "blocks": 8, "groups": 32, "unimix": 0.01}
    shape = unroll.Shape(**rest, **(of_12m | change))
    assert wide_sequence_kernels.fits(shape, torch.device("cuda:0")) is fits
    for smaller in (RTX_4090, SLICE):
        gpu(smaller)
        assert not wide_sequence_kernels.fits(shape, torch.device("cuda:0"))


def test_only_the_networks_the_dream_knows_take_its_kernel() -> None:
    rssm = make_rssm()
    shape = unroll.Shape.of(rssm, make_start(ROWS), length=1, low=torch.bfloat16)
    several = ActionSpec(kind="multi_discrete", sizes=(2, 3))

    def policy(action: ActionSpec = CONTINUOUS, layers: int = 3, units: int = 16, **style: Any) -> Decisions:
        actor = LatentActor(input_size=48, action=action, layers=layers, units=units, **style)
        return Decisions(actor, torch.zeros(1))

    fits = dream_kernel.fits_whole
    assert fits(shape, rssm, policy())
    assert not fits(shape, rssm, lambda features, step: features)  # a policy it cannot look into
    assert not fits(shape, rssm, Decisions(SimpleNamespace(decide=None), torch.zeros(1)))  # type: ignore[arg-type]
    assert not fits(replace(shape, low=torch.float32), rssm, policy())
    assert not fits(replace(shape, batch=20), rssm, policy())
    for other in ({"action": several}, {"layers": 1}, {"units": 128}, {"activation": "elu"}):
        assert not fits(shape, rssm, policy(**other))  # type: ignore[arg-type]
    assert not fits(shape, rssm, policy(distribution="truncated"))
    rssm.prior_stack.layers = rssm.prior_stack.layers[:1]
    assert not fits(shape, rssm, policy())


@pytest.mark.gpu
@pytest.mark.parametrize(("classes", "deter", "hidden"), [(4, 512, 64), (16, 2048, 256)], ids=["1m", "12m"])
def test_on_a_gpu_half_precision_stays_close_to_the_loop_and_repeats_itself(
    classes: int, deter: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    latent = CategoricalLatent(groups=32, classes=classes)
    rssm = shaken(RSSM(input_size=24, action=CONTINUOUS, latent=latent, deter=deter, hidden=hidden, blocks=8))
    embedding, action = torch.randn(16, 64, 24, device=DEVICE), torch.randn(16, 64, 3, device=DEVICE)
    is_first = torch.rand(16, 64, device=DEVICE) < 0.05

    def observe() -> State:
        torch.manual_seed(1)
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
            return rssm.observe_sequence(embedding, action, is_first, rssm.initial_state(16, DEVICE))[0]

    first, again = observe(), observe()
    assert all(torch.equal(first[key], again[key]) for key in first)
    monkeypatch.setattr(unroll, "whole_sequence_for", lambda shape, device: None)
    looped = observe()
    # Rounding differs; now and then it tips one of the 32 choices, and from there the two go different ways.
    chose_alike = (first["stoch"] == looped["stoch"]).all(dim=-1)
    has_parted = (~chose_alike).cumsum(dim=1) - (~chose_alike).long() > 0  # before this row
    apart = (first["deter"] - looped["deter"]).abs().mean(dim=-1)
    assert not has_parted[:, 0].any() and (~has_parted).sum() > 24
    assert apart[~has_parted].max() < 0.02
