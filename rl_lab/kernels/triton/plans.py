"""What TD-MPC2's plans promise, in one kernel per layer instead of five.

    x [H+1, R, Z + A]    a latent and the action taken there, side by side, of every plan; the last one: the policy's
    chain                x[t] -> latent of x[t+1], H times, then the policy           layers wait for each other
    judges               rewards of x[0] to x[H-1] and two critics of x[H]            all of them at once

Every layer normalises what it reads, so that no kernel stands between two products. For many plans that is done once by
a kernel of its own, and cuBLAS multiplies.

Products read bf16 or fp16: what autocast says, and fp16 in the place of TF32, whose mantissa has as many bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_lab.kernels.triton.heads import mean_of_bins, symexp
from rl_lab.kernels.triton.normed import EPSILON, mish_factor, normed

MANY_ROWS = 2048  # from here on tensor cores are busy, and normalising once is cheaper than in every program
FEW_ROWS = 1024  # up to here small tiles, so that there are programs enough for a GPU
SMALL_TILE, TILE = (32, 64, 8, 4), (64, 64, 8, 3)  # rows, columns, warps and stages of a program


@triton.jit
def _layer(
    x, weights, bias, scale, shift, out, drawn, rows, x_judge, x_row, last_state, REWARDS: tl.constexpr,
    HAS_DRAWN: tl.constexpr, IS_NORMED: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    judge = tl.program_id(2)
    member = judge * 0
    if HAS_DRAWN:
        member = tl.where(judge < REWARDS, 0, tl.load(drawn + tl.maximum(judge - REWARDS, 0)).to(tl.int32) + 1)
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < rows)[:, None]
    source = x + tl.minimum(judge, last_state).to(tl.int64) * x_judge + row[:, None] * x_row
    mean = tl.zeros([R], tl.float32)
    deviation = tl.zeros([R], tl.float32)
    if IS_NORMED:
        every = tl.arange(0, WHOLE)
        whole = tl.load(source + every[None, :], mask=here & (every < K)[None, :], other=0.0).to(tl.float32)
        mean = tl.sum(whole, axis=1) / K
        centred = tl.where((every < K)[None, :], whole - mean[:, None], 0.0)
        deviation = tl.rsqrt(tl.sum(centred * centred, axis=1) / K + EPS)
    found = tl.zeros([R, COLUMNS], tl.float32)
    for start in range(0, K, PART):
        k = start + tl.arange(0, PART)
        value = tl.load(source + k[None, :], mask=here & (k < K)[None, :], other=0.0)
        there = (k < K)[:, None] & (column < N)[None, :]
        weight = tl.load(weights + (member * K + k)[:, None] * N + column[None, :], mask=there, other=0.0)
        if IS_NORMED:
            own_scale = tl.load(scale + member * K + k, mask=k < K, other=0.0)
            own_shift = tl.load(shift + member * K + k, mask=k < K, other=0.0)
            y = (value.to(tl.float32) - mean[:, None]) * deviation[:, None] * own_scale[None, :] + own_shift[None, :]
            value = (y * mish_factor(y)[0]).to(weight.dtype)
        found = tl.dot(value, weight, found)
    found += tl.load(bias + member * N + column, mask=column < N, other=0.0)[None, :]
    place = judge.to(tl.int64) * rows * N + row[:, None] * N + column[None, :]
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
def _promise(
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
    for judge in tl.static_range(REWARDS + 2):
        start = logits + (judge * rows + row) * WIDTH
        above = tl.load(start[:, None] + half + 1 + k[None, :], mask=inside, other=float("-inf")).to(tl.float32)
        below = tl.load(start[:, None] + half - 1 - k[None, :], mask=inside, other=float("-inf")).to(tl.float32)
        middle = tl.load(start + half, mask=row < rows, other=0.0).to(tl.float32)
        number = symexp(mean_of_bins(above, below, middle, sizes))
        if judge < REWARDS:
            total += weight * number
            weight = weight * discount
        elif judge == REWARDS:
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
    """Copies of networks of one shape, side by side, as products read them: sizes are whole eighths."""

    def __init__(self, mlps: list[Any], dtype: torch.dtype) -> None:
        count = sum(len(mlp.weights[0]) for mlp in mlps)
        device, targets, sources = mlps[0].weights[0].device, [], []
        self.weights, self.biases = [], []
        for level in range(3):
            inputs, outputs = mlps[0].weights[level].shape[1:]
            is_padded = inputs % 8 or outputs % 8
            make = torch.zeros if is_padded else torch.empty
            weight = make(count, _eighths(inputs), _eighths(outputs), dtype=dtype, device=device)
            bias = make(count, 1, _eighths(outputs), device=device)
            self.weights.append(weight)
            self.biases.append(bias)
            start = 0
            for mlp in mlps:
                own = slice(start, start := start + len(mlp.weights[level]))
                targets += [weight[own, :inputs, :outputs], bias[own, :, :outputs]]
                sources += [mlp.weights[level], mlp.biases[level]]
        torch._foreach_copy_(targets[::2], sources[::2])
        torch._foreach_copy_(targets[1::2], sources[1::2])
        self.scales, self.shifts = (
            [together[0] if len(together) == 1 else torch.cat(together) for together in zip(*each, strict=False)]
            for each in ([mlp.norm_weights for mlp in mlps], [mlp.norm_biases for mlp in mlps])
        )

    def of(self, members: Tensor) -> Layers:
        """Those of some members."""
        found = object.__new__(Layers)
        for name, values in vars(self).items():
            setattr(found, name, [each.index_select(0, members) for each in values])
        return found

    def __call__(self, x: Tensor, *, drawn: Tensor | None = None, rewards: int = 0) -> Tensor:
        """States `[1, R, W]` to `[1, R, outputs]`; of rewards and critics `[H+1, R, W]` to `[H+2, R, outputs]`: the
        rewards of all states but the last, and two `drawn` critics of that one."""
        judges, rows = 1 if drawn is None else rewards + len(drawn), x.shape[1]
        if rows >= MANY_ROWS:
            return self._many(x, drawn, rewards, judges)
        hidden = self._product(0, x, drawn, rewards, judges)
        hidden = self._product(1, hidden, drawn, rewards, judges)
        return self._product(2, hidden, drawn, rewards, judges)

    def _product(self, level: int, x: Tensor, drawn: Tensor | None, rewards: int, judges: int) -> Tensor:
        rows, (inputs, outputs) = x.shape[1], self.weights[level].shape[1:]
        out = torch.empty(judges, rows, outputs, dtype=x.dtype, device=x.device)
        size, columns, warps, stages = SMALL_TILE if rows * judges <= FEW_ROWS else TILE
        norm = max(level - 1, 0)
        _layer[(triton.cdiv(rows, size), triton.cdiv(outputs, columns), judges)](
            x, self.weights[level], self.biases[level], self.scales[norm], self.shifts[norm], out,
            self.biases[level] if drawn is None else drawn, rows, x.stride(0), x.stride(1), len(x) - 1,
            REWARDS=rewards, HAS_DRAWN=drawn is not None, IS_NORMED=level > 0, K=inputs,
            WHOLE=triton.next_power_of_2(inputs), N=outputs, R=size, COLUMNS=columns, PART=64, EPS=EPSILON,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out

    def _many(self, x: Tensor, drawn: Tensor | None, rewards: int, judges: int) -> Tensor:
        layers = self
        if drawn is not None:
            layers = self.of(torch.cat((drawn.new_zeros(rewards), drawn + 1)))
            x = torch.cat((x, x[-1:].expand(judges - len(x), -1, -1)))
        for level in range(3):
            x = torch.bmm(x, layers.weights[level])
            if level < 2:
                out = torch.empty_like(x)
                args = (layers.biases[level], layers.scales[level], layers.shifts[level], out)
                normed(x, *args, simplex=0, out_row=x.shape[-1])
                x = out
        return x.add_(layers.biases[2])


class Model:
    """Dynamics and policy of a workflow: they go on from rows of states and actions `[R, Z + A]`."""

    def __init__(self, workflow: Any, latent: Tensor, dtype: torch.dtype) -> None:
        self.workflow, self.latent, self.dtype = workflow, latent, dtype
        self.dynamics, self.actor = (Layers([part.mlp], dtype) for part in (workflow.dynamics, workflow.actor))
        self.latent_size, self.action_size = latent.shape[-1], workflow.action_size

    def states(self, count: int, horizon: int) -> Tensor:
        """`[horizon, N * count, Z + A]`, the first ones with the latents."""
        Z, rows = self.latent_size, len(self.latent) * count
        width = _eighths(Z + self.action_size)
        x = torch.zeros(horizon, rows, width, dtype=self.dtype, device=self.latent.device)
        x[0, :, :Z].unflatten(0, (-1, count)).copy_(self.latent.unsqueeze(1))
        return x

    def advance(self, x: Tensor, step: int) -> None:
        """From row `step` to the latents of the next one."""
        last = self.workflow.dynamics.mlp
        after = self.dynamics(x[step : step + 1])  # with its bias
        affine = (last.norm_weights[2], last.norm_biases[2])
        normed(after, None, *affine, x[step + 1], simplex=last.simplex_size, out_row=x.shape[-1])

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
        self.judges = Layers([workflow.reward_head.mlp, workflow.critic.mlp], dtype)
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
        drawn = torch.rand(self.workflow.critic.members, device=plans.device).argsort()[:2]
        logits, bins = self.judges(x, drawn=drawn, rewards=horizon), self.workflow.critic.bins
        totals = torch.empty(count, candidates, device=plans.device)
        _promise[(triton.cdiv(rows, 4),)](
            logits, bins, totals, rows, float(self.workflow.discount), REWARDS=horizon,
            IS_LEAST=self.workflow.plan_value == "least", K=len(bins), WIDTH=logits.shape[-1],
            BLOCK=triton.next_power_of_2(len(bins) // 2), R=4,
        )  # fmt: skip
        return totals


def _eighths(size: int) -> int:
    return (size + 7) // 8 * 8


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
