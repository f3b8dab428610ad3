"""The runtime changes speed, never numbers; what is not there is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from rl_lab.config.compose import compose
from rl_lab.experiment import build as wiring
from rl_lab.training import runtime as runtime_module
from rl_lab.training.runtime import Runtime, resolve_device
from rl_lab.types import ConfigError


@pytest.fixture(autouse=True)
def restore_torch_settings() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


class Doubler:
    compiled: ClassVar[tuple[str, ...]] = ("double",)

    def double(self, number: torch.Tensor) -> torch.Tensor:
        return number * 2.0


def test_fp32_reuses_one_empty_context() -> None:
    runtime = Runtime(device="cpu")
    assert runtime.autocast() is runtime.autocast()
    with runtime.autocast():
        assert not torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_bf16_autocasts() -> None:
    with Runtime(device="cpu", precision="bf16").autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_tf32_changes_nothing_on_a_cpu() -> None:
    runtime, before = Runtime(device="cpu", precision="tf32"), torch.backends.cuda.matmul.allow_tf32
    with runtime.autocast():
        assert not torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert torch.backends.cuda.matmul.allow_tf32 is before


def test_tf32_is_off_again_for_the_next_run_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = torch.backends.cuda.matmul.allow_tf32
    runtime = Runtime(device="cpu", precision="tf32")
    monkeypatch.setattr(runtime, "device", torch.device("cuda"))
    try:
        runtime._set_products()
        assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
        for precision in ("bf16", "fp32"):
            runtime.precision = precision
            runtime._set_products()
            assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def test_auto_threads_on_cpu_is_one() -> None:
    assert Runtime(device="cpu").threads == torch.get_num_threads() == 1
    assert Runtime(device="cpu", threads=2).threads == torch.get_num_threads() == 2


@pytest.mark.parametrize("deterministic", [True, False])
def test_determinism_is_switched(deterministic: bool) -> None:
    Runtime(device="cpu", deterministic=deterministic)
    assert torch.are_deterministic_algorithms_enabled() is deterministic


def test_without_compilation_functions_stay_what_they_are() -> None:
    doubler, runtime = Doubler(), Runtime(device="cpu")
    runtime.compile_methods(doubler)
    assert "double" not in vars(doubler)
    assert runtime.compile(abs) is abs


def test_with_compilation_named_methods_are_compiled_and_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function: asked.append(function.__name__) or function)
    doubler = Doubler()
    Runtime(device="cpu", compile=True).compile_methods(doubler)
    assert asked == ["double"]
    assert doubler.double(torch.tensor(3.0)).item() == 6.0


def test_batches_already_on_the_device_are_not_copied() -> None:
    batch = {"reward": torch.zeros(2)}
    assert Runtime(device="cpu").to_device(batch)["reward"] is batch["reward"]


def test_devices_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    for device in ("cuda", "gpu"):
        with pytest.raises(
            ConfigError, match=r"'cuda' was asked for, but torch sees no CUDA GPU here. Write device: c"
        ):
            resolve_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda:0")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match=r"'cuda:2' does not exist; allowed: cuda:0 to cuda:1"):
        resolve_device("cuda:2")


def test_mistakes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"runtime device: 'cud' is not known.*Did you mean 'cuda'"):
        Runtime(device="cud")
    with pytest.raises(ConfigError, match=r"runtime device: 'cuda:first' is not known"):
        Runtime(device="cuda:first")
    with pytest.raises(ConfigError, match=r"runtime precision: 'bf15' is not known.*Did you mean 'bf16'"):
        Runtime(device="cpu", precision="bf15")
    with pytest.raises(ConfigError, match=r"fp16 needs a GPU and the device is cpu. Write precision: bf16"):
        Runtime(device="cpu", precision="fp16")
    with pytest.raises(ConfigError, match=r"runtime threads: 0; allowed is auto or a whole number"):
        Runtime(device="cpu", threads=0)
    doubler = Doubler()
    doubler.compiled = ("doubel",)  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"Doubler.compiled names 'doubel'.*Did you mean 'double'"):
        Runtime(device="cpu").compile_methods(doubler)


@pytest.mark.parametrize(
    ("has_gpu", "is_needed", "has_triton", "imported"),
    [
        (True, False, True, ["triton"]),
        (True, False, False, []),
        (False, False, True, []),
        (False, True, True, ["triton"]),
        (False, True, False, []),
    ],
)
def test_triton_comes_before_anything_that_draws_where_it_is_used(
    has_gpu: bool, is_needed: bool, has_triton: bool, imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(runtime_module, "find_spec", lambda name: object() if has_triton else None)
    monkeypatch.setattr(runtime_module, "import_module", found.append)
    runtime_module.import_triton_first(is_needed=is_needed)
    assert found == imported


@pytest.mark.parametrize(
    ("words", "is_needed"),
    [([], False), (["debug.check_finite=true"], True), (["preset=debug"], True), (["runtime.compile=true"], True)],
)
def test_environments_are_made_after_triton(words: list[str], is_needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at every operation and compiling import torch's compiler, which imports Triton."""
    order: list[Any] = []
    monkeypatch.setattr(wiring, "import_triton_first", lambda *, is_needed: order.append(is_needed))
    monkeypatch.setattr(wiring, "call_checked", lambda *_, **__: order.append("environment"))
    wiring.build_environment(compose("ppo_cartpole", words), stream="train_environment")
    assert order == [is_needed, "environment"]


@pytest.mark.parametrize(("device", "made_current"), [("cuda:1", ["cuda:1"]), ("cuda:0", []), ("cpu", [])])
def test_another_gpu_than_the_first_becomes_the_current_one(
    device: str, made_current: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(runtime_module, "resolve_device", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda which: found.append(str(which)))
    Runtime(device=device)
    assert found == made_current
