"""`RSSM.observe_sequence` with DreamerV3's cell as one autograd node: states row by row, weight gradients all at once.

     forward, row t                                                  kernels between products
     x_t   = [deter_t-1, stoch_t-1], reset where is_first
     pre   = x W_in'                 two layers side by side         norm, SiLU       -> inputs (with the action's)
     mixed = inputs W_shared + deter-blocks W_own                    norm, SiLU       -> active
     gates = active W_gates                                          GRU gates        -> deter_t
     above = deter_t W_posterior' + from_embedding_t                 norm, SiLU       -> hidden
     param = hidden W_output'                                        softmax, choice  -> stoch_t

Left to autograd, each of the 64 steps would form its own gradient of every weight and add it up: a third of all matrix
products and a thousand kernels. Here the backward pass carries the states' gradients alone; the input of each product
is kept, and every weight's gradient is one product over all rows at the end. Weights are cast once, not once per step
(products with `out=`, as all are here, take no part in autocasting).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rl_lab.kernels.triton import elementwise, sequence, wide_sequence
from rl_lab.kernels.triton.elementwise import NORM_EPSILON


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

    @classmethod
    def of(cls, rssm: Any) -> Weights:
        cell, posterior = rssm.cell, rssm.posterior_layer
        return cls(
            *(cell.from_deter.linear.weight, cell.from_deter.linear.bias, cell.from_deter.norm.weight),
            *(cell.from_stoch.linear.weight, cell.from_stoch.linear.bias, cell.from_stoch.norm.weight),
            *(cell.mix.weight, cell.mix.bias, cell.mix_norm.weight, cell.gates.weight, cell.gates.bias),
            *(posterior.linear.weight[:, : rssm.deter], posterior.norm.weight),
            *(rssm.posterior_output.weight, rssm.posterior_output.bias),
        )


@dataclass(frozen=True)
class Shape:
    """Sizes and constants of one sequence."""

    length: int
    batch: int
    deter: int
    stoch: int
    hidden: int
    blocks: int
    groups: int
    unimix: float
    low: torch.dtype  # of matrix products
    high: torch.dtype = torch.float32  # of the memory
    epsilon: float = NORM_EPSILON

    @classmethod
    def of(cls, rssm: Any, state: dict[str, Tensor], *, length: int, low: torch.dtype) -> Shape:
        (batch, deter), stoch, latent = state["deter"].shape, state["stoch"].shape[1], rssm.latent
        sizes = {"hidden": rssm.cell.hidden, "blocks": rssm.cell.blocks, "groups": latent.groups}
        return cls(length, batch, deter, stoch, **sizes, unimix=latent.unimix, low=low, high=state["deter"].dtype)


def observe_sequence(
    rssm: Any, embedding: Tensor, action: Tensor, is_first: Tensor, state: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """`RSSM.observe_sequence`. What does not wait for the recurrence is computed for all rows at once: the layer that
    reads the actions, and what the posterior's first layer makes of the embeddings."""
    batch_size, length = is_first.shape
    noise = rssm.latent.noise(length, batch_size, device=embedding.device)
    from_action = rssm.cell.from_action(rssm.encode_action(action).masked_fill(is_first.unsqueeze(-1), 0.0))
    posterior = rssm.posterior_layer.linear
    from_embedding = F.linear(embedding, posterior.weight[:, rssm.deter :], posterior.bias)
    weights, keep = Weights.of(rssm), (~is_first).to(torch.float32).t().contiguous()
    shape = Shape.of(rssm, state, length=length, low=from_embedding.dtype)
    whole = whole_sequence_for(shape, embedding.device) if rssm.one_kernel else None
    inputs = (from_action.transpose(0, 1), from_embedding.transpose(0, 1), keep, noise, state["deter"], state["stoch"])
    tensors = [getattr(weights, field.name) for field in fields(Weights)]
    outputs = _Unroll.apply(shape, whole, *inputs, *tensors)  # type: ignore[no-untyped-call]
    deters, stochs, posteriors = (output.transpose(0, 1) for output in outputs)
    return {"deter": deters, "stoch": stochs}, posteriors


def whole_sequence_for(shape: Shape, device: torch.device) -> Any:
    """The module whose kernels go through all rows at once, if the model is small enough for one; or None."""
    return next((each for each in (sequence, wide_sequence) if each.fits(shape, device)), None)


def blocks_of(rows: Tensor, blocks: int) -> Tensor:
    """`[R, D]` as `[G, R, D/G]`, in place."""
    return rows.unflatten(1, (blocks, -1)).transpose(0, 1)


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


class Activations:
    """What every row leaves for the backward pass, time-major."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        def empty(*sizes: int, dtype: torch.dtype = shape.low) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        T, B, D, h, G = shape.length, shape.batch, shape.deter, shape.hidden, shape.blocks
        self.state = empty(T, B, D + shape.stoch)  # x_t
        self.before = empty(T, B, D, dtype=shape.high)  # deter_t-1 * keep_t
        self.pre = empty(T, B, 2 * h)
        self.inputs = empty(T, B, 3 * h)
        self.mixed = empty(T, B, D)
        self.mix_scale = empty(T, B, dtype=shape.high)  # of the norm, where one kernel goes through all rows
        self.active = empty(T, B, D)
        self.gates = empty(G, T, B, 3, D // G)
        self.deter = empty(T, B, D)  # deter_t as products read it
        self.above = empty(T, B, h)
        self.hidden = empty(T, B, h)
        self.output = empty(T, B, shape.stoch)


@dataclass(frozen=True)
class Forward:
    """One sequence: its inputs, and the tensors that its results are written to."""

    products: Products
    weights: Weights
    shape: Shape
    rows: Activations  # they hold the state before row 0 and the actions' part of the inputs
    from_embedding: Tensor  # [T, B, h]
    keep: Tensor  # [T, B]: 0 where is_first
    noise: Tensor | None  # [T, B, groups, classes]; None: the likeliest is chosen
    deters: Tensor  # [T, B, D]
    stochs: Tensor  # [T, B, Z]
    parameters: Tensor  # [T, B, Z]

    def run(self) -> None:
        """Row by row."""
        shape, rows, keep, D = self.shape, self.rows, self.keep, self.shape.deter
        for t in range(shape.length):
            keep_next = before = state = None
            if t + 1 < shape.length:
                keep_next, before, state = keep[t + 1], rows.before[t + 1], rows.state[t + 1]
            low_next, chosen_next = (None, None) if state is None else (state[:, :D], state[:, D:])
            after = (keep_next, self.deters[t], before, low_next)
            advance(self.products, self.weights, shape, rows, t, rows.state[t], rows.before[t], *after)
            torch.addmm(self.from_embedding[t], rows.deter[t], self.products.posterior.t(), out=rows.above[t])
            norm = (self.weights.posterior_norm, rows.hidden[t])
            elementwise.norm_silu(rows.above[t], None, *norm, segments=1, epsilon=shape.epsilon)
            torch.mm(rows.hidden[t], self.products.output.t(), out=rows.output[t])
            noise = None if self.noise is None else self.noise[t].flatten(1)
            args = (rows.output[t], self.weights.output_bias, noise, keep_next, self.parameters[t], self.stochs[t])
            elementwise.sample(*args, chosen_next, groups=shape.groups, unimix=shape.unimix)


class _Unroll(Function):
    """From the state before row 0, deter `[B, D]` and stoch `[B, Z]`, to deter, stoch and posterior of all rows.

    Time comes first here: from_action and from_embedding `[T, B, h]`, keep `[T, B]`, noise `[T, B, groups, classes]`;
    so are the results `[T, B, ...]`. No gradient flows into the state before row 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        shape: Shape,
        whole: Any,
        from_action: Tensor,
        from_embedding: Tensor,
        keep: Tensor,
        noise: Tensor | None,
        deter: Tensor,
        stoch: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = Weights(*tensors)
        products, rows = Products(weights, shape), Activations(shape, deter.device)
        D, is_first = shape.deter, keep[0].unsqueeze(-1) == 0.0
        deters = torch.empty_like(rows.before)
        stochs, parameters = deter.new_empty(2, shape.length, shape.batch, shape.stoch).unbind()
        rows.inputs[..., 2 * shape.hidden :] = from_action
        rows.before[0] = deter.masked_fill(is_first, 0.0)
        rows.state[0, :, :D] = rows.before[0]
        rows.state[0, :, D:] = stoch.masked_fill(is_first, 0.0)
        results = (deters, stochs, parameters)
        forward = Forward(products, weights, shape, rows, from_embedding.to(shape.low), keep, noise, *results)
        if whole is None:
            forward.run()
        else:
            whole.run_forward(forward)
        ctx.shape, ctx.products, ctx.rows, ctx.whole = shape, products, rows, whole
        ctx.save_for_backward(keep, parameters, *tensors)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, from_deter: Tensor, from_stoch: Tensor, from_parameters: Tensor) -> tuple[Any, ...]:
        keep, parameters, *tensors = ctx.saved_tensors
        back = Backward(ctx.shape, ctx.products, ctx.rows, Weights(*tensors), keep, parameters)
        gradients = (from_deter.contiguous(), from_stoch.contiguous(), from_parameters.contiguous())
        if ctx.whole is None:
            back.run(*gradients)
        else:
            ctx.whole.run_backward(back, *gradients)
        found = back.weights()
        inputs = (back.inputs[..., 2 * ctx.shape.hidden :], back.above, None, None, None, None)
        return None, None, *inputs, *[getattr(found, field.name) for field in fields(Weights)]


def advance(
    products: Products,
    weights: Weights,
    shape: Shape,
    rows: Activations,
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
    elementwise.norm_silu(
        rows.pre[t], products.inward_bias, products.inward_norm, rows.inputs[t], segments=2, epsilon=epsilon
    )
    torch.mm(rows.inputs[t], products.shared, out=rows.mixed[t])
    blocks_of(rows.mixed[t], G).baddbmm_(blocks_of(state[:, :D], G), products.own)
    elementwise.norm_silu(
        rows.mixed[t], weights.mix_bias, weights.mix_norm, rows.active[t], segments=1, epsilon=epsilon
    )
    torch.bmm(blocks_of(rows.active[t], G), products.gates, out=rows.gates[:, t].flatten(2))
    elementwise.gate(
        rows.gates[:, t], weights.gates_bias, before, keep_next, after, rows.deter[t], next_before, next_low
    )


class Backward:
    """Gradients of the result of each product, row by row, then of every weight at once."""

    def __init__(
        self, shape: Shape, products: Products, rows: Activations, weights: Weights, keep: Tensor, parameters: Tensor
    ) -> None:
        self.shape, self.products, self.rows, self.learned = shape, products, rows, weights
        self.keep, self.parameters = keep, parameters
        self.pre, self.inputs, self.mixed = (torch.empty_like(each) for each in (rows.pre, rows.inputs, rows.mixed))
        self.active, self.gates, self.above = (torch.empty_like(each) for each in (rows.active, rows.gates, rows.above))
        self.hidden, self.output = torch.empty_like(rows.hidden), torch.empty_like(rows.output)

    def run(self, from_deter: Tensor, from_stoch: Tensor, from_parameters: Tensor) -> None:
        shape, products, rows = self.shape, self.products, self.rows
        D, G, h = shape.deter, shape.blocks, shape.hidden
        constants: dict[str, Any] = {"epsilon": shape.epsilon, "wants_parameters": False}
        low_state, high = torch.empty_like(rows.state[0]), torch.empty_like(rows.before[0])
        from_posterior = torch.empty_like(rows.deter[0])
        states, directs = (low_state, torch.empty_like(low_state)), (high, torch.empty_like(high))
        for t in reversed(range(shape.length)):
            is_end = t + 1 == shape.length
            keep_next = None if is_end else self.keep[t + 1]
            later, later_direct = states[(t + 1) % 2], directs[(t + 1) % 2]
            state, direct = states[t % 2], directs[t % 2]
            elementwise.sample_backward(
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
            elementwise.norm_silu_backward(
                rows.above[t], None, self.learned.posterior_norm, self.hidden[t], self.above[t], segments=1, **constants
            )
            torch.mm(self.above[t], products.posterior, out=from_posterior)
            elementwise.gate_backward(
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
            elementwise.norm_silu_backward(
                rows.mixed[t], self.learned.mix_bias, self.learned.mix_norm, self.active[t], self.mixed[t],
                segments=1, **constants,
            )  # fmt: skip
            torch.mm(self.mixed[t], products.shared.t(), out=self.inputs[t])
            elementwise.norm_silu_backward(
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
        found = elementwise.norm_silu_backward(
            flat, bias, weight, gradient, torch.empty_like(flat), segments=segments, epsilon=self.shape.epsilon,
            wants_parameters=True,
        )  # fmt: skip
        assert found is not None
        return found
