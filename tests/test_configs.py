"""Every shipped config: it composes, builds, names real classes, and documents every key it offers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_lab.api import collect, train
from rl_lab.config.compose import compose
from rl_lab.config.construct import parameters_of, resolve_target
from rl_lab.config.experiments import list_experiments
from rl_lab.config.explain import documented_keys
from rl_lab.config.files import PACKAGE_CONFIGS
from rl_lab.config.schema import CheckpointBlock, DebugBlock, EvaluationBlock, LoggingBlock, RunsBlock, StopBlock
from rl_lab.environments.factory import make_environment
from rl_lab.experiment.build import check
from rl_lab.training.optimizer import Optimizer
from rl_lab.training.runtime import Runtime
from rl_lab.types import MissingExtraError

ROOT = Path(__file__).parent.parent
EXPERIMENTS = [info.name for info in list_experiments()]
ALL_FILES = sorted(PACKAGE_CONFIGS.rglob("*.yaml"))
GROUP_FILES = [file for file in ALL_FILES if file.parent.name != "experiment"]

# What wiring fills in: no config may set these, so none lists them. `input` stands for `input_size`.
INJECTED = {"observation", "action", "num_envs", "capacity_steps", "input_size"}
INJECTED |= {"spec", "seed", "device", "directory"}  # of buffers


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE_CONFIGS).as_posix()


def blocks_with_targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping that names a class, with its place."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        for key, value in node.items():
            yield from blocks_with_targets(value, f"{path}.{key}" if path else str(key))


# --- experiments -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_can_be_built(name: str, tmp_path: Path) -> None:
    config = compose(name)
    for block in (config["buffers"] or {}).values():
        setting = next((key for key in ("dataset", "path") if key in (block or {})), None)
        if setting is not None:
            block[setting] = str(tmp_path / "data")
            collect("random", environment=config["environment"]["id"], steps=50, output=tmp_path / "data")
    try:
        check(config)
    except MissingExtraError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_can_be_debugged(name: str) -> None:
    assert compose(name, ["preset=debug"])["training"]["limit_cycles"] == 3


FAMILIES = ["ppo_cartpole", "dqn_cartpole", "sac_pendulum", "dreamer_v3_cartpole", "planet_pendulum"]


@pytest.mark.parametrize("name", [*FAMILIES, "q_learning_frozenlake", "reinforce_cartpole"])
def test_a_debugged_experiment_learns(name: str, tmp_path: Path) -> None:
    """Fewer rows than one batch needs would let every update hook go untried."""
    overrides = ["preset=debug", "runtime.device=cpu", "evaluation.timeout_steps=10"]
    run = train(name, overrides=overrides, runs_dir=tmp_path, quiet=True)
    assert run.status["counts"]["updates"] == 3


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce", "random"])
def test_every_algorithm_runs_on_any_environment(algorithm: str) -> None:
    check(compose(f"rl_lab/Counter-v0:{algorithm}", ["preset=debug"]))


@pytest.mark.parametrize("memory", ["none", "gru", "lstm"])
def test_every_memory_can_be_chosen(memory: str) -> None:
    check(compose("ppo_cartpole", [f"memory={memory}", "preset=debug"]))


TASKS = {  # environment, kind of its image or vector, environments, frames per agent step, updates per agent step
    "none": ("Pendulum-v1", None, 16, 1, 1.0),
    "dmc_proprio": ("dmc/walker_walk", "state", 16, 1, 1.0),
    "dmc_proprio_2024": ("dmc/walker_walk", "state", 16, 2, 0.5),
    "dmc_vision": ("dmc/walker_walk", "pixels", 16, 1, 0.25),
    "minigrid": ("MiniGrid-DoorKey-5x5-v0", None, 16, 1, 1.0),
    "classic_control": ("CartPole-v1", None, 4, 1, 1.0),
    "atari": ("atari/pong", "grey", 16, 1, 0.03125),
    "atari100k": ("atari/pong", "rgb", 1, 1, 0.25),
    "crafter": ("rl_lab/Crafter-v1", None, 1, 1, 0.5),
    "memory_maze": ("memory_maze/9x9", None, 4, 1, 0.25),
    "vizdoom": ("vizdoom/basic", None, 8, 1, 0.25),
    "bsuite": ("bsuite/catch", None, 1, 1, 1.0),
    "popgym": ("popgym-RepeatPreviousEasy-v0", None, 16, 1, 1.0),
    "retro": ("rl_lab/Retro-v0", None, 4, 1, 0.25),
    "minecraft": ("minecraft/minerl", None, 16, 1, 0.03125),
    "procgen": ("envpool/CoinrunHard-v0", None, 16, 1, 0.0625),
}


def test_every_task_is_listed_here() -> None:
    assert {file.stem for file in (PACKAGE_CONFIGS / "task").glob("*.yaml")} == TASKS.keys()


@pytest.mark.parametrize("task", TASKS)
def test_every_task_sets_up_dreamer(task: str) -> None:
    config = compose("dreamer_v3", [f"task={task}", "size=1m"])
    environment, (prefill, train) = config["environment"], config["training"]["phases"]
    seen = (environment["id"], environment["kwargs"].get("observation"), environment["num_envs"])
    assert (*seen, environment["action_repeat"], train["updates_per_step"]) == TASKS[task]
    assert "updates_per_step" not in prefill and "updates_per_step" not in config["training"]
    try:
        small = ["size=1m", "preset=debug", "runtime.device=cpu", "buffers.replay.capacity_rows=1000"]
        check(compose("dreamer_v3", [f"task={task}", *small]))
    except MissingExtraError as missing:
        pytest.skip(str(missing))


def test_the_first_release_is_set_up_alike_on_every_task() -> None:
    for words, task in (([], "walker_walk"), (["environment=dmc/finger_spin"], "finger_spin")):
        environment = compose("dreamer_v3_2023", words)["environment"]
        assert (environment["id"], environment["num_envs"], environment["action_repeat"]) == (f"dmc/{task}", 4, 1)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_are_short(name: str) -> None:
    lines = (PACKAGE_CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert len(lines) <= 40, f"{name} has {len(lines)} lines"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_sets_only_keys_that_its_groups_document(name: str) -> None:
    """A key that only an experiment knows could not be found with `rl-lab config explain`."""
    offered = {key for file in GROUP_FILES for key in documented_keys(file)}
    sets = documented_keys(PACKAGE_CONFIGS / "experiment" / f"{name}.yaml")
    # A list of phases is read line by line; its keys are those of Phase, which the scheduler checks.
    unknown = [key for key in sets if key not in offered and not key.startswith(("training.phases.", "defaults"))]
    own_targets = [path for path, _ in blocks_with_targets(_content(name))]
    assert not [key for key in unknown if not key.startswith(tuple(own_targets) or ("\0",))]


def _content(name: str) -> dict[str, Any]:
    return yaml.safe_load((PACKAGE_CONFIGS / "experiment" / f"{name}.yaml").read_text())


# --- classes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ALL_FILES, ids=name_of)
def test_every_target_resolves(file: Path) -> None:
    for place, block in blocks_with_targets(yaml.safe_load(file.read_text())):
        assert inspect.isclass(resolve_target(block["_target_"], place=place))


def settable(target: Any) -> set[str]:
    """What a config may set: the parameters that wiring does not fill in."""
    parameters, _ = parameters_of(target)
    names = set(parameters) - INJECTED
    return names | ({"input"} if "input_size" in parameters else set())


@pytest.mark.parametrize("file", sorted((PACKAGE_CONFIGS / "algorithm").glob("*.yaml")), ids=name_of)
def test_every_option_of_an_algorithm_can_be_overridden(file: Path) -> None:
    """Hydra refuses to override what no YAML lists, so every constructor parameter must be listed."""
    for place, block in blocks_with_targets(yaml.safe_load(file.read_text())):
        offered = settable(resolve_target(block["_target_"], place=place))
        assert block.keys() - {"_target_"} == offered, place


@pytest.mark.parametrize("file", sorted((PACKAGE_CONFIGS / "algorithm").glob("*.yaml")), ids=name_of)
def test_every_option_of_an_optimizer_can_be_overridden(file: Path) -> None:
    optimizers = yaml.safe_load(file.read_text()).get("optimizers") or {}
    for name, block in [(name, block) for name, block in optimizers.items() if block is not None]:
        filled_in = {"parameters", "precision", "world"}
        assert block.keys() == (settable(Optimizer) - filled_in) | {"parts"}, name


@pytest.mark.parametrize(
    ("path", "schema", "filled_in"),
    [
        ("environment", make_environment, {"seed", "stream", "render"}),
        ("evaluation", EvaluationBlock, set()),
        ("logging", LoggingBlock, set()),
        ("debug", DebugBlock, set()),
        ("runs", RunsBlock, set()),
        ("runtime", Runtime, set()),
        ("training.checkpoint", CheckpointBlock, set()),
        ("training.stop", StopBlock, set()),
    ],
)
def test_every_option_of_a_block_can_be_overridden(path: str, schema: Any, filled_in: set[str]) -> None:
    block: Any = compose(None)
    for part in path.split("."):
        block = block[part]
    assert block.keys() == set(inspect.signature(schema).parameters) - filled_in


def test_defaults_in_yaml_and_code_agree_where_the_block_is_optional() -> None:
    """A block left out of a Python-made config must behave as the shipped one does."""
    config = compose("ppo")
    assert config["logging"].pop("highlight")  # each algorithm's own; a block left out highlights none
    for path, schema in (
        ("evaluation", EvaluationBlock),
        ("logging", LoggingBlock),
        ("runs", RunsBlock),
        ("debug", DebugBlock),
    ):
        assert schema(**config[path]) == schema(), path
    assert StopBlock(**config["training"]["stop"]) == StopBlock()
    assert CheckpointBlock(**config["training"]["checkpoint"]) == CheckpointBlock()


# --- documentation -----------------------------------------------------------------------------


@pytest.mark.parametrize("file", GROUP_FILES, ids=name_of)
def test_every_key_is_documented(file: Path) -> None:
    leaves = set(_leaves(yaml.safe_load(file.read_text()), _prefix(file)))
    comments = documented_keys(file)
    for key in leaves:
        assert comments.get(key), f"{name_of(file)}: {key} has no comment beside or above it"


def _prefix(file: Path) -> str:
    is_global = "@package _global_" in file.read_text() or file.parent == PACKAGE_CONFIGS
    group = file.relative_to(PACKAGE_CONFIGS).parts[0]  # of nested ones, environment/dmc, the first
    return "" if is_global else group


def _leaves(node: Any, path: str) -> Iterator[str]:
    """Keys with a value of their own; classes, defaults lists and phases explain themselves elsewhere."""
    for key, value in (node or {}).items():
        place = f"{path}.{key}" if path else str(key)
        if key in ("_target_", "defaults") or (place == "training.phases" and isinstance(value, list)):
            continue
        if isinstance(value, dict) and value:
            yield from _leaves(value, place)
        elif value != {} or path:
            yield place


DOCUMENTS = [file for file in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")] if file.is_file()]


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_documents_name_experiments_that_exist(file: Path) -> None:
    """`rl-lab train NAME` in a document works as written; `my_...` stands for what the reader writes."""
    named = set(re.findall(r"rl-lab train ([a-z][\w/-]*)(?![\w/:.=-])", file.read_text()))
    algorithms = {path.stem for path in (PACKAGE_CONFIGS / "algorithm").glob("*.yaml")}
    shown = {
        path.stem for path in (ROOT / "examples").rglob("configs/experiment/*.yaml")
    }  # in the folder that is named
    unknown = [name for name in named - algorithms - shown - set(EXPERIMENTS) if not name.startswith("my_")]
    assert not unknown
