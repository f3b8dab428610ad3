"""Whole updates, and answers of a policy, as CUDA graphs: recorded once, replayed with one launch instead of hundreds.

    call 1, 2, 3    eager on a side stream: real updates on real data that also start up the libraries
    call 4          records the method (nothing runs yet), then replays it: the fourth update
    call 5 …        copy batch and numbers into the recording's own tensors, replay, copy the outputs out

One recording per set of choices and shapes, up to a number; whatever comes beyond it runs eagerly, until one that was
not used for long makes room. What a recording cannot see is Python: a method that is captured reads nothing back,
decides nothing by data and counts nothing there.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rl_lab.types import Batch, ConfigError

WARM_UP_CALLS = 3  # as torch's own guide: libraries choose and cache their kernels in the first calls
MOST_RECORDINGS = 16  # per method: each holds memory of its own, and a policy may be asked with any number of rows
FORGOTTEN_AFTER = 1000  # calls of a method that a recording did not serve: then it makes room for another shape
Result = TypeVar("Result")


def is_capturing() -> bool:
    """Whether what is launched now is being recorded instead of run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class GraphBackend(Protocol):
    """What records and replays; tests put one in that needs no GPU."""

    def warm_up(self, function: Callable[[], Result]) -> Result:
        """Run it for real, where a recording would be made."""
        ...

    def capture(self, function: Callable[[], Result]) -> tuple[Any, Result]:
        """Record it without running it: the graph, and the tensors that every replay fills anew."""
        ...

    def replay(self, graph: Any) -> None:
        """Run what was recorded."""
        ...


class CudaGraphs:
    """CUDA graphs, each with memory of its own. Draws continue the device's default generator, as eager ones do:
    torch registers it with the graph and moves it on by what one replay draws."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None  # made at first use: a CUDA context costs memory and a second

    @property
    def stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def warm_up(self, function: Callable[[], Result]) -> Result:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = function()
        current.wait_stream(self.stream)
        return result

    def capture(self, function: Callable[[], Result]) -> tuple[Any, Result]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (loaders, writers) may go on using the GPU meanwhile.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            result = function()
        return graph, result

    def replay(self, graph: Any) -> None:
        graph.replay()


@dataclass
class Packed:
    """A method's outputs with all its scalars in one vector, so that one copy takes them out of a recording."""

    outputs: dict[str, Tensor | None]  # None: a scalar, the next one of the vector
    scalars: Tensor | None  # float32 [number of scalars]

    def copied(self) -> Batch:
        """The outputs apart from the recording, whose own the next call overwrites."""
        scalars = iter(()) if self.scalars is None else iter(self.scalars.clone().unbind())
        return {name: next(scalars) if other is None else other.clone() for name, other in self.outputs.items()}


@dataclass
class Recording:
    """One method with one set of choices and shapes."""

    inputs: list[tuple[list[Tensor], list[int]]]  # its own batch and numbers, by dtype, and the place of each
    run: Callable[[], Packed]
    calls: int = 0
    last_call: int = 0  # the method's
    graph: Any = None
    outputs: Packed = field(default_factory=lambda: Packed({}, None))

    def take(self, values: list[Tensor]) -> None:
        """Copy a batch in; from pinned memory without waiting."""
        for own, places in self.inputs:  # one launch each
            torch._foreach_copy_(own, [values[place] for place in places], non_blocking=True)


class CapturedMethod:
    """A method `(batch, numbers, **choices) -> outputs` that is recorded when it has run a few times."""

    def __init__(
        self, method: Callable[..., Batch], *, place: str, device: torch.device, backend: GraphBackend
    ) -> None:
        self.method = method
        self.place = place  # for messages: `SAC.learn`
        self.device = device
        self.backend = backend
        self.recordings: dict[Hashable, Recording] = {}
        self.calls = 0
        self.preparing = ""  # what goes on before a replay, in words, for whoever shows the run

    def __call__(self, batch: Batch, numbers: Batch, **choices: bool | int | str) -> Batch:
        if torch.is_anomaly_enabled():  # it looks at every operation, which a replay does not show
            return self.method(batch, numbers, **choices)
        values = [*batch.values(), *numbers.values()]
        shapes = tuple([(value.shape, value.dtype) for value in values])
        key = (tuple(batch), tuple(numbers), shapes, tuple(sorted(choices.items())))
        recording = self.recordings.get(key)
        self.calls += 1
        if recording is None and len(self.recordings) == MOST_RECORDINGS and not self._makes_room():
            inputs = ({name: value.to(self.device) for name, value in each.items()} for each in (batch, numbers))
            return self._pack(self.method(*inputs, **choices)).copied()
        if recording is None:
            recording = self.recordings[key] = self._begin(batch, numbers, choices)
        with torch.no_grad():
            recording.take(values)
        recording.calls, recording.last_call = recording.calls + 1, self.calls
        if recording.graph is None:
            if recording.calls <= WARM_UP_CALLS:
                self.preparing = "compiling kernels"
                outputs = self.backend.warm_up(recording.run).copied()
                self.preparing = ""
                return outputs
            self.preparing = "recording a CUDA graph"
            recording.graph, recording.outputs = self._capture(recording.run)
            self.preparing = ""
        self.backend.replay(recording.graph)
        return recording.outputs.copied()

    def forget(self) -> None:
        """Throw the recordings away: something they took for granted has changed."""
        self.recordings.clear()

    def _makes_room(self) -> bool:
        """Throw away the recording that was used longest ago, if that is long enough ago."""
        oldest = min(self.recordings, key=lambda key: self.recordings[key].last_call)
        if self.calls - self.recordings[oldest].last_call <= FORGOTTEN_AFTER:
            return False
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a replay may still be running
        del self.recordings[oldest]
        return True

    def _begin(self, batch: Batch, numbers: Batch, choices: Mapping[str, bool | int | str]) -> Recording:
        with torch.inference_mode(mode=False):  # whoever comes first: others may write into them as well
            own_batch = {name: torch.empty(v.shape, dtype=v.dtype, device=self.device) for name, v in batch.items()}
            own_numbers = {name: torch.empty(v.shape, dtype=v.dtype, device=self.device) for name, v in numbers.items()}
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[int]]] = {}
        for place, tensor in enumerate([*own_batch.values(), *own_numbers.values()]):
            tensors, places = by_dtype.setdefault(tensor.dtype, ([], []))
            tensors.append(tensor)
            places.append(place)

        def run() -> Packed:
            return self._pack(self.method(dict(own_batch), dict(own_numbers), **choices))

        return Recording(list(by_dtype.values()), run)

    def _pack(self, outputs: Batch) -> Packed:
        for name, output in outputs.items():
            if not isinstance(output, Tensor):
                raise ConfigError(
                    f"{self.place} returns '{name}' as {type(output).__name__}, but a captured method returns tensors: "
                    "a number would stay what it was when the method was recorded. Return it from outside, or write "
                    "runtime.capture=false."
                )
        scalars = [output.detach().float() for output in outputs.values() if _is_scalar(output)]
        others = {name: None if _is_scalar(output) else output.detach() for name, output in outputs.items()}
        return Packed(others, torch.stack(scalars) if scalars else None)

    def _capture(self, run: Callable[[], Packed]) -> tuple[Any, Packed]:
        try:
            return self.backend.capture(run)
        except RuntimeError as error:
            first: BaseException = error
            while isinstance(first.__context__, RuntimeError):  # leaving a broken recording raises once more
                first = first.__context__
            reason = str(first).strip().split("\n")[0].rstrip(".")
            frames = traceback.extract_tb(first.__traceback__)
            frame = [each for each in frames if not each.filename.startswith(torch.__path__[0])][-1]
            raise ConfigError(
                f"{self.place} cannot be recorded as a CUDA graph: {reason}, at `{frame.line}` "
                f"({Path(frame.filename).name}, line {frame.lineno}). "
                "A captured method may not read a tensor's value (.item(), bool(tensor), nonzero), copy between CPU "
                "and GPU, or wait. Write runtime.capture=false to run it as it is."
            ) from error


def _is_scalar(tensor: Tensor) -> bool:
    return tensor.dim() == 0 and tensor.is_floating_point() and tensor.dtype != torch.float64
