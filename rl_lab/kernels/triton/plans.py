"""The value of TD-MPC2's plans, in one kernel per layer instead of five.

    x [H+1, R, Z + A]    a latent and the action taken there, side by side, of every plan; the last one: the policy's
    chain                x[t] -> latent of x[t+1], H times, then the policy           layers wait for each other
    heads                rewards of x[0] to x[H-1] and two critics of x[H]            all at once

Every layer normalises what it reads, so that no kernel stands between two products. For many plans that is done once by
a kernel of its own, and cuBLAS multiplies.

Products read bf16 or fp16: what autocast says, and fp16 in the place of TF32, whose mantissa has as many bits.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_lab.kernels.triton.heads import mean_of_bins, symexp
from rl_lab.kernels.triton.normed import EPSILON, mish_factor, normed

MANY_ROWS = 2048  # from here on tensor cores are busy, and normalising once is cheaper than in every program
FEW_ROWS = 1024  # up to here small tiles, so that there are programs enough for a GPU
COPIED = 1024  # numbers of a program that copies parameters
SMALL_TILE, TILE = (32, 64, 8, 4), (32, 128, 8, 3)  # rows, columns, warps and stages of a program


@triton.jit
def _copy(source, out, place, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALL_ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A matrix `[ROWS, COLUMNS]` to `[ALL_ROWS, WIDTH]`, with zeros for the rest."""
    row, column = place // WIDTH, place % WIDTH
    value = tl.load(source + row * COLUMNS + column, mask=(row < ROWS) & (column < COLUMNS), other=0.0)
    tl.store(out + place, value, mask=row < ALL_ROWS)


@triton.jit
def _pack(
    weight0, weight1, weight2, bias0, bias1, bias2, scale0, scale1, shift0, shift1, matrices, vectors, matrices_row,
    vectors_row, INPUTS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, OUTPUTS: tl.constexpr,
    ALL_INPUTS: tl.constexpr, ALL_OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The parameters of a network's members, side by side as `Layers` has them; a program copies a part of one."""
    piece, member, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    place = piece * BLOCK + tl.arange(0, BLOCK)
    matrix = matrices + member * matrices_row
    if part == 0:
        _copy(weight0 + member * INPUTS * FIRST, matrix, place, INPUTS, FIRST, ALL_INPUTS, FIRST)
    elif part == 1:
        matrix += ALL_INPUTS * FIRST
        _copy(weight1 + member * FIRST * SECOND, matrix, place, FIRST, SECOND, FIRST, SECOND)
    elif part == 2:
        matrix += (ALL_INPUTS + SECOND) * FIRST
        _copy(weight2 + member * SECOND * OUTPUTS, matrix, place, SECOND, OUTPUTS, SECOND, ALL_OUTPUTS)
    else:
        vector = vectors + member * vectors_row
        _copy(bias0 + member * FIRST, vector, place, 1, FIRST, 1, FIRST)
        _copy(scale0 + member * FIRST, vector + FIRST, place, 1, FIRST, 1, FIRST)
        _copy(shift0 + member * FIRST, vector + 2 * FIRST, place, 1, FIRST, 1, FIRST)
        vector += 3 * FIRST
        _copy(bias1 + member * SECOND, vector, place, 1, SECOND, 1, SECOND)
        _copy(scale1 + member * SECOND, vector + SECOND, place, 1, SECOND, 1, SECOND)
        _copy(shift1 + member * SECOND, vector + 2 * SECOND, place, 1, SECOND, 1, SECOND)
        _copy(bias2 + member * OUTPUTS, vector + 3 * SECOND, place, 1, OUTPUTS, 1, ALL_OUTPUTS)


@triton.jit
def _member(head, draws, REWARDS: tl.constexpr, CRITICS: tl.constexpr, BLOCK: tl.constexpr):
    """Whose parameters a head has: the reward's are the first; two critics follow, those with the least `draws`."""
    critic = tl.arange(0, BLOCK)
    drawn = tl.load(draws + critic, mask=critic < CRITICS, other=float("inf"))
    first = tl.argmin(drawn, axis=0)
    second = tl.argmin(tl.where(critic == first, float("inf"), drawn), axis=0)
    return tl.where(head < REWARDS, 0, 1 + tl.where(head == REWARDS, first, second))


@triton.jit
def _layer(
    x, weights, bias, scale, shift, out, draws, rows, x_head, x_row, last_state, weights_row, vectors_row,
    REWARDS: tl.constexpr, CRITICS: tl.constexpr, MEMBERS: tl.constexpr, IS_NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    COLUMNS: tl.constexpr, PART: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2)
    if CRITICS > 0:
        member = _member(head, draws, REWARDS, CRITICS, MEMBERS).to(tl.int64)
        weights += member * weights_row
        bias += member * vectors_row
        scale += member * vectors_row
        shift += member * vectors_row
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < rows)[:, None]
    source = x + tl.minimum(head, last_state).to(tl.int64) * x_head + row[:, None] * x_row
    mean = tl.zeros([R], tl.float32)
    rstd = tl.zeros([R], tl.float32)
    if IS_NORMED:
        every = tl.arange(0, WHOLE)
        whole = tl.load(source + every[None, :], mask=here & (every < K)[None, :], other=0.0).to(tl.float32)
        mean = tl.sum(whole, axis=1) / K
        centred = tl.where((every < K)[None, :], whole - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / K + EPS)
    found = tl.zeros([R, COLUMNS], tl.float32)
    for start in range(0, K, PART):
        k = start + tl.arange(0, PART)
        value = tl.load(source + k[None, :], mask=here & (k < K)[None, :], other=0.0)
        there = (k < K)[:, None] & (column < N)[None, :]
        weight = tl.load(weights + k[:, None] * N + column[None, :], mask=there, other=0.0)
        if IS_NORMED:
            own_scale = tl.load(scale + k, mask=k < K, other=0.0)
            own_shift = tl.load(shift + k, mask=k < K, other=0.0)
            y = (value.to(tl.float32) - mean[:, None]) * rstd[:, None] * own_scale[None, :] + own_shift[None, :]
            value = (y * mish_factor(y)[0]).to(weight.dtype)
        found = tl.dot(value, weight, found)
    if HAS_BIAS:
        found += tl.load(bias + column, mask=column < N, other=0.0)[None, :]
    place = head.to(tl.int64) * rows * N + row[:, None] * N + column[None, :]
    tl.store(out + place, found, mask=here & (column < N)[None, :])


@triton.jit
def _act(
    answer, noise, action, count, answer_row, action_row, lowest, half_range, A: tl.constexpr, BLOCK: tl.constexpr
):
    """tanh of a draw around the mean, from a row's `[mean, spread]` to its place in x and to that of its noise."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    row, number = place // A, place % A
    mean = tl.load(answer + row * answer_row + number, mask=inside, other=0.0).to(tl.float32)
    spread = tl.load(answer + row * answer_row + A + number, mask=inside, other=0.0).to(tl.float32)
    std = tl.exp(lowest + half_range * (2.0 * tl.sigmoid(2.0 * spread)))
    drawn = mean + tl.load(noise + place, mask=inside, other=0.0) * std
    taken = 2.0 * tl.sigmoid(2.0 * drawn) - 1.0
    tl.store(noise + place, taken, mask=inside)
    tl.store(action + row * action_row + number, taken, mask=inside)


@triton.jit
def _value_of_plans(
    logits, bins, totals, rows, discount, REWARDS: tl.constexpr, IS_LEAST: tl.constexpr, K: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Discounted rewards, and after them the mean or the least of two values."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    half: tl.constexpr = K // 2
    k = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (k < half)[None, :]
    sizes = tl.load(bins + half + 1 + k, mask=k < half, other=0.0)
    total = tl.zeros([R], tl.float32)
    weight = total + 1.0
    first = total
    for head in tl.static_range(REWARDS + 2):
        start = logits + (head * rows + row) * WIDTH
        above = tl.load(start[:, None] + half + 1 + k[None, :], mask=inside, other=float("-inf")).to(tl.float32)
        below = tl.load(start[:, None] + half - 1 - k[None, :], mask=inside, other=float("-inf")).to(tl.float32)
        middle = tl.load(start + half, mask=row < rows, other=0.0).to(tl.float32)
        number = symexp(mean_of_bins(above, below, middle, sizes))
        if head < REWARDS:
            total += weight * number
            weight = weight * discount
        elif head == REWARDS:
            first = number
        elif IS_LEAST:
            total += weight * tl.minimum(first, number, propagate_nan=tl.PropagateNan.ALL)
        else:
            total += weight * 0.5 * (first + number)
    tl.store(totals + row, total, mask=row < rows)


def product_dtype() -> torch.dtype | None:
    """What products read here: autocast's own, fp16 for TF32, None for fp32."""
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return torch.float16 if torch.backends.cuda.matmul.allow_tf32 else None


class Layers:
    """Copies of networks of one shape, their members side by side, as products read them. Sizes are whole sixteens:
    only of such rows the compiler knows that they may be read in pieces of 16 bytes.

    matrices  [E, weight0 | weight1 | weight2]
    vectors   [E, bias0 | scale0 | shift0 | bias1 | scale1 | shift1 | bias2]
    """

    def __init__(self, mlps: list[Any], dtype: torch.dtype) -> None:
        first, second, outputs = (each.shape[2] for each in mlps[0].weights)
        inputs = mlps[0].weights[0].shape[1]
        self.sizes = (_whole(inputs), first, second, _whole(outputs))
        count, device = sum(len(mlp.weights[0]) for mlp in mlps), mlps[0].weights[0].device
        numbers = [before * after for before, after in pairwise(self.sizes)]
        self.matrices = torch.empty(count, sum(numbers), dtype=dtype, device=device)
        self.vectors = torch.empty(count, 3 * (first + second) + self.sizes[3], device=device)
        start = 0
        for mlp in mlps:
            members = len(mlp.weights[0])
            _pack[(triton.cdiv(max(numbers), COPIED), members, 4)](
                *mlp.weights, *mlp.biases, *mlp.norm_weights[:2], *mlp.norm_biases[:2], self.matrices[start:],
                self.vectors[start:], self.matrices.shape[1], self.vectors.shape[1], INPUTS=inputs, FIRST=first,
                SECOND=second, OUTPUTS=outputs, ALL_INPUTS=self.sizes[0], ALL_OUTPUTS=self.sizes[3], BLOCK=COPIED,
            )  # fmt: skip
            start += members
        self._set_views()

    def _set_views(self) -> None:
        shapes = list(pairwise(self.sizes))
        matrices = self.matrices.split([before * after for before, after in shapes], dim=1)
        self.weights = [each.unflatten(1, shape) for each, shape in zip(matrices, shapes, strict=True)]
        widths = [size for size in self.sizes[1:3] for _ in range(3)]
        vectors = self.vectors.split([*widths, self.sizes[3]], dim=1)
        self.biases, self.scales, self.shifts = vectors[0::3], vectors[1::3], vectors[2::3]

    def of(self, members: Tensor) -> Layers:
        """Those of some members."""
        found = object.__new__(Layers)
        found.sizes = self.sizes
        found.matrices, found.vectors = (each.index_select(0, members) for each in (self.matrices, self.vectors))
        found._set_views()
        return found

    def __call__(self, x: Tensor, *, has_bias: bool = True) -> Tensor:
        """The first member's: states `[1, R, W]` to `[1, R, outputs]`; without the last bias for who adds it."""
        if x.shape[1] < MANY_ROWS:
            return self._few(x, None, 0, has_bias=has_bias)
        out = x.new_empty(1, x.shape[1], self.sizes[3])
        self._many(x, slice(0, 1), out)
        return out.add_(self.biases[2][0]) if has_bias else out

    def heads(self, x: Tensor, draws: Tensor) -> Tensor:
        """Of rewards and critics `[H+1, R, W]` to `[H+2, R, outputs]`: the rewards of all states but the last, and of
        that one the two critics with the least `draws` `[E]`."""
        rewards, rows = len(x) - 1, x.shape[1]
        if rows < MANY_ROWS:
            return self._few(x, draws, rewards)
        out = x.new_empty(rewards + 2, rows, self.sizes[3])
        self._many(x[:-1].reshape(1, -1, x.shape[2]), slice(0, 1), out[:-2].view(1, -1, self.sizes[3]))
        out[:-2].add_(self.biases[2][0])
        critics = self.of(draws.argsort()[:2] + 1)
        critics._many(x[-1:].expand(2, -1, -1), slice(0, 2), out[-2:])
        out[-2:].add_(critics.biases[2].unsqueeze(1))
        return out

    def _few(self, x: Tensor, draws: Tensor | None, rewards: int, *, has_bias: bool = True) -> Tensor:
        """Normalised by the product that reads it."""
        rows, heads, critics = x.shape[1], 1 if draws is None else rewards + 2, 0 if draws is None else len(draws)
        size, columns, warps, stages = SMALL_TILE if rows * heads <= FEW_ROWS else TILE
        for level, (inputs, outputs) in enumerate(pairwise(self.sizes)):
            out, norm = torch.empty(heads, rows, outputs, dtype=x.dtype, device=x.device), max(level - 1, 0)
            _layer[(triton.cdiv(rows, size), triton.cdiv(outputs, columns), heads)](
                x, self.weights[level], self.biases[level], self.scales[norm], self.shifts[norm], out,
                self.vectors if draws is None else draws, rows, x.stride(0), x.stride(1), len(x) - 1,
                self.matrices.shape[1], self.vectors.shape[1], REWARDS=rewards, CRITICS=critics,
                MEMBERS=triton.next_power_of_2(max(critics, 1)), IS_NORMED=level > 0, HAS_BIAS=level < 2 or has_bias,
                K=inputs, WHOLE=triton.next_power_of_2(inputs), N=outputs, R=size, COLUMNS=columns, PART=64,
                EPS=EPSILON, num_warps=warps, num_stages=stages,
            )  # fmt: skip
            x = out
        return x

    def _many(self, x: Tensor, members: slice, out: Tensor) -> None:
        """Normalised once, and without the last bias."""
        for level in range(2):
            pre = torch.bmm(x, self.weights[level][members])
            x = torch.empty_like(pre)
            bias, scale, shift = (each[level][members] for each in (self.biases, self.scales, self.shifts))
            normed(pre, bias, scale, shift, x, simplex=0, out_row=x.shape[-1])
        torch.bmm(x, self.weights[2][members], out=out)


class Model:
    """Dynamics and policy of a workflow: they go on from rows of states and actions `[R, Z + A]`."""

    def __init__(self, workflow: Any, latent: Tensor, dtype: torch.dtype) -> None:
        self.workflow, self.latent, self.dtype = workflow, latent, dtype
        self.dynamics, self.actor = (Layers([part.mlp], dtype) for part in (workflow.dynamics, workflow.actor))
        self.latent_size, self.action_size = latent.shape[-1], workflow.action_size

    def states(self, count: int, horizon: int) -> Tensor:
        """`[horizon, N * count, Z + A]`, the first ones with the latents."""
        Z, rows = self.latent_size, len(self.latent) * count
        width = _whole(Z + self.action_size)
        x = torch.zeros(horizon, rows, width, dtype=self.dtype, device=self.latent.device)
        x[0, :, :Z].unflatten(0, (-1, count)).copy_(self.latent.unsqueeze(1))
        return x

    def advance(self, x: Tensor, step: int) -> None:
        """From row `step` to the latents of the next one."""
        last = self.workflow.dynamics.mlp
        after = self.dynamics(x[step : step + 1], has_bias=False)
        vectors = (last.biases[2], last.norm_weights[2], last.norm_biases[2])
        normed(after, *vectors, x[step + 1], simplex=last.simplex_size, out_row=x.shape[-1])

    def act(self, x: Tensor) -> Tensor:
        """The policy's actions `[R, A]` in states `[R, Z + A]`, which they join."""
        answer = self.actor(x[None, :, : self.latent_size])[0]
        taken = torch.randn(len(x), self.action_size, device=x.device)
        lowest, highest = self.workflow.actor.log_std_bounds
        _act[(triton.cdiv(taken.numel(), 256),)](
            answer, taken, x[:, self.latent_size :], taken.numel(), answer.stride(0), x.stride(0), float(lowest),
            0.5 * (highest - lowest), A=self.action_size, BLOCK=256,
        )  # fmt: skip
        return taken


class Scores(Model):
    """`ImplicitModelWorkflow.value_of_plans` from latents `[N, Z]`, for plans of one horizon."""

    def __init__(self, workflow: Any, latent: Tensor, dtype: torch.dtype) -> None:
        super().__init__(workflow, latent, dtype)
        self.reward_and_critics = Layers([workflow.reward_head.mlp, workflow.critic.mlp], dtype)
        self.x = latent.new_empty(0)

    def __call__(self, plans: Tensor) -> Tensor:
        """Plans `[N, C, H, A]` to numbers `[N, C]`."""
        count, candidates, horizon, A = plans.shape
        rows, Z = count * candidates, self.latent_size
        if self.x.shape[:2] != (horizon + 1, rows):
            self.x = self.states(candidates, horizon + 1)
        x = self.x
        x[:horizon, :, Z : Z + A].copy_(plans.reshape(rows, horizon, A).transpose(0, 1))
        for step in range(horizon):
            self.advance(x, step)
        self.act(x[horizon])
        draws = torch.rand(self.workflow.critic.members, device=plans.device)
        logits, bins = self.reward_and_critics.heads(x, draws), self.workflow.critic.bins
        totals = torch.empty(count, candidates, device=plans.device)
        _value_of_plans[(triton.cdiv(rows, 4),)](
            logits, bins, totals, rows, float(self.workflow.discount), REWARDS=horizon,
            IS_LEAST=self.workflow.plan_value == "least", K=len(bins), WIDTH=logits.shape[-1],
            BLOCK=triton.next_power_of_2(len(bins) // 2), R=4,
        )  # fmt: skip
        return totals


def _whole(size: int) -> int:
    """The next multiple of 16."""
    return (size + 15) // 16 * 16


def scores(workflow: Any, latent: Tensor, task: Tensor | None) -> Any:
    """`ImplicitModelWorkflow.scores`."""
    dtype = product_dtype()
    return NotImplemented if dtype is None else Scores(workflow, latent, dtype)


def proposed_plans(workflow: Any, latent: Tensor, horizon: int, task: Tensor | None = None) -> Tensor:
    """`ImplicitModelWorkflow.proposed_plans`."""
    dtype = product_dtype()
    if dtype is None:
        return NotImplemented
    model, actions = Model(workflow, latent, dtype), []
    x = model.states(workflow.policy_plans, horizon)
    for step in range(horizon):
        actions.append(model.act(x[step]))
        if step < horizon - 1:
            model.advance(x, step)
    return torch.stack(actions, dim=1).unflatten(0, (len(latent), workflow.policy_plans))
