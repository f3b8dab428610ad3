"""What a workflow may reach: named parts and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rl_lab.training.runtime import Runtime
from rl_lab.types import CollectResult, ConfigError, EnvSpec, Metrics, Phase, PolicyStep, did_you_mean

Policy = Callable[..., PolicyStep]
"""`policy(time_step, state, mode=...)`: what a Collector or an Evaluator asks for actions."""


class Parts(Mapping[str, Any]):
    """Named things of one kind. `require` checks, at start-up, that a part can do what its user needs."""

    def __init__(self, kind: str, parts: Mapping[str, Any]) -> None:
        self.kind = kind
        self._parts = dict(parts)
        self.asked: set[str] = set()  # names somebody wanted; what nobody wants is probably a mistake

    def add(self, name: str, part: Any) -> None:
        """A part that the workflow makes of others, such as a slow copy: it is saved and restored with the rest."""
        assert name not in self._parts, f"{self.kind}.{name} is there already"
        self.asked.add(name)
        self._parts[name] = part

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return self._parts[name]

    def peek(self, name: str) -> Any:
        """The part called `name`, without a user for it."""
        return self._parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def require(self, name: str, protocol: type | None = None) -> Any:
        """The part called `name`; `protocol` (a Protocol class) says which methods it must have."""
        self.asked.add(name)
        if name not in self._parts:
            have = ", ".join(self._parts) or "none"
            raise ConfigError(
                f"The workflow needs {self.kind}.{name}, which the config does not have (it has: {have})."
                f"{did_you_mean(name, self._parts)} Add a block `{self.kind}.{name}:` with a `_target_`."
            )
        part = self._parts[name]
        missing = [method for method in _methods_of(protocol) if not hasattr(part, method)]
        if missing:
            raise ConfigError(
                f"{self.kind}.{name} is a {type(part).__name__}, which lacks {', '.join(missing)}: the workflow needs "
                f"what {protocol.__name__ if protocol else ''} describes. Choose another `_target_`."
            )
        return part

    def optional(self, name: str, protocol: type | None = None) -> Any | None:
        """The part called `name`, checked like `require`, or None where the config has none."""
        self.asked.add(name)
        return self.require(name, protocol) if name in self._parts else None


def _methods_of(protocol: type | None) -> list[str]:
    if protocol is None:
        return []
    own = [name for name in vars(protocol) if not name.startswith("_") or name == "__call__"]
    return own + [name for name in vars(protocol).get("__annotations__", {}) if name not in own]


class CollectorLike(Protocol):
    def collect(self, policy: Policy, *, phase: Phase) -> CollectResult: ...
    def restart(self) -> None: ...


class EvaluatorLike(Protocol):
    def evaluate(self, policy: Policy, *, episodes: int) -> Metrics: ...


@dataclass(frozen=True)
class WorkflowContext:
    """Narrow on purpose: what a workflow cannot reach it cannot entangle."""

    components: Parts
    controllers: Parts
    optimizers: Parts
    collector: CollectorLike
    evaluator: EvaluatorLike
    runtime: Runtime
    spec: EnvSpec
    num_envs: int
