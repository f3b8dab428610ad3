"""Captured methods: the same numbers as eager ones, by a backend that records and runs again without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from rl_lab.training import capture as capture_module
from rl_lab.training import optimizer as optimizer_module
from rl_lab.training import runtime as runtime_module
from rl_lab.training.capture import MOST_RECORDINGS, WARM_UP_CALLS, CapturedMethod, CudaGraphs, Packed
from rl_lab.training.optimizer import Optimizer
from rl_lab.training.runtime import Runtime
from rl_lab.training.update_rules import UpdateRule
from rl_lab.types import Batch, ConfigError, Progress
from rl_lab.utils import tree

CPU = torch.device("cpu")


class AgainBackend:
    """Replaying is running again into the same output tensors; recording leaves no trace in `state`."""

    def __init__(self, state: Callable[[], list[Tensor]] = list) -> None:
        self.state = state
        self.log: list[str] = []

    def warm_up(self, function: Callable[[], Packed]) -> Packed:
        self.log.append("warm_up")
        return function()

    def capture(self, function: Callable[[], Packed]) -> tuple[Any, Packed]:
        self.log.append("capture")
        before, generator = [tensor.detach().clone() for tensor in self.state()], torch.get_rng_state()
        outputs = function()
        with torch.no_grad():
            for tensor, value in zip(self.state(), before, strict=True):
                tensor.copy_(value)
        torch.set_rng_state(generator)
        return (function, outputs), outputs

    def replay(self, graph: Any) -> None:
        self.log.append("replay")
        function, outputs = graph
        new = function()
        with torch.inference_mode():  # a graph does not ask in which mode its outputs were made
            for name, tensor in outputs.outputs.items():
                if tensor is not None:
                    tensor.copy_(new.outputs[name])
            if outputs.scalars is not None:
                outputs.scalars.copy_(new.scalars)


class Learner:
    """A small regression with noise: what a workflow looks like to the runtime."""

    compiled: ClassVar[tuple[str, ...]] = ()
    captured: ClassVar[tuple[str, ...]] = ("learn",)

    def __init__(self, name: str = "adam") -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = Optimizer(
            parameters={"network": self.network},
            name=name,
            learning_rate="linear(0.1, 0)",
            max_grad_norm=0.5,
            adaptive_clip=0.3 if name == "laprop" else None,
        )

    def learn(self, batch: Batch, numbers: Batch, *, with_bonus: bool = False) -> Batch:
        error = (self.network(batch["input"])[:, 0] - batch["target"]).square()
        loss = error.mean() * numbers["scale"] + (error.std() if with_bonus else 0.0)
        taken = self.optimizer.apply(loss)
        return {"loss/error": loss.detach(), "priority": error.detach().sqrt(), **taken}

    def state(self) -> list[Tensor]:
        rule = self.optimizer.rule
        slots = [tensor for tensors in rule.state.values() for tensor in tensors]
        return [*self.network.parameters(), *slots, *rule._count_tensors]


@pytest.fixture(autouse=True)
def static_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: counts and learning rates in tensors."""

    def init(self: UpdateRule, *arguments: Any, is_static: bool | None = None, **settings: Any) -> None:
        original(self, *arguments, is_static=True if is_static is None else is_static, **settings)

    original = UpdateRule.__init__
    monkeypatch.setattr(UpdateRule, "__init__", init)


def batch_of(seed: int, rows: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"input": torch.randn(rows, 3, generator=generator), "target": torch.randn(rows, generator=generator)}


def captured_learner(name: str = "adam") -> tuple[Learner, Runtime, AgainBackend]:
    learner, runtime = Learner(name), Runtime(device="cpu")
    runtime.graphs = backend = AgainBackend(learner.state)
    runtime.capture_methods(learner)
    return learner, runtime, backend


def taught(learner: Learner, runtime: Runtime, *, updates: int, first: int = 0, **choices: bool) -> list[Batch]:
    outputs = []
    for update in range(first, first + updates):
        learner.optimizer.prepare(Progress(fraction=update / 100))
        outputs.append(learner.learn(batch_of(update), runtime.numbers({"scale": 1.0 + update % 3}), **choices))
    return outputs


@pytest.mark.parametrize("name", ["adam", "laprop", "rmsprop", "sgd"])
def test_captured_updates_equal_eager_ones_bit_for_bit(name: str) -> None:
    eager, captured = Learner(name), captured_learner(name)[0]
    results = []
    for learner in (eager, captured):
        torch.manual_seed(1)
        results.append(taught(learner, Runtime(device="cpu"), updates=12))
    assert tree.equal(results[0], results[1])
    assert tree.equal(eager.network.state_dict(), captured.network.state_dict())
    assert tree.equal(eager.optimizer.state_dict(), captured.optimizer.state_dict())
    assert captured.optimizer.rule.counts == [12] * 4  # the recording itself was no update
    assert len({round(float(each["loss/error"]), 6) for each in results[0]}) == 12


def test_the_first_calls_run_eagerly_then_one_recording_serves_all() -> None:
    learner, runtime, backend = captured_learner()
    taught(learner, runtime, updates=6)
    assert backend.log == ["warm_up"] * WARM_UP_CALLS + ["capture", "replay", "replay", "replay"]


def test_each_choice_and_each_shape_is_recorded_apart() -> None:
    learner, runtime, backend = captured_learner()
    taught(learner, runtime, updates=4)
    taught(learner, runtime, updates=4, with_bonus=True)
    for _ in range(4):
        learner.learn(batch_of(0, rows=5), runtime.numbers({"scale": 1.0}))
    assert backend.log.count("capture") == 3
    assert isinstance(learner.learn, CapturedMethod)
    assert len(learner.learn.recordings) == 3
    taught(learner, runtime, updates=1)
    assert backend.log[-1] == "replay"


def test_beyond_a_number_of_shapes_nothing_more_is_recorded() -> None:
    backend = AgainBackend()
    method = CapturedMethod(lambda batch, numbers: {"sum": batch["x"].sum()}, place="sum", device=CPU, backend=backend)
    for size in range(1, MOST_RECORDINGS + 4):
        for _ in range(WARM_UP_CALLS + 2):
            assert float(method({"x": torch.ones(size)}, {})["sum"]) == size
    assert len(method.recordings) == MOST_RECORDINGS == backend.log.count("capture")


def test_a_shape_that_is_no_longer_used_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "FORGOTTEN_AFTER", 20)
    backend = AgainBackend()
    method = CapturedMethod(lambda batch, numbers: {"sum": batch["x"].sum()}, place="sum", device=CPU, backend=backend)
    sizes = range(1, MOST_RECORDINGS + 1)
    for size in (*sizes, *sizes):
        method({"x": torch.ones(size)}, {})
    for _ in range(WARM_UP_CALLS + 4):  # of size 1 nobody asks any more
        assert float(method({"x": torch.ones(50)}, {})["sum"]) == 50.0
        for size in sizes[1:4]:
            method({"x": torch.ones(size)}, {})
    assert len(method.recordings) == MOST_RECORDINGS and backend.log.count("capture") == 4
    held = {shapes[0][0][0] for _, _, shapes, _ in method.recordings}
    assert 50 in held and 1 not in held


def test_outputs_are_not_overwritten_by_the_next_replay() -> None:
    learner, runtime, _ = captured_learner()
    taught(learner, runtime, updates=4)
    first = taught(learner, runtime, updates=1, first=4)[0]
    kept = {name: tensor.clone() for name, tensor in first.items()}
    second = taught(learner, runtime, updates=1, first=5)[0]
    assert tree.equal(first, kept)
    assert not tree.equal(first, second)
    assert first["loss/error"].dim() == 0 and first["priority"].shape == (6,)


def test_a_batch_given_to_a_captured_method_is_left_alone() -> None:
    learner, runtime, _ = captured_learner()
    batch = batch_of(0)
    for _ in range(5):
        learner.learn(batch, runtime.numbers({"scale": 1.0}))
    assert tree.equal(batch, batch_of(0))


def test_an_output_that_is_an_input_is_not_overwritten_by_the_next_call() -> None:
    class Echo(Learner):
        def learn(self, batch: Batch, numbers: Batch, *, with_bonus: bool = False) -> Batch:
            return {"echo": batch["target"], "count": torch.tensor(3), "half": torch.tensor(0.5, dtype=torch.bfloat16)}

    echo, runtime = Echo(), Runtime(device="cpu")
    runtime.graphs = AgainBackend()
    runtime.capture_methods(echo)
    outputs = [echo.learn(batch_of(update), {}) for update in range(6)]
    assert all(torch.equal(each["echo"], batch_of(update)["target"]) for update, each in enumerate(outputs))
    assert [(name, tensor.dtype) for name, tensor in outputs[5].items()] == [
        ("echo", torch.float32),
        ("count", torch.int64),  # whole numbers keep their type
        ("half", torch.float32),
    ]


def test_what_was_recorded_without_gradients_serves_those_who_want_them() -> None:
    """Evaluations answer in inference mode; a film asks outside it."""

    class Echo(Learner):
        def learn(self, batch: Batch, numbers: Batch, *, with_bonus: bool = False) -> Batch:
            return {"twice": batch["target"] * 2.0}

    echo, runtime = Echo(), Runtime(device="cpu")
    runtime.graphs = AgainBackend()
    runtime.capture_methods(echo)
    with torch.inference_mode():
        for update in range(5):
            echo.learn(batch_of(update), {})
    assert torch.equal(echo.learn(batch_of(9), {})["twice"], batch_of(9)["target"] * 2.0)


def test_forgotten_recordings_are_made_anew() -> None:
    learner, runtime, backend = captured_learner()
    taught(learner, runtime, updates=4)
    learner.network[0].requires_grad_(False)
    runtime.forget_captures()
    frozen = learner.network[0].weight.detach().clone()
    backend.log.clear()
    taught(learner, runtime, updates=5)
    assert backend.log == ["warm_up"] * WARM_UP_CALLS + ["capture", "replay", "replay"]
    assert torch.equal(learner.network[0].weight, frozen)
    assert learner.optimizer.rule.counts == [4, 4, 9, 9]


def test_a_restored_learner_goes_on_bit_for_bit() -> None:
    learner, runtime, _ = captured_learner()
    taught(learner, runtime, updates=7)
    saved = tree.map_leaves(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf,
        {"network": dict(learner.network.state_dict()), "optimizer": learner.optimizer.state_dict()},
    )
    generator = torch.get_rng_state()
    ahead = taught(learner, runtime, updates=5, first=7)
    other, other_runtime, _ = captured_learner()
    other.network.load_state_dict(saved["network"])
    other.optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(generator)
    assert tree.equal(taught(other, other_runtime, updates=5, first=7), ahead)


def test_anomaly_detection_runs_eagerly() -> None:
    learner, runtime, backend = captured_learner()
    with torch.autograd.set_detect_anomaly(True):
        taught(learner, runtime, updates=5)
    assert backend.log == []


def test_without_a_gpu_or_when_switched_off_methods_stay_what_they_are() -> None:
    for capture in ("auto", True, False):
        learner = Learner()
        Runtime(device="cpu", capture=capture).capture_methods(learner)
        assert "learn" not in vars(learner)


def test_a_number_that_stays_is_not_sent_again() -> None:
    runtime = Runtime(device="cpu")
    first = runtime.numbers({"scale": 0.5, "bonus": 1.0})
    second = runtime.numbers({"scale": 0.5, "bonus": 2.0})
    assert second["scale"] is first["scale"]
    assert (first["bonus"].item(), second["bonus"].item()) == (1.0, 2.0)
    assert second["bonus"].dtype == torch.float32 and second["bonus"].dim() == 0


def test_a_constant_learning_rate_is_written_once_and_a_schedule_every_time() -> None:
    learner = Learner("sgd")
    weight = learner.network[3].bias
    before = weight.item()
    assert learner.optimizer.prepare(Progress(fraction=0.5)) == {"learning_rate": 0.05}
    learner.optimizer.apply(weight.sum())
    assert before - weight.item() == pytest.approx(0.05 * 0.5)  # the norm 1 is clipped to .5
    learner.optimizer.prepare(Progress(fraction=1.0))
    learner.optimizer.apply(weight.sum())
    assert before - weight.item() == pytest.approx(0.025)


def test_what_cannot_be_recorded_says_the_cure() -> None:
    class Stubborn(AgainBackend):
        def capture(self, function: Callable[[], Packed]) -> tuple[Any, Packed]:
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nSearch for more")
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")

    learner, runtime = Learner(), Runtime(device="cpu")
    runtime.graphs = Stubborn()
    runtime.capture_methods(learner)
    message = (
        r"Learner.learn cannot be recorded.*is capturing, at `raise RuntimeError.*` \(test_capture.py, line \d+\)\. A "
        r".*runtime.capture=false"
    )
    with pytest.raises(ConfigError, match=message):
        taught(learner, runtime, updates=4)

    class Numeric(Learner):
        def learn(self, batch: Batch, numbers: Batch, *, with_bonus: bool = False) -> Batch:
            return {"rate": 0.5}  # type: ignore[dict-item]

    numeric = Numeric()
    runtime.capture_methods(numeric)
    with pytest.raises(ConfigError, match=r"Numeric.learn returns 'rate' as float, but a captured method returns ten"):
        taught(numeric, runtime, updates=1)


def test_settings_that_do_not_go_with_capture_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner()
    learner.captured = ("lern",)  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"Learner.captured names 'lern', which is not.*Did you mean 'learn'"):
        Runtime(device="cpu").capture_methods(learner)
    with pytest.raises(ConfigError, match=r"runtime capture: 'yes'; allowed: auto, true, false"):
        Runtime(device="cpu", capture="yes")
    monkeypatch.setattr(runtime_module, "resolve_device", lambda device: torch.device("cuda:0"))
    with pytest.raises(
        ConfigError, match=r"runtime capture: true does not go with precision fp16.*Write precision: bf"
    ):
        Runtime(device="cuda", precision="fp16", capture=True, threads=1)
    monkeypatch.setattr(optimizer_module, "is_capturing", lambda: True)
    parameter = nn.Parameter(torch.ones(2))
    for settings, setting in (({"accumulate": 2}, "accumulate 2"), ({"precision": "fp16"}, "precision fp16")):
        with pytest.raises(ConfigError, match=rf"optimizer {setting}: a CUDA graph repeats one update.*capture: false"):
            Optimizer(parameters=[parameter], **settings).apply(parameter.sum())  # type: ignore[arg-type]


def test_a_runtime_that_compiles_nothing_says_so() -> None:
    learner = Learner()
    assert Runtime(device="cpu").remarks(learner) == []
    runtime = Runtime(device="cpu", compile=True)
    assert runtime.remarks(learner) == ["runtime.compile is true, but Learner names no methods to compile: nothing is."]
    learner.compiled = ("learn",)  # type: ignore[misc]
    assert runtime.remarks(learner) == []


def test_a_runtime_that_captures_nothing_says_so() -> None:
    runtime = Runtime(device="cpu", capture=True)
    assert runtime.remarks(Learner()) == ["runtime.capture is true, but the device is cpu: nothing is captured."]
    runtime.graphs = CudaGraphs(runtime.device)
    assert runtime.remarks(Learner()) == []
    learner = Learner()
    learner.captured = ()  # type: ignore[misc]
    assert runtime.remarks(learner) == ["runtime.capture is true, but Learner names no methods to capture: nothing is."]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adam", "laprop"])
def test_cuda_graphs_equal_eager_updates(name: str) -> None:
    outcomes = []
    for capture in (False, True):
        learner, runtime = Learner(name), Runtime(device="cuda", capture=capture)
        learner.network.cuda()
        clip = 0.3 if name == "laprop" else None  # with it, LaProp is one kernel
        learner.optimizer = Optimizer(
            parameters=[learner.network], name=name, learning_rate="linear(0.1, 0)", adaptive_clip=clip
        )
        assert learner.optimizer.rule.gradients_stay == (name == "laprop")
        runtime.capture_methods(learner)
        torch.manual_seed(1)
        outputs = []
        for update in range(20):
            learner.optimizer.prepare(Progress(fraction=update / 100))
            outputs.append(learner.learn(runtime.to_device(batch_of(update)), runtime.numbers({"scale": 1.0})))
        outcomes.append(
            (outputs, learner.network.state_dict(), learner.optimizer.state_dict(), torch.cuda.get_rng_state())
        )
    assert tree.equal(outcomes[0], outcomes[1])
