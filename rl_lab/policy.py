"""A trained policy for use outside training: give it what `env.reset()` or `env.step()` returned.

policy = rl_lab.load("@last")
env = policy.environment()
observation, _ = env.reset()
policy.reset()
observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from rl_lab import __version__
from rl_lab.collection.collector import to_time_step
from rl_lab.environments.recipe import Blueprint
from rl_lab.types import Batch, ConfigError, EnvRows, EnvSpec
from rl_lab.workflows.base import Mode, Workflow, WorldModelWorkflow

if TYPE_CHECKING:
    from rl_lab.experiment.export import PolicyFile


class Source(Protocol):
    """What a policy knows of where it comes from."""

    def environment(self, *, num_envs: int | None, render: bool) -> Any: ...

    def recipe(self) -> Callable[[], Policy]: ...


class Policy:
    """Keeps the recurrent state and the normaliser of a workflow; acts deterministically unless asked otherwise.

    Observations are those of the environment with the wrappers of its config. A leading axis more than the space
    has means a batch: the answer then has that axis too.
    """

    if not TYPE_CHECKING:  # a type checker knows what is there

        def __getattr__(self, name: str) -> Any:
            known = {"predict": "act(observation)", "save": "export(path)"}  # as Stable-Baselines3 calls them
            hint = f": write policy.{known[name]}" if name in known else ""
            raise AttributeError(f"'Policy' object has no attribute '{name}'{hint}", name=name, obj=self)

    def __init__(
        self, workflow: Workflow, blueprint: Blueprint, *, device: torch.device, source: Source | None = None
    ) -> None:
        self.workflow = workflow
        self.spec: EnvSpec = blueprint.spec
        self.blueprint = blueprint
        self.device = device
        self._source = source
        self._begins: np.ndarray  # of the last call's observations: those whose episodes are new
        self.reset()

    def __repr__(self) -> str:
        kind = self.spec.action.kind
        return f"<Policy of {type(self.workflow).__name__} for {self.spec.id}: {kind} actions, on {self.device}>"

    def environment(self, *, num_envs: int | None = None, render: bool = False) -> Any:
        """The environment this policy acts in, with the wrappers of its config, in Gymnasium's form: a gymnasium.Env
        or, with `num_envs`, a vector environment (after each step, `policy.reset(terminated | truncated)`). `render`
        makes it draw RGB arrays."""
        if self._source is None:
            raise ConfigError("policy.environment() needs a policy that came from rl_lab.load.")
        return self._source.environment(num_envs=num_envs, render=render)

    def reset(self, which: Any = None) -> None:
        """New episodes begin: forget what the last ones left in memory. `which` is a mask of booleans or indices into
        the last batch, where only some of its episodes are new."""
        if which is not None:
            self._begins |= self._mask(which)
            return
        self._state: Any = None
        self._begins = np.ones(0, dtype=bool)
        self._count = 0  # observations of the last call

    def _mask(self, which: Any) -> np.ndarray:
        """Indices or booleans as one boolean for each of the last observations."""
        if self._count == 0:
            raise ConfigError(
                "policy.reset(which) begins some episodes of the last batch anew, and there was no batch yet: call "
                "policy.reset() before the first policy.act."
            )
        given = np.asarray(which)
        if given.dtype == bool and given.shape in ((self._count,), () if self._count == 1 else None):
            return given.reshape(self._count)
        mask = np.zeros(self._count, dtype=bool)
        is_index = given.size == 0 or (given.dtype.kind in "iu" and given.ndim < 2 and given.min() >= 0)
        if given.dtype == bool or not is_index or (given.size and given.max() >= self._count):
            raise ConfigError(
                f"policy.reset({which!r}): the last batch had {self._count} observations, so write {self._count} "
                f"booleans or indices from 0 to {self._count - 1}; policy.reset() is for all of them."
            )
        mask[given.astype(int)] = True
        return mask

    def act(self, observation: Any, *, deterministic: bool = True) -> Any:
        """The action the environment expects, for one observation or for a batch of them."""
        converter = self.blueprint.observations
        self._check(observation)
        batch_size = converter.batch_size(observation)
        if batch_size is None:
            arrays = converter.allocate(1)
            converter.write(observation, arrays, 0)
        else:
            arrays = converter.batch(observation, batch_size)
        count = 1 if batch_size is None else batch_size
        if self._state is not None and count != self._count:
            raise ConfigError(
                f"policy.act was given {count} observations after {self._count}: what it remembers is of those. Call "
                "policy.reset() where new episodes begin."
            )
        nothing = np.zeros(count, dtype=bool)
        is_first = self._begins if count == self._count else np.full(count, self._count == 0)
        rows = EnvRows(arrays, np.zeros(count, dtype=np.float32), is_first, nothing, nothing)
        with torch.inference_mode():
            mode: Mode = "eval" if deterministic else "train"
            answer = self.workflow.act(to_time_step(rows, self.device), self._state, mode=mode)
        self._state, self._begins, self._count = answer.state, np.zeros(count, dtype=bool), count
        action = answer.action.cpu().numpy()
        actions = self.blueprint.actions
        return actions.rows(action)[0] if batch_size is None else actions.batch(action)

    def _check(self, observation: Any) -> None:
        """One observation, or a batch of at least one, of the shapes that the environment has."""
        batches = set()
        for key, shape, expected in self.blueprint.observations.shapes(observation):
            extra = None if shape is None else len(shape) - len(expected)
            if shape is None or extra not in (0, 1) or shape[extra:] != expected or 0 in shape[:extra]:
                found = "is not there" if shape is None else f"has shape {shape}"
                batch = "(N, " + ", ".join(map(str, expected)) + ")" if expected else "(N,)"
                raise ConfigError(
                    f"policy.act: observation '{key}' {found}; those of {self.spec.id} have shape {expected}, or "
                    f"{batch} for a batch."
                )
            batches.add(shape[:extra])
        if len(batches) > 1:
            raise ConfigError(
                f"policy.act: the parts of the observation are batches of different sizes: {sorted(batches)}."
            )

    def export(self, path: str | Path) -> PolicyFile:
        """Write this policy, acting deterministically, as one file that needs neither RL Lab nor the environment: a
        torch.export program (.pt2) or ONNX (.onnx). It is compared with `act` before it is there; docs/export.md."""
        from rl_lab.experiment.export import export_policy  # tracing brings half of torch along

        return export_policy(self, Path(path))

    def imagine(self, *, horizon: int = 15) -> Batch:
        """What a world model predicts to happen next, from the last `act` on: named tensors `[N, horizon + 1, ...]`
        (every observation key, `reward`, the model's state) and `action [N, horizon, ...]`, as the model reads them:
        numbers before they are scaled to the environment's range. Each call draws anew (`torch.manual_seed`)."""
        if not isinstance(self.workflow, WorldModelWorkflow):
            raise ConfigError(
                f"imagine() needs a model of the world, which {type(self.workflow).__name__} does not learn: load a "
                "run of dreamer or planet."
            )
        if self._state is None:
            raise ConfigError("imagine() goes on from what the policy has seen: call policy.act(observation) first.")
        if horizon < 1:
            raise ConfigError(f"imagine(horizon={horizon}): a dream has at least 1 step.")
        with torch.inference_mode():
            return self.workflow.imagine(self._state, horizon=horizon)

    def __copy__(self) -> Policy:
        """The same networks, and a memory of its own."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], Policy], tuple[dict[str, Any]]]:
        """Pickled with its weights, its memory and how to build it again; the environment itself stays behind."""
        if self._source is None:
            raise pickle.PicklingError("Only a policy that came from rl_lab.load can be pickled.")
        memory = io.BytesIO()
        torch.save((self._state, self._begins, self._count), memory)
        # Packed twice, so that another version says what is wrong before it looks for anything inside.
        content = pickle.dumps((self._source.recipe(), memory.getvalue()))
        return _unpickled, ({"rl_lab_version": __version__, "content": content},)


def _unpickled(packed: dict[str, Any]) -> Policy:
    if packed.get("rl_lab_version") != __version__:
        raise ConfigError(
            f"This policy was pickled by RL Lab {packed.get('rl_lab_version', 'of an unknown version')}, and this is "
            f"{__version__}: use that version, or load the policy from its run with rl_lab.load."
        )
    build, memory = pickle.loads(packed["content"])
    policy: Policy = build()
    state, begins, count = torch.load(io.BytesIO(memory), map_location=policy.device, weights_only=False)
    policy._state, policy._begins, policy._count = state, begins, count
    return policy
