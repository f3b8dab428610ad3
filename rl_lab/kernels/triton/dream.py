"""`RSSM.imagine` with DreamerV3's cell and without gradients: few kernels per step, or one for all steps.

A dream is 15 steps of three networks that wait for each other (actor, recurrence, prior): 30 kernels a step, each too
small to fill a GPU. Where the networks are small, one program goes through all of them for sixteen dreams of its own,
and no program waits for another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from rl_lab.kernels.door import is_unchanged
from rl_lab.kernels.gpu import HEADS, RSSM, is_standard_layer
from rl_lab.kernels.triton import elementwise
from rl_lab.kernels.triton.heads import scaled_action
from rl_lab.kernels.triton.recurrence import Activations, Products, Shape, Weights, advance
from rl_lab.kernels.triton.sequence import ROWS, scale_of, silu_of_norm

WARPS, STAGES = 8, 2  # the fastest on an H200 of 4 and 8 warps, 1 to 3 stages


@triton.jit
def _dream(
    inward, shared, own, gate_weights, in_bias, in_norm, mix_bias, mix_norm, gates_bias,
    action_in, action_bias, action_norm,
    prior_first, prior_first_bias, prior_first_norm, prior_second, prior_second_bias, prior_second_norm,
    prior_output, prior_output_bias,
    actor_first, actor_first_bias, actor_first_norm, actor_more, actor_more_bias, actor_more_norm,
    mean_weights, mean_bias, std_weights, std_bias,
    action_noise, latent_noise, before, states, actions, inputs, mixed,
    HORIZON, N, epsilon, latent_unimix, action_unimix, lowest, highest,
    IS_DISCRETE: tl.constexpr, A: tl.constexpr, A_BLOCK: tl.constexpr, MORE: tl.constexpr, U: tl.constexpr,
    G: tl.constexpr, W: tl.constexpr, H: tl.constexpr, GROUPS: tl.constexpr, CLASSES: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The policy in the model: R rows for all steps of a dream; no program waits for another."""
    D: tl.constexpr = G * W
    Z: tl.constexpr = GROUPS * CLASSES
    low = states.dtype.element_ty
    r = tl.program_id(0) * R + tl.arange(0, R)
    h, w, z, u, a = tl.arange(0, H), tl.arange(0, W), tl.arange(0, Z), tl.arange(0, U), tl.arange(0, A_BLOCK)
    is_action = a < A
    for step in range(HORIZON):
        row = step * N + r
        # The state is read by the actor and by the cell.
        decided = tl.zeros([R, U], tl.float32)
        from_deter = tl.zeros([R, H], tl.float32)
        for g in range(G):
            x = tl.load(states + row[:, None] * (D + Z) + g * W + w[None, :])
            m = tl.load(actor_first + u[None, :] * (D + Z) + g * W + w[:, None])
            decided = tl.dot(x, m, decided, input_precision="ieee")
            m = tl.load(inward + h[None, :] * (D + Z) + g * W + w[:, None])
            from_deter = tl.dot(x, m, from_deter, input_precision="ieee")
        chosen = tl.load(states + row[:, None] * (D + Z) + D + z[None, :])
        read_choice = tl.load(actor_first + u[None, :] * (D + Z) + D + z[:, None])
        decided = tl.dot(chosen, read_choice, decided, input_precision="ieee")
        read_choice = tl.load(inward + (H + h)[None, :] * (D + Z) + D + z[:, None])
        from_stoch = tl.dot(chosen, read_choice, input_precision="ieee")
        # The actor's other layers, its answer, and what the cell reads of it.
        thought = decided.to(low).to(tl.float32) + tl.load(actor_first_bias + u)[None, :]
        thought = silu_of_norm(thought, tl.load(actor_first_norm + u), scale_of(thought, epsilon, U)).to(low)
        for layer in tl.static_range(MORE):
            think = tl.load(actor_more + layer * U * U + u[None, :] * U + u[:, None])
            further = tl.dot(thought, think, input_precision="ieee").to(low).to(tl.float32)
            further += tl.load(actor_more_bias + layer * U + u)[None, :]
            weight = tl.load(actor_more_norm + layer * U + u)
            thought = silu_of_norm(further, weight, scale_of(further, epsilon, U)).to(low)
        there = is_action[None, :] & (u >= 0)[:, None]
        say = tl.load(mean_weights + a[None, :] * U + u[:, None], mask=there, other=0.0)
        answer = tl.dot(thought, say, input_precision="ieee")
        answer = (answer + tl.load(mean_bias + a, mask=is_action, other=0.0)[None, :]).to(low).to(tl.float32)
        place = row[:, None] * A + a[None, :]
        inside = is_action[None, :] & (r >= 0)[:, None]
        drawn = tl.load(action_noise + place, mask=inside, other=0.0)
        if IS_DISCRETE:
            answer = tl.where(inside, answer, float("-inf"))
            odds = tl.exp(answer - tl.max(answer, axis=1)[:, None])
            odds = odds / tl.sum(odds, axis=1)[:, None] * (1.0 - action_unimix) + action_unimix / A
            taken = tl.argmax(tl.where(inside, tl.log(odds) + drawn, float("-inf")), axis=1)
            tl.store(actions + row, taken.to(tl.int64))
            action_read = tl.where(a[None, :] == taken[:, None], 1.0, 0.0)
        else:
            say = tl.load(std_weights + a[None, :] * U + u[:, None], mask=there, other=0.0)
            spread = tl.dot(thought, say, input_precision="ieee")
            spread = (spread + tl.load(std_bias + a, mask=is_action, other=0.0)[None, :]).to(low).to(tl.float32)
            spread = lowest + (highest - lowest) * tl.sigmoid(spread + 2.0)
            action = 2.0 * tl.sigmoid(2.0 * answer) - 1.0 + drawn * spread
            tl.store(actions + place, action, mask=inside)
            action_read = tl.where(inside, action / tl.maximum(tl.abs(action), 1.0), 0.0)
        hear = tl.load(action_in + h[None, :] * A + a[:, None], mask=is_action[:, None] & (h >= 0)[None, :], other=0.0)
        heard = tl.dot(action_read.to(low), hear, input_precision="ieee").to(low).to(tl.float32)
        heard += tl.load(action_bias + h)[None, :]
        scratch = r[:, None] * (3 * H) + h[None, :]
        heard = silu_of_norm(heard, tl.load(action_norm + h), scale_of(heard, epsilon, H))
        tl.store(inputs + scratch + 2 * H, heard.to(low))
        deter_pre = from_deter.to(low).to(tl.float32) + tl.load(in_bias + h)[None, :]
        deter_seen = silu_of_norm(deter_pre, tl.load(in_norm + h), scale_of(deter_pre, epsilon, H))
        tl.store(inputs + scratch, deter_seen.to(low))
        stoch_pre = from_stoch.to(low).to(tl.float32) + tl.load(in_bias + H + h)[None, :]
        stoch_seen = silu_of_norm(stoch_pre, tl.load(in_norm + H + h), scale_of(stoch_pre, epsilon, H))
        tl.store(inputs + scratch + H, stoch_seen.to(low))
        tl.debug_barrier()
        squares = tl.zeros([R], tl.float32)
        for g in range(G):
            total = tl.zeros([R, W], tl.float32)
            for s in tl.static_range(3):
                x = tl.load(inputs + scratch + s * H)
                m = tl.load(shared + (s * H + h)[:, None] * D + g * W + w[None, :])
                total = tl.dot(x, m, total, input_precision="ieee")
            x = tl.load(states + row[:, None] * (D + Z) + g * W + w[None, :])
            m = tl.load(own + g * W * W + w[:, None] * W + w[None, :])
            total = tl.dot(x, m, total, input_precision="ieee").to(low)
            tl.store(mixed + r[:, None] * D + g * W + w[None, :], total)
            x = total.to(tl.float32) + tl.load(mix_bias + g * W + w)[None, :]
            squares += tl.sum(x * x, axis=1)
        scale = tl.rsqrt(squares / D + epsilon)
        tl.debug_barrier()
        expected = tl.zeros([R, H], tl.float32)
        for g in range(G):
            column = r[:, None] * D + g * W + w[None, :]
            x = tl.load(mixed + column).to(tl.float32) + tl.load(mix_bias + g * W + w)[None, :]
            opened = silu_of_norm(x, tl.load(mix_norm + g * W + w), scale).to(low)
            m = gate_weights + g * W * 3 * W + w[:, None] * (3 * W) + w[None, :]
            b = gates_bias + g * 3 * W + w
            reset = tl.dot(opened, tl.load(m), input_precision="ieee").to(low).to(tl.float32) + tl.load(b)[None, :]
            middle = tl.dot(opened, tl.load(m + W), input_precision="ieee").to(low).to(tl.float32)
            middle += tl.load(b + W)[None, :]
            update = tl.dot(opened, tl.load(m + 2 * W), input_precision="ieee").to(low).to(tl.float32)
            update = tl.sigmoid(update + tl.load(b + 2 * W)[None, :] - 1.0)
            old = tl.load(before + column)
            new = old + update * (2.0 * tl.sigmoid(2.0 * tl.sigmoid(reset) * middle) - 1.0 - old)
            tl.store(before + column, new)
            tl.store(states + (row + N)[:, None] * (D + Z) + g * W + w[None, :], new.to(low))
            m = tl.load(prior_first + h[None, :] * D + g * W + w[:, None])
            expected = tl.dot(new.to(low), m, expected, input_precision="ieee")
        x = expected.to(low).to(tl.float32) + tl.load(prior_first_bias + h)[None, :]
        x = silu_of_norm(x, tl.load(prior_first_norm + h), scale_of(x, epsilon, H)).to(low)
        m = tl.load(prior_second + h[None, :] * H + h[:, None])
        y = tl.dot(x, m, input_precision="ieee").to(low).to(tl.float32) + tl.load(prior_second_bias + h)[None, :]
        x = silu_of_norm(y, tl.load(prior_second_norm + h), scale_of(y, epsilon, H)).to(low)
        m = tl.load(prior_output + z[None, :] * H + h[:, None])
        logits = tl.dot(x, m, input_precision="ieee").to(low).to(tl.float32) + tl.load(prior_output_bias + z)[None, :]
        logits = tl.reshape(logits, (R * GROUPS, CLASSES))
        weights = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        probs = weights / tl.sum(weights, axis=1)[:, None] * (1.0 - latent_unimix) + latent_unimix / CLASSES
        noise = tl.load(latent_noise + row[:, None] * Z + z[None, :])
        best = tl.argmax(probs / tl.reshape(noise, (R * GROUPS, CLASSES)), axis=1)
        one_hot = tl.reshape(tl.where(tl.arange(0, CLASSES)[None, :] == best[:, None], 1.0, 0.0), (R, Z))
        tl.store(states + (row + N)[:, None] * (D + Z) + D + z[None, :], one_hot.to(low))
        tl.debug_barrier()


# --- from torch ---------------------------------------------------------------------------------


State = dict[str, Tensor]


@torch.no_grad()
def imagine(
    rssm: Any, start: State, policy: Callable[[Tensor, int], Tensor], horizon: int, *, deterministic: bool = False
) -> tuple[State, Tensor]:
    """`RSSM.imagine`; states are in the dtype of matrix products."""
    deter, device = start["deter"], start["deter"].device
    noise = None if deterministic else rssm.latent.noise(horizon, len(deter), device=device)
    weights = replace(Weights.of(rssm), output=rssm.prior_output.weight, output_bias=rssm.prior_output.bias)
    shape = Shape.of(rssm, start, length=1, low=elementwise.autocast_dtype(device))
    if noise is not None and rssm.one_kernel and fits_whole(shape, rssm, policy):
        states, actions = whole_dream(rssm, weights, shape, start, policy, noise)
    else:
        states, actions = step_by_step(rssm, weights, shape, start, policy, noise, horizon)
    states, D = states.transpose(0, 1), shape.deter
    return {"deter": states[..., :D], "stoch": states[..., D:]}, actions.transpose(0, 1)


def step_by_step(
    rssm: Any,
    weights: Weights,
    shape: Shape,
    start: State,
    policy: Callable[[Tensor, int], Tensor],
    noise: Tensor | None,
    horizon: int,
) -> tuple[Tensor, Tensor]:
    """From states `[N, ...]`: deter and stoch side by side `[H+1, N, D+Z]` in `shape.low`, and the actions
    `[H, N, ...]`. `shape` is that of one step, `weights.output` are the prior's."""
    deter, stoch = start["deter"], start["stoch"]
    count, D, Z, low = shape.batch, shape.deter, shape.stoch, shape.low
    products, rows, actions = Products(weights, shape), Activations(shape, deter.device), []
    states = torch.empty(horizon + 1, count, D + Z, dtype=low, device=deter.device)
    states[0, :, :D], states[0, :, D:] = deter, stoch
    before, after = deter.clone(), torch.empty_like(deter)
    parameters, choice = deter.new_empty(2, count, Z).unbind()
    everyone = deter.new_ones(count)
    for step in range(horizon):
        state, following = states[step], states[step + 1]
        actions.append(policy(state, step))
        is_continuous = rssm.action.kind == "continuous"
        encoded = scaled_action(actions[-1], low) if is_continuous else rssm.encode_action(actions[-1])
        rows.inputs[0, :, 2 * shape.hidden :] = rssm.cell.from_action(encoded)
        advance(products, weights, shape, rows, 0, state, before, everyone, after, before, following[:, :D])
        logits = F.linear(rssm.prior_stack(rows.deter[0]), rssm.prior_output.weight)
        drawn = None if noise is None else noise[step].flatten(1)
        args = (logits, weights.output_bias, drawn, everyone, parameters, choice, following[:, D:])
        elementwise.sample(*args, groups=shape.groups, unimix=shape.unimix)
    return states, torch.stack(actions)


def fits_whole(shape: Shape, rssm: Any, policy: Any) -> bool:
    """Whether the networks are as small as the kernel holds them, and of the kind it knows: DreamerV3's."""
    actor = getattr(policy, "actor", None)
    methods = ("decide", "forward", "_log_probs", "_numbers")
    if not (
        is_unchanged(policy, f"{RSSM}:Decisions", "__call__") and is_unchanged(actor, f"{HEADS}:LatentActor", *methods)
    ):
        return False
    assert actor is not None
    is_bounded = actor.action.kind == "continuous" and actor.distribution == "bounded"
    prior, layers = rssm.prior_stack.layers, actor.stack.layers
    width, classes, units = shape.deter // shape.blocks, shape.stoch // shape.groups, actor.stack.output_size
    return (
        (is_bounded or actor.action.kind == "discrete")
        and shape.low.itemsize == 2
        and shape.batch % ROWS == 0
        and len(prior) == 2
        and len(layers) > 1
        and all(is_standard_layer(layer) for layer in (*prior, *layers))
        and all(size & (size - 1) == 0 for size in (width, shape.hidden, units, shape.groups, classes))
        and all(16 <= size <= 64 for size in (width, shape.hidden, units))
        and 16 <= shape.stoch <= 128
        and sum(actor.action.sizes) <= 64
    )


def whole_dream(
    rssm: Any, weights: Weights, shape: Shape, start: State, policy: Any, latent_noise: Tensor
) -> tuple[Tensor, Tensor]:
    """The same as `step_by_step` in one kernel."""
    actor, action_noise, prior = policy.actor, policy.noise, rssm.prior_stack.layers
    products, low, device = Products(weights, shape), shape.low, action_noise.device
    horizon, count = action_noise.shape[:2]
    D, h, size = shape.deter, shape.hidden, sum(actor.action.sizes)
    is_discrete = actor.action.kind == "discrete"
    states = torch.empty(horizon + 1, count, D + shape.stoch, dtype=low, device=device)
    states[0, :, :D], states[0, :, D:] = start["deter"], start["stoch"]
    if is_discrete:
        actions = torch.empty(horizon, count, dtype=torch.int64, device=device)
    else:
        actions = torch.empty(horizon, count, size, device=device)
    lowest, highest = actor.stds
    _dream[(count // ROWS,)](
        products.inward, products.shared, products.own.contiguous(), products.gates,
        products.inward_bias, products.inward_norm, weights.mix_bias, weights.mix_norm, weights.gates_bias,
        *_three(rssm.cell.from_action, low),
        *_three(prior[0], low), *_three(prior[1], low), products.output, weights.output_bias,
        *_three(actor.stack.layers[0], low), *_stacked(actor.stack.layers[1:], low),
        *_two(actor.output, low), *_two(actor.output if is_discrete else actor.deviation_output, low),
        action_noise, latent_noise, start["deter"].clone(), states, actions,
        torch.empty(count, 3 * h, dtype=low, device=device), torch.empty(count, D, dtype=low, device=device),
        horizon, count, shape.epsilon, shape.unimix, actor.unimix, lowest, highest,
        IS_DISCRETE=is_discrete, A=size, A_BLOCK=max(16, triton.next_power_of_2(size)),
        MORE=len(actor.stack.layers) - 1, U=actor.stack.output_size,
        G=shape.blocks, W=D // shape.blocks, H=h, GROUPS=shape.groups, CLASSES=shape.stoch // shape.groups, R=ROWS,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return states, actions


def _two(linear: nn.Linear, low: torch.dtype) -> tuple[Tensor, Tensor]:
    return linear.weight.to(low), linear.bias


def _three(layer: Any, low: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return *_two(layer.linear, low), layer.norm.weight


def _stacked(layers: Any, low: torch.dtype) -> list[Tensor]:
    """Layers of one shape as three tensors."""
    return [torch.stack(each) for each in zip(*(_three(layer, low) for layer in layers), strict=True)]
