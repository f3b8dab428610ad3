"""Small multi-layer perceptrons on a CPU, forward and backward, for learning and for acting.

A 2x64 network on a minibatch of 256 rows computes for about 100 microseconds; layer by layer, autograd's bookkeeping
and torch.tanh take twice as long again. Here all layers of all networks that read the same rows are one autograd node:

    forward    h_0 = x,   h_i = f(h_{i-1} W_i' + b_i);   the last layer may have no f
    backward   g_i = dL/dh_i * f'(h_i),   dW_i = g_i' h_{i-1},   db_i = sum g_i,   dL/dh_{i-1} = g_i W_i

tanh and relu know their derivative from their own output, so nothing but the h_i is kept. A loss that knows its
gradient by the networks' outputs joins the same node (`differentiate`). No memory is shared between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from rl_lab.kernels.door import FastPath, has_hooks, is_unchanged

FEWEST_ROWS = 64  # to learn from; below, calling Python from the backward pass costs more than it saves
FEWEST_ROWS_OF_A_LOSS = 16  # whose own operations are saved as well
MOST_PRODUCTS = 2**18  # of one matrix product in numpy; its BLAS wakes threads for more

Loss = Callable[[list[Tensor]], tuple[list[Tensor], list[list[Tensor | None]], Any]]
"""Outputs `[M, D]` of each network to the loss terms, the gradient of each term by each output (None: it has none), and
whatever else the caller wants to know."""

_tanh_backward = torch.ops.aten.tanh_backward
_relu_backward = torch.ops.aten.threshold_backward


class Network(NamedTuple):
    """One network: weights `[out, in]`, biases `[out]`, and how many of the layers are activated."""

    weights: list[Tensor]
    biases: list[Tensor]
    is_tanh: bool
    active_layers: int


class Networks(NamedTuple):
    """The networks of one module, and its parameters: weight, bias, weight, bias, ... An ensemble's have a leading axis
    for its networks, `[E, out, in]` and `[E, 1, out]`."""

    members: list[Network]
    parameters: list[Tensor]


def plain_mlp(module: Any) -> Networks | None:
    """The network of an `MLP`; None where it is not made of plain layers with tanh or relu."""
    if not is_unchanged(module, "rl_lab.components.networks.encoders:MLP", "forward") or module.norms is not None:
        return None
    parameters: list[Tensor] = []
    for layer in (*module.hidden, *([] if module.output is None else [module.output])):
        if type(layer) is not nn.Linear or layer.bias is None or "forward" in vars(layer) or has_hooks(layer):
            return None
        parameters += layer._parameters.values()  # type: ignore[arg-type]
    if not parameters or module.activation not in (torch.tanh, torch.relu):
        return None
    weights, biases = parameters[::2], parameters[1::2]
    active = len(module.hidden)
    return Networks([Network(weights, biases, module.activation is torch.tanh, active)], parameters)


def plain_ensemble(module: Any) -> Networks | None:
    """The networks of an `EnsembleMLP`; None where they have norms or other activations than tanh and relu."""
    is_one = is_unchanged(module, "rl_lab.components.networks.ensemble:EnsembleMLP", "forward")
    if not is_one or module.norms is not None or module.activation not in (torch.tanh, torch.relu):
        return None
    pairs = zip(module.weights._parameters.values(), module.biases._parameters.values(), strict=True)
    parameters = [each for pair in pairs for each in pair]
    is_tanh, active = module.activation is torch.tanh, len(parameters) // 2 - 1
    facts = [is_tanh, *((id(parameter), parameter.data_ptr()) for parameter in parameters)]
    known = _ensembles.get(module)
    if known is None or known[0] != facts:  # moved or replaced since
        parts = [Network(part[::2], part[1::2], is_tanh, active) for part in _parts(parameters)]
        known = _ensembles[module] = (facts, Networks(parts, parameters))
    return known[1]


_ensembles: WeakKeyDictionary[nn.Module, tuple[list[Any], Networks]] = WeakKeyDictionary()


def _parts(stacked: list[Tensor]) -> list[list[Tensor]]:
    """Weights `[E, out, in]` and biases `[E, 1, out]` in turns: for each network, its own ones, in the same memory."""
    with torch.no_grad():
        flat = [each.squeeze(1) if index % 2 else each for index, each in enumerate(stacked)]
        return [list(part) for part in zip(*(each.unbind() for each in flat), strict=True)]


# --- forward and backward ------------------------------------------------------------------------


def forward(network: Network, rows: Tensor) -> list[Tensor]:
    """The rows `[M, F]`, then what each layer makes of them, `[M, width]`; without a graph."""
    reached = [rows]
    for index, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        if len(rows) * weight.numel() <= MOST_PRODUCTS:
            values = rows.detach().numpy() @ weight.detach().numpy().T
            values += bias.detach().numpy()
            rows = torch.from_numpy(values)
        else:
            rows = torch.addmm(bias, rows, weight.t())
        if index < network.active_layers:
            if network.is_tanh:
                values = rows.numpy()
                np.tanh(values, out=values)  # on the same memory, six times as fast as torch.tanh
            else:
                rows.relu_()
        reached.append(rows)
    return reached


def backward(
    network: Network,
    reached: Sequence[Tensor],
    gradient: Tensor,
    *,
    into: Sequence[Tensor] = (),
    wants_rows: bool = False,
) -> Tensor | None:
    """From the gradient `[M, D]` of the output: those of the parameters `into` memory for each weight and bias, where
    there is any; and that of the rows."""
    is_own = False  # memory that nobody else sees may be written to
    for index in reversed(range(len(network.weights))):
        before, weight = reached[index], network.weights[index]
        if index < network.active_layers:
            activated = reached[index + 1]
            if is_own and network.is_tanh:
                _tanh_backward.grad_input(gradient, activated, grad_input=gradient)
            elif is_own:
                _relu_backward.grad_input(gradient, activated, 0, grad_input=gradient)
            else:
                back = _tanh_backward if network.is_tanh else _relu_backward
                gradient = back(gradient, activated) if network.is_tanh else back(gradient, activated, 0)
        if into:
            if before.shape[1] < gradient.shape[1]:  # the same product; a few columns are faster on the left
                into[2 * index].copy_(_product(before.t(), gradient).t())
            else:
                _product(gradient.t(), before, out=into[2 * index])
            torch.sum(gradient, 0, out=into[2 * index + 1])
        if index > 0 or wants_rows:
            gradient, is_own = _product(gradient, weight.detach()), True
    return gradient if wants_rows else None


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """The matrix product; small ones are numpy's, whose calls cost less."""
    if len(left) * right.numel() > MOST_PRODUCTS:
        return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)
    into = None if out is None else out.numpy()
    return torch.from_numpy(np.matmul(left.detach().numpy(), right.detach().numpy(), out=into))


# --- as autograd nodes ---------------------------------------------------------------------------


def differentiate(modules: Sequence[Networks], rows: Tensor, loss: Loss) -> tuple[tuple[Tensor, ...], Any]:
    """The terms of a loss of the outputs that all networks give for rows `[M, F]`, and what else the loss says."""
    said: list[Any] = []
    parameters = [parameter for networks in modules for parameter in networks.parameters]
    terms: tuple[Tensor, ...] = _Loss.apply(modules, loss, said, rows, *parameters)  # type: ignore[no-untyped-call]
    return terms, said[0]


class _Loss(Function):
    @staticmethod
    def forward(ctx: Any, modules: Any, loss: Loss, said: list[Any], rows: Tensor, *parameters: Tensor) -> Any:
        ctx.modules = modules
        ctx.reached = [[forward(member, rows) for member in networks.members] for networks in modules]
        terms, ctx.gradients, more = loss([each[-1] for members in ctx.reached for each in members])
        said.append(more)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, *parameters)  # torch sees whether they were changed in place before backward
        return tuple(terms)

    @staticmethod
    def backward(ctx: Any, *scales: Tensor | None) -> tuple[Any, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.gradients[0])
        for scale, term in zip(scales, ctx.gradients, strict=True):
            for index, part in enumerate(term):
                if scale is not None and part is not None:
                    other = gradients[index]
                    gradients[index] = part * scale if other is None else torch.addcmul(other, part, scale)
        return None, None, None, *_backward_all(ctx, gradients, ctx.needs_input_grad[3:])


class _Outputs(Function):
    @staticmethod
    def forward(ctx: Any, networks: Networks, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.modules = [networks]
        ctx.reached = [[forward(member, rows) for member in networks.members]]
        output = _joined(networks, [reached[-1] for reached in ctx.reached[0]])
        ctx.save_for_backward(rows, output, *parameters)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        parts = [gradient] if gradient.dim() == 2 else list(gradient.unbind())
        return None, *_backward_all(ctx, parts, ctx.needs_input_grad[1:])


def _joined(networks: Networks, outputs: list[Tensor]) -> Tensor:
    return outputs[0] if networks.parameters[0].dim() == 2 else torch.stack(outputs)


def _backward_all(ctx: Any, gradients: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of the rows and of every parameter, from those of every network's output."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "A fast path cannot be differentiated twice (create_graph=True): write runtime.fast_paths=off."
        )
    _ = ctx.saved_tensors  # raises where something was changed in place since
    of_rows: Tensor | None = None
    found: list[Tensor | None] = []
    outputs = iter(gradients)
    for networks, reached in zip(ctx.modules, ctx.reached, strict=True):
        given = [next(outputs) for _ in networks.members]
        learns = any(needed[1 + len(found) : 1 + len(found) + len(networks.parameters)]) and given[0] is not None
        own = [torch.empty_like(parameter) for parameter in networks.parameters] if learns else []
        each = [own] if not own or own[0].dim() == 2 else _parts(own)
        for member, layers, gradient, into in zip(networks.members, reached, given, cycle(each), strict=False):
            if gradient is not None:
                back = backward(member, layers, gradient, into=into, wants_rows=needed[0])
                of_rows = back if of_rows is None or back is None else of_rows + back
        found += own if learns else [None] * len(networks.parameters)
    return [of_rows, *found]


# --- the forward pass of an MLP and of an ensemble -------------------------------------------------


def is_plain(rows: Tensor) -> bool:
    """float32 on a CPU, to be computed in float32 there and now."""
    return rows.dtype is torch.float32 and rows.is_cpu and not torch.is_autocast_enabled("cpu")


def learns_from(rows: Tensor, fewest: int = FEWEST_ROWS_OF_A_LOSS) -> bool:
    """Whether there are enough rows `[..., F]` to learn from to be worth a node of its own."""
    return torch.is_grad_enabled() and is_plain(rows) and rows.numel() >= fewest * rows.shape[-1]


def _run(networks: Networks | None, features: Tensor) -> Tensor:
    if networks is None or networks.parameters[0].dtype is not torch.float32:
        return NotImplemented
    leading = features.shape[:-1]
    rows = features if features.dim() == 2 else features.reshape(-1, features.shape[-1])
    if torch.is_grad_enabled():
        output = _Outputs.apply(networks, rows, *networks.parameters)  # type: ignore[no-untyped-call]
    else:
        output = _joined(networks, [forward(member, rows)[-1] for member in networks.members])
    return output if len(leading) == 1 else output.view(*leading, output.shape[-1])  # type: ignore[no-any-return]


def _fits(rows: Tensor) -> bool:
    return learns_from(rows, FEWEST_ROWS) if torch.is_grad_enabled() else is_plain(rows)


def _mlp_forward(module: Any, features: Tensor) -> Tensor:
    return _run(plain_mlp(module), features) if _fits(features) else NotImplemented


def _ensemble_forward(module: Any, *inputs: Tensor) -> Tensor:
    if not _fits(inputs[0]):
        return NotImplemented
    return _run(plain_ensemble(module), inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=-1))


MLP_FORWARD = FastPath(_mlp_forward, ("rl_lab.components.networks.encoders:MLP.forward",))
ENSEMBLE_FORWARD = FastPath(_ensemble_forward, ("rl_lab.components.networks.ensemble:EnsembleMLP.forward",))
