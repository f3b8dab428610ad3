"""Policies that leave the lab: one file, the same actions, without rl_lab; and what cannot leave, and why."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import WITHOUT_RL_LAB, about_torch, play_without_rl_lab, untrained, write_rows

import rl_lab
from rl_lab import api
from rl_lab.experiment import export, export_check
from rl_lab.policy import Policy
from rl_lab.types import ConfigError, MissingExtraError, PolicyStep, RunError
from rl_lab.workflows.ppo import PPO
from tests.tiny_dreamer import TINY_OLDER_DREAMER, TINY_PARTS
from tests.tiny_tdmpc2 import TINY_TDMPC2_MODEL

ROOT = Path(__file__).parents[2]
SMALL = ["components.encoder.hidden_sizes=[8]"]
TINY_IMPLICIT = [word for word in TINY_TDMPC2_MODEL if "planner" not in word and "continue_head" not in word]
TINY_STRIDED = [word for word in TINY_OLDER_DREAMER if not word.startswith(("buffers", "training", "environment"))]

# name -> experiment, overrides, formats
Cases = dict[str, tuple[str, list[str], str]]
FAST: Cases = {  # one process for all of them: it takes longer to import torch than to act
    "discrete": ("ppo_cartpole", SMALL, "pt2 onnx"),
    "continuous": ("ppo_pendulum", SMALL, "pt2"),
    "recurrent": ("ppo_recall", [*SMALL, "components.memory.hidden_size=8"], "pt2 onnx"),
    "images": ("rl_lab/PixelCatch-v0:ppo", ["components.encoder.image_features=8"], "pt2"),
    "masked_dictionary": ("rl_lab/MaskedChain-v0:ppo", [], "pt2"),
    "reinforce": ("reinforce_cartpole", SMALL, "pt2"),
    "dqn": ("dqn_cartpole_rainbow", [], "pt2"),
    "sac": ("sac_pendulum", [], "pt2"),
    "table": ("q_learning_frozenlake", [], "pt2"),
    "dreamer": ("dreamer_v3_cartpole", TINY_PARTS, "pt2"),
    "cloned": ("rl_lab/PointMass-v0:bc", ["actor=mixture", "algorithm.sample_in_evaluations=false"], "pt2"),
    "without_plans": ("tdmpc2_pendulum", [*TINY_IMPLICIT, "planner=none"], "pt2"),
}
OTHERS: Cases = {
    "expected": ("dqn_cartpole", ["q_values=expected"], "pt2 onnx"),
    "quantile": ("dqn_cartpole", ["q_values=quantile", "components.q_values.dueling=true"], "pt2 onnx"),
    "sac_discrete": ("sac_cartpole", [], "pt2 onnx"),
    "squashed": ("ppo_pendulum", ["controllers.actor.squashed=true", "controllers.actor.std=state"], "pt2 onnx"),
    "lstm": ("ppo_recall", ["memory=lstm"], "pt2 onnx"),
    "multi_discrete": ("rl_lab/MultiTarget-v0:ppo", [], "pt2 onnx"),
    "cloned_gaussian": ("rl_lab/PointMass-v0:bc", [], "pt2 onnx"),
    "first_tdmpc": ("tdmpc_pendulum", ["planner=none"], "pt2 onnx"),
    "world_models": ("world_models_follow", [], "pt2 onnx"),
}
SLOW: dict[str, Cases] = {
    "others": OTHERS,
    "other_formats": {
        name: (experiment, overrides, "onnx")
        for name, (experiment, overrides, formats) in FAST.items()
        if formats == "pt2"
    },
    "images": {
        "sac_pixels": ("sac_pixels", [], "pt2 onnx"),
        "dreamer_pixels": ("rl_lab/PixelCatch-v0:dreamer", TINY_PARTS, "pt2 onnx"),
    },
    "older_world_models": {
        "v1": ("Pendulum-v1:dreamer_v1", TINY_STRIDED, "pt2 onnx"),
        "v2": ("CartPole-v1:dreamer_v2", TINY_STRIDED, "pt2 onnx"),
        "v2_continuous": ("Pendulum-v1:dreamer_v2", TINY_STRIDED, "pt2 onnx"),
        "v3_continuous": ("Pendulum-v1:dreamer", TINY_PARTS, "pt2 onnx"),
    },
}
CASES = [
    pytest.param(FAST, id="one of each"),
    *(pytest.param(cases, id=name, marks=pytest.mark.slow) for name, cases in SLOW.items()),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cases", CASES)
def test_a_file_acts_as_the_policy_does_where_rl_lab_cannot_be_imported(cases: Cases, tmp_path: Path) -> None:
    expected: dict[Path, dict[str, np.ndarray]] = {}
    for name, (experiment, overrides, formats) in cases.items():
        policy = untrained(experiment, overrides)
        for suffix in formats.split():
            path = tmp_path / f"{name}.{suffix}"
            written = policy.export(path)
            assert written.agreement.observations == 256
            expected[path] = write_rows(policy, path)
    found = play_without_rl_lab([*expected])
    for path, answers in expected.items():
        for key, action in answers.items():
            assert found[path][key].shape == action.shape, (path.name, key)
            is_close = np.abs(found[path][key] - action) <= (1e-5 if action.dtype.kind == "f" else 0)
            assert is_close.all(), f"{path.name}, batch/step {key}: {found[path][key]} instead of {action}"


def test_the_resets_of_these_tests_matter() -> None:
    """A policy that ignored is_first, or forgot at every step, would be found out."""
    policy = untrained("ppo_recall", [*SMALL, "components.memory.hidden_size=8"])
    module = export.PolicyModule(policy.workflow, policy.blueprint)
    inputs = {
        name: torch.rand_like(value) if value.dtype.is_floating_point else value
        for name, value in module.example.items()
    }
    remembered = module(inputs | {"is_first": torch.tensor([False, True])})["next_policy_state"]
    forgotten = module(inputs | {"is_first": torch.tensor([True, True])})["next_policy_state"]
    assert not torch.allclose(remembered[0], forgotten[0]) and torch.equal(remembered[1], forgotten[1])


# --- what a file is ------------------------------------------------------------------------------


def test_a_file_says_what_it_takes_and_gives(tmp_path: Path) -> None:
    policy = untrained("ppo_pendulum", ["memory=lstm", "components.memory.hidden_size=8"])
    about = policy.export(tmp_path / "policy.pt2").about
    assert about_torch(tmp_path / "policy.pt2") == json.loads(json.dumps(about))
    assert about["algorithm"] == "PPO" and about["environment"] == "Pendulum-v1" and "rl_lab_version" in about
    assert about["observation"] == {"vector": {"shape": [3], "dtype": "float32"}}
    assert about["state"] == {"policy_state": {"shape": [16], "dtype": "float32", "initial": 0}}
    assert about["inputs"] == ["vector", "is_first", "policy_state"]
    assert about["outputs"] == ["action", "next_policy_state"]
    action = about["action"]
    assert (action["kind"], action["shape"], action["dtype"]) == ("continuous", [1], "float32")
    assert (action["low"], action["high"]) == ([-2.0], [2.0])


def test_a_file_holds_only_what_acts(tmp_path: Path) -> None:
    policy = untrained(
        "ppo_cartpole", ["components.encoder.hidden_sizes=[4]", "controllers.critic.hidden_sizes=[512,512]"]
    )
    policy.export(tmp_path / "policy.pt2")
    program = torch.export.load(str(tmp_path / "policy.pt2"))
    names = {name for name in program.state_dict if "_start" not in name}
    assert names and all("encoder" in name or "actor" in name for name in names)
    assert not any(value.requires_grad for value in program.state_dict.values())


def test_exporting_changes_nothing_of_the_policy(tmp_path: Path) -> None:
    policy = untrained("ppo_recall", [*SMALL, "components.memory.hidden_size=8"])
    observation = np.array([1.0, 0.0, 0.0], np.float32)
    policy.act(observation)
    state, weights = policy._state.clone(), {k: v.clone() for k, v in policy.workflow.actor.state_dict().items()}
    policy.export(tmp_path / "policy.pt2")
    assert torch.equal(policy._state, state)
    assert all(torch.equal(value, weights[name]) for name, value in policy.workflow.actor.state_dict().items())
    assert all(parameter.requires_grad for parameter in policy.workflow.actor.parameters())


def test_what_a_file_does_otherwise_than_the_run_is_said(tmp_path: Path) -> None:
    words = [*TINY_PARTS, "algorithm.sample_in_evaluations=true", "runtime.precision=bf16"]
    policy = untrained("dreamer_v3_cartpole", words)
    written = policy.export(tmp_path / "policy.pt2")
    assert written.notes == [
        "In evaluations this policy draws its actions; the file takes the likeliest ones.",
        "The run acts in bf16; the file computes in float32.",
    ]
    assert written.agreement.largest_difference == 0
    assert policy.workflow.sample_in_evaluations and policy.workflow.context.runtime.precision == "bf16"


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experiment", "reason"),
    [
        ("random_cartpole", "RandomPolicy cannot be written to a file: its actions are drawn at random"),
        ("bandit_ucb", "Bandit cannot be written to a file: it learns from the reward of every pull"),
        ("planet_pendulum", "PlaNet cannot be written to a file: it plans anew at every step"),
        ("tdmpc2_pendulum", "it plans anew at every step, with draws of its own; one trained with planner=none can"),
    ],
)
def test_a_policy_without_a_network_that_acts_is_refused(experiment: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        untrained(experiment).export(tmp_path / "policy.pt2")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("package", export.PACKAGES)
def test_onnx_without_its_packages_names_the_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(MissingExtraError, match=rf"needs {package}: install with `pip install 'rl-lab\[export\]'`"):
        untrained("ppo_cartpole").export(tmp_path / "policy.onnx")


def test_a_file_that_acts_otherwise_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = untrained("ppo_pendulum", SMALL)
    calls = export.NativeActions.forward
    monkeypatch.setattr(export.NativeActions, "forward", lambda self, action: calls(self, action) + 1e-3)
    with pytest.raises(RunError, match=r"2\d\d of 256 actions differ, by 0.001.* at most, so it is not kept"):
        policy.export(tmp_path / "policy.pt2")
    assert not any(tmp_path.iterdir())


def test_a_choice_between_equals_is_drawn_again_and_a_defect_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, answers = untrained("ppo_cartpole", SMALL), {0: [1.0, *[0.0] * 255], 1: [0.0] * 256}

    def compare(answers: dict[int, list[float]]) -> export_check.Agreement:
        monkeypatch.setattr(export_check, "open_file", lambda path, format: None)
        monkeypatch.setattr(export_check, "_differences", lambda *_, seed: np.array(answers[seed])[:, None])
        return export_check.compare(policy, Path("x"), "torch", {})

    assert compare(answers) == export_check.Agreement(256, 0.0)
    for wrong in ({0: [float("nan")] * 256}, dict.fromkeys(range(3), answers[0])):
        with pytest.raises(RunError, match="would not act as the policy does"):
            compare(wrong)


def test_the_tolerance_grows_with_a_wide_range() -> None:
    assert export_check._tolerance(untrained("ppo_cartpole", SMALL).blueprint) == 0.0
    assert export_check._tolerance(untrained("ppo_pendulum", SMALL).blueprint) == pytest.approx([2e-5])


def test_another_shape_of_actions_is_refused() -> None:
    with pytest.raises(RunError, match=r"answers with shape \(4, 2\) instead of \(4, 1\)"):
        export_check._distance(np.zeros((4, 1)), np.zeros((4, 2)))


class Drawing(PPO):
    def act(self, time_step: Any, state: Any, *, mode: Any) -> PolicyStep:
        return super().act(time_step, state, mode="train")


class Counting(PPO):
    def act(self, time_step: Any, state: Any, *, mode: Any) -> PolicyStep:
        action = super().act(time_step, state, mode=mode).action
        return PolicyStep(action.view(len(action)))


@pytest.mark.parametrize(
    ("workflow", "message"),
    [(Drawing, 'Drawing.act draws at random in mode "eval"'), (Counting, r"write x.shape\[0\] instead of len\(x\)")],
)
def test_an_act_that_no_file_can_hold_says_what_to_change(workflow: type[PPO], message: str, tmp_path: Path) -> None:
    policy = untrained("ppo_cartpole", SMALL)
    policy.workflow.__class__ = workflow
    with pytest.raises(ConfigError, match=message):
        policy.export(tmp_path / "policy.pt2")


def test_a_policy_on_a_gpu_is_sent_to_the_cpu_first(tmp_path: Path) -> None:
    policy = untrained("ppo_cartpole", SMALL)
    policy.device = torch.device("cuda:0")
    with pytest.raises(ConfigError, match=r'on cuda:0.*rl_lab.load\(run, device="cpu"\)'):
        policy.export(tmp_path / "policy.pt2")


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("policy.bin", None, "end the name with .pt2 or .pt or .onnx"),
        ("policy.pt2", "onnx", "end the name with .onnx"),
        ("policy.pt2", "jax", "format is 'jax': write torch or onnx"),
    ],
)
def test_a_name_that_says_no_format_is_refused(name: str, format: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export.check_format(Path(name), format)


def test_the_name_says_the_format() -> None:
    assert [export.check_format(Path(name)) for name in ("a.pt", "a.pt2", "b.onnx")] == ["torch", "torch", "onnx"]


# --- from a run ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """A short recurrent run that tests may read but not change."""
    words = ["preset=debug", "training.phases.train.collect_steps=32", "algorithm.epochs=1", "runtime.device=cpu"]
    return api.train("ppo_recall", overrides=words, runs_dir=tmp_path_factory.mktemp("runs"), quiet=True)


def test_the_command_says_where_the_file_is_and_how_it_was_checked(
    run: api.Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from rl_lab.cli.main import main

    assert main(["export-policy", str(run.path), "--output", str(tmp_path / "recall.pt2")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"policy: .*recall.pt2 \(torch, \d+ kB\)\ncheck: the same actions .* 256 random", said)
    assert (
        'use it: torch.export.load("recall.pt2").module()({"vector": ..., "is_first": ..., "policy_state": ...})'
        in said
    )
    assert main(["export-policy", str(run.path), "--format", "onnx", "--output", "x.pt2"]) == 2
    assert "end the name with .onnx" in capsys.readouterr().err


def test_without_an_output_the_file_lies_in_the_run(run: api.Run) -> None:
    written = api.export_policy(run)
    assert written.path == run.path / "policy.pt2" and written.size_bytes == written.path.stat().st_size
    assert about_torch(written.path)["environment"] == "rl_lab/Recall-v0"


def test_a_policy_acts_where_its_environment_is_not_installed(run: api.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    observation = np.array([0.0, 1.0, 0.0], np.float32)
    expected = rl_lab.load(run).act(observation)

    def not_here(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("no such environment here")

    monkeypatch.setattr("rl_lab.environments.recipe.Recipe.build", not_here)
    policy = rl_lab.load(run, device="cpu")
    assert isinstance(policy, Policy) and policy.act(observation) == expected
    assert policy.spec.id == "rl_lab/Recall-v0" and policy.spec.solved_return == 0.95


def test_an_older_run_asks_its_environment(run: api.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = rl_lab.load(run).spec
    monkeypatch.setattr("rl_lab.runs.run_directory.RunDirectory.read_environment", lambda self: None)
    assert rl_lab.load(run).spec == kept


def test_fp16_of_a_gpu_becomes_fp32_on_the_cpu(run: api.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**run.config, "runtime": {**run.config["runtime"], "device": "cuda", "precision": "fp16"}}
    monkeypatch.setattr(api, "open_config", lambda directory, trust: config)
    assert rl_lab.load(run, device="cpu").workflow.context.runtime.precision == "fp32"


# --- the page ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_the_script_of_the_page_serves_a_policy_without_rl_lab(run: api.Run, suffix: str, tmp_path: Path) -> None:
    rl_lab.load(run, device="cpu").export(tmp_path / f"policy.{suffix}")
    page = (ROOT / "docs" / "export.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    script = next(block for block in blocks if f"policy.{suffix}" in block and "sys.stdin" in block)
    policy, requests, expected = rl_lab.load(run), [], []
    for is_first, cue in ((True, 0), (False, 2), (True, 1), (False, 2)):
        vector = np.eye(3, dtype=np.float32)[cue]
        if is_first:
            policy.reset()
        requests.append(json.dumps({"vector": vector.tolist(), "is_first": is_first}))
        expected.append(policy.act(vector))
    answer = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_RL_LAB + script],
        input="\n".join(requests),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr
    assert [json.loads(line) for line in answer.stdout.splitlines()] == expected
