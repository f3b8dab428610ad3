"""From a loss to changed parameters: the only place that calls backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.training.capture import is_capturing
from rl_lab.training.gradients import LossScale, Segments, SegmentsByMembers, clip_adaptively, divisor_to
from rl_lab.training.laprop import LaProp
from rl_lab.training.schedules import Number, never_negative, parse_number, value_at
from rl_lab.training.update_rules import SGD, Adam, AdamW, RMSprop, UpdateRule
from rl_lab.training.world import World
from rl_lab.types import ConfigError, Gradients, Metrics, Progress, StateTree, did_you_mean

RULES: dict[str, type[UpdateRule]] = {
    "adam": Adam,
    "adamw": AdamW,
    "rmsprop": RMSprop,
    "laprop": LaProp,
    "sgd": SGD,
}
Parameters = Mapping[str, nn.Module] | Iterable[nn.Module | Tensor]

# Below these, copying all gradients into one vector is the fastest way to their norm.
SMALL_MODEL_NUMBERS, SMALL_MODEL_NUMBERS_ON_A_CPU = 2**18, 2**15


class Optimizer:
    """`step(loss)`: schedule, scale, backward, average over ranks, clip, change the parameters, clear.

    A method that the runtime captures calls `apply` itself, after somebody outside it called `prepare`:

        prepare(progress)   Python decides the learning rate and writes it where the device reads it
        apply(loss)         all the rest, the same launches every time, so that a CUDA graph can replay them

    Nothing here waits for the device: `grad_norm` stays a tensor, and whoever writes it sees whether it is finite.
    (fp16 is the exception: it must know at once whether its loss scale was too large.)
    """

    def __init__(
        self,
        *,
        parameters: Parameters,
        name: str = "adam",
        learning_rate: Number | str | Mapping[str, Any] = 3e-4,
        rate_of: Mapping[str, float] | None = None,
        max_grad_norm: float | None = None,
        adaptive_clip: float | None = None,
        epsilon: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        accumulate: int = 1,
        precision: str = "fp32",
        log_module_norms: bool = False,
        world: World | None = None,
    ) -> None:
        if name not in RULES:
            raise ConfigError(
                f"optimizer name: '{name}' is not known; allowed: {', '.join(RULES)}.{did_you_mean(str(name), RULES)}"
            )
        if accumulate < 1:
            raise ConfigError(f"optimizer accumulate: {accumulate}; allowed is a whole number from 1 on. Write 1.")
        for place, limit in (("max_grad_norm", max_grad_norm), ("adaptive_clip", adaptive_clip)):
            if limit is not None and limit <= 0:
                raise ConfigError(
                    f"optimizer {place}: {limit}; allowed is a number above 0. Write null to switch it off."
                )
        for place, number in (("epsilon", epsilon), ("weight_decay", weight_decay)):
            if not 0.0 <= number < inf:
                raise ConfigError(f"optimizer {place}: {number}; allowed is a number from 0 on. Write {place}: 0.0.")
        for place, fraction in (("betas", betas[0]), ("betas", betas[1]), ("momentum", momentum)):
            if not 0.0 <= fraction < 1.0:
                raise ConfigError(f"optimizer {place}: {fraction}; allowed is 0 up to below 1, such as 0.9.")
        named = named_parameters(parameters)
        self.parameters = list(named.values())
        self.learning_rate = never_negative(
            parse_number(learning_rate, "optimizer learning_rate"), "optimizer learning_rate"
        )
        self.max_grad_norm = max_grad_norm
        self.adaptive_clip = adaptive_clip
        self.accumulate = accumulate
        self.log_module_norms = log_module_norms
        self.world = world or World()
        self.rule = RULES[name](
            named, epsilon=epsilon, betas=(betas[0], betas[1]), weight_decay=weight_decay, momentum=momentum
        )
        self.rule.rates = _rates_of(rate_of or {}, list(named))
        self.rule.gradients_stay = self.rule.is_static and adaptive_clip is not None
        self.loss_scale = LossScale() if precision == "fp16" else None
        self.accumulated = 0  # losses since the last change of the parameters
        self._rate = value_at(self.learning_rate, Progress())
        self._rate_tensor = (
            torch.full((), self._rate, device=self.parameters[0].device) if self.rule.is_static else None
        )
        few = SMALL_MODEL_NUMBERS_ON_A_CPU if self.parameters[0].is_cpu else SMALL_MODEL_NUMBERS
        self._is_small = sum(parameter.numel() for parameter in self.parameters) <= few
        self._members = _members_by_module(list(named))
        self._scratch = SegmentsByMembers()

    def step(self, loss: Tensor, progress: Progress | None = None) -> Metrics:
        """One gradient step (with `accumulate` > 1: a part of one; then metrics come with the last part).

        A loss that depends on nothing that learns (a phase froze everything) changes nothing.
        """
        if not loss.requires_grad:
            return {}
        prepared = self.prepare(progress)
        changed = self.apply(loss)
        return {} if self.accumulated else prepared | changed

    def prepare(self, progress: Progress | None = None) -> Metrics:
        """Take the learning rate of this point of the run; the changes that follow use it. Its metric is a number."""
        rate = value_at(self.learning_rate, progress or Progress())
        if self._rate_tensor is not None and rate != self._rate:
            self._rate_tensor.fill_(rate)  # a launch, not a copy: it waits for nothing
        self._rate = rate
        return {"learning_rate": rate}

    def apply(self, loss: Tensor | None, gradients: Gradients | None = None) -> Metrics:
        """Backward and one change at the prepared learning rate. Every metric is a tensor.

        `gradients` of parameters, where somebody knows them already, take the place of a loss.
        """
        sources = (loss,) if gradients is None else gradients.parameters
        if not any(each is not None and each.requires_grad for each in sources):
            return {}
        if self.loss_scale is not None:
            self._refuse_capture("precision fp16", "its loss scale must be read back. Write precision: bf16")
        if self.accumulate > 1:
            self._refuse_capture(
                f"accumulate {self.accumulate}", "only every so many updates change anything. Write accumulate: 1"
            )
        scale = (1.0 if self.loss_scale is None else self.loss_scale.value) / self.accumulate
        if gradients is None:
            assert loss is not None
            torch.autograd.backward(loss if scale == 1.0 else loss * scale)
        elif scale == 1.0 and self._are_all_of_this_step(gradients):
            return self._change_parameters(gradients.values, gradients.joined)
        else:
            _add_gradients(gradients, scale)
        self.accumulated += 1
        if self.accumulated < self.accumulate:
            return {}
        metrics = self._change_parameters(
            [parameter.grad if parameter.requires_grad else None for parameter in self.parameters]
        )
        self.accumulated = 0
        for parameter in self.parameters:
            parameter.grad = None
        return metrics

    def _are_all_of_this_step(self, gradients: Gradients) -> bool:
        """Whether there is one for each parameter, in order, none of them frozen, and none to add them to."""
        ours = self.parameters
        return (
            len(gradients.parameters) == len(ours)
            and all(map(is_, gradients.parameters, ours))
            and all(each.requires_grad and each.grad is None for each in ours)
        )

    def _refuse_capture(self, setting: str, reason: str) -> None:
        if is_capturing():
            raise ConfigError(
                f"optimizer {setting}: a CUDA graph repeats one update, but {reason}, or runtime.capture: false."
            )

    def _change_parameters(self, everyone: Sequence[Tensor | None], joined: Tensor | None = None) -> Metrics:
        """By one gradient for each parameter, or None; `joined` is the memory of them all, where it is one piece."""
        own = [gradient for gradient in everyone if gradient is not None]
        gradients = self.world.mean(own)
        metrics: Metrics = {}
        if not gradients:
            return metrics  # everything is frozen
        if self.loss_scale is not None:
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale.value)
        if self.log_module_norms:
            metrics |= self._module_norms(everyone)
        norms = torch.stack(torch._foreach_norm(gradients)) if self.rule.gradients_stay else None  # read once for both
        if norms is None and joined is not None and gradients is own:
            grad_norm = torch.linalg.vector_norm(joined)
        else:
            grad_norm = self._norm(gradients) if norms is None else torch.linalg.vector_norm(norms)
        metrics["grad_norm"] = grad_norm
        if self.loss_scale is not None and not self.loss_scale.accepts(grad_norm):
            return metrics
        if self.adaptive_clip is not None:
            pairs = zip(self.parameters, everyone, strict=True)
            clipped = [parameter for parameter, gradient in pairs if gradient is not None]
            gradients = clip_adaptively(clipped, gradients, self.adaptive_clip, self._segments(clipped), norms)
        divisor = None
        if self.max_grad_norm is not None:
            norm = grad_norm if self.adaptive_clip is None else self._norm(gradients)
            divisor = divisor_to(self.max_grad_norm, norm)
        rate = self._rate if self._rate_tensor is None else self._rate_tensor
        if len(gradients) < len(everyone):
            present = iter(gradients)
            self.rule.apply([None if gradient is None else next(present) for gradient in everyone], rate, divisor)
        else:
            self.rule.apply(gradients, rate, divisor)
        return metrics

    def _segments(self, parameters: list[Tensor]) -> Segments | None:
        """On a GPU: scratch space to clip these gradients in a few launches."""
        return self._scratch.of(parameters) if self.rule.is_static else None

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        if self._is_small:
            return torch.linalg.vector_norm(torch._C._nn.flatten_dense_tensors(gradients))  # cat without 12 reshapes
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))

    def _module_norms(self, everyone: Sequence[Tensor | None]) -> Metrics:
        norms: Metrics = {}
        for module, members in self._members.items():
            present = [gradient for index in members if (gradient := everyone[index]) is not None]
            if present:
                norms[f"grad_norm/{module}"] = self._norm(present)
        return norms

    def state_dict(self) -> StateTree:
        """Everything a continued run needs, as plain data: also gradients of a step that is not complete."""
        waiting = [(name, p.grad) for name, p in zip(self.rule.names, self.parameters, strict=True)]
        return {
            "rule": self.rule.get_state(),
            "accumulated": self.accumulated,
            "gradients": {name: gradient for name, gradient in waiting if gradient is not None},
            "loss_scale": None if self.loss_scale is None else self.loss_scale.get_state(),
        }

    def load_state_dict(self, state: StateTree) -> None:
        """Put back what `state_dict` returned."""
        self.rule.set_state(state["rule"])
        self.accumulated = int(state["accumulated"])
        for name, parameter in zip(self.rule.names, self.parameters, strict=True):
            waiting = state["gradients"].get(name)
            parameter.grad = None if waiting is None else torch.as_tensor(waiting).to(parameter.device).clone()
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.set_state(state["loss_scale"])


def named_parameters(parameters: Parameters) -> dict[str, Tensor]:
    """Parameters by name, each once even where two modules share it: `{"actor": module}` gives `actor.weight`."""
    items = parameters.items() if isinstance(parameters, Mapping) else enumerate(parameters)
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, item in items:
        for name, parameter in item.named_parameters() if isinstance(item, nn.Module) else [("", item)]:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                named[f"{prefix}.{name}" if name else str(prefix)] = parameter
    if not named:
        raise ConfigError("optimizer parameters: there is nothing to learn. Name modules that have parameters.")
    return named


def _add_gradients(gradients: Gradients, scale: float) -> None:
    """To the parameters, as backward of the scaled loss would."""
    for parameter, gradient in zip(gradients.parameters, gradients.values, strict=True):
        if parameter.requires_grad:
            part = gradient if scale == 1.0 else gradient * scale
            parameter.grad = part if parameter.grad is None else parameter.grad + part


def _rates_of(rate_of: Mapping[str, float], names: list[str]) -> list[float] | None:
    """One factor of the learning rate for each parameter, by the part it belongs to; None: 1 for all."""
    if not rate_of:
        return None
    parts = list(_members_by_module(names))
    for part, factor in rate_of.items():
        if part not in parts:
            raise ConfigError(
                f"optimizer rate_of: '{part}' is none of its parts.{did_you_mean(part, parts)} There are: "
                f"{', '.join(parts)}."
            )
        if not 0.0 <= factor < inf:
            raise ConfigError(f"optimizer rate_of.{part}: {factor}; allowed is a number from 0 on, such as 0.3.")
    return [float(rate_of.get(name.split(".")[0], 1.0)) for name in names]


def _members_by_module(names: list[str]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        members.setdefault(name.split(".")[0], []).append(index)
    return members
