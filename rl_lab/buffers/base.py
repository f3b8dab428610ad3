"""What the Collector writes to and the Orchestrator samples from."""

from __future__ import annotations

from typing import Protocol

from rl_lab.types import Batch, Progress, StateTree


class Buffer(Protocol):
    """Rows in, batches out. Rows follow the one data convention (docs/time_steps.md)."""

    def add(self, row: Batch) -> None:
        """Store one answered row of N environments: observation keys, flags, reward, action, extras `[N, ...]`.

        A buffer may copy the row later, so its tensors must not change any more.
        """

    def set_pending(self, row: Batch) -> None:
        """Show the newest time step, which the policy has not answered yet (no action, no extras)."""

    def clear(self) -> None:
        """Forget every row."""

    def cut(self) -> None:
        """The environments are others from here on: episodes under way end with the newest row."""

    def ready(self) -> bool:
        """Whether `sample` can give a batch now."""

    def sample(self, progress: Progress | None = None) -> Batch:
        """A batch `[B, T, ...]` of consecutive rows; `progress` is asked by settings that follow a schedule."""

    def learned(self, batch: Batch) -> None:
        """A batch of this buffer has been through every hook, which may have noted a `priority` or latents in it."""

    def get_state(self) -> StateTree: ...

    def set_state(self, state: StateTree) -> None: ...
