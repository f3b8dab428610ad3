"""Drawing without a screen: what works is found in processes of their own, and no run fails for want of an image."""

from __future__ import annotations

import importlib.metadata
import itertools
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_lab.collection.evaluator import Evaluator
from rl_lab.environments import async_environment, make_environment, mujoco_drawing, rendering
from rl_lab.environments.recipe import Recipe
from rl_lab.experiment.film import reported_to
from rl_lab.types import ConfigError, PolicyStep
from rl_lab.utils import graphics


def test_a_probe_that_crashes_hangs_or_fails_is_a_reason_and_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert graphics.why_it_fails("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)") == "it crashed (signal 11)"
    assert graphics.why_it_fails("assert 0, 'libOSMesa is not installed'") == "libOSMesa is not installed"
    assert graphics.why_it_fails("raise SystemExit(3)") == "exit code 3"
    assert graphics.why_it_fails("pass") == ""
    monkeypatch.setattr(graphics, "PROBE_TIMEOUT_S", 0.05)
    assert graphics.why_it_fails("import time; time.sleep(60)") == "no answer within 0.05 s"


def test_every_backend_can_be_probed_here() -> None:
    """Whatever works on this machine, no probe has a mistake of its own."""
    for name in graphics.BACKENDS:
        why = graphics.why_not(name)
        assert not why.startswith(("NameError", "SyntaxError", "TypeError", "AttributeError")), why


def test_the_first_backend_that_works_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"egl": "it crashed (signal 11)", "osmesa": ""}
    monkeypatch.setattr(graphics, "why_not", reasons.__getitem__)
    assert graphics.first_that_works(("egl", "osmesa")) == "osmesa"
    reasons["osmesa"] = "libOSMesa is not installed"
    assert graphics.first_that_works(("egl", "osmesa")) is None


def test_without_any_backend_nothing_is_named_and_mujoco_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rendering, "mujoco_backend", lambda: None)
    rendering.prepare_headless()
    assert "MUJOCO_GL" not in rendering.os.environ
    assert rendering.os.environ["SDL_VIDEODRIVER"] == "offscreen"  # "dummy" would draw nothing


@pytest.mark.parametrize("mine", [None, "2"])
def test_small_images_are_drawn_by_one_thread_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, mine: str | None
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("LP_NUM_THREADS", raising=False)
    if mine is not None:
        monkeypatch.setenv("LP_NUM_THREADS", mine)
    rendering.prepare_headless(uses_mujoco=False)
    assert rendering.os.environ["LP_NUM_THREADS"] == (mine or "0")


@pytest.mark.slow
def test_torch_can_import_triton_after_mujoco_has_loaded_mesa() -> None:
    """Two LLVMs in one process: in the other order it ends with a segmentation fault."""
    pytest.importorskip("dm_control")
    pytest.importorskip("triton")
    script = """
        from rl_lab.environments import make_environment
        make_environment(id="dmc/cartpole_balance", vectorization="sync").reset()
        import torch._dynamo
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == 0


def test_environments_that_draw_nothing_in_3d_probe_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise AssertionError("each probe is a process")

    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(rendering, "mujoco_backend", fail)
    make_environment(id="CartPole-v1", vectorization="sync").close()


def test_dm_control_with_mujoco_4_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dm_control")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "4.0.0")
    with pytest.raises(ConfigError, match=r"dm_control does not run with mujoco 4.0.0.*pip install 'mujoco<4'"):
        make_environment(id="dmc/cartpole_balance")


def test_workers_never_come_from_a_fork_of_this_process() -> None:
    """A fork of a process that has drawn with EGL hangs."""
    assert async_environment._context().get_start_method() in ("forkserver", "spawn")


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Any]]:
    pytest.importorskip("mujoco")
    if rendering.mujoco_backend() is None:
        pytest.skip("no OpenGL here")
    envs = [Recipe(env_id, render=True).build() for env_id in ("InvertedPendulum-v5", "Reacher-v5")]
    for env in envs:
        env.reset(seed=0)
    yield envs
    for env in envs:
        env.close()


class TestMujoco:
    def test_each_environment_of_a_process_draws_itself(self, pair: list[Any]) -> None:
        """Gymnasium's renderer would show the other one, or black, after the first round."""
        rounds = [[env.render().copy() for env in pair] for _ in range(3)]
        for before, after in itertools.pairwise(rounds):
            for mine, again in zip(before, after, strict=True):
                np.testing.assert_array_equal(mine, again)
        assert all(image.std() > 1 for image in rounds[0])
        assert not np.array_equal(rounds[0][0], rounds[0][1])

    def test_shadows_and_smooth_edges_are_off(self, pair: list[Any]) -> None:
        pair[0].render()
        quality = pair[0].unwrapped.model.vis.quality
        assert quality.shadowsize == 0 and quality.offsamples == 0
        assert isinstance(pair[0].unwrapped.mujoco_renderer, mujoco_drawing.OwnRenderer)

    def test_workers_start_after_this_process_has_drawn(self, pair: list[Any]) -> None:
        pair[0].render()
        environment = make_environment(
            id="InvertedPendulum-v5", num_envs=2, vectorization="async", render=True, worker_timeout_s=60.0
        )
        environment.reset()
        frame = environment.render()
        assert frame is not None and frame.std() > 1
        environment.close()


def test_a_run_without_any_renderer_says_once_that_there_is_no_video() -> None:
    said: list[str] = []
    evaluator = Evaluator(
        lambda: make_environment(id="rl_lab/Counter-v0"),
        make_render_environment=lambda: make_environment(id="rl_lab/Counter-v0", render=True),
        device=torch.device("cpu"),
        report=said.append,
    )
    for _ in range(3):
        assert evaluator.record(lambda time_step, state, mode: PolicyStep(torch.zeros(1, dtype=torch.int64))) is None
    assert said == ["Rendering failed and is left out: the environment draws nothing, it has no render() of its own."]


class TakesNoRenderMode(gym.Env):
    metadata = {"render_modes": ["rgb_array"]}  # type: ignore[assignment]
    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 0.0, True, False, {}

    def render(self) -> Any:
        return np.zeros((4, 4, 3), np.uint8)


class CannotBeFilmed(TakesNoRenderMode):
    def __init__(self, render_mode: str | None = None) -> None:
        if render_mode is not None:
            raise OSError("no libGL")


def test_an_environment_that_takes_no_render_mode_is_built_without() -> None:
    for cls in (TakesNoRenderMode, CannotBeFilmed):
        gym.registry.pop(f"rendering_test/{cls.__name__}-v0", None)
        gym.register(f"rendering_test/{cls.__name__}-v0", entry_point=cls)
    environment = make_environment(id="rendering_test/TakesNoRenderMode-v0", render=True, vectorization="sync")
    environment.reset()
    frame = environment.render()
    assert frame is not None and frame.shape == (4, 4, 3)
    with pytest.raises(ConfigError, match="its constructor raised OSError: no libGL"):
        make_environment(id="rendering_test/CannotBeFilmed-v0", render=True, vectorization="sync")


def test_an_environment_that_fails_when_it_is_to_be_filmed_ends_no_training() -> None:
    said: list[str] = []
    evaluator: Any = SimpleNamespace(report=said.append)
    with reported_to(evaluator):
        raise ConfigError("environment 'x' cannot be made.")
    assert said == ["There is no video: environment 'x' cannot be made."]


def test_a_renderer_that_fails_is_named_and_where_to_look() -> None:
    class Blind:
        def render(self) -> None:
            raise OSError("no libGL")

    events: list[str] = []
    assert rendering.FrameTaker(events).take(Blind()) is None
    assert events == ["Rendering failed and is left out: OSError: no libGL (`rl-lab doctor` says what is missing)"]


def test_mujoco_stays_below_4_in_every_list_of_requirements() -> None:
    requirements = importlib.metadata.requires("rl-lab") or []
    assert any(each.startswith("mujoco<4") for each in requirements), requirements


@pytest.mark.parametrize("env_id", ["CartPole-v1", "InvertedPendulum-v5"])
def test_pictures_are_not_blank_without_a_display_nor_is_anything_said_at_exit(env_id: str) -> None:
    """In a fresh process, as drivers are chosen at import, with an environment that nobody closes."""
    if env_id != "CartPole-v1":
        pytest.importorskip("mujoco")
    program = (
        "from rl_lab.environments import make_environment\n"
        f"environment = make_environment(id='{env_id}', vectorization='sync', render=True)\n"
        "environment.reset()\n"
        "print(environment.render().std() > 1)\n"
    )
    settings = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=settings, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-1] == "True", done.stderr
    assert "Error" not in done.stderr
