"""What the Collector writes to and the Orchestrator samples from."""

from __future__ import annotations

from typing import Protocol

from rl_lab.types import Batch, Progress, StateTree


class Buffer(Protocol):
    """Rows in, batches out. Rows follow the one data convention (docs/time_steps.md)."""

    def add(self, row: Batch) -> None:
        """Store one answered row of N environments: observation keys, flags, reward, action, extras `[N, ...]`.

        The row is given away: a buffer may copy it later, so nobody writes into its tensors any more.
        """
        ...

    def set_pending(self, row: Batch) -> None:
        """Tell the newest time step, which the policy has not answered yet (no action, no extras)."""
        ...

    def clear(self) -> None:
        """Forget every row."""
        ...

    def ready(self) -> bool:
        """Whether `sample` can give a batch now."""
        ...

    def sample(self, progress: Progress | None = None) -> Batch:
        """A batch `[B, T, ...]` of consecutive rows; `progress` is asked by settings that follow a schedule."""
        ...

    def learned(self, batch: Batch) -> None:
        """A batch this buffer gave has been through every hook, which may have noted things in it.

        Prioritised replay takes its `priority` from there, sequence replay the latents to write back; who needs
        nothing does nothing.
        """
        ...

    def get_state(self) -> StateTree: ...

    def set_state(self, state: StateTree) -> None: ...
