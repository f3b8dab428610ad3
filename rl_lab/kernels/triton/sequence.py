"""A whole sequence of a small world model in one kernel forward and one backward.

One time step of 16 rows is a few microseconds of arithmetic in eleven kernels that wait for each other. Where the
recurrence is small, each block of the memory gets a program of its own, which keeps the block's weights and goes
through all time steps without ending. Twice per step the programs of the same rows must know of each other: the norm
reads all blocks, and so do the layers after it. They leave their parts in memory, meet, and add up all parts in the
same order, so the result is the same every time.

     row t      each block                             meeting         every program, the same
     forward    mixed, its square                   -> norm
                gates, deter; parts of two layers   -> sums            posterior, choice, next row's inputs
     backward   gradients of posterior, choice;
                gates                               -> along the norm
                mixed; parts of the inputs' gradients -> sums          gradients of the state before
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from rl_lab.kernels.triton.recurrence import Backward, Forward, Products, Shape

ROWS = 16  # of one program: the least that a matrix product takes
WARPS = 8  # of 4, 8 and 16 the fastest on an H200
SHARED_BYTES = 160 * 1024  # that a program may have on an A100 or later; the weights of size 1m take 112 KiB of them


@triton.jit
def silu_of_norm(x, weight, scale):
    y = x * scale[:, None] * weight[None, :]
    return y * tl.sigmoid(y)


@triton.jit
def scale_of(x, epsilon, WIDTH: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + epsilon)


@triton.jit
def silu_gradient(y):
    sigmoid = tl.sigmoid(y)
    return sigmoid * (1.0 + y * (1.0 - sigmoid))


@triton.jit
def norm_silu_gradient(x, weight, gradient, epsilon, WIDTH: tl.constexpr):
    scale = scale_of(x, epsilon, WIDTH)
    normed = x * scale[:, None]
    g = gradient * silu_gradient(normed * weight[None, :]) * weight[None, :]
    return scale[:, None] * (g - normed * (tl.sum(g * normed, axis=1) / WIDTH)[:, None])


@triton.jit
def after_gates(old, reset, middle, update, b_reset, b_middle, b_update):
    """The memory after a GRU's gates; 2 sigmoid(2x) - 1 is tanh(x)."""
    reset_ = tl.sigmoid(reset.to(tl.float32) + b_reset)
    candidate = 2.0 * tl.sigmoid(2.0 * reset_ * (middle.to(tl.float32) + b_middle)) - 1.0
    return old + tl.sigmoid(update.to(tl.float32) + b_update) * (candidate - old)


@triton.jit
def inward_gradient(gradient, x, norm, epsilon, low: tl.constexpr, H: tl.constexpr):
    """Back through one of the two layers that read the state before, whose outputs `x` are normed."""
    return norm_silu_gradient(x, norm, gradient.to(low).to(tl.float32), epsilon, H).to(low)


@triton.jit
def store_inward(to, place, of_deter, of_stoch, H: tl.constexpr):
    """Side by side, what belongs to the layer over the memory and to the one over the latent."""
    tl.store(to + place, of_deter)
    tl.store(to + place + H, of_stoch)


@triton.jit
def kept_of(x, keep):
    """What is left of x `[R, C]` where `keep [R, 1]` is 0 at the first row of an episode; NaN times 0 would be NaN."""
    return tl.where(keep > 0.0, x, 0.0)


@triton.jit
def arrive(counter):
    """Counts this program in: what it stored before, others may read once they have waited for everyone."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def wait(counter, everyone):
    """Until `everyone` arrivals were counted. What nobody waits for is best stored and read between the two."""
    arrived = tl.atomic_add(counter, 0, sem="acquire")
    while arrived < everyone:
        arrived = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def meet(counter, everyone):
    arrive(counter)
    wait(counter, everyone)


@triton.jit
def _forward(
    inward, shared, own, gate_weights, posterior, output_weights, in_bias, in_norm, mix_bias, mix_norm, gates_bias,
    posterior_norm, output_bias, from_embedding, keep, noise, state, before, pre, inputs, mixed, mix_scale, active,
    gates, deter_low, above, hidden, output, deters, stochs, parameters, counters, squares_of, parts_of,
    T, B, epsilon, unimix, HAS_NOISE: tl.constexpr, G: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
    GROUPS: tl.constexpr, CLASSES: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = G * W
    Z: tl.constexpr = GROUPS * CLASSES
    low = state.dtype.element_ty
    g, rows_id = tl.program_id(0), tl.program_id(1)
    local = tl.arange(0, R)
    r = rows_id * R + local
    h, w, z, classes = tl.arange(0, H), tl.arange(0, W), tl.arange(0, Z), tl.arange(0, CLASSES)
    counter = counters + rows_id
    squares_of += rows_id * G * R
    parts_of += rows_id * G * R * 2 * H
    mine = local[:, None] * (2 * H) + h[None, :]
    is_first_block = g == 0
    # This block's weights stay here.
    w_deter = tl.load(inward + h[None, :] * (D + Z) + g * W + w[:, None])  # [W, H]
    w_stoch = tl.load(inward + (H + h)[None, :] * (D + Z) + D + z[:, None])  # [Z, H]
    w_shared_0 = tl.load(shared + h[:, None] * D + g * W + w[None, :])  # [H, W]
    w_shared_1 = tl.load(shared + (H + h)[:, None] * D + g * W + w[None, :])
    w_shared_2 = tl.load(shared + (2 * H + h)[:, None] * D + g * W + w[None, :])
    w_own = tl.load(own + g * W * W + w[:, None] * W + w[None, :])
    gate = gate_weights + g * W * 3 * W + w[:, None] * (3 * W) + w[None, :]
    w_reset, w_middle, w_update = tl.load(gate), tl.load(gate + W), tl.load(gate + 2 * W)
    w_posterior = tl.load(posterior + h[None, :] * D + g * W + w[:, None])  # [W, H]
    w_output = tl.load(output_weights + z[None, :] * H + h[:, None])  # [H, Z]
    deter_bias, stoch_bias = tl.load(in_bias + h)[None, :], tl.load(in_bias + H + h)[None, :]
    deter_norm, stoch_norm = tl.load(in_norm + h), tl.load(in_norm + H + h)
    b_mix, n_mix = tl.load(mix_bias + g * W + w)[None, :], tl.load(mix_norm + g * W + w)
    b_reset = tl.load(gates_bias + g * 3 * W + w)[None, :]
    b_middle = tl.load(gates_bias + g * 3 * W + W + w)[None, :]
    b_update = tl.load(gates_bias + g * 3 * W + 2 * W + w)[None, :] - 1.0
    n_posterior, b_output = tl.load(posterior_norm + h), tl.load(output_bias + z)[None, :]
    # What every block makes of the state before row 0.
    old = tl.load(before + r[:, None] * D + g * W + w[None, :])
    chosen = tl.load(state + r[:, None] * (D + Z) + D + z[None, :])
    tl.store(parts_of + g * R * 2 * H + mine, tl.dot(old.to(low), w_deter, input_precision="ieee"))
    meet(counter, G)
    from_deter = tl.zeros([R, H], tl.float32)
    for b in tl.static_range(G):
        from_deter += tl.load(parts_of + b * R * 2 * H + mine, cache_modifier=".cg")
    for t in range(T):
        row = t * B + r
        has_next = row + B < T * B
        keep_next = tl.load(keep + row + B, mask=has_next, other=0.0)[:, None]
        embedded = tl.load(from_embedding + row[:, None] * H + h[None, :]).to(tl.float32)
        place = row[:, None] * (3 * H) + h[None, :]
        action_seen = tl.load(inputs + place + 2 * H)
        column = row[:, None] * D + g * W + w[None, :]
        # Two layers read the state; they, the action and this block of the memory are mixed.
        from_stoch = tl.dot(chosen, w_stoch, input_precision="ieee").to(low)
        x = from_deter.to(low).to(tl.float32) + deter_bias
        deter_seen = silu_of_norm(x, deter_norm, scale_of(x, epsilon, H)).to(low)
        x = from_stoch.to(tl.float32) + stoch_bias
        stoch_seen = silu_of_norm(x, stoch_norm, scale_of(x, epsilon, H)).to(low)
        total = tl.dot(old.to(low), w_own, input_precision="ieee")
        total = tl.dot(action_seen, w_shared_2, total, input_precision="ieee")
        total = tl.dot(deter_seen, w_shared_0, total, input_precision="ieee")
        total = tl.dot(stoch_seen, w_shared_1, total, input_precision="ieee").to(low)
        x_mixed = total.to(tl.float32) + b_mix
        tl.store(squares_of + g * R + local, tl.sum(x_mixed * x_mixed, axis=1))
        arrive(counter)
        tl.store(mixed + column, total)
        if is_first_block:
            two = row[:, None] * (2 * H) + h[None, :]
            tl.store(pre + two, from_deter.to(low))
            tl.store(pre + two + H, from_stoch)
            tl.store(inputs + place, deter_seen)
            tl.store(inputs + place + H, stoch_seen)
        wait(counter, G * (2 * t + 2))
        squares = tl.zeros([R], tl.float32)
        for b in tl.static_range(G):
            squares += tl.load(squares_of + b * R + local, cache_modifier=".cg")
        # The gates of this block.
        scale = tl.rsqrt(squares / D + epsilon)
        opened = silu_of_norm(x_mixed, n_mix, scale).to(low)
        reset = tl.dot(opened, w_reset, input_precision="ieee").to(low)
        middle = tl.dot(opened, w_middle, input_precision="ieee").to(low)
        update = tl.dot(opened, w_update, input_precision="ieee").to(low)
        new = after_gates(old, reset, middle, update, b_reset, b_middle, b_update)
        new_low = new.to(low)
        tl.store(parts_of + g * R * 2 * H + mine, tl.dot(new_low, w_deter, input_precision="ieee"))
        tl.store(parts_of + g * R * 2 * H + mine + H, tl.dot(new_low, w_posterior, input_precision="ieee"))
        arrive(counter)
        old = kept_of(new, keep_next)
        tl.store(active + column, opened)
        kept = gates + (g * T * B + row)[:, None] * (3 * W) + w[None, :]
        tl.store(kept, reset)
        tl.store(kept + W, middle)
        tl.store(kept + 2 * W, update)
        tl.store(deters + column, new)
        tl.store(deter_low + column, new_low)
        tl.store(before + column + B * D, old, mask=has_next[:, None])
        tl.store(state + (row + B)[:, None] * (D + Z) + g * W + w[None, :], old.to(low), mask=has_next[:, None])
        wait(counter, G * (2 * t + 3))
        from_deter = tl.zeros([R, H], tl.float32)
        from_memory = tl.zeros([R, H], tl.float32)
        for b in tl.static_range(G):
            from_deter += tl.load(parts_of + b * R * 2 * H + mine, cache_modifier=".cg")
            from_memory += tl.load(parts_of + b * R * 2 * H + mine + H, cache_modifier=".cg")
        from_deter = kept_of(from_deter, keep_next)
        # The posterior, and a choice from it.
        total = (from_memory + embedded).to(low)
        x = total.to(tl.float32)
        seen = silu_of_norm(x, n_posterior, scale_of(x, epsilon, H)).to(low)
        raw_logits = tl.dot(seen, w_output, input_precision="ieee").to(low)
        logits = raw_logits.to(tl.float32) + b_output
        choice = row[:, None] * Z + z[None, :]
        apart = tl.reshape(logits, (R * GROUPS, CLASSES))
        weights = tl.exp(apart - tl.max(apart, axis=1)[:, None])
        probs = weights / tl.sum(weights, axis=1)[:, None] * (1.0 - unimix) + unimix / CLASSES
        if HAS_NOISE:
            probs = probs / tl.reshape(tl.load(noise + choice), (R * GROUPS, CLASSES))
        best = tl.argmax(probs, axis=1)
        one_hot = tl.reshape(tl.where(classes[None, :] == best[:, None], 1.0, 0.0), (R, Z))
        chosen = (one_hot * keep_next).to(low)
        if is_first_block:
            tl.store(mix_scale + row, scale)
            place = row[:, None] * H + h[None, :]
            tl.store(above + place, total)
            tl.store(hidden + place, seen)
            tl.store(output + choice, raw_logits)
            tl.store(parameters + choice, logits)
            tl.store(stochs + choice, one_hot)
            tl.store(state + (row + B)[:, None] * (D + Z) + D + z[None, :], chosen, mask=has_next[:, None])


@triton.jit
def _backward(
    inward, shared, own, gate_weights, posterior, output_weights, in_bias, in_norm, mix_bias, mix_norm, gates_bias,
    posterior_norm, keep, before, pre, mixed, mix_scale, gates, above, parameters, from_deter, from_stoch,
    from_parameters, for_pre, for_inputs, for_mixed, for_active, for_gates, for_above, for_hidden, for_output,
    counters, along_of, parts_of, T, B, epsilon, unimix, G: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
    GROUPS: tl.constexpr, CLASSES: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = G * W
    Z: tl.constexpr = GROUPS * CLASSES
    low = pre.dtype.element_ty
    g, rows_id = tl.program_id(0), tl.program_id(1)
    local = tl.arange(0, R)
    r = rows_id * R + local
    h, w, z = tl.arange(0, H), tl.arange(0, W), tl.arange(0, Z)
    counter = counters + rows_id
    along_of += rows_id * G * R
    parts_of += rows_id * G * R * 2 * H
    mine = local[:, None] * (2 * H) + h[None, :]
    is_first_block = g == 0
    # This block's weights stay here, turned round.
    w_deter = tl.load(inward + h[:, None] * (D + Z) + g * W + w[None, :])  # [H, W]
    w_stoch = tl.load(inward + (H + h)[:, None] * (D + Z) + D + z[None, :])  # [H, Z]
    w_shared_0 = tl.load(shared + h[None, :] * D + g * W + w[:, None])  # [W, H]
    w_shared_1 = tl.load(shared + (H + h)[None, :] * D + g * W + w[:, None])
    w_own = tl.load(own + g * W * W + w[None, :] * W + w[:, None])
    gate = gate_weights + g * W * 3 * W + w[None, :] * (3 * W) + w[:, None]
    w_reset, w_middle, w_update = tl.load(gate), tl.load(gate + W), tl.load(gate + 2 * W)
    w_posterior = tl.load(posterior + h[:, None] * D + g * W + w[None, :])  # [H, W]
    w_output = tl.load(output_weights + z[:, None] * H + h[None, :])  # [Z, H]
    deter_bias, stoch_bias = tl.load(in_bias + h)[None, :], tl.load(in_bias + H + h)[None, :]
    deter_norm, stoch_norm = tl.load(in_norm + h), tl.load(in_norm + H + h)
    b_mix, n_mix = tl.load(mix_bias + g * W + w)[None, :], tl.load(mix_norm + g * W + w)[None, :]
    b_reset = tl.load(gates_bias + g * 3 * W + w)[None, :]
    b_middle = tl.load(gates_bias + g * 3 * W + W + w)[None, :]
    b_update = tl.load(gates_bias + g * 3 * W + 2 * W + w)[None, :] - 1.0
    n_posterior = tl.load(posterior_norm + h)
    later = tl.zeros([R, W], tl.float32)
    for_choice = tl.zeros([R, Z], tl.float32)
    for step in range(T):
        t = T - 1 - step
        row = t * B + r
        keep_next = tl.load(keep + row + B, mask=row + B < T * B, other=0.0)[:, None]
        column = row[:, None] * D + g * W + w[None, :]
        # The choice, the posterior's output and its hidden layer.
        choice = row[:, None] * Z + z[None, :]
        logits = tl.reshape(tl.load(parameters + choice), (R * GROUPS, CLASSES))
        weights = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        probs = weights / tl.sum(weights, axis=1)[:, None]
        for_choice = tl.load(from_stoch + choice).to(tl.float32) + kept_of(for_choice, keep_next)
        for_probs = tl.reshape(for_choice, (R * GROUPS, CLASSES)) * (1.0 - unimix)
        for_logits = tl.reshape(probs * (for_probs - tl.sum(for_probs * probs, axis=1)[:, None]), (R, Z))
        for_raw = (for_logits + tl.load(from_parameters + choice).to(tl.float32)).to(low)
        seen = tl.dot(for_raw, w_output, input_precision="ieee").to(low)
        one = row[:, None] * H + h[None, :]
        x = tl.load(above + one).to(tl.float32)
        back = norm_silu_gradient(x, n_posterior, seen.to(tl.float32), epsilon, H).to(low)
        if is_first_block:
            tl.store(for_output + choice, for_raw)
            tl.store(for_hidden + one, seen)
            tl.store(for_above + one, back)
        # The gates of this block.
        for_new = tl.dot(back, w_posterior, input_precision="ieee").to(low).to(tl.float32)
        for_new += tl.load(from_deter + column).to(tl.float32) + kept_of(later, keep_next)
        kept = (g * T * B + row)[:, None] * (3 * W) + w[None, :]
        reset = tl.sigmoid(tl.load(gates + kept).to(tl.float32) + b_reset)
        middle = tl.load(gates + kept + W).to(tl.float32) + b_middle
        update = tl.sigmoid(tl.load(gates + kept + 2 * W).to(tl.float32) + b_update)
        old = tl.load(before + column)
        candidate = 2.0 * tl.sigmoid(2.0 * reset * middle) - 1.0
        inner = for_new * update * (1.0 - candidate * candidate)
        for_reset = (inner * middle * reset * (1.0 - reset)).to(low)
        for_middle = (inner * reset).to(low)
        for_update = (for_new * (candidate - old) * update * (1.0 - update)).to(low)
        direct = for_new * (1.0 - update)
        opened = tl.dot(for_reset, w_reset, input_precision="ieee")
        opened = tl.dot(for_middle, w_middle, opened, input_precision="ieee")
        opened = tl.dot(for_update, w_update, opened, input_precision="ieee").to(low)
        # The norm over all blocks: how the for_new lies along it.
        scale = tl.load(mix_scale + row)[:, None]
        normed = (tl.load(mixed + column).to(tl.float32) + b_mix) * scale
        after_norm = opened.to(tl.float32) * silu_gradient(normed * n_mix) * n_mix
        tl.store(along_of + g * R + local, tl.sum(after_norm * normed, axis=1))
        arrive(counter)
        tl.store(for_gates + kept, for_reset)
        tl.store(for_gates + kept + W, for_middle)
        tl.store(for_gates + kept + 2 * W, for_update)
        tl.store(for_active + column, opened)
        wait(counter, G * (2 * step + 1))
        along = tl.zeros([R], tl.float32)
        for b in tl.static_range(G):
            along += tl.load(along_of + b * R + local, cache_modifier=".cg")
        for_mix = (scale * (after_norm - normed * (along / D)[:, None])).to(low)
        tl.store(parts_of + g * R * 2 * H + mine, tl.dot(for_mix, w_shared_0, input_precision="ieee"))
        tl.store(parts_of + g * R * 2 * H + mine + H, tl.dot(for_mix, w_shared_1, input_precision="ieee"))
        arrive(counter)
        tl.store(for_mixed + column, for_mix)
        later = tl.dot(for_mix, w_own, direct, input_precision="ieee")
        two = row[:, None] * (2 * H) + h[None, :]
        x_deter = tl.load(pre + two).to(tl.float32) + deter_bias
        x_stoch = tl.load(pre + two + H).to(tl.float32) + stoch_bias
        wait(counter, G * (2 * step + 2))
        first = tl.zeros([R, H], tl.float32)
        second = tl.zeros([R, H], tl.float32)
        for b in tl.static_range(G):
            first += tl.load(parts_of + b * R * 2 * H + mine, cache_modifier=".cg")
            second += tl.load(parts_of + b * R * 2 * H + mine + H, cache_modifier=".cg")
        for_deter = inward_gradient(first, x_deter, deter_norm, epsilon, low, H)
        for_stoch = inward_gradient(second, x_stoch, stoch_norm, epsilon, low, H)
        later = tl.dot(for_deter, w_deter, later, input_precision="ieee")
        for_choice = tl.dot(for_stoch, w_stoch, input_precision="ieee")
        if is_first_block:
            store_inward(for_inputs, row[:, None] * (3 * H) + h[None, :], first.to(low), second.to(low), H)
            store_inward(for_pre, two, for_deter, for_stoch, H)


# --- from torch ---------------------------------------------------------------------------------


def fits(shape: Shape, device: torch.device) -> bool:
    """Whether a block's weights fit into a multiprocessor's memory and all programs are there at the same time."""
    width, classes = shape.deter // shape.blocks, shape.stoch // shape.groups
    return (
        shape.low.itemsize == 2
        and shape.batch % ROWS == 0
        and can_hold(device, programs=shape.blocks * (shape.batch // ROWS), shared_bytes=SHARED_BYTES)
        and all(size & (size - 1) == 0 for size in (width, shape.hidden, shape.groups, classes))
        and 16 <= width <= 64
        and 16 <= shape.hidden <= 64
        and 16 <= shape.stoch <= 128
    )


def can_hold(device: torch.device, *, programs: int, shared_bytes: int) -> bool:
    """Whether so many programs can be at work at the same time and still leave half of the device to others: one that
    waits for a program that never gets its turn would wait for ever."""
    if torch.version.hip is not None:
        return False  # never tried there
    index = torch.cuda.current_device() if device.index is None else device.index
    found = triton.runtime.driver.active.utils.get_device_properties(index)
    return bool(found["multiprocessor_count"] >= 2 * programs and found["max_shared_mem"] >= shared_bytes)


def run_forward(sequence: Forward) -> None:
    """All rows of a sequence."""
    shape = sequence.shape
    matrices = matrices_of(sequence.products, sequence.products.posterior)
    launch_forward(_forward, sequence, matrices, grid=_grid(shape), parts=shape.blocks, **_sizes(shape))


def run_backward(back: Backward, *gradients: Tensor) -> None:
    """The gradients of the results of every product, from those of deters, stochs and parameters."""
    shape = back.shape
    launch_backward(_backward, back, gradients, grid=_grid(shape), parts=shape.blocks, **_sizes(shape))


def launch_forward(
    kernel: Any, sequence: Forward, matrices: list[Tensor], *, grid: tuple[int, int], parts: int, **constants: Any
) -> None:
    """`kernel` with everything a sequence needs; its programs add up `parts` parts of the layers."""
    products, weights, shape, rows = sequence.products, sequence.weights, sequence.shape, sequence.rows
    keep, noise = sequence.keep, sequence.noise
    kernel[grid](
        *matrices,
        products.inward_bias, products.inward_norm, weights.mix_bias, weights.mix_norm, weights.gates_bias,
        weights.posterior_norm, weights.output_bias,
        sequence.from_embedding.contiguous(), keep, keep if noise is None else noise,
        rows.state, rows.before, rows.pre, rows.inputs, rows.mixed, rows.mix_scale, rows.active, rows.gates,
        rows.deter, rows.above, rows.hidden, rows.output, sequence.deters, sequence.stochs, sequence.parameters,
        *_meeting_place(grid, parts, shape, keep.device),
        shape.length, shape.batch, shape.epsilon, shape.unimix, HAS_NOISE=noise is not None, **constants,
    )  # fmt: skip


def launch_backward(
    kernel: Any, back: Backward, gradients: tuple[Tensor, ...], *, grid: tuple[int, int], parts: int, **constants: Any
) -> None:
    """Backward; the actions' gradients are one product at the end."""
    products, weights, shape, rows, keep = back.products, back.learned, back.shape, back.rows, back.keep
    kernel[grid](
        *matrices_of(products, products.posterior),
        products.inward_bias, products.inward_norm, weights.mix_bias, weights.mix_norm, weights.gates_bias,
        weights.posterior_norm,
        keep, rows.before, rows.pre, rows.mixed, rows.mix_scale, rows.gates, rows.above, back.parameters,
        *gradients,
        back.pre, back.inputs, back.mixed, back.active, back.gates, back.above, back.hidden, back.output,
        *_meeting_place(grid, parts, shape, keep.device),
        shape.length, shape.batch, shape.epsilon, shape.unimix, **constants,
    )  # fmt: skip
    h = shape.hidden
    back.inputs[..., 2 * h :] = back.mixed @ products.shared[2 * h :].t()


def matrices_of(products: Products, over_memory: Tensor) -> list[Tensor]:
    """In the order of the kernels' arguments; `over_memory` are the layers that read the whole memory."""
    own, over_memory = products.own.contiguous(), over_memory.contiguous()
    return [products.inward, products.shared, own, products.gates, over_memory, products.output]


def _meeting_place(
    grid: tuple[int, int], parts: int, shape: Shape, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """A counter of arrivals, and memory for what the programs tell each other."""
    programs, groups = grid
    arrived = torch.zeros(groups, dtype=torch.int32, device=device)
    one = torch.empty(groups, programs, ROWS, device=device)
    return arrived, one, torch.empty(groups, parts, ROWS, 2 * shape.hidden, device=device)


def _grid(shape: Shape) -> tuple[int, int]:
    return shape.blocks, shape.batch // ROWS  # the programs of the same rows are started one after the other


def _sizes(shape: Shape) -> dict[str, int]:
    classes = shape.stoch // shape.groups
    sizes = {"G": shape.blocks, "W": shape.deter // shape.blocks, "H": shape.hidden}
    sizes |= {"GROUPS": shape.groups, "CLASSES": classes, "R": ROWS, "num_warps": WARPS, "num_stages": 1}
    return sizes | {"launch_cooperative_grid": True}  # the device starts all programs together or none
