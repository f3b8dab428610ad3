"""DreamerV3's recurrence over a whole sequence as one autograd node: states one by one, weights all at once.

     forward, row t                                                  kernels between products
     x_t   = [deter_t-1, stoch_t-1] * keep_t
     pre   = x W_in'                 two layers side by side         norm, SiLU       -> inputs (with the action's)
     mixed = inputs W_shared + deter-blocks W_own                    norm, SiLU       -> active
     gates = active W_gates                                          GRU gates        -> deter_t
     above = deter_t W_posterior' + from_embedding_t                 norm, SiLU       -> hidden
     param = hidden W_output'                                        softmax, choice  -> stoch_t

Left to autograd, each of the 64 steps would form its own gradient of every weight and add it up: a third of all matrix
products and a thousand kernels. Here the way back carries the states' gradients alone; what each product received is
kept, and every weight's gradient is one product over all rows at the end. Weights are cast once, not once per step
(products that are told where to write, as all are here, take no part in automatic casting).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rl_lab.kernels.plain import Kernels, blocks_of, kernels_for


@dataclass(frozen=True)
class Weights:
    """Everything the recurrence learns, in the shapes of its layers."""

    deter_in: Tensor  # [h, D]
    deter_in_bias: Tensor
    deter_in_norm: Tensor
    stoch_in: Tensor  # [h, Z]
    stoch_in_bias: Tensor
    stoch_in_norm: Tensor
    mix: Tensor  # [G, D/G + 3h, D/G]
    mix_bias: Tensor
    mix_norm: Tensor
    gates: Tensor  # [G, D/G, 3D/G]
    gates_bias: Tensor
    posterior: Tensor  # [h, D]: the deter's columns of the posterior's first layer
    posterior_norm: Tensor
    output: Tensor  # [P, h]
    output_bias: Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes and constants of one unroll."""

    length: int
    batch: int
    deter: int
    stoch: int
    hidden: int
    blocks: int
    groups: int
    unimix: float
    epsilon: float
    low: torch.dtype  # of matrix products
    high: torch.dtype  # of the memory that is carried on
    one_kernel: bool = True  # for all steps, where there is one that fits

    @classmethod
    def of(cls, weights: Weights, deter: Tensor, stoch: Tensor, **constants: Any) -> Shape:
        """From a state deter `[B, D]`, stoch `[B, Z]`, and the numbers that no tensor tells."""
        return cls(
            batch=len(deter),
            deter=deter.shape[-1],
            stoch=stoch.shape[-1],
            hidden=len(weights.deter_in),
            blocks=weights.gates.shape[0],
            high=deter.dtype,
            **constants,
        )


def unroll(
    weights: Weights,
    from_action: Tensor,
    from_embedding: Tensor,
    keep: Tensor,
    noise: Tensor | None,
    deter: Tensor,
    stoch: Tensor,
    *,
    groups: int,
    unimix: float,
    epsilon: float,
    low: torch.dtype,
    one_kernel: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the state before row 0, deter `[B, D]` and stoch `[B, Z]`, to deter, stoch and posterior of all rows.

    Time comes first here: from_action and from_embedding `[T, B, h]`, keep `[T, B]`, noise `[T, B, groups, classes]`;
    so are the results `[T, B, ...]`. No gradient flows into the state before row 0.
    """
    constants = {"groups": groups, "unimix": unimix, "epsilon": epsilon, "low": low, "one_kernel": one_kernel}
    shape = Shape.of(weights, deter, stoch, length=len(keep), **constants)
    tensors = [getattr(weights, field.name) for field in fields(Weights)]
    result: tuple[Tensor, Tensor, Tensor] = _Unroll.apply(  # type: ignore[no-untyped-call]
        shape, from_action, from_embedding, keep, noise, deter, stoch, *tensors
    )
    return result


class Products:
    """The weights as the products read them: cast once, cut and laid side by side."""

    def __init__(self, weights: Weights, shape: Shape) -> None:
        size, hidden, low = shape.deter, shape.hidden, shape.low
        # Two layers as one product of twice the width: the zeros cost less than a second kernel would.
        self.inward = weights.deter_in.new_zeros(2 * hidden, size + shape.stoch, dtype=low)
        self.inward[:hidden, :size] = weights.deter_in
        self.inward[hidden:, size:] = weights.stoch_in
        own, shared = weights.mix.split((size // shape.blocks, 3 * hidden), dim=1)
        self.own = own.to(low)  # [G, D/G, D/G]
        self.shared = shared.transpose(0, 1).reshape(3 * hidden, size).to(low)
        self.gates = weights.gates.to(low)
        self.posterior = weights.posterior.to(low)
        self.output = weights.output.to(low)
        self.inward_bias = torch.cat((weights.deter_in_bias, weights.stoch_in_bias))
        self.inward_norm = torch.cat((weights.deter_in_norm, weights.stoch_in_norm))


class Rows:
    """What every row leaves behind for the way back, time-major."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        def room(*sizes: int, dtype: torch.dtype = shape.low) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        T, B, D, h, G = shape.length, shape.batch, shape.deter, shape.hidden, shape.blocks
        self.state = room(T, B, D + shape.stoch)  # x_t
        self.before = room(T, B, D, dtype=shape.high)  # deter_t-1 * keep_t
        self.pre = room(T, B, 2 * h)
        self.inputs = room(T, B, 3 * h)
        self.mixed = room(T, B, D)
        self.mix_scale = room(T, B, dtype=shape.high)  # of the norm, where one kernel goes through all rows
        self.active = room(T, B, D)
        self.gates = room(G, T, B, 3, D // G)
        self.deter = room(T, B, D)  # deter_t as products read it
        self.above = room(T, B, h)
        self.hidden = room(T, B, h)
        self.output = room(T, B, shape.stoch)


@dataclass(frozen=True)
class Course:
    """One sequence: what is known of it, and room for what becomes of it."""

    products: Products
    weights: Weights
    shape: Shape
    rows: Rows  # they hold the state before row 0 and the actions' part of the inputs
    from_embedding: Tensor  # [T, B, h]
    keep: Tensor  # [T, B]
    noise: Tensor | None  # [T, B, groups, classes]; None: the likeliest is chosen
    deters: Tensor  # [T, B, D]
    stochs: Tensor  # [T, B, Z]
    parameters: Tensor  # [T, B, Z]


def whole_sequence_for(shape: Shape, device: torch.device) -> Any:
    """The kernels that go through all rows at once, where there is a GPU and the model is small enough; or None."""
    if device.type != "cuda" or not shape.one_kernel:
        return None
    from rl_lab.kernels.triton import sequence as sequence_kernels
    from rl_lab.kernels.triton import wide_sequence as wide_sequence_kernels

    return next((each for each in (sequence_kernels, wide_sequence_kernels) if each.fits(shape, device)), None)


class _Unroll(Function):
    @staticmethod
    def forward(
        ctx: Any,
        shape: Shape,
        from_action: Tensor,
        from_embedding: Tensor,
        keep: Tensor,
        noise: Tensor | None,
        deter: Tensor,
        stoch: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = Weights(*tensors)
        products, rows = Products(weights, shape), Rows(shape, deter.device)
        T, D = shape.length, shape.deter
        deters = torch.empty_like(rows.before)
        stochs, parameters = deter.new_empty(2, T, shape.batch, shape.stoch).unbind()
        from_embedding = from_embedding.to(shape.low)
        rows.inputs[..., 2 * shape.hidden :] = from_action
        rows.before[0] = deter * keep[0].unsqueeze(-1)
        rows.state[0, :, :D] = rows.before[0]
        rows.state[0, :, D:] = stoch * keep[0].unsqueeze(-1)
        results = (deters, stochs, parameters)
        whole = whole_sequence_for(shape, deter.device)
        follow = _follow if whole is None else whole.follow
        follow(Course(products, weights, shape, rows, from_embedding, keep, noise, *results))
        ctx.shape, ctx.products, ctx.rows, ctx.whole = shape, products, rows, whole
        ctx.save_for_backward(keep, parameters, *tensors)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, from_deter: Tensor, from_stoch: Tensor, from_parameters: Tensor) -> tuple[Any, ...]:
        shape, products, rows = ctx.shape, ctx.products, ctx.rows
        keep, parameters, *tensors = ctx.saved_tensors
        back = Slopes(shape, products, rows, Weights(*tensors), keep, parameters)
        told = (from_deter.contiguous(), from_stoch.contiguous(), from_parameters.contiguous())
        if ctx.whole is None:
            back.states(*told)
        else:
            ctx.whole.trace_back(back, *told)
        gradients = back.weights()
        from_action = back.inputs[..., 2 * shape.hidden :]
        return (
            None,
            from_action,
            back.above,
            None,
            None,
            None,
            None,
            *[getattr(gradients, field.name) for field in fields(Weights)],
        )


def _follow(course: Course) -> None:
    """Row by row."""
    products, weights, shape, rows = course.products, course.weights, course.shape, course.rows
    keep, noise, deters = course.keep, course.noise, course.deters
    kernels, T, D = kernels_for(keep.device), shape.length, shape.deter
    for t in range(T):
        following = t + 1 if t + 1 < T else None
        keep_next = None if following is None else keep[following]
        _advance(
            kernels,
            products,
            weights,
            shape,
            rows,
            t,
            rows.state[t],
            rows.before[t],
            keep_next,
            deters[t],
            None if following is None else rows.before[following],
            None if following is None else rows.state[following, :, :D],
        )
        torch.addmm(course.from_embedding[t], rows.deter[t], products.posterior.t(), out=rows.above[t])
        kernels.norm_silu(
            rows.above[t], None, weights.posterior_norm, rows.hidden[t], segments=1, epsilon=shape.epsilon
        )
        torch.mm(rows.hidden[t], products.output.t(), out=rows.output[t])
        kernels.sample(
            rows.output[t],
            weights.output_bias,
            None if noise is None else noise[t].flatten(1),
            keep_next,
            course.parameters[t],
            course.stochs[t],
            None if following is None else rows.state[following, :, D:],
            groups=shape.groups,
            unimix=shape.unimix,
        )


def _advance(
    kernels: Kernels,
    products: Products,
    weights: Weights,
    shape: Shape,
    rows: Rows,
    t: int,
    state: Tensor,
    before: Tensor,
    keep_next: Tensor | None,
    after: Tensor,
    next_before: Tensor | None,
    next_low: Tensor | None,
) -> None:
    """One row's deter, from the state before it and the action's part of its inputs."""
    D, G, epsilon = shape.deter, shape.blocks, shape.epsilon
    torch.mm(state, products.inward.t(), out=rows.pre[t])
    kernels.norm_silu(
        rows.pre[t], products.inward_bias, products.inward_norm, rows.inputs[t], segments=2, epsilon=epsilon
    )
    torch.mm(rows.inputs[t], products.shared, out=rows.mixed[t])
    blocks_of(rows.mixed[t], G).baddbmm_(blocks_of(state[:, :D], G), products.own)
    kernels.norm_silu(rows.mixed[t], weights.mix_bias, weights.mix_norm, rows.active[t], segments=1, epsilon=epsilon)
    torch.bmm(blocks_of(rows.active[t], G), products.gates, out=rows.gates[:, t].flatten(2))
    kernels.gate(rows.gates[:, t], weights.gates_bias, before, keep_next, after, rows.deter[t], next_before, next_low)


@torch.no_grad()
def dream(
    weights: Weights,
    start: dict[str, Tensor],
    decide: Callable[[Tensor, int], Tensor],
    expect: Callable[[Tensor], Tensor],
    noise: Tensor | None,
    *,
    shape: Shape,
    horizon: int,
) -> Tensor:
    """Without a graph, `horizon` steps from states `[N, ...]`: deter and stoch side by side, `[H+1, N, D+Z]` in
    `shape.low`; `shape` is that of one step.

    `decide(state, step)` gives the action's part of the cell's inputs `[N, h]`, `expect(deter)` the prior's logits
    without their bias, which is `weights.output_bias` here.
    """
    deter, stoch = start["deter"], start["stoch"]
    count, D, Z, low = shape.batch, shape.deter, shape.stoch, shape.low
    kernels, products, rows = kernels_for(deter.device), Products(weights, shape), Rows(shape, deter.device)
    states = torch.empty(horizon + 1, count, D + Z, dtype=low, device=deter.device)
    states[0, :, :D], states[0, :, D:] = deter, stoch
    before, after = deter.clone(), torch.empty_like(deter)
    parameters, choice = deter.new_empty(2, count, Z).unbind()
    everyone = deter.new_ones(count)
    for step in range(horizon):
        following = states[step + 1]
        rows.inputs[0, :, 2 * shape.hidden :] = decide(states[step], step)
        _advance(
            kernels, products, weights, shape, rows, 0, states[step], before, everyone, after, before,
            following[:, :D],
        )  # fmt: skip
        kernels.sample(
            expect(rows.deter[0]),
            weights.output_bias,
            None if noise is None else noise[step].flatten(1),
            everyone,
            parameters,
            choice,
            following[:, D:],
            groups=shape.groups,
            unimix=shape.unimix,
        )
    return states


class Slopes:
    """The way back: gradients of what each product gave, row by row, then of every weight at once."""

    def __init__(
        self, shape: Shape, products: Products, rows: Rows, weights: Weights, keep: Tensor, parameters: Tensor
    ) -> None:
        self.shape, self.products, self.rows, self.learned = shape, products, rows, weights
        self.keep, self.parameters = keep, parameters
        self.kernels = kernels_for(keep.device)
        self.pre, self.inputs, self.mixed = (torch.empty_like(each) for each in (rows.pre, rows.inputs, rows.mixed))
        self.active, self.gates, self.above = (torch.empty_like(each) for each in (rows.active, rows.gates, rows.above))
        self.hidden, self.output = torch.empty_like(rows.hidden), torch.empty_like(rows.output)

    def states(self, from_deter: Tensor, from_stoch: Tensor, from_parameters: Tensor) -> None:
        shape, products, rows, kernels = self.shape, self.products, self.rows, self.kernels
        D, G, h = shape.deter, shape.blocks, shape.hidden
        constants = {"epsilon": shape.epsilon, "wants_parameters": False}
        low_state, high = torch.empty_like(rows.state[0]), torch.empty_like(rows.before[0])
        from_posterior = torch.empty_like(rows.deter[0])
        states, directs = (low_state, torch.empty_like(low_state)), (high, torch.empty_like(high))
        for t in reversed(range(shape.length)):
            is_end = t + 1 == shape.length
            keep_next = None if is_end else self.keep[t + 1]
            later, later_direct = states[(t + 1) % 2], directs[(t + 1) % 2]
            state, direct = states[t % 2], directs[t % 2]
            kernels.sample_backward(
                self.parameters[t],
                from_stoch[t],
                from_parameters[t],
                None if is_end else later[:, D:],
                keep_next,
                self.output[t],
                groups=shape.groups,
                unimix=shape.unimix,
            )
            torch.mm(self.output[t], products.output, out=self.hidden[t])
            kernels.norm_silu_backward(
                rows.above[t], None, self.learned.posterior_norm, self.hidden[t], self.above[t], segments=1, **constants
            )
            torch.mm(self.above[t], products.posterior, out=from_posterior)
            kernels.gate_backward(
                rows.gates[:, t],
                self.learned.gates_bias,
                rows.before[t],
                from_deter[t],
                from_posterior,
                None if is_end else later[:, :D],
                None if is_end else later_direct,
                keep_next,
                self.gates[:, t],
                direct,
            )
            torch.bmm(self.gates[:, t].flatten(2), products.gates.transpose(1, 2), out=blocks_of(self.active[t], G))
            kernels.norm_silu_backward(
                rows.mixed[t], self.learned.mix_bias, self.learned.mix_norm, self.active[t], self.mixed[t],
                segments=1, **constants,
            )  # fmt: skip
            torch.mm(self.mixed[t], products.shared.t(), out=self.inputs[t])
            kernels.norm_silu_backward(
                rows.pre[t], products.inward_bias, products.inward_norm, self.inputs[t, :, : 2 * h], self.pre[t],
                segments=2, **constants,
            )  # fmt: skip
            torch.mm(self.pre[t], products.inward, out=state)
            blocks_of(state[:, :D], G).baddbmm_(blocks_of(self.mixed[t], G), products.own.transpose(1, 2))

    def weights(self) -> Weights:
        """One product over all rows per matrix, one pass over all rows per norm."""
        shape, rows = self.shape, self.rows
        D, G, h = shape.deter, shape.blocks, shape.hidden
        pre, inputs, mixed, active = (each.flatten(0, 1) for each in (self.pre, self.inputs, self.mixed, self.active))
        above, hidden, output = (each.flatten(0, 1) for each in (self.above, self.hidden, self.output))
        state, gates = rows.state.flatten(0, 1), self.gates.flatten(1, 2).flatten(2)  # [R, D + Z], [G, R, 3D/G]
        inward_bias, inward_norm = self._bias_and_norm(
            rows.pre, self.products.inward_bias, self.products.inward_norm, inputs[:, : 2 * h], 2
        )
        mix_bias, mix_norm = self._bias_and_norm(rows.mixed, self.learned.mix_bias, self.learned.mix_norm, active, 1)
        _, posterior_norm = self._bias_and_norm(rows.above, None, self.learned.posterior_norm, hidden, 1)
        own = torch.bmm(blocks_of(state[:, :D], G).transpose(1, 2), blocks_of(mixed, G))
        shared = rows.inputs.flatten(0, 1).t().mm(mixed).view(3 * h, G, D // G).transpose(0, 1)
        return Weights(
            deter_in=pre[:, :h].t().mm(state[:, :D]).to(shape.high),
            deter_in_bias=inward_bias[:h],
            deter_in_norm=inward_norm[:h],
            stoch_in=pre[:, h:].t().mm(state[:, D:]).to(shape.high),
            stoch_in_bias=inward_bias[h:],
            stoch_in_norm=inward_norm[h:],
            mix=torch.cat((own, shared), dim=1).to(shape.high),
            mix_bias=mix_bias,
            mix_norm=mix_norm,
            gates=torch.bmm(blocks_of(rows.active.flatten(0, 1), G).transpose(1, 2), gates).to(shape.high),
            gates_bias=gates.sum(dim=1, dtype=shape.high).flatten(),
            posterior=above.t().mm(rows.deter.flatten(0, 1)).to(shape.high),
            posterior_norm=posterior_norm,
            output=output.t().mm(rows.hidden.flatten(0, 1)).to(shape.high),
            output_bias=output.sum(dim=0, dtype=shape.high),
        )

    def _bias_and_norm(
        self, pre: Tensor, bias: Tensor | None, weight: Tensor, gradient: Tensor, segments: int
    ) -> tuple[Tensor, Tensor]:
        flat = pre.flatten(0, 1)
        found: tuple[Tensor, Tensor] = self.kernels.norm_silu_backward(
            flat, bias, weight, gradient, torch.empty_like(flat), segments=segments, epsilon=self.shape.epsilon,
            wants_parameters=True,
        )  # fmt: skip
        return found
