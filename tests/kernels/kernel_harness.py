"""One harness for every fast path: the same results and gradients as the formula it stands for, on hard inputs.

A case makes a call afresh from a seed: `make(inputs) -> Call`. `Inputs` draws tensors for one variant: how many rows,
how they lie in memory, which values they have. The call is made twice from the same seed, once through the door and
once as the formula is written; then results, gradients and the random generator are compared, and what was passed in,
with all parameters, must be as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.kernels import door

ROWS = (1, 2, 3, 64, 257)


@dataclass(frozen=True)
class Variant:
    rows: int = 64
    layout: str = "contiguous"  # contiguous, strided, transposed
    values: str = "normal"  # normal, saturated, nan
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.layout}, {self.values}, {str(self.dtype).removeprefix('torch.')}"


VARIANTS = [
    *(Variant(rows=rows) for rows in ROWS),
    *(Variant(layout=layout) for layout in ("strided", "transposed")),
    *(Variant(values=values) for values in ("saturated", "nan")),
]


class Inputs:
    """Tensors of one variant; the same ones for the same seed."""

    def __init__(self, variant: Variant, seed: int) -> None:
        self.variant, self.rows = variant, variant.rows
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *sizes: int, requires_grad: bool = False, scale: float = 1.0) -> Tensor:
        """`[rows, *sizes]`, laid out and valued as the variant says."""
        values = torch.randn(self.rows, *sizes, generator=self.generator) * scale
        if self.variant.values == "saturated":
            values = values * 100.0
        if self.variant.values == "nan" and values.numel() > 1:
            values.view(-1)[values.numel() // 2] = torch.nan
        values = values.to(self.variant.dtype)
        if self.variant.layout == "strided":
            wide = torch.zeros(self.rows, *(2 * size for size in sizes), dtype=values.dtype)
            place = wide[(slice(None), *(slice(None, None, 2) for _ in sizes))]
            values = place.copy_(values) if sizes else torch.stack((values, values), dim=1)[:, 0]
        elif self.variant.layout == "transposed" and sizes:
            values = values.transpose(0, -1).contiguous().transpose(0, -1)
        return values.requires_grad_(requires_grad)

    def integers(self, high: int, *sizes: int) -> Tensor:
        return torch.randint(high, (self.rows, *sizes), generator=self.generator)

    def uniform(self, *sizes: int) -> Tensor:
        return torch.rand(self.rows, *sizes, generator=self.generator)


@dataclass
class Call:
    """`formula(*args, **keywords)`; gradients are compared for `leaves` and for the parameters of `modules`."""

    formula: Callable[..., Any]
    args: Sequence[Any] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    modules: Sequence[nn.Module] = ()
    leaves: Sequence[Tensor] = ()

    def learning(self) -> list[Tensor]:
        own = [parameter for module in self.modules for parameter in module.parameters()]
        return [tensor for tensor in (*self.leaves, *own) if tensor.requires_grad]

    def everything(self) -> list[Tensor]:
        own = [each for module in self.modules for each in (*module.parameters(), *module.buffers())]
        return [*tensors_in((self.args, self.keywords)), *own]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)
    elif hasattr(tree, "__dataclass_fields__"):
        yield from tensors_in(vars(tree))


def run(call: Call, *, plain: bool, seed: int) -> tuple[list[Tensor], list[Tensor | None], Tensor]:
    """Results, gradients of what learns, and where the random generator stands."""
    torch.manual_seed(seed)
    before = [tensor.detach().clone() for tensor in call.everything()]
    with door.plain_formulas() if plain else nullcontext():
        output = call.formula(*call.args, **call.keywords)
        known = getattr(output, "gradients", None)
        assert known is None or not plain, "the formula itself leaves its gradients to autograd"
        results = list(tensors_in(output if known is None else replace(output, gradients=None)))
        gradients = _gradients(call, results) if known is None else _known_gradients(call, results, output)
    for tensor, old in zip(call.everything(), before, strict=True):
        assert torch.equal(tensor.nan_to_num(), old.nan_to_num()), "an input or a parameter was changed"
    return [result.detach() for result in results], gradients, torch.get_rng_state()


def _gradients(call: Call, results: Sequence[Tensor]) -> list[Tensor | None]:
    learning = call.learning()
    differentiable = [result for result in results if result.requires_grad]
    if not learning or not differentiable:
        return []
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(result.shape, generator=generator).to(result.dtype) for result in differentiable]
    return list(torch.autograd.grad(differentiable, learning, weights, allow_unused=True))


def _known_gradients(call: Call, results: Sequence[Tensor], output: Any) -> list[Tensor | None]:
    """Those a loss brings with it, of the sum of its terms with the weights that they have in `_gradients`."""
    assert not any(result.requires_grad for result in results), "a loss with known gradients has no graph"
    generator = torch.Generator().manual_seed(7)
    scales = {name: float(torch.randn((), generator=generator)) for name in output.terms}
    known = output.gradients(scales)
    by_parameter = {id(each): gradient for each, gradient in zip(known.parameters, known.values, strict=True)}
    if known.joined is not None:
        assert torch.equal(known.joined.nan_to_num(), torch.cat([v.flatten() for v in known.values]).nan_to_num())
    return [by_parameter.get(id(parameter)) for parameter in call.learning()]


class _Trusted:
    """Stands for what a fast path was read from, and holds while it is told to."""

    def __init__(self) -> None:
        self.holds = True

    def still_holds(self) -> bool:
        return self.holds


@contextmanager
def trusted_formulas() -> Iterator[None]:
    """Inside, fast paths are used although a test has replaced a formula, such as a draw, on both sides alike."""
    trusted, look_up = _Trusted(), door._look_up
    door._look_up = lambda name, plain: (door.find(name), trusted)  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        door._look_up, trusted.holds = look_up, False


def check(
    name: str,
    make: Callable[[Inputs], Call],
    variant: Variant,
    *,
    seed: int = 0,
    tolerance: float = 2e-5,
    is_used: bool = True,
) -> None:
    """The fast path `name` equals its formula; `is_used` says whether it should have been taken for this variant."""
    door.open_door(True, takes_unmeasured=True)
    fast = run(make(Inputs(variant, seed)), plain=False, seed=seed)
    assert (name.removeprefix("rl_lab.kernels.") in door.in_use()) == is_used, f"{door.in_use()}, {door._door.edited}"
    plain = run(make(Inputs(variant, seed)), plain=True, seed=seed)
    assert len(fast[0]) == len(plain[0]) and len(fast[1]) == len(plain[1])
    assert torch.equal(fast[2], plain[2]), "the two draw different random numbers"
    gradients = list(zip(fast[1], plain[1], strict=True))
    if variant.values == "nan" and gradients:  # which numbers it spoils is a matter of order, that it does is not
        spoilt = [any(each is not None and bool(each.isnan().any()) for each in side) for side in (fast[1], plain[1])]
        assert spoilt[0] == spoilt[1], "NaN reaches the gradients of one of the two only"
        gradients = []
    for ours, theirs in [*zip(fast[0], plain[0], strict=True), *gradients]:
        if ours is None or theirs is None:
            assert (ours is None or not ours.any()) and (theirs is None or not theirs.any())
            continue
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (ours.shape, theirs.shape, ours.dtype)
        finite = theirs.float().nan_to_num(posinf=0.0, neginf=0.0).abs()
        scale = float(finite.max().clamp(min=1.0)) if finite.numel() else 1.0
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def shaken(part: Any, seed: int = 0) -> Any:
    """With biases and norms of their own, so that each one matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return part
