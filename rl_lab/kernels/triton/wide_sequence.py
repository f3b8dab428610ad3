"""As `sequence.py`, where a block is too wide for one program: each program has some columns of the memory.

Products over the whole memory are cut into tiles too, so the programs of the same rows meet four times per step there
and five times back. Every program keeps the weights of its tiles; only the latent's layer is read anew at each step.
Between arriving and waiting a program stores what no other program reads and begins with what needs no other.

     row t      forward                                       backward
                latent's layer; mixed columns  -> norm        choice of one group               -> all choices
                gates, deter columns           -> deter       posterior; gates of the columns   -> gates
                tiles of two layers            -> sums        their products                    -> along the norm
                posterior; choice of one group -> choices     mixed columns                     -> mixed
                                                              tiles of two layers               -> sums
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_lab.kernels.triton.sequence import (
    ROWS,
    after_gates,
    arrive,
    can_hold,
    inward_gradient,
    kept_of,
    launch_backward,
    launch_forward,
    matrices_of,
    meet,
    norm_silu_gradient,
    scale_of,
    silu_gradient,
    silu_of_norm,
    store_inward,
    wait,
)

if TYPE_CHECKING:
    from rl_lab.kernels.triton.recurrence import Backward, Forward, Shape

COLUMNS = 32  # of the memory, per program
TILE = 16  # columns of the layers over the whole memory: the least that a matrix product takes
LATENT_STEP = 64  # numbers of the latent that are read at a time
WARPS = 8
STAGES = 3  # of the latent's layer, whose weights are read anew at each step
SHARED_BYTES = 224 * 1024  # that a program may have on an H100 or later; size 12m takes 220 KiB of them


@triton.jit
def once(x):
    """x itself. Triton has every warp compute what leads from memory straight to a product; this breaks the way."""
    return tl.sum(x[:, :, None], axis=2)


@triton.jit
def _place(W: tl.constexpr, C: tl.constexpr, CLASSES: tl.constexpr):
    """Program p of the rows rows_id: its block of the memory, its first column there, and its group of the latent."""
    p = tl.program_id(0)
    return p, tl.program_id(1), p // (W // C), (p % (W // C)) * C, p * CLASSES + tl.arange(0, CLASSES)


@triton.jit
def _tiles(
    parts_of, p, local, h,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The columns of the two layers that are program p's, its part of their sums, where it leaves its tile and where
    all tiles lie."""
    layer = (p // SPLIT) * N + tl.arange(0, N)
    part = (p % SPLIT) * (4 * Q) + tl.arange(0, Q)
    mine = parts_of + (p % SPLIT) * R * 2 * H + local[:, None] * (2 * H) + layer[None, :]
    theirs = parts_of + local[:, None] * (2 * H) + h[None, :]
    return layer, part, mine, theirs


@triton.jit
def _tile(x, row, part, STRIDE: tl.constexpr, Q: tl.constexpr, w_0, w_1, w_2, w_3):
    """A tile of x times a matrix, from four parts of the sum: one after the other they would wait for each other."""
    at = x + row[:, None] * STRIDE + part[None, :]
    sum_0 = tl.dot(tl.load(at, cache_modifier=".cg"), w_0, input_precision="ieee")
    sum_1 = tl.dot(tl.load(at + Q, cache_modifier=".cg"), w_1, input_precision="ieee")
    sum_2 = tl.dot(tl.load(at + 2 * Q, cache_modifier=".cg"), w_2, input_precision="ieee")
    sum_3 = tl.dot(tl.load(at + 3 * Q, cache_modifier=".cg"), w_3, input_precision="ieee")
    return (sum_0 + sum_1) + (sum_2 + sum_3)


@triton.jit
def _without_choice(
    theirs, state, inputs, pre, w_own, w_deter, w_action, bias, norm, row, inside, keep, block, h, epsilon, is_writer,
    H: tl.constexpr, S: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """What these columns mix of a row before its latent is known: the block's memory, the action, the whole memory."""
    low = state.dtype.element_ty
    place = row[:, None] * (3 * H) + h[None, :]
    memory = tl.load(state + row[:, None] * S + block[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    action = tl.load(inputs + place + 2 * H, mask=inside, other=0.0)
    from_deter = tl.zeros([R, H], tl.float32)
    for s in tl.static_range(SPLIT):
        from_deter += tl.load(theirs + s * R * 2 * H + H, cache_modifier=".cg")
    from_deter = kept_of(from_deter, keep).to(low)
    x = from_deter.to(tl.float32) + bias
    seen = silu_of_norm(x, norm, scale_of(x, epsilon, H)).to(low)
    total = tl.dot(memory, w_own, input_precision="ieee")
    total += tl.dot(action, w_action, input_precision="ieee")
    total += tl.dot(seen, w_deter, input_precision="ieee")
    if is_writer:
        tl.store(pre + row[:, None] * (2 * H) + h[None, :], from_deter, mask=inside)
        tl.store(inputs + place, seen, mask=inside)
    return total


@triton.jit
def _forward(
    inward, shared, own, gate_weights, upward, output_weights, in_bias, in_norm, mix_bias, mix_norm, gates_bias,
    posterior_norm, output_bias, from_embedding, keep, noise, state, before, pre, inputs, mixed, mix_scale, active,
    gates, deter_low, above, hidden, output, deters, stochs, parameters, counters, squares_of, parts_of,
    T, B, epsilon, unimix, HAS_NOISE: tl.constexpr, G: tl.constexpr, W: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    GROUPS: tl.constexpr, CLASSES: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
    ZK: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = G * W
    Z: tl.constexpr = GROUPS * CLASSES
    S: tl.constexpr = D + Z
    P: tl.constexpr = D // C
    Q: tl.constexpr = D // SPLIT // 4
    low = state.dtype.element_ty
    p, rows_id, g, inner, group = _place(W, C, CLASSES)
    local, h, w, c = tl.arange(0, R), tl.arange(0, H), tl.arange(0, W), tl.arange(0, C)
    r = rows_id * R + local
    has_group = (group < Z)[None, :]
    block = g * W + w
    counter = counters + rows_id
    squares_of += rows_id * P * R
    layer, part, mine, theirs = _tiles(parts_of + rows_id * SPLIT * R * 2 * H, p, local, h, H, R, N, Q, SPLIT)
    is_writer = p == P - 1
    # This program's weights stay here.
    up = upward + layer[None, :] * D + part[:, None]
    up_0, up_1, up_2, up_3 = tl.load(up), tl.load(up + Q), tl.load(up + 2 * Q), tl.load(up + 3 * Q)  # [D/SPLIT/4, N]
    w_shared_0 = tl.load(shared + h[:, None] * D + p * C + c[None, :])  # [H, C]
    w_shared_1 = tl.load(shared + (H + h)[:, None] * D + p * C + c[None, :])
    w_shared_2 = tl.load(shared + (2 * H + h)[:, None] * D + p * C + c[None, :])
    w_own = tl.load(own + g * W * W + w[:, None] * W + inner + c[None, :])  # [W, C]
    gate = gate_weights + g * W * 3 * W + w[:, None] * (3 * W) + inner + c[None, :]
    w_reset, w_middle, w_update = tl.load(gate), tl.load(gate + W), tl.load(gate + 2 * W)
    w_output = tl.load(output_weights + group[None, :] * H + h[:, None], mask=has_group, other=0.0)  # [H, CLASSES]
    deter_bias, stoch_bias = tl.load(in_bias + h)[None, :], tl.load(in_bias + H + h)[None, :]
    deter_norm, stoch_norm = tl.load(in_norm + h), tl.load(in_norm + H + h)
    b_mix = tl.load(mix_bias + p * C + c)[None, :]
    b_block, n_block = tl.load(mix_bias + block)[None, :], tl.load(mix_norm + block)
    b_reset = tl.load(gates_bias + g * 3 * W + inner + c)[None, :]
    b_middle = tl.load(gates_bias + g * 3 * W + W + inner + c)[None, :]
    b_update = tl.load(gates_bias + g * 3 * W + 2 * W + inner + c)[None, :] - 1.0
    n_posterior = tl.load(posterior_norm + h)
    b_output = tl.load(output_bias + group, mask=group < Z, other=0.0)[None, :]
    old = tl.load(before + r[:, None] * D + p * C + c[None, :])
    tl.store(mine, _tile(state, r, part, S, Q, up_0, up_1, up_2, up_3))
    meet(counter, P)
    known = _without_choice(
        theirs, state, inputs, pre, w_own, w_shared_0, w_shared_2, deter_bias, deter_norm,
        r, (r >= 0)[:, None], tl.load(keep + r)[:, None], block, h, epsilon, is_writer, H, S, R, SPLIT,
    )  # fmt: skip
    for t in range(T):
        row = t * B + r
        has_next = (row + B < T * B)[:, None]
        column = row[:, None] * D + p * C + c[None, :]
        # The latent's layer completes what is mixed.
        from_stoch = tl.zeros([R, H], tl.float32)
        for start in range(0, Z, ZK):
            z = start + tl.arange(0, ZK)
            chosen = tl.load(state + row[:, None] * S + D + z[None, :], cache_modifier=".cg")
            read = tl.load(inward + (H + h)[None, :] * S + D + z[:, None])
            from_stoch = tl.dot(chosen, read, from_stoch, input_precision="ieee")
        stoch_low = from_stoch.to(low)
        x_stoch = stoch_low.to(tl.float32) + stoch_bias
        stoch_seen = silu_of_norm(x_stoch, stoch_norm, scale_of(x_stoch, epsilon, H)).to(low)
        total = tl.dot(stoch_seen, w_shared_1, known, input_precision="ieee").to(low)
        x_mixed = total.to(tl.float32) + b_mix
        tl.store(squares_of + p * R + local, tl.sum(x_mixed * x_mixed, axis=1))
        tl.store(mixed + column, total)
        arrive(counter)
        if is_writer:
            tl.store(pre + row[:, None] * (2 * H) + H + h[None, :], stoch_low)
            tl.store(inputs + row[:, None] * (3 * H) + H + h[None, :], stoch_seen)
        one = row[:, None] * H + h[None, :]
        embedded = tl.load(from_embedding + one)
        keep_next = tl.load(keep + row[:, None] + B, mask=has_next, other=0.0)
        wait(counter, P * (4 * t + 2))
        # The gates of these columns read the whole block.
        programs = tl.arange(0, P)
        squares = tl.load(squares_of + programs[:, None] * R + local[None, :], cache_modifier=".cg")
        x_block = tl.load(mixed + row[:, None] * D + block[None, :], cache_modifier=".cg").to(tl.float32) + b_block
        scale = tl.rsqrt(tl.sum(squares, axis=0) / D + epsilon)
        opened = once(silu_of_norm(x_block, n_block, scale)).to(low)
        reset = tl.dot(opened, w_reset, input_precision="ieee").to(low)
        middle = tl.dot(opened, w_middle, input_precision="ieee").to(low)
        update = tl.dot(opened, w_update, input_precision="ieee").to(low)
        new = after_gates(old, reset, middle, update, b_reset, b_middle, b_update)
        tl.store(deter_low + column, new.to(low))
        old = kept_of(new, keep_next)
        tl.store(state + (row + B)[:, None] * S + p * C + c[None, :], old.to(low), mask=has_next)
        arrive(counter)
        if inner == 0:
            tl.store(active + row[:, None] * D + block[None, :], opened)
        tl.store(before + column + B * D, old, mask=has_next)
        tl.store(deters + column, new)
        kept = gates + (g * T * B + row)[:, None] * (3 * W) + inner + c[None, :]
        tl.store(kept, reset)
        tl.store(kept + W, middle)
        tl.store(kept + 2 * W, update)
        if is_writer:
            tl.store(mix_scale + row, scale)
        wait(counter, P * (4 * t + 3))
        # A tile of the two layers that read the whole memory: the posterior's, and the next row's.
        tl.store(mine, _tile(deter_low, row, part, D, Q, up_0, up_1, up_2, up_3))
        arrive(counter)
        choice = row[:, None] * Z + group[None, :]
        if HAS_NOISE:
            drawn = tl.load(noise + choice, mask=has_group, other=1.0)
        wait(counter, P * (4 * t + 4))
        # The posterior, and one group's choice from it.
        from_memory = embedded.to(tl.float32)
        for s in tl.static_range(SPLIT):
            from_memory += tl.load(theirs + s * R * 2 * H, cache_modifier=".cg")
        above_low = from_memory.to(low)
        x_above = above_low.to(tl.float32)
        seen = silu_of_norm(x_above, n_posterior, scale_of(x_above, epsilon, H)).to(low)
        raw_logits = tl.dot(seen, w_output, input_precision="ieee").to(low)
        logits = raw_logits.to(tl.float32) + b_output
        weights = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        probs = weights / tl.sum(weights, axis=1)[:, None] * (1.0 - unimix) + unimix / CLASSES
        if HAS_NOISE:
            probs = probs / drawn
        best = tl.argmax(probs, axis=1)
        one_hot = tl.where(tl.arange(0, CLASSES)[None, :] == best[:, None], 1.0, 0.0)
        following = state + (row + B)[:, None] * S + D + group[None, :]
        tl.store(following, (one_hot * keep_next).to(low), mask=has_next & has_group)
        arrive(counter)
        tl.store(stochs + choice, one_hot, mask=has_group)
        tl.store(parameters + choice, logits, mask=has_group)
        tl.store(output + choice, raw_logits, mask=has_group)
        if is_writer:
            tl.store(above + one, above_low)
            tl.store(hidden + one, seen)
        known = _without_choice(
            theirs, state, inputs, pre, w_own, w_shared_0, w_shared_2, deter_bias, deter_norm,
            row + B, has_next, keep_next, block, h, epsilon, is_writer, H, S, R, SPLIT,
        )  # fmt: skip
        wait(counter, P * (4 * t + 5))


@triton.jit
def _backward(
    inward, shared, own, gate_weights, posterior, output_weights, in_bias, in_norm, mix_bias, mix_norm, gates_bias,
    posterior_norm, keep, before, pre, mixed, mix_scale, gates, above, parameters, from_deter, from_stoch,
    from_parameters, for_pre, for_inputs, for_mixed, for_active, for_gates, for_above, for_hidden, for_output,
    counters, along_of, parts_of, T, B, epsilon, unimix, G: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    H: tl.constexpr, GROUPS: tl.constexpr, CLASSES: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    SPLIT: tl.constexpr, ZK: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = G * W
    Z: tl.constexpr = GROUPS * CLASSES
    P: tl.constexpr = D // C
    Q: tl.constexpr = D // SPLIT // 4
    low = pre.dtype.element_ty
    p, rows_id, g, inner, group = _place(W, C, CLASSES)
    local, h, w, c = tl.arange(0, R), tl.arange(0, H), tl.arange(0, W), tl.arange(0, C)
    r = rows_id * R + local
    has_group = (group < Z)[None, :]
    counter = counters + rows_id
    along_of += rows_id * P * R
    layer, part, mine, theirs = _tiles(parts_of + rows_id * SPLIT * R * 2 * H, p, local, h, H, R, N, Q, SPLIT)
    is_writer = p == P - 1
    # This program's weights stay here, turned round.
    w_choice = tl.load(inward + (H + h)[:, None] * (D + Z) + D + group[None, :], mask=has_group, other=0.0)
    w_posterior = tl.load(posterior + h[:, None] * D + p * C + c[None, :])  # [H, C]
    gate = gate_weights + g * W * 3 * W + (inner + c)[None, :] * (3 * W) + w[:, None]
    w_reset, w_middle, w_update = tl.load(gate), tl.load(gate + W), tl.load(gate + 2 * W)  # [W, C]
    w_own = tl.load(own + g * W * W + (inner + c)[None, :] * W + w[:, None])  # [W, C]
    down = shared + layer[None, :] * D + part[:, None]
    down_0, down_1, down_2, down_3 = tl.load(down), tl.load(down + Q), tl.load(down + 2 * Q), tl.load(down + 3 * Q)
    w_deter = tl.load(inward + h[:, None] * (D + Z) + p * C + c[None, :])  # [H, C]
    deter_bias, stoch_bias = tl.load(in_bias + h)[None, :], tl.load(in_bias + H + h)[None, :]
    deter_norm, stoch_norm = tl.load(in_norm + h), tl.load(in_norm + H + h)
    b_mix, n_mix = tl.load(mix_bias + p * C + c)[None, :], tl.load(mix_norm + p * C + c)[None, :]
    b_reset = tl.load(gates_bias + g * 3 * W + inner + c)[None, :]
    b_middle = tl.load(gates_bias + g * 3 * W + W + inner + c)[None, :]
    b_update = tl.load(gates_bias + g * 3 * W + 2 * W + inner + c)[None, :] - 1.0
    n_posterior = tl.load(posterior_norm + h)
    later = tl.zeros([R, C], tl.float32)
    for_stoch = tl.zeros([R, H], tl.float32).to(low)
    choice = ((T - 1) * B + r)[:, None] * Z + group[None, :]
    logits = tl.load(parameters + choice, mask=has_group, other=0.0)
    for_chosen = tl.load(from_stoch + choice, mask=has_group, other=0.0)
    for_parameters = tl.load(from_parameters + choice, mask=has_group, other=0.0)
    for step in range(T):
        t = T - 1 - step
        row = t * B + r
        keep_next = tl.load(keep + row + B, mask=row + B < T * B, other=0.0)[:, None]
        column = row[:, None] * D + p * C + c[None, :]
        # One group's choice.
        weights = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        probs = weights / tl.sum(weights, axis=1)[:, None]
        for_choice = kept_of(tl.dot(for_stoch, w_choice, input_precision="ieee"), keep_next)
        for_probs = (for_chosen.to(tl.float32) + for_choice) * (1.0 - unimix)
        for_logits = probs * (for_probs - tl.sum(for_probs * probs, axis=1)[:, None])
        tl.store(for_output + choice, (for_logits + for_parameters.to(tl.float32)).to(low), mask=has_group)
        arrive(counter)
        one = row[:, None] * H + h[None, :]
        x_above = tl.load(above + one).to(tl.float32)
        kept = (g * T * B + row)[:, None] * (3 * W) + inner + c[None, :]
        reset = tl.sigmoid(tl.load(gates + kept).to(tl.float32) + b_reset)
        middle = tl.load(gates + kept + W).to(tl.float32) + b_middle
        update = tl.sigmoid(tl.load(gates + kept + 2 * W).to(tl.float32) + b_update)
        candidate = 2.0 * tl.sigmoid(2.0 * reset * middle) - 1.0
        change = candidate - tl.load(before + column)
        known = tl.load(from_deter + column).to(tl.float32) + kept_of(later, keep_next)
        wait(counter, P * (5 * step + 1))
        # The posterior's layers, and the gates of these columns.
        for_seen = tl.zeros([R, H], tl.float32)
        for start in range(0, Z, ZK):
            z = start + tl.arange(0, ZK)
            for_raw = tl.load(for_output + row[:, None] * Z + z[None, :], cache_modifier=".cg")
            read = tl.load(output_weights + z[:, None] * H + h[None, :])
            for_seen = tl.dot(for_raw, read, for_seen, input_precision="ieee")
        seen = for_seen.to(low)
        back = norm_silu_gradient(x_above, n_posterior, seen.to(tl.float32), epsilon, H).to(low)
        for_new = tl.dot(back, w_posterior, input_precision="ieee").to(low).to(tl.float32) + known
        through = for_new * update * (1.0 - candidate * candidate)
        tl.store(for_gates + kept, (through * middle * reset * (1.0 - reset)).to(low))
        tl.store(for_gates + kept + W, (through * reset).to(low))
        tl.store(for_gates + kept + 2 * W, (for_new * change * update * (1.0 - update)).to(low))
        arrive(counter)
        if is_writer:
            tl.store(for_hidden + one, seen)
            tl.store(for_above + one, back)
        scale = tl.load(mix_scale + row)[:, None]
        normed = (tl.load(mixed + column).to(tl.float32) + b_mix) * scale
        bend = silu_gradient(normed * n_mix) * n_mix
        wait(counter, P * (5 * step + 2))
        # What the gates of the whole block read of these columns, and how that lies along the norm.
        whole = for_gates + (g * T * B + row)[:, None] * (3 * W) + w[None, :]
        opened = tl.dot(tl.load(whole, cache_modifier=".cg"), w_reset, input_precision="ieee")
        opened += tl.dot(tl.load(whole + W, cache_modifier=".cg"), w_middle, input_precision="ieee")
        opened += tl.dot(tl.load(whole + 2 * W, cache_modifier=".cg"), w_update, input_precision="ieee")
        opened_low = opened.to(low)
        after_norm = opened_low.to(tl.float32) * bend
        tl.store(along_of + p * R + local, tl.sum(after_norm * normed, axis=1))
        arrive(counter)
        tl.store(for_active + column, opened_low)
        two = row[:, None] * (2 * H) + h[None, :]
        x_deter = tl.load(pre + two).to(tl.float32) + deter_bias
        x_stoch = tl.load(pre + two + H).to(tl.float32) + stoch_bias
        wait(counter, P * (5 * step + 3))
        programs = tl.arange(0, P)
        along = tl.load(along_of + programs[:, None] * R + local[None, :], cache_modifier=".cg")
        for_mix = scale * (after_norm - normed * (tl.sum(along, axis=0) / D)[:, None])
        tl.store(for_mixed + column, for_mix.to(low))
        meet(counter, P * (5 * step + 4))
        # A tile of the layers that were mixed, and this part of the block itself.
        tl.store(mine, _tile(for_mixed, row, part, D, Q, down_0, down_1, down_2, down_3))
        arrive(counter)
        block = tl.load(for_mixed + row[:, None] * D + g * W + w[None, :], cache_modifier=".cg")
        later = tl.dot(block, w_own, for_new * (1.0 - update), input_precision="ieee")
        choice -= B * Z
        has_choice = has_group & (choice >= 0)
        logits = tl.load(parameters + choice, mask=has_choice, other=0.0)
        for_chosen = tl.load(from_stoch + choice, mask=has_choice, other=0.0)
        for_parameters = tl.load(from_parameters + choice, mask=has_choice, other=0.0)
        wait(counter, P * (5 * step + 5))
        first = tl.zeros([R, H], tl.float32)
        second = tl.zeros([R, H], tl.float32)
        for s in tl.static_range(SPLIT):
            first += tl.load(theirs + s * R * 2 * H, cache_modifier=".cg")
            second += tl.load(theirs + s * R * 2 * H + H, cache_modifier=".cg")
        for_deter = inward_gradient(first, x_deter, deter_norm, epsilon, low, H)
        for_stoch = inward_gradient(second, x_stoch, stoch_norm, epsilon, low, H)
        later = tl.dot(for_deter, w_deter, later, input_precision="ieee")
        if is_writer:
            store_inward(for_inputs, row[:, None] * (3 * H) + h[None, :], first.to(low), second.to(low), H)
            store_inward(for_pre, two, for_deter, for_stoch, H)


# --- from torch ---------------------------------------------------------------------------------


def fits(shape: Shape, device: torch.device) -> bool:
    """Whether a program's weights fit into a multiprocessor's memory and all programs are there at the same time."""
    width, classes = shape.deter // shape.blocks, shape.stoch // shape.groups
    programs = shape.deter // COLUMNS
    return (
        shape.low.itemsize == 2
        and shape.batch % ROWS == 0
        and can_hold(device, programs=programs * (shape.batch // ROWS), shared_bytes=SHARED_BYTES)
        and all(size & (size - 1) == 0 for size in (width, shape.blocks, shape.hidden, classes))
        and COLUMNS <= width <= 256
        and 64 <= shape.hidden <= 256
        and classes >= 16
        and classes * shape.hidden <= 16 * 256  # the latent's tiles; more take more memory than there is
        and shape.groups <= programs
        and shape.stoch % LATENT_STEP == 0
        and programs * TILE % (2 * shape.hidden) == 0
    )


def run_forward(sequence: Forward) -> None:
    """All rows of a sequence."""
    shape, products = sequence.shape, sequence.products
    upward = torch.cat((products.posterior, products.inward[: shape.hidden, : shape.deter]))
    matrices = matrices_of(products, upward)
    launch_forward(_forward, sequence, matrices, grid=_grid(shape), parts=_split(shape), **_sizes(shape))


def run_backward(back: Backward, *gradients: Tensor) -> None:
    """The gradients of the results of every product, from those of deters, stochs and parameters."""
    shape = back.shape
    launch_backward(_backward, back, gradients, grid=_grid(shape), parts=_split(shape), **_sizes(shape))


def _grid(shape: Shape) -> tuple[int, int]:
    return shape.deter // _columns(shape), shape.batch // ROWS


def _columns(shape: Shape) -> int:
    return min(COLUMNS, shape.deter // shape.blocks)


def _split(shape: Shape) -> int:
    """Into how many parts the sums over the memory are cut, so that every program has a tile of one."""
    return shape.deter // _columns(shape) * TILE // (2 * shape.hidden)


def _sizes(shape: Shape) -> dict[str, int]:
    sizes = {"G": shape.blocks, "W": shape.deter // shape.blocks, "H": shape.hidden, "GROUPS": shape.groups}
    sizes |= {"CLASSES": shape.stoch // shape.groups, "R": ROWS, "C": _columns(shape), "N": TILE}
    sizes |= {"SPLIT": _split(shape), "ZK": min(LATENT_STEP, shape.stoch)}
    # cooperative: the device starts all programs together or none, whoever else is using it
    return sizes | {"num_warps": WARPS, "num_stages": STAGES, "launch_cooperative_grid": True}
