"""Small multi-layer perceptrons on a CPU, forward and backward, for learning and for acting.

A 2x64 network on a minibatch of 256 rows computes for about 100 microseconds; layer by layer, autograd's bookkeeping
and torch.tanh take twice as long again. Here all layers of all networks that read the same rows are one autograd node:

    forward    h_0 = x,   h_i = f(h_{i-1} W_i' + b_i);   the last layer may have no f
    backward   g_i = dL/dh_i * f'(h_i),   dW_i = g_i' h_{i-1},   db_i = sum g_i,   dL/dh_{i-1} = g_i W_i

tanh and relu know their derivative from their own output, so nothing but the h_i is kept. A loss that knows its
gradient by the networks' outputs joins the same node (`differentiate`), or needs none (`gradients_by_parameter`).

All of it works on numpy arrays, whose calls cost less than torch's: those of parameters are views of their memory, only
read, and taken anew where a parameter lies elsewhere. No memory is shared between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from rl_lab.kernels.door import FastPath, has_gradient_hooks, has_hooks, is_unchanged
from rl_lab.kernels.formulas import MLP
from rl_lab.kernels.remembered import remembered
from rl_lab.types import Gradients

FEWEST_ROWS = 64  # to learn from; below, calling Python from the backward pass costs more than it saves
FEWEST_ROWS_OF_A_LOSS = 16  # whose own operations are saved as well
MOST_PRODUCTS = 2**18  # of one matrix product in numpy; its BLAS wakes threads for more
MOST_PRODUCTS_OF_MKL = 2**20  # above, oneDNN takes half the time where MKL does not use a processor's AVX-512
MOST_NUMBERS = 2**13  # of one elementwise operation in numpy; torch has the faster loops and the slower calls

Scales = Sequence[float | None]
ByOutput = Sequence[np.ndarray | None]
Loss = Callable[[list[np.ndarray]], tuple[list[float], Callable[[Scales], ByOutput], Any]]
"""Outputs `[M, D]` of each network to the loss terms; to what computes, from a scale of each term (None: it does not
count), the gradient of their sum by each output (None: it has none); and to whatever else the caller wants to know."""

_tensor = torch.from_numpy
_onednn_linear = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_relu_backward = torch.ops.aten.threshold_backward.grad_input


class Layer(NamedTuple):
    """Weight `[out, in]`, its transpose and bias `[out]`, as arrays and as tensors of the same memory."""

    weight: np.ndarray
    transposed: np.ndarray
    bias: np.ndarray
    weight_tensor: Tensor
    transposed_tensor: Tensor
    bias_tensor: Tensor


class Network(NamedTuple):
    """One network, and how many of its layers are activated."""

    layers: list[Layer]
    is_tanh: bool
    active_layers: int


class Networks(NamedTuple):
    """The networks of one module, and its parameters: weight, bias, weight, bias, ... An ensemble's have a leading axis
    for its networks, `[E, out, in]` and `[E, 1, out]`."""

    members: list[Network]
    parameters: list[Tensor]
    arrays: list[np.ndarray]  # the memory of the parameters
    size: int  # of numbers in them


@remembered
def plain_mlp(module: Any) -> Networks | None:
    """The network of an `MLP`; None where it is not made of plain layers with tanh or relu."""
    if not is_unchanged(module, "rl_lab.components.networks.encoders:MLP", "forward") or module.norms is not None:
        return None
    parameters: list[Tensor] = []
    modules: dict[str, Any] = vars(module)["_modules"]  # asking for an attribute takes three times as long
    hidden, output = vars(modules["hidden"])["_modules"].values(), modules.get("output")
    for layer in hidden if output is None else (*hidden, output):
        if type(layer) is not nn.Linear or "forward" in vars(layer) or has_hooks(layer):
            return None
        parameters += vars(layer)["_parameters"].values()
    arrays, activation = _arrays(parameters), module.activation
    if not arrays or (activation is not torch.tanh and activation is not torch.relu):
        return None
    members = [_network(arrays, activation is torch.tanh, len(hidden))]
    return Networks(members, parameters, arrays, sum(array.size for array in arrays))


@remembered
def plain_ensemble(module: Any) -> Networks | None:
    """The networks of an `EnsembleMLP`; None where they have norms or other activations than tanh and relu."""
    is_one = is_unchanged(module, "rl_lab.components.networks.ensemble:EnsembleMLP", "forward")
    if not is_one or module.norms is not None or module.activation not in (torch.tanh, torch.relu):
        return None
    pairs = zip(module.weights._parameters.values(), module.biases._parameters.values(), strict=True)
    parameters = [each for pair in pairs for each in pair]
    arrays = _arrays(parameters)
    if not arrays:
        return None
    is_tanh, active = module.activation is torch.tanh, len(parameters) // 2 - 1
    members = [_network(part, is_tanh, active) for part in _parts(arrays)]
    return Networks(members, parameters, arrays, sum(array.size for array in arrays))


def _network(arrays: list[np.ndarray], is_tanh: bool, active_layers: int) -> Network:
    layers = []
    for weight, bias in zip(arrays[::2], arrays[1::2], strict=True):
        tensor = _tensor(weight)
        layers.append(Layer(weight, weight.T, bias, tensor, tensor.t(), _tensor(bias)))
    return Network(layers, is_tanh, active_layers)


def _arrays(parameters: Sequence[Tensor | None]) -> list[np.ndarray] | None:
    """Their memory; None where one is missing, is not float32 on a CPU, or has hooks for its gradient."""
    for parameter in parameters:
        if parameter is None or parameter.dtype is not torch.float32 or not parameter.is_cpu:
            return None
        if has_gradient_hooks(parameter):
            return None
    return [(each.detach() if each.requires_grad else each).numpy() for each in parameters]  # type: ignore[union-attr]


def _parts(arrays: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Of one network, its own arrays; of an ensemble's weights `[E, out, in]` and biases `[E, 1, out]`, those of each
    of its networks, in the same memory."""
    if arrays[0].ndim == 2:
        return [arrays]
    return [
        [each[index, 0] if place % 2 else each[index] for place, each in enumerate(arrays)]
        for index in range(len(arrays[0]))
    ]


# --- forward and backward ------------------------------------------------------------------------


def forward(network: Network, rows: np.ndarray) -> list[np.ndarray]:
    """The rows `[M, F]`, then what each layer makes of them, `[M, width]`."""
    reached, activated = [rows], range(network.active_layers)
    for index, layer in enumerate(network.layers):
        is_active = index in activated
        if len(rows) * layer.weight.size <= MOST_PRODUCTS:
            rows = rows @ layer.transposed
            rows += layer.bias
            if is_active and not network.is_tanh:
                np.maximum(rows, 0.0, out=rows)
        else:
            product = large_product(_tensor(rows), layer.weight_tensor, layer.bias_tensor)
            rows = (product.relu_() if is_active and not network.is_tanh else product).numpy()
        if is_active and network.is_tanh:
            np.tanh(rows, out=rows)  # on the same memory, six times as fast as torch.tanh
        reached.append(rows)
    return reached


def backward(
    network: Network,
    reached: Sequence[np.ndarray],
    gradient: np.ndarray,
    *,
    into: Sequence[np.ndarray] = (),
    wants_rows: bool = False,
) -> np.ndarray | None:
    """From the gradient `[M, D]` of the output: those of the parameters `into` memory for each weight and bias, where
    there is any; and that of the rows."""
    is_own = False  # memory that nobody else sees may be written to
    ones = np.ones(len(gradient), np.float32)  # a product with them sums faster than a sum
    for index in reversed(range(len(network.layers))):
        before = reached[index]
        if index < network.active_layers:
            activated, out = reached[index + 1], gradient if is_own else np.empty(gradient.shape, np.float32)
            if network.is_tanh:
                _tanh_backward(_tensor(gradient), _tensor(activated), grad_input=_tensor(out))
            elif activated.size <= MOST_NUMBERS:
                np.multiply(gradient, activated > 0.0, out=out)
            else:
                _relu_backward(_tensor(gradient), _tensor(activated), 0, grad_input=_tensor(out))
            gradient = out
        if into:
            if before.shape[1] < gradient.shape[1] and before.size * gradient.shape[1] > MOST_PRODUCTS:
                into[2 * index][...] = _product(before.T, gradient).T  # a few columns are faster on the left
            else:
                _product(gradient.T, before, out=into[2 * index])
            np.matmul(ones, gradient, out=into[2 * index + 1])
        if index > 0 or wants_rows:
            layer, is_own = network.layers[index], True
            if len(gradient) * layer.weight.size <= MOST_PRODUCTS and len(layer.weight) > 1:
                gradient = gradient @ layer.weight
            else:
                gradient = large_product(_tensor(gradient), layer.transposed_tensor).numpy()
    return gradient if wants_rows else None


def _product(left: np.ndarray, right: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The matrix product; large ones are torch's, and so are those of a column and a row, where numpy has no kernel."""
    if len(left) * right.size <= MOST_PRODUCTS and len(right) > 1:
        return np.matmul(left, right, out=out)  # type: ignore[no-any-return, call-overload]
    result = large_product(_tensor(left), _tensor(right.T)).numpy()
    if out is None:
        return result
    out[...] = result
    return out


def large_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows @ weight' + bias in memory of its own."""
    if rows.numel() * len(weight) > MOST_PRODUCTS_OF_MKL and _has_onednn():
        return _onednn_linear(rows, weight, bias, "none", [], "")  # type: ignore[misc, no-any-return]
    return torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())


def _has_onednn() -> bool:
    """Whether torch has the operation that its own compiler calls for linear layers, and nobody switched oneDNN off."""
    return _onednn_linear is not None and torch._C._get_mkldnn_enabled()


def gradients_by_parameter(
    modules: Sequence[Networks], reached: Sequence[Sequence[np.ndarray]], by_outputs: ByOutput
) -> Gradients:
    """Each parameter of these modules and its gradient, from what each of their networks reached and the gradient by
    its output; modules whose output has none are left out."""
    outputs = iter(zip(reached, by_outputs, strict=True))
    work = [(networks, [next(outputs) for _ in networks.members]) for networks in modules]
    work = [(networks, parts) for networks, parts in work if parts[0][1] is not None]
    joined, first, found = np.empty(sum(networks.size for networks, _ in work), np.float32), 0, []
    for networks, parts in work:
        own = []
        for array in networks.arrays:
            own.append(joined[first : first + array.size].reshape(array.shape))
            first += array.size
        for member, (layers, gradient), into in zip(networks.members, parts, _parts(own), strict=True):
            backward(member, layers, gradient, into=into)  # type: ignore[arg-type]
        found += own
    parameters = [parameter for networks, _ in work for parameter in networks.parameters]
    return Gradients(parameters, list(map(_tensor, found)), _tensor(joined))


def bring_gradients(
    modules: Sequence[Networks],
    reached: Sequence[Sequence[np.ndarray]],
    terms: Sequence[str],
    by_output: Callable[[Scales], ByOutput],
) -> Callable[[Mapping[str, float | Tensor]], Gradients]:
    """`LossOutput.gradients` of a loss with these terms."""

    def gradients(scales: Mapping[str, float | Tensor]) -> Gradients:
        numbers: list[float | None] = [float(scales[name]) or None for name in terms]  # 0 leaves a term out
        if not any(numbers):
            numbers[0] = 0.0
        return gradients_by_parameter(modules, reached, by_output(numbers))

    return gradients


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
        ctx.modules, values = modules, rows.detach().numpy()
        ctx.reached = [[forward(member, values) for member in networks.members] for networks in modules]
        terms, ctx.by_output, more = loss([each[-1] for members in ctx.reached for each in members])
        said.append(more)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, *parameters)  # torch sees whether they were changed in place before backward
        return tuple(map(torch.scalar_tensor, terms))

    @staticmethod
    def backward(ctx: Any, *scales: Tensor | None) -> tuple[Any, ...]:
        gradients = ctx.by_output([None if scale is None else float(scale) for scale in scales])
        return None, None, None, *_backward_all(ctx, gradients, ctx.needs_input_grad[3:])


class _Outputs(Function):
    @staticmethod
    def forward(ctx: Any, networks: Networks, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.modules, values = [networks], rows.detach().numpy()
        ctx.reached = [[forward(member, values) for member in networks.members]]
        output = _joined(networks, ctx.reached[0])
        ctx.save_for_backward(rows, output, *parameters)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        values = gradient.numpy()
        parts = [values] if values.ndim == 2 else list(values)
        return None, *_backward_all(ctx, parts, ctx.needs_input_grad[1:])


def _joined(networks: Networks, reached: list[list[np.ndarray]]) -> Tensor:
    outputs = [each[-1] for each in reached]
    return _tensor(outputs[0] if networks.parameters[0].dim() == 2 else np.stack(outputs))


def _backward_all(ctx: Any, gradients: Sequence[np.ndarray | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of the rows and of every parameter, from those of every network's output."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "A fast path cannot be differentiated twice (create_graph=True): write runtime.fast_paths=off."
        )
    _ = ctx.saved_tensors  # raises where something was changed in place since
    of_rows: np.ndarray | None = None
    found: list[Tensor | None] = []
    outputs = iter(gradients)
    for networks, reached in zip(ctx.modules, ctx.reached, strict=True):
        given = [next(outputs) for _ in networks.members]
        learns = any(needed[1 + len(found) : 1 + len(found) + len(networks.parameters)]) and given[0] is not None
        own = empty_gradients(networks) if learns else []
        parts = _parts(own) if own else [()] * len(given)
        for member, layers, gradient, into in zip(networks.members, reached, given, parts, strict=True):
            if gradient is not None:
                back = backward(member, layers, gradient, into=into, wants_rows=needed[0])
                of_rows = back if of_rows is None or back is None else of_rows + back
        found += [_tensor(each) for each in own] if learns else [None] * len(networks.parameters)
    return [None if of_rows is None else _tensor(of_rows), *found]


def empty_gradients(networks: Networks) -> list[np.ndarray]:
    """Memory for the gradient of each parameter."""
    return [np.empty(parameter.shape, np.float32) for parameter in networks.parameters]


# --- the forward pass of an MLP and of an ensemble -------------------------------------------------


def is_plain(rows: Tensor) -> bool:
    """float32 on a CPU, to be computed in float32 there and now; a subclass of Tensor may compute otherwise."""
    return type(rows) is Tensor and rows.dtype is torch.float32 and rows.is_cpu and not torch.is_autocast_enabled("cpu")


def learns_from(rows: Tensor, fewest: int = FEWEST_ROWS_OF_A_LOSS) -> bool:
    """Whether there are enough rows `[..., F]` to learn from to be worth a node of its own."""
    return torch.is_grad_enabled() and is_plain(rows) and rows.numel() >= fewest * rows.shape[-1]


def _run(networks: Networks | None, features: Tensor) -> Tensor:
    if networks is None:
        return NotImplemented
    leading = features.shape[:-1]
    rows = features if features.dim() == 2 else features.reshape(-1, features.shape[-1])
    if torch.is_grad_enabled():
        output = _Outputs.apply(networks, rows, *networks.parameters)  # type: ignore[no-untyped-call]
    else:
        values = rows.detach().numpy()
        output = _joined(networks, [forward(member, values) for member in networks.members])
    return output if len(leading) == 1 else output.view(*leading, output.shape[-1])  # type: ignore[no-any-return]


def _fits(rows: Tensor) -> bool:
    return learns_from(rows, FEWEST_ROWS) if torch.is_grad_enabled() else is_plain(rows)


def _mlp_forward(module: Any, features: Tensor) -> Tensor:
    return _run(plain_mlp(module), features) if _fits(features) else NotImplemented


def _ensemble_forward(module: Any, *inputs: Tensor) -> Tensor:
    if not _fits(inputs[0]):
        return NotImplemented
    return _run(plain_ensemble(module), inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=-1))


MLP_FORWARD = FastPath(_mlp_forward, (MLP,))
ENSEMBLE_FORWARD = FastPath(_ensemble_forward, ("rl_lab.components.networks.ensemble:EnsembleMLP.forward",))
