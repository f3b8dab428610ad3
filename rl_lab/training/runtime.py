"""Where and how fast tensors are computed: device, precision, threads, compilation, CUDA graphs. Never what is."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_lab.kernels.door import open_door
from rl_lab.training.capture import CapturedMethod, CudaGraphs, GraphBackend
from rl_lab.types import Batch, ConfigError, did_you_mean

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
PRECISIONS: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,  # stored; products round what they read to 10 bits of mantissa
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
Function = TypeVar("Function", bound=Callable[..., Any])


class Runtime:
    """One per run. `autocast()` wraps forward passes; `compile_methods` and `capture_methods` take the pure methods
    a workflow names."""

    def __init__(
        self,
        *,
        device: str = "auto",
        precision: str = "fp32",
        compile: bool = False,
        capture: bool | str = "auto",
        threads: int | str = "auto",
        deterministic: bool = True,
        fast_paths: bool | str = True,
    ) -> None:
        self.device = resolve_device(device)
        if self.device.index:
            torch.cuda.set_device(self.device)  # kernels of our own are launched on the current one
        if precision not in PRECISIONS:
            raise ConfigError(
                f"runtime precision: '{precision}' is not known; allowed: {', '.join(PRECISIONS)}."
                f"{did_you_mean(str(precision), PRECISIONS)}"
            )
        if precision == "fp16" and self.device.type == "cpu":
            raise ConfigError(
                "runtime precision: fp16 needs a GPU and the device is cpu. Write precision: bf16 or fp32."
            )
        self.precision = precision
        self._set_products()
        self.compiles = compile
        self.wants_capture = capture is True
        self.graphs: GraphBackend | None = CudaGraphs(self.device) if self._captures(capture) else None
        self._captured: list[CapturedMethod] = []
        self._numbers: dict[str, tuple[float, Tensor]] = {}  # the newest value of each name, and its tensor
        self.threads = self._set_threads(threads)
        self.fast_paths = _is_on(fast_paths)
        open_door(self.fast_paths, takes_unmeasured=fast_paths == "all")
        self.deterministic = deterministic
        self._set_determinism()
        self._no_context: AbstractContextManager[None] = nullcontext()
        if self.device.type == "cpu":
            keep_freed_memory()

    def autocast(self) -> AbstractContextManager[Any]:
        """Around forward passes: the chosen precision; with fp32 and tf32, nothing."""
        if PRECISIONS[self.precision] is torch.float32:
            return self._no_context
        return torch.autocast(self.device.type, dtype=PRECISIONS[self.precision])

    def compile(self, function: Function) -> Function:
        """The function, compiled if this runtime compiles."""
        return torch.compile(function) if self.compiles else function  # type: ignore[return-value]

    def compile_methods(self, owner: Any) -> None:
        """Compile the methods `owner.compiled` names, in place."""
        for name in owner.compiled:
            method = _method_of(owner, "compiled", name)
            if self.compiles:
                setattr(owner, name, self.compile(method))

    def capture_methods(self, owner: Any) -> None:
        """Let the methods `owner.captured` names be replayed as CUDA graphs, in place; without a GPU they stay."""
        for name in owner.captured:
            method = _method_of(owner, "captured", name)
            if self.graphs is not None:
                place = f"{type(owner).__name__}.{name}"
                captured = CapturedMethod(method, place=place, device=self.device, backend=self.graphs)
                self._captured.append(captured)
                setattr(owner, name, captured)

    @property
    def preparing(self) -> str:
        """What is being compiled or recorded just now, in words; empty when nothing is."""
        return next((captured.preparing for captured in list(self._captured) if captured.preparing), "")

    def forget_captures(self) -> None:
        """Record anew from the next call on: what is frozen has changed, or a state was put back."""
        if any(captured.recordings for captured in self._captured) and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a replay may still be running
        for captured in self._captured:
            captured.forget()

    def numbers(self, values: Mapping[str, float]) -> Batch:
        """Scalars of schedules as 0-dim tensors here, for captured methods; a value that stays is not sent again."""
        for name, value in values.items():
            if name not in self._numbers or self._numbers[name][0] != value:
                self._numbers[name] = (value, torch.full((), value, dtype=torch.float32, device=self.device))
        return {name: self._numbers[name][1] for name in values}

    def scalars(self, values: Mapping[str, float]) -> Mapping[str, float | Tensor]:
        """Numbers for a method that may be captured: as `numbers` on a GPU, and as they are on a CPU, where a formula
        takes them faster."""
        return values if self.device.type == "cpu" else self.numbers(values)

    @property
    def captures(self) -> bool:
        """Whether methods are recorded and replayed."""
        return self.graphs is not None

    def remarks(self, owner: Any) -> list[str]:
        """Sentences about settings that change nothing for this owner."""
        found, name = [], type(owner).__name__
        if self.compiles and not owner.compiled:
            found.append(f"runtime.compile is true, but {name} names no methods to compile: nothing is.")
        if self.wants_capture and self.graphs is None:
            found.append(f"runtime.capture is true, but the device is {self.device.type}: nothing is captured.")
        elif self.wants_capture and not owner.captured:
            found.append(f"runtime.capture is true, but {name} names no methods to capture: nothing is.")
        return found

    def to_device(self, batch: Batch) -> Batch:
        """The batch on this device; tensors already there are not copied."""
        return {key: tensor.to(self.device, non_blocking=True) for key, tensor in batch.items()}

    def _captures(self, capture: bool | str) -> bool:
        if capture not in (True, False, "auto"):
            raise ConfigError(
                f"runtime capture: {capture!r}; allowed: auto, true, false. Write capture: auto (on for a GPU)."
            )
        if capture is True and self.precision == "fp16":
            raise ConfigError(
                "runtime capture: true does not go with precision fp16, whose loss scale is read back after every "
                "update. Write precision: bf16, or capture: false."
            )
        return bool(capture) and self.device.type == "cuda" and self.precision != "fp16"

    def _set_products(self) -> None:
        """Whether a GPU's tensor cores take products of fp32. Torch has them on for convolutions, off for matrices."""
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
            torch.backends.cudnn.allow_tf32 = True

    def _set_threads(self, threads: int | str) -> int:
        count = thread_count(threads, self.device)
        if count != torch.get_num_threads():
            torch.set_num_threads(count)
        return count

    def _set_determinism(self) -> None:
        if self.compiles:
            torch.use_deterministic_algorithms(self.deterministic, warn_only=True)
        else:  # the same without importing the compiler, which takes a second that eager runs need not wait
            torch._C._set_deterministic_algorithms(self.deterministic, warn_only=True)
        # Filling fresh memory would cost time on every operation and change no result that reads only what it wrote.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if self.device.type == "cuda":
            if self.deterministic:
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
            torch.backends.cudnn.deterministic = self.deterministic
            torch.backends.cudnn.benchmark = not self.deterministic


def thread_count(threads: int | str, device: torch.device) -> int:
    """`auto` on CPU is one thread: small networks lose more to waking threads than they gain."""
    if threads == "auto":
        return 1 if device.type == "cpu" else torch.get_num_threads()
    if isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1:
        return threads
    raise ConfigError(
        f"runtime threads: {threads!r}; allowed is auto or a whole number from 1 on. Write threads: auto."
    )


def _is_on(fast_paths: bool | str) -> bool:
    choices: dict[bool | str, bool] = {True: True, "on": True, "all": True, False: False, "off": False}
    if fast_paths not in choices:
        raise ConfigError(f"runtime fast_paths: {fast_paths!r}; allowed: on, all, off. Write fast_paths: on.")
    return choices[fast_paths]


def _method_of(owner: Any, listed: str, name: str) -> Callable[..., Any]:
    method = getattr(owner, name, None)
    if not callable(method):
        raise ConfigError(
            f"{type(owner).__name__}.{listed} names '{name}', which is not one of its methods."
            f"{did_you_mean(name, dir(owner))}"
        )
    return method


def resolve_device(device: str) -> torch.device:
    """`auto` is the first GPU, or the CPU where there is none; anything else must be there."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = str(device).replace("gpu", "cuda")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(
            f"runtime device: '{device}' is not known; allowed: auto, cpu, cuda, cuda:0, cuda:1, and so on."
            f"{did_you_mean(kind, ('auto', 'cuda'))}"  # not cpu: 'tpu' and 'gpu' are others
        )
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"runtime device: '{device}' was asked for, but torch sees no CUDA GPU here. Write device: cpu or "
            "device: auto, or install a torch built for CUDA."
        )
    if int(index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ConfigError(f"runtime device: '{device}' does not exist; allowed: cuda:0 to cuda:{last}.")
    return torch.device("cuda", int(index or 0))


def keep_freed_memory() -> None:
    """Let glibc keep what is freed instead of handing it back to the system: every page that comes anew costs a fault,
    which takes a fifth of the time of a small update. Other C libraries have no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**28)
        mallopt(M_MMAP_THRESHOLD, 2**25)  # the most it takes


def import_triton_first(*, is_needed: bool = False) -> None:
    """Where there is a GPU or torch's compiler is used, before anything draws: Mesa's OpenGL and Triton each bring an
    LLVM, and Python crashes if Triton's is the second."""
    if (is_needed or torch.cuda.is_available()) and find_spec("triton") is not None:
        import_module("triton")
