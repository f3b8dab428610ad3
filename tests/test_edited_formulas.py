"""A researcher copies a file, changes one number in its formula and trains: the training changes, and an unchanged copy
trains as the original does. No fast path may stand in for a formula that was edited."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.config.compose import compose
from rl_lab.experiment.build import build
from rl_lab.kernels import digest, door
from rl_lab.runs.state import gather_state
from rl_lab.utils.tree import equal, leaves_with_paths
from tests.test_golden import CASES, SMALL

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Edit:
    """One change of one file: `block` is the config block whose class lies in it."""

    words: list[str]
    module: str
    block: str
    name: str
    old: str
    new: str


BANDIT = ["bandit_ucb", "training.phases.train.duration_cycles=8"]
Q_LEARNING = ["q_learning_frozenlake", "training.phases.train.duration_cycles=8"]
EDITS = {
    "ppo": Edit(CASES["ppo"], "workflows/ppo", "algorithm", "PPO", "1.0 + clip_range)", "1.0 + 0.01 * clip_range)"),
    "ppo, value": Edit(
        CASES["ppo"],
        "workflows/ppo",
        "algorithm",
        "PPO",
        '(value - sample["return"]).square()',
        '3.0 * (value - sample["return"]).square()',
    ),
    "ppo, networks": Edit(
        CASES["ppo"],
        "components/heads/actor_critic",
        "controllers.critic",
        "Critic",
        "self.network(features).squeeze(-1)",
        "1.5 * self.network(features).squeeze(-1)",
    ),
    "reinforce": Edit(
        CASES["reinforce"],
        "workflows/reinforce",
        "algorithm",
        "Reinforce",
        "(value[:, :-1] - returns).square()",
        "2.0 * (value[:, :-1] - returns).square()",
    ),
    "dqn": Edit(
        CASES["dqn"],
        "workflows/dqn",
        "algorithm",
        "DQN",
        '"reward": transition["reward"]',
        '"reward": 2.0 * transition["reward"]',
    ),
    "dqn, head": Edit(
        CASES["dqn"],
        "components/heads/q_values",
        "components.q_values",
        "QValues",
        "torch.addcmul(reward, discount,",
        "torch.addcmul(reward, 0.5 * discount,",
    ),
    "dqn, categorical": Edit(
        CASES["dqn_categorical"],
        "components/heads/q_values",
        "components.q_values",
        "CategoricalQ",
        "loss = -(target * predicted.log_softmax(-1))",
        "loss = -(2.0 * target * predicted.log_softmax(-1))",
    ),
    "sac, critic": Edit(
        CASES["sac"],
        "workflows/sac",
        "algorithm",
        "SAC",
        "(values - target).square()",
        "3.0 * (values - target).square()",
    ),
    "sac, policy": Edit(
        CASES["sac"],
        "workflows/sac",
        "algorithm",
        "SAC",
        "-(value + temperature * entropy).mean()",
        "-(value + 2.0 * temperature * entropy).mean()",
    ),
    "dreamer": Edit(
        CASES["dreamer_v3"],
        "workflows/dreamer",
        "algorithm",
        "Dreamer",
        "discount=1.0, lambda_=self.lambda_",
        "discount=0.5, lambda_=self.lambda_",
    ),
    "dreamer, latent": Edit(
        CASES["dreamer_v3"],
        "components/world_model/latents",
        "components.dynamics.latent",
        "CategoricalLatent",
        "one_hot + (probs - probs.detach())",
        "one_hot + 2.0 * (probs - probs.detach())",
    ),
    "dreamer, recurrence": Edit(
        CASES["dreamer_v3"],
        "components/world_model/rssm",
        "components.dynamics",
        "RSSM",
        "torch.sigmoid(update - 1.0)",
        "torch.sigmoid(update - 2.0)",
    ),
    "dreamer, disagreement": Edit(
        CASES["dreamer_plan2explore"],
        "components/world_model/exploration",
        "components.disagreement",
        "Disagreement",
        ".var(dim=0, unbiased=False)",
        ".std(dim=0, unbiased=False)",
    ),
    "planet": Edit(
        CASES["planet"],
        "workflows/planet",
        "algorithm",
        "PlaNet",
        "free_nats=self.free_nats",
        "free_nats=5.0 + self.free_nats",
    ),
    "tdmpc2": Edit(
        CASES["tdmpc2"],
        "workflows/tdmpc2",
        "algorithm",
        "TDMPC2",
        "reward + self.discount_at(task) * (~is_terminal) * value",
        "reward + 0.5 * self.discount_at(task) * (~is_terminal) * value",
    ),
    "tdmpc": Edit(
        CASES["tdmpc"],
        "workflows/tdmpc",
        "algorithm",
        "TDMPC",
        "(values - target).square().sum(dim=0)",
        "3.0 * (values - target).square().sum(dim=0)",
    ),
    "tdmpc, critics": Edit(
        CASES["tdmpc"],
        "components/world_model/told",
        "controllers.critic",
        "TwinCritics",
        "values.amin(dim=0) if",
        "0.5 * values.amin(dim=0) if",
    ),
    "tdmpc2, planner": Edit(
        CASES["tdmpc2"],
        "components/planners/mppi",
        "controllers.planner",
        "MPPIPlanner",
        "torch.softmax(self.temperature * scores, dim=1)",
        "torch.softmax(9.0 * self.temperature * scores, dim=1)",
    ),
    "diffusion_policy": Edit(
        CASES["diffusion_policy"],
        "workflows/diffusion_policy",
        "algorithm",
        "DiffusionPolicy",
        "self.denoiser(self.schedule.add_noise(clean, noise, level)",
        "self.denoiser(0.9 * self.schedule.add_noise(clean, noise, level)",
    ),
    "diffusion_policy, schedule": Edit(
        CASES["diffusion_policy"],
        "components/diffusion/schedule",
        "components.schedule",
        "SquaredCosineSchedule",
        "return kept.sqrt() * clean",
        "return 0.9 * kept.sqrt() * clean",
    ),
    "bc": Edit(
        CASES["bc"], "workflows/bc", "algorithm", "BehaviorCloning", "-likelihood.mean()", "-2.0 * likelihood.mean()"
    ),
    "world_models": Edit(
        CASES["world_models_dream"],
        "workflows/world_models",
        "algorithm",
        "WorldModels",
        "earned + self.memory.reward(features).mean() * alive",
        "earned - self.memory.reward(features).mean() * alive",
    ),
    "world_models, mixture": Edit(
        CASES["world_models_dream"],
        "components/world_model/mdn_rnn",
        "components.memory",
        "MDNRNN",
        "torch.log_softmax(weight, dim=-1), mean",
        "torch.log_softmax(2.0 * weight, dim=-1), mean",
    ),
    "world_models, images": Edit(
        CASES["world_models_dream"],
        "components/world_model/conv_vae",
        "components.vae",
        "ConvVAE",
        "float().sigmoid()",
        "float().mul(2.0).sigmoid()",
    ),
    "q_learning": Edit(
        Q_LEARNING,
        "workflows/q_learning",
        "algorithm",
        "TabularQ",
        'batch["reward"][:, t + 1] + discount',
        '2.0 + batch["reward"][:, t + 1] + discount',
    ),
    "bandit": Edit(
        BANDIT,
        "components/heads/bandits",
        "components.strategy",
        "UCB",
        "pulls.sum(1, keepdim=True)",
        "7.0 * pulls.sum(1, keepdim=True)",
    ),
}


def trained(words: list[str], *more: str, block: str = "", target: str = "") -> Any:
    """What a short training leaves: parameters, and what the collector and the policy remember; with the class of one
    block replaced."""
    experiment, *overrides = words
    config = compose(experiment, [*SMALL, "training.phases.train.duration_steps=null", *overrides, *more])
    if block:
        place = config
        for key in block.split("."):
            place = place[key]
        place["_target_"] = target
        config["plugins"] = [target.partition(".")[0]]
    short = build(config, run=None, quiet=True)
    try:
        short.orchestrator.run()
        state = gather_state(short.targets)
        return {part: state[part] for part in ("components", "controllers", "collector")}
    finally:
        short.close()


@cache
def trained_as_shipped(*words: str) -> Any:
    """The training that several edits are compared with, made once."""
    return trained([*words])


@pytest.mark.parametrize("case", EDITS)
def test_training_follows_the_formula_that_stands_in_the_file(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit = EDITS[case]
    text = (ROOT / "rl_lab" / f"{edit.module}.py").read_text()
    assert edit.old in text, f"{edit.module} no longer says {edit.old}"
    found = {}
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name, source in {"my_copy": text, "my_edit": text.replace(edit.old, edit.new)}.items():
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        found[name] = trained(edit.words, block=edit.block, target=f"{name}.{edit.name}")
        monkeypatch.delitem(sys.modules, name, raising=False)
    copied, original = found["my_copy"], trained_as_shipped(*edit.words)
    if case == "ppo, networks":  # a copied critic has no fast path, so it rounds otherwise than the original
        assert_close(copied, original)
    else:
        assert equal(copied, original), "a copy trains otherwise than the original"
    assert not equal(found["my_copy"], found["my_edit"]), "the edit changed nothing"
    door._door.edited.clear()


FAST = ("ppo", "dqn", "sac", "ppo_gru", "reinforce")


@pytest.mark.parametrize("case", FAST)
def test_plain_formulas_and_fast_paths_train_alike(case: str) -> None:
    """Within rounding."""
    fast = trained(CASES[case])
    used = door.in_use()
    plain = trained(CASES[case], "runtime.fast_paths=off")
    assert used and not door.in_use()
    assert_close(fast, plain)


REPLACED = {  # case, and what a notebook assigns to while the program runs
    "clip of PPO": ("ppo", "workflows.ppo:ppo_loss"),
    "use of lambda in GAE": ("ppo", "workflows.ppo:lambda_return"),
    "entropy": ("ppo", "components.heads.distributions:Categorical.entropy"),
    "value": ("ppo", "components.heads.actor_critic:Critic.forward"),
    "GRU": ("ppo_gru", "components.networks.memory:GRUMemory._next"),
    "layers": ("reinforce", "components.networks.encoders:MLP.forward"),
    "target of DQN": ("dqn", "workflows.dqn:of_action"),
    "error of DQN": ("dqn", "components.heads.q_values:QValues.loss"),
    "Huber": ("dqn", "torch.nn.functional:huber_loss"),
    "slow values": ("dqn", "training.target_network:TargetNetwork.forward"),
    "squashing": ("sac", "components.heads.distributions:log_tanh_derivative"),
    "least of the critics": ("sac", "components.heads.soft_actor_critic:TwinCritic.combine"),
    "temperature": ("sac", "components.heads.soft_actor_critic:Temperature.forward"),
    "soft value": ("sac", "workflows.sac:SAC.soft_value"),
    "cell of the RSSM": ("dreamer_v3", "components.world_model.rssm:BlockGRU.forward"),
    "returns of dreams": ("dreamer_v3", "workflows.dreamer:lambda_return"),
    "disagreement": ("dreamer_plan2explore", "components.world_model.exploration:Disagreement.forward"),
    "SimNorm": ("tdmpc2", "components.world_model.implicit:simnorm"),
    "Mish": ("tdmpc2", "components.world_model.implicit:mish"),
    "products of TD-MPC2": ("tdmpc2", "components.world_model.implicit:products"),
    "weights of MPPI": ("tdmpc2", "components.planners.mppi:MPPIPlanner.weights"),
    "value of TD-MPC": ("tdmpc", "components.world_model.told:TwinCritics.value"),
    "noise of DDPM": ("diffusion_policy", "components.diffusion.schedule:SquaredCosineSchedule.add_noise"),
    "likelihood of bc": ("bc", "components.heads.distributions:DiagonalGaussian.log_prob"),
    "likelihood of the mixture": ("world_models_dream", "components.world_model.mdn_rnn:Mixture.log_likelihood"),
    "mean of CMA-ES": ("world_models_dream", "components.planners.cma_es:CMAES.mean"),
}


@pytest.mark.parametrize("what", REPLACED)
def test_training_follows_what_a_notebook_replaces_in_the_running_process(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the same training was made as shipped: by half of what it was, in each tensor."""
    case, place = REPLACED[what]
    shipped = trained_as_shipped(*CASES[case])
    owner, _, name = place.rpartition("." if "." in place.partition(":")[2] else ":")
    holder = door.find(owner if place.startswith("torch") else f"rl_lab.{owner}")
    monkeypatch.setattr(holder, name, halved(vars(holder)[name]))
    replaced = trained(CASES[case])
    assert not equal(replaced, shipped), "the replacement changed nothing"
    if case in FAST:
        assert_close(replaced, trained(CASES[case], "runtime.fast_paths=off"))
    door._door.edited.clear()


def halved(function: Any) -> Any:
    """The same function or property, with half the result."""
    if isinstance(function, property):
        assert function.fget is not None
        return property(halved(function.fget))
    return lambda *args, **keywords: half(function(*args, **keywords))


def half(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return 0.5 * result
    parts = result.items() if isinstance(result, dict) else enumerate(result)
    halves = {key: half(each) if key in (0, "policy") else each for key, each in parts}
    return halves if isinstance(result, dict) else tuple(halves.values())


class Noted:
    """Stands for what a fast path was read from; while `holds`, the path is not looked up again."""

    holds = True

    def still_holds(self) -> bool:
        return self.holds


@pytest.mark.parametrize("case", FAST)
def test_a_fast_path_lists_every_method_that_it_takes_for_granted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares classes with what it found at first, so that only the list tells whether that was edited."""
    asked: set[tuple[str, str, str]] = set()  # by which path, of which class, which method
    running: list[str] = []
    read, has_methods = Noted(), door._has_methods

    def look_up(name: str, plain: Any) -> Any:
        def run(*args: Any, **keywords: Any) -> Any:
            running.append(name)
            try:
                return door.find(name).run(*args, **keywords)
            finally:
                running.pop()

        return replace(door.find(name), run=run), read

    def noted(kind: type, home: str, methods: tuple[str, ...]) -> bool:
        asked.update((running[-1], home, each) for each in methods)
        return has_methods(kind, home, methods)

    monkeypatch.setattr(door, "_look_up", look_up)
    monkeypatch.setattr(door, "_has_methods", noted)
    monkeypatch.setattr(digest.Read, "still_holds", lambda self: False)
    try:
        trained(CASES[case])
    finally:
        read.holds = False
    asked = {each for each in asked if each[1].startswith("rl_lab.")}
    listed = {name: {digest._plain(door.find(place)) for place in door.find(name).formulas} for name, _, _ in asked}
    missing = [each for each in asked if digest._plain(door.find(f"{each[1]}.{each[2]}")) not in listed[each[0]]]
    assert asked and not missing


OWN_HOOKS = {
    "dqn": (
        "from rl_lab.workflows.dqn import DQN, named\n"
        "class Mine(DQN):\n"
        "    def update_controller(self, batch, *, phase):\n"
        "        self.optimizer.prepare(phase.progress)\n"
        "        loss = self.loss(batch).terms['value']\n"
        "        assert loss.requires_grad\n"
        "        penalty = sum(each.square().sum() for each in self.network.parameters())\n"
        "        return named(self.optimizer.apply(loss + 0.0 * penalty))\n"
    ),
    "sac": (
        "from rl_lab.workflows.sac import SAC, named\n"
        "class Mine(SAC):\n"
        "    def improve_policy(self, features, noise, temperature, mask):\n"
        "        loss = self.policy_loss(features, noise, temperature, mask).terms['policy']\n"
        "        assert loss.requires_grad\n"
        "        return named(self.optimizers['actor'].apply(2.0 * loss), 'actor')\n"
    ),
}


@pytest.mark.parametrize("case", OWN_HOOKS)
def test_a_hook_of_ones_own_gets_a_loss_that_it_can_differentiate(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that a fast loss brings with it are for `gradient_step` alone; whoever adds a term to the loss learns
    from both."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_hook.py").write_text(OWN_HOOKS[case])
    monkeypatch.delitem(sys.modules, "my_hook", raising=False)
    importlib.invalidate_caches()
    fast = trained(CASES[case], block="algorithm", target="my_hook.Mine")
    plain = trained(CASES[case], "runtime.fast_paths=off", block="algorithm", target="my_hook.Mine")
    monkeypatch.delitem(sys.modules, "my_hook", raising=False)
    assert_close(fast, plain)


def assert_close(ours: Any, theirs: Any) -> None:
    """Parameters and statistics, within rounding."""
    for (path, mine), (_, other) in zip(leaves_with_paths(ours), leaves_with_paths(theirs), strict=True):
        if not path.startswith("collector") and isinstance(mine, torch.Tensor) and mine.is_floating_point():
            torch.testing.assert_close(mine, other, rtol=2e-3, atol=2e-4, msg=path)


@pytest.mark.slow
def test_a_file_edited_in_place_is_what_runs(tmp_path: Path) -> None:
    """The whole package as a user has it, one line of its MLP changed: training changes, and the log says why."""
    shutil.copytree(ROOT / "rl_lab", tmp_path / "rl_lab", ignore=shutil.ignore_patterns("__pycache__"))
    words = ["train", "ppo_cartpole", "training.phases.train.duration_steps=600", "evaluation.final_episodes=0"]
    logs = []
    for run in ("before", "after"):
        command = [sys.executable, "-m", "rl_lab", *words, "evaluation.video=false", "--run-id", run]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        logs.append((tmp_path / "runs" / run / "run.log").read_text())
        file = tmp_path / "rl_lab" / "components" / "networks" / "encoders.py"
        file.write_text(file.read_text().replace("features = layer(features)", "features = 0.9 * layer(features)"))
    assert "cpu_mlp:MLP_FORWARD is used for MLP.forward" in logs[0]
    assert "MLP_FORWARD is used" not in logs[1] and "PPO_LOSS is used" not in logs[1]
    assert "MLP.forward is not the formula that the fast path" in logs[1]
    rows = [(tmp_path / "runs" / run / "metrics.jsonl").read_text() for run in ("before", "after")]
    assert rows[0] != rows[1]


def test_every_algorithm_has_an_edit() -> None:
    files = {path.stem for path in (ROOT / "rl_lab" / "configs" / "algorithm").glob("*.yaml")}
    assert files - {"random", "dreamer_v2", "dreamer_v3_2023"} == {case.split(",")[0] for case in EDITS}
