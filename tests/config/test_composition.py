"""YAML and overrides to one plain, complete dictionary: what is found, what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_lab.config.compose import apply_overrides, compose, split_sweep, to_yaml
from rl_lab.config.experiments import experiment_names, list_experiments
from rl_lab.config.explain import documented_keys, explain
from rl_lab.config.files import PACKAGE_CONFIGS, from_yaml
from rl_lab.types import ConfigError

ALGORITHMS = ", ".join(sorted(file.stem for file in (PACKAGE_CONFIGS / "algorithm").glob("*.yaml")))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def user_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's project: the folder one stands in has a `configs` of its own."""
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "configs" / "experiment" / "mine.yaml",
        "# @package _global_\ndefaults:\n  - override /algorithm: ppo\n"
        "experiment:\n  name: mine\n  description: My own\n"
        "environment:\n  id: MountainCar-v0\nalgorithm:\n  epochs: 3\n",
    )
    return tmp_path / "configs"


# --- naming an experiment ----------------------------------------------------------------------


def summary(config: dict[str, Any]) -> tuple[str, str, str]:
    return config["experiment"]["name"], config["environment"]["id"], config["algorithm"]["_target_"].rsplit(".", 1)[-1]


@pytest.mark.parametrize(
    ("experiment", "expected"),
    [
        (None, ("ppo_cartpole", "CartPole-v1", "PPO")),
        ("ppo_acrobot", ("ppo_acrobot", "Acrobot-v1", "PPO")),
        ("CartPole-v1:ppo", ("ppo_cartpole", "CartPole-v1", "PPO")),  # the experiment of that name, tuned
        ("CartPole-v1:reinforce", ("reinforce_cartpole", "CartPole-v1", "Reinforce")),
        ("CartPole-v1:ppo_cartpole", ("ppo_cartpole", "CartPole-v1", "PPO")),  # an experiment's name
        ("CartPole-v1:ppo_efficient", ("ppo_cartpole_efficient", "CartPole-v1", "PPO")),  # without the environment's
        ("CartPole-v1:dqn_rainbow", ("dqn_cartpole_rainbow", "CartPole-v1", "DQN")),
        ("CartPole-v1:dreamer", ("dreamer_v3_cartpole", "CartPole-v1", "Dreamer")),
        ("Pendulum-v1:dreamer", ("dreamer_v3_pendulum", "Pendulum-v1", "Dreamer")),  # made for it, not for any
        ("Pendulum-v1:dreamer_v3", ("dreamer_v3_pendulum", "Pendulum-v1", "Dreamer")),
        ("Pendulum-v1:dreamer_v2", ("dreamer_v2", "Pendulum-v1", "Dreamer")),
        ("Pendulum-v1:dreamer_v1", ("dreamer_v1", "Pendulum-v1", "Dreamer")),
        ("Pendulum-v1:planet", ("planet_pendulum", "Pendulum-v1", "PlaNet")),
        ("dmc/walker_walk:dreamer", ("dreamer_v3_walker_walk", "dmc/walker_walk", "Dreamer")),
        ("rl_lab/BanditGaussian-v0:bandit_thompson", ("bandit_thompson", "rl_lab/BanditGaussian-v0", "Bandit")),
        ("Acrobot-v1:dreamer_v1", ("dreamer_v1_acrobot_v1", "Acrobot-v1", "Dreamer")),  # made for any environment
        ("dmc/cartpole_swingup:dreamer_v3", ("dreamer_v3_dmc_cartpole_swingup", "dmc/cartpole_swingup", "Dreamer")),
        ("MountainCar-v0:ppo", ("ppo_mountaincar_v0", "MountainCar-v0", "PPO")),  # any other id
        ("rl_lab/Counter-v0:random", ("random_rl_lab_counter_v0", "rl_lab/Counter-v0", "RandomPolicy")),
        ("my.package:Env-v0:ppo", ("ppo_my_package_env_v0", "my.package:Env-v0", "PPO")),
        ("reinforce", ("reinforce", "CartPole-v1", "Reinforce")),  # an algorithm's own defaults
    ],
)
def test_an_experiment_is_named_or_spelt_environment_and_algorithm(
    experiment: str | None, expected: tuple[str, str, str]
) -> None:
    assert summary(compose(experiment)) == expected


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        (
            "ppo_cartpol",
            "There is no experiment 'ppo_cartpol'. Did you mean 'ppo_cartpole'? `rl-lab experiments` lists",
        ),
        ("zzz", "There is no experiment 'zzz'. `rl-lab experiments` lists them; ENVIRONMENT:ALGORITHM, such as"),
        (
            "CartPole-v1:pop",
            "'CartPole-v1:pop': 'pop' is neither an algorithm nor an experiment for CartPole-v1. Did you mean 'ppo'?",
        ),
        (
            "Taxi-v4:",
            f"'Taxi-v4:': '' is neither an algorithm nor an experiment for Taxi-v4. Algorithms: {ALGORITHMS}. "
            "Experiments: q_learning_taxi.",
        ),
        (
            "rl_lab/BanditGaussian-v0:bandit",
            "'rl_lab/BanditGaussian-v0:bandit' means several experiments: bandit_epsilon_greedy, bandit_gradient, "
            "bandit_thompson, bandit_ucb. Name one of them.",
        ),
        (
            "Acrobot-v1:ppo_cartpole_efficient",
            "ppo_cartpole_efficient is made for CartPole-v1. To try its settings elsewhere, write: "
            "rl-lab train ppo_cartpole_efficient environment.id=Acrobot-v1",
        ),
    ],
)
def test_a_misspelt_experiment_is_refused_with_the_nearest(experiment: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        compose(experiment)
    assert message in str(refusal.value)


def test_the_list_tells_algorithm_and_environment_even_of_inherited_experiments() -> None:
    found = {info.name: info for info in list_experiments()}
    assert (found["ppo_acrobot"].algorithm, found["ppo_acrobot"].environment) == ("ppo", "Acrobot-v1")
    inherited = found["reinforce_cartpole_no_baseline"]
    assert (inherited.algorithm, inherited.environment) == ("reinforce", "CartPole-v1")
    assert all(info.description for info in found.values())


@pytest.mark.parametrize("name", [info.name for info in list_experiments()])
def test_the_list_agrees_with_what_is_composed(name: str) -> None:
    info = next(info for info in list_experiments() if info.name == name)
    config = compose(name)
    assert config["environment"]["id"] == info.environment
    workflow = info.algorithm.partition("_v")[0]  # a version is another setup of the same workflow
    assert workflow in config["algorithm"]["_target_"]
    assert config["experiment"]["name"] == name


def test_an_algorithm_chosen_alone_brings_its_own_defaults() -> None:
    assert compose(None, ["algorithm=sac"]) == compose("sac")
    assert summary(compose(None, ["algorithm=sac", "environment.id=Pendulum-v1"])) == ("sac", "Pendulum-v1", "SAC")
    assert compose(None, ["algorithm=ppo"]) == compose(None)
    assert compose("ppo_acrobot", ["algorithm=ppo"]) == compose("ppo_acrobot")
    assert explain("algorithm.target_rate", None, ["algorithm=sac"]).source == "algorithm/sac.yaml"


@pytest.mark.parametrize(
    ("experiment", "cure"), [("ppo_acrobot", "Acrobot-v1:sac"), ("Acrobot-v1:ppo", "Acrobot-v1:sac"), ("ppo", "sac")]
)
def test_an_algorithm_is_not_mixed_with_an_experiment_of_another(experiment: str, cure: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        compose(experiment, ["algorithm=sac"])
    assert str(refusal.value) == (
        f"algorithm=sac: {experiment} is set up for ppo, and its settings do not fit. Write: rl-lab train {cure}"
    )


# --- overriding --------------------------------------------------------------------------------


def test_values_are_typed_and_the_last_override_wins() -> None:
    config = compose(None, ["seed=1", "seed=3", "algorithm.discount=0.9", "experiment.tags=[a,b]", "plugins=null"])
    assert (config["seed"], config["algorithm"]["discount"]) == (3, 0.9)
    assert (config["experiment"]["tags"], config["plugins"]) == (["a", "b"], None)


def test_interpolations_are_resolved() -> None:
    config = compose(None, ["algorithm.discount=0.5"])
    assert config["components"]["reward_normalizer"]["discount"] == 0.5


@pytest.mark.parametrize("text", ["linear(1e-3, 0)", "linear(1e-3,0)", "cosine(1e-3, 0, over=50000 agent_steps)"])
def test_a_schedule_needs_no_quotes_of_its_own(text: str) -> None:
    config = compose(None, [f"optimizers.controller.learning_rate={text}"])
    assert config["optimizers"]["controller"]["learning_rate"] == text
    assert compose(None, [f"optimizers.controller.learning_rate='{text}'"]) == config


@pytest.mark.parametrize("name", ["train", "0"])
def test_a_phase_is_overridden_by_its_name_or_its_place(name: str) -> None:
    config = compose(None, [f"training.phases.{name}.duration_steps=77", f"training.phases.{name}.options.heat=2"])
    (phase,) = config["training"]["phases"]
    assert (phase["duration_steps"], phase["options"]) == (77, {"heat": 2})


REFUSED: list[tuple[str, str]] = [
    (
        "algorithm.discout=0.9",
        "algorithm.discout is not a setting. Did you mean 'algorithm.discount'? algorithm has: _target_, discount",
    ),
    (
        "max_restarts=3",
        "max_restarts is not a setting. Did you mean 'environment.max_restarts'? The config has: experiment",
    ),
    ("algoritm=ppo", "algoritm is not a setting. Did you mean 'algorithm'?"),
    ("pre=debug", "pre is not a setting."),
    ("algorithm=null", "algorithm=null: write one of bandit, bc, diffusion_policy, dqn, dreamer,"),
    ("memory=[gru]", "memory=[gru]: write one of gru, lstm, none."),
    ("size=12", "size=12: there is no such choice. Did you mean '12m'?"),
    ("size=5m", "size=5m: there is no such choice. Did you mean 'tdmpc2/5m'?"),
    ("memory=1.5", "memory=1.5: there is no such choice. Choices: gru, lstm, none."),
    ("presett=debug", "presett is not a setting. Did you mean 'preset'?"),
    (
        "preset=dmc_vision",
        "preset=dmc_vision: there is no such choice. Did you mean task=dmc_vision? Choices: debug, none.",
    ),
    ("task=dmc_vison", "task=dmc_vison: there is no such choice. Did you mean 'dmc_vision'? Choices: atari,"),
    (
        "algorithm=pp0",
        f"algorithm=pp0: there is no such choice. Did you mean 'ppo'? Choices: {ALGORITHMS}.",
    ),
    ("algorithm.discount.x=1", "algorithm.discount.x is not a setting."),
    (
        "environment.kwargs.size=3",
        "environment.kwargs.size is not a setting. environment.kwargs is empty; to add to it, write +environment",
    ),
    ("seed=0,1", "'seed=0,1' names several values: add -m (--multirun) to run each of them."),
    ("seed", "'seed' cannot be read: write key=value, for example algorithm.discount=0.98."),
    ("seed=[1", "'seed=[1' cannot be read: write key=value, for example algorithm.discount=0.98."),
    (
        "training.phases.tran.duration_steps=5",
        "there is no phase 'tran'. Did you mean 'train'? Phases: train; write training.phases.NAME.KEY=VALUE.",
    ),
    ("training.phases.3.duration_steps=5", "there is no phase '3'. Phases: train"),
    (
        "training.phases.train.duraton_steps=5",
        "duraton_steps is not a setting. Did you mean 'duration_steps'? A phase has: name, type",
    ),
    ("training.phases.train=5", "training.phases.train is a whole phase: set one of its keys"),
    (
        "~algorithm.discount",
        "~algorithm.discount: a setting cannot be taken away, only changed: write algorithm.discount=",
    ),
    ("+colour@seed=red", "'+colour@seed=red' chooses of 'colour', which is not a config group: write key=value."),
    (
        "environment.wrappers={id: grey}",
        "'environment.wrappers={id: grey}' is one of a list: write 'environment.wrappers=[{id: grey}]'.",
    ),
    ("environment.kwargs=[size]", "'environment.kwargs=[size]': environment.kwargs has names and values: write 'env"),
    (
        "environment.kwargs={size: 3}",
        "'environment.kwargs={size: 3}' cannot be set: Key 'size' is not in struct. To add a key, write +environment",
    ),
]


@pytest.mark.parametrize(("override", "message"), REFUSED)
def test_a_wrong_override_is_refused_with_the_nearest_spelling(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        compose("ppo_cartpole", [override])
    assert message in str(refusal.value)


def test_an_empty_curriculum_has_no_phase_to_override() -> None:
    with pytest.raises(ConfigError, match="there is no phase 'train'. Phases: none"):
        compose(None, ["training.phases=[]", "training.phases.train.duration_steps=5"])


def test_free_mappings_take_new_keys_with_a_plus() -> None:
    assert compose(None, ["+environment.kwargs.size=3"])["environment"]["kwargs"] == {"size": 3}


def test_a_key_is_added_once() -> None:
    with pytest.raises(ConfigError, match=r"'\+environment.kwargs.size=4' adds what is there already: write env"):
        compose(None, ["+environment.kwargs.size=3", "+environment.kwargs.size=4"])


def test_a_config_is_the_callers_own_and_files_are_read_again_once_they_change(user_configs: Path) -> None:
    compose("mine")["algorithm"]["epochs"] = 1000
    assert compose("mine")["algorithm"]["epochs"] == 3
    file = user_configs / "experiment" / "mine.yaml"
    file.write_text(file.read_text().replace("epochs: 3", "epochs: 7"))
    assert compose("mine")["algorithm"]["epochs"] == 7
    file.unlink()
    with pytest.raises(ConfigError, match="There is no experiment 'mine'"):
        compose("mine")


def test_a_new_target_starts_its_block_afresh() -> None:
    """The keys of the old class are not those of the new one; where it reads from stays."""
    config = compose(None, ["controllers.critic._target_=torch.nn.Linear", "+controllers.critic.out_features=1"])
    critic = config["controllers"]["critic"]
    assert critic == {"_target_": "torch.nn.Linear", "input": ["critic_encoder", "encoder"], "out_features": 1}


# --- the user's own configs --------------------------------------------------------------------


def test_a_users_experiment_joins_ours(user_configs: Path) -> None:
    config = compose("mine")
    assert summary(config) == ("mine", "MountainCar-v0", "PPO")
    assert config["algorithm"]["epochs"] == 3
    names = [info.name for info in list_experiments()]
    assert "mine" in names
    assert "ppo_cartpole" in names


def test_a_users_file_replaces_ours_of_the_same_name(user_configs: Path) -> None:
    write(user_configs / "preset" / "debug.yaml", "# @package _global_\nseed: 99                 # mine\n")
    config = compose(None, ["preset=debug"])
    assert config["seed"] == 99
    assert config["environment"]["num_envs"] != 2
    assert explain("seed", None, ["preset=debug"]).source == "preset/debug.yaml"


def test_a_users_experiment_wins_by_its_name_alone(user_configs: Path) -> None:
    assert summary(compose("MountainCar-v0:ppo"))[0] == "ppo_mountaincar_v0"
    assert summary(compose("MountainCar-v0:mine"))[0] == "mine"
    named = (user_configs / "experiment" / "mine.yaml").read_text().replace("name: mine", "name: ppo_mountaincar")
    write(user_configs / "experiment" / "ppo_mountaincar.yaml", named)
    assert summary(compose("MountainCar-v0:ppo"))[0] == "ppo_mountaincar"
    own = "# @package _global_\ndefaults:\n  - dreamer_v3_pendulum\nexperiment:\n  name: my_dreamer\n"
    write(user_configs / "experiment" / "my_dreamer.yaml", own)
    assert summary(compose("Pendulum-v1:dreamer"))[0] == "dreamer_v3_pendulum"
    assert summary(compose("Pendulum-v1:my_dreamer"))[0] == "my_dreamer"


def test_another_folder_can_be_named(tmp_path: Path, user_configs: Path) -> None:
    other = tmp_path / "elsewhere"
    write(other / "experiment" / "far.yaml", "# @package _global_\nexperiment:\n  name: far\n")
    assert compose("far", config_dir=other)["experiment"]["name"] == "far"
    assert "mine" not in [info.name for info in list_experiments(other)]
    with pytest.raises(ConfigError, match="--config-dir .*nowhere is not a folder"):
        compose(None, config_dir=tmp_path / "nowhere")


LATIN = "# @package _global_\nseed: 1   # café\n".encode("latin-1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1\n", r"configs/experiment/broken\.yaml is not valid YAML \(line 2\): expected ',' or '\]'"),
        (b"a: \x01\n", r"configs/experiment/broken\.yaml is not valid YAML: unacceptable character #x0001"),
        (b"- 1\n", r"configs/experiment/broken\.yaml does not hold a config"),
        (LATIN, r"configs/experiment/broken\.yaml is not UTF-8 text \(byte 0xe9 in line 2\): save it as UTF-8"),
        (b"defaults: 5\n", r"experiment/broken\.yaml: defaults is 5: write a list, such as"),
        (b"defaults:\n- broken\n", r"experiment/broken\.yaml builds on itself"),
    ],
)
def test_a_broken_file_stops_only_what_names_it(
    user_configs: Path, content: bytes, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    (user_configs / "experiment" / "broken.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refusal:
        compose("broken")
    assert "\n" not in str(refusal.value)
    assert summary(compose("mine"))[0] == "mine"
    assert summary(compose("CartPole-v1:ppo"))[0] == "ppo_cartpole"
    names = [info.name for info in list_experiments()]
    assert "ppo_cartpole" in names
    if "broken" not in names:
        assert {record.message.split(":")[0] for record in caplog.records} == {"left out"}
        assert "experiment/broken.yaml" in caplog.records[0].message
    assert "broken" in experiment_names()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"# @package _global_\nseed: [1\n", r"is not valid YAML \(line 3\): expected"), (LATIN, "is not UTF-8 text")],
)
def test_a_broken_file_of_another_group_is_named(user_configs: Path, content: bytes, message: str) -> None:
    for place in ("preset/broken.yaml", "preset_for/debug_mine.yaml"):
        (user_configs / place).parent.mkdir()
        (user_configs / place).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"configs/preset/broken\.yaml {message}"):
        compose(None, ["preset=broken"])
    assert compose(None, ["preset=debug"])["environment"]["num_envs"] == 2


def test_what_only_hydra_refuses_is_a_sentence_too(user_configs: Path) -> None:
    write(user_configs / "preset" / "twice.yaml", "# @package _global_\nseed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match=r"A config cannot be read: .*found duplicate key seed.*twice\.yaml"):
        compose(None, ["preset=twice"])


# --- sweeps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "combinations"),
    [
        (["seed=1"], [["seed=1"]]),
        (["seed=0,1", "x=1"], [["seed=0", "x=1"], ["seed=1", "x=1"]]),
        (["seed=range(0,3)"], [["seed=0"], ["seed=1"], ["seed=2"]]),
        (["a=1,2", "b=x,y"], [["a=1", "b=x"], ["a=1", "b=y"], ["a=2", "b=x"], ["a=2", "b=y"]]),
        (["+a=1,2"], [["+a=1"], ["+a=2"]]),
        (["a=linear(1e-3, 0)"], [["a='linear(1e-3, 0)'"]]),
        (["a='x,y',z"], [["a='x,y'"], ["a=z"]]),
    ],
)
def test_a_sweep_is_every_combination(overrides: list[str], combinations: list[list[str]]) -> None:
    assert split_sweep(overrides) == combinations


def test_swept_values_mean_what_was_written() -> None:
    (first, second) = split_sweep(["optimizers.controller.learning_rate=choice('linear(1e-3,0)',1e-3)"])
    assert compose(None, first)["optimizers"]["controller"]["learning_rate"] == "linear(1e-3,0)"
    assert compose(None, second)["optimizers"]["controller"]["learning_rate"] == 1e-3


# --- saved configs -----------------------------------------------------------------------------


def test_a_config_survives_its_yaml() -> None:
    config = compose("ppo_recall")
    assert from_yaml(to_yaml(config), place="config.yaml") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "run/config.yaml is not valid YAML"),
        ("- 1", r"run/config.yaml does not hold a config \(a mapping of blocks\)"),
        ("!!python/object/apply:os.system [true]", "run/config.yaml is not valid YAML"),
    ],
)
def test_a_damaged_config_is_refused_and_runs_nothing(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_yaml(text, place="run/config.yaml")


def test_overrides_apply_to_a_saved_config_without_changing_it() -> None:
    config = compose(None)
    before = to_yaml(config)
    changed = apply_overrides(
        config, ["seed=5", "training.phases.train.collect_steps=9", "algorithm.clip_range=linear(0.2, 0)"]
    )
    assert (changed["seed"], changed["training"]["phases"][0]["collect_steps"]) == (5, 9)
    assert changed["algorithm"]["clip_range"] == "linear(0.2, 0)"
    assert to_yaml(config) == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sed=5", "sed is not a setting. Did you mean 'seed'?"),
        ("algorithm=reinforce", "algorithm is a block: set one of its keys. algorithm has: _target_, discount"),
        ("seed=1,2", "'seed=1,2' names several values"),
        ("training.phases.tran.collect_steps=1", "there is no phase 'tran'. Did you mean 'train'?"),
    ],
)
def test_a_wrong_override_of_a_saved_config_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        apply_overrides(compose(None), [override])
    assert message in str(refusal.value)


# --- explaining --------------------------------------------------------------------------------


def test_a_setting_is_explained_by_the_comment_beside_it() -> None:
    found = explain("algorithm.gae_lambda")
    assert found.documentation == "0: one-step advantages, 1: Monte Carlo"
    assert found.value == compose(None)["algorithm"]["gae_lambda"]
    assert (found.type, found.source) == ("float", "experiment/ppo_cartpole.yaml")


@pytest.mark.parametrize(
    ("key", "experiment", "overrides", "source"),
    [
        ("seed", None, [], "config.yaml"),
        ("algorithm.clip_range", None, [], "algorithm/ppo.yaml"),
        ("components.encoder.hidden_sizes", "reinforce", [], "algorithm/reinforce.yaml"),
        ("components.encoder.hidden_sizes", "ppo", [], "algorithm/ppo.yaml"),
        ("components.memory.hidden_size", "ppo_recall", [], "memory/gru.yaml"),
        ("environment.num_envs", None, ["preset=debug"], "preset/debug.yaml"),
        ("environment.id", "dreamer_v3", ["task=dmc_vision"], "environment/dmc/walker_walk.yaml"),
        ("environment.kwargs.observation", "dreamer_v3", ["task=dmc_vision"], "task/dmc_vision.yaml"),
        ("environment.id", "reinforce_cartpole_no_baseline", [], "experiment/reinforce_cartpole.yaml"),
    ],
)
def test_the_source_is_the_file_that_spoke_last(
    key: str, experiment: str | None, overrides: list[str], source: str
) -> None:
    assert explain(key, experiment, overrides).source == source


def test_blocks_choices_and_phases_are_explained() -> None:
    block = explain("algorithm.loss_scales")
    assert block.children == [f"algorithm.loss_scales.{name}" for name in ("policy", "value", "entropy")]
    assert explain("preset").documentation == "A choice of config files: preset=debug|none."
    assert explain("training.phases.train").children[0] == "training.phases.train.name"
    for name in ("train", "0"):
        expected = compose(None)["training"]["phases"][0]["collect_steps"]
        assert explain(f"training.phases.{name}.collect_steps").value == expected
    assert explain("training.phases.train.freeze").value == ()
    assert explain("training.phases.train.options.heat").value is None


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("discount", "Did you mean 'algorithm.discount'?"),
        ("training.phases.train.nope", "training.phases.train.nope is not a setting. A phase has"),
        ("training.phases.nope", "there is no phase 'nope'"),
    ],
)
def test_what_is_not_there_cannot_be_explained(key: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        explain(key)
    assert message in str(refusal.value)


def test_comments_are_found_beside_and_above_their_keys(tmp_path: Path) -> None:
    file = tmp_path / "algorithm" / "x.yaml"
    write(
        file,
        "# @package _global_\n# About the file.\nalgorithm:\n  # Said above,\n  # in two lines.\n  one: 1\n"
        "  two: 2   # said beside\n  three: '#not'\nseed: 0\n",
    )
    assert yaml.safe_load(file.read_text())["algorithm"]["three"] == "#not"
    found = documented_keys(file)
    assert found["algorithm.one"] == "Said above, in two lines."
    assert found["algorithm.two"] == "said beside"
    assert found["algorithm.three"] == ""
    assert found["seed"] == ""


@pytest.mark.parametrize("task", [[], ["task=atari100k"]])
def test_preset_debug_reaches_its_updates_and_its_end_soon(task: list[str]) -> None:
    """Atari waits for 50,000 rows, and a game may last 27,000 agent steps."""
    config = compose("dqn_atari", [*task, "preset=debug"])
    assert config["buffers"]["replay"]["minimum_rows"] <= 1000
    assert config["evaluation"]["timeout_steps"] <= 1000
