"""Words of other libraries: understood where they mean one thing, answered with ours otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_lab.cli.parsing import Parser, UsageError, settings_from_options
from rl_lab.config.compose import apply_overrides, compose
from rl_lab.config.files import PACKAGE_CONFIGS, value_at
from rl_lab.config.groups import as_dict, join_groups
from rl_lab.config.translate import _say_once, translate, unsaid
from rl_lab.config.words import ALGORITHM_WORDS, ENVIRONMENT_WORDS, TABLE, WORDS
from rl_lab.types import ConfigError
from rl_lab.utils.reports import REPORTS_VARIABLE

ALGORITHMS = sorted(file.stem for file in (PACKAGE_CONFIGS / "algorithm").glob("*.yaml"))
PHASE = "training.phases"


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    """Every algorithm's own settings, joined once."""
    return {name: as_dict(join_groups([f"algorithm={name}"], None), resolve=False) for name in ALGORITHMS}


@pytest.fixture(autouse=True)
def _anew() -> None:
    _say_once.cache_clear()  # what was said once is said again


def meaning(word: str, config: dict[str, Any]) -> str:
    """What a word sets, or the sentence that answers it."""
    try:
        return " ".join(translate([word], config))
    except ConfigError as error:
        return str(error)


def test_no_word_stands_in_two_rows_or_hides_a_setting_of_ours() -> None:
    names = [name for row in TABLE for name in row]
    assert len(names) == len(set(names)) == len(WORDS)
    base = as_dict(join_groups([], None), resolve=False)
    groups = {path.name for path in PACKAGE_CONFIGS.iterdir() if path.is_dir()}
    assert not ({*names, *ENVIRONMENT_WORDS, *ALGORITHM_WORDS} & (base.keys() | groups))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", [row[0] for row in TABLE])
def test_every_word_sets_what_the_algorithm_has_or_gets_a_sentence(
    name: str, algorithm: str, configs: dict[str, dict[str, Any]]
) -> None:
    config, word = configs[algorithm], WORDS[name]
    value = next(iter(word.values), "20000")
    answer = meaning(f"{name}={value}", config)
    assert answer.endswith(".") or "=" in answer or word.values.get(value, "") is None
    for setting in answer.split(" ") if not answer.endswith(".") else []:
        key = setting.partition("=")[0]
        if key.startswith(f"{PHASE}."):
            phase = next(each for each in config["training"]["phases"] if each["name"] == key.split(".")[2])
            assert key.split(".")[3] in phase
        elif setting:
            parent, _, last = key.rpartition(".")
            assert last in (value_at(config, parent) if parent else config), setting
    if answer.endswith("."):
        assert name in answer and "*" not in answer.replace("optimizers.*", "").replace("buffers.*", "")


UNDERSTOOD = [
    ("ppo", "total_timesteps=1e5", f"{PHASE}.train.duration_steps=100000"),
    ("ppo", "lr=3e-4", "optimizers.controller.learning_rate=3e-4"),
    ("ppo", "n_steps=256", f"{PHASE}.train.collect_steps=256"),
    ("ppo", "batch_size=32", "algorithm.minibatch_size=32"),
    ("ppo", "ent_coef=0.01", "algorithm.loss_scales.entropy=0.01"),
    ("ppo", "n_envs=8", "environment.num_envs=8"),
    ("ppo", "num_envs=8", "environment.num_envs=8"),
    ("ppo", "device=gpu", "runtime.device=cuda"),
    ("ppo", "runtime.device=gpu", "runtime.device=cuda"),
    ("ppo", "device=cuda:1", "runtime.device=cuda:1"),
    ("ppo", "verbose=0", "logging.terminal=quiet"),
    ("ppo", "verbose=1", ""),
    ("ppo", "policy=MlpPolicy", ""),
    ("ppo", "normalize=true", "components.observation_normalizer.mode=rolling"),
    ("dqn", "batch_size=32", "buffers.replay.batch_size=32"),
    ("dqn", "buffer_size=5000", "buffers.replay.capacity_rows=5000"),
    ("dqn", "n_steps=3", "algorithm.n_step=3"),
    ("dqn", "learning_starts=500", "buffers.replay.minimum_rows=500"),
    ("dqn", "tau=0.01", "algorithm.target_rate=0.01"),
    ("sac", "total_timesteps=20000", f"{PHASE}.train.duration_steps=15000"),  # after 5,000 at random
    ("sac", "learning_starts=100", f"{PHASE}.prefill.duration_steps=100"),
    (
        "sac",
        "learning_rate=1e-3",
        "optimizers.critic.learning_rate=1e-3 optimizers.actor.learning_rate=1e-3 "
        "optimizers.temperature.learning_rate=1e-3",
    ),
    ("dreamer", "gamma=0.99", "algorithm.discount=0.99"),
    ("dreamer", "gae_lambda=0.9", "algorithm.lambda_=0.9"),
    ("q_learning", "lr=0.2", "algorithm.learning_rate=0.2"),
    ("bandit", "epsilon=0.2", "components.strategy.epsilon=0.2"),
    ("random", "total_timesteps=300", f"{PHASE}.play.duration_steps=300"),
]


@pytest.mark.parametrize(("algorithm", "word", "sets"), UNDERSTOOD)
def test_a_word_that_can_mean_one_thing_sets_it(
    algorithm: str, word: str, sets: str, configs: dict[str, dict[str, Any]]
) -> None:
    assert meaning(word, configs[algorithm]) == sets


@pytest.mark.parametrize("prefill", [f"{PHASE}.prefill.duration_steps=3e2", "learning_starts=300"])
def test_a_total_leaves_what_the_same_command_gives_other_phases(
    prefill: str, configs: dict[str, dict[str, Any]]
) -> None:
    settings = translate(["total_timesteps=1_000", prefill], configs["sac"])
    assert settings[0] == f"{PHASE}.train.duration_steps=700"
    assert settings[1].partition("=")[0] == f"{PHASE}.prefill.duration_steps"


ANSWERED = [
    (
        "dreamer_v2",
        "lr=1e-4",
        "could mean several settings that differ here: optimizers.world_model.learning_rate (0.0",
    ),
    ("bandit", "lr=1e-4", "lr would be optimizers.*.learning_rate or algorithm.learning_rate, which Bandit does not"),
    ("sac", "ent_coef=0.1", "ent_coef is not a setting here: SAC learns its temperature: components.temperature.init"),
    ("sac", "total_timesteps=5000", "leaves nothing to learn from after training.phases.prefill.duration_steps=5000"),
    ("ppo", "total_timesteps=many", "write a number of agent steps, such as 100000 or 1e5."),
    ("ppo", "total_timesteps=0.5", "write a whole number of agent steps of at least 1, such as 1e5."),
    ("ppo", "buffer_size=10", "buffer_size would be buffers.*.capacity_rows, which PPO does not have: leave it out."),
    ("reinforce", "batch_size=32", "REINFORCE learns from whole episodes: buffers.episodes.episodes_per_batch=16."),
    ("ppo", "net_arch=[64,64]", "each part has its own: controllers.actor.hidden_sizes=[64,64]"),
    ("ppo", "policy=MlpLstmPolicy", "memory=lstm or memory=gru gives PPO one that remembers."),
    ("ppo", "verbose=7", "verbose=7: write logging.terminal=VALUE"),
    ("ppo", "cuda=true", "the device: runtime.device=cuda, cpu or auto."),
    ("dqn", "exploration_fraction=0.1", "algorithm.epsilon='linear(1.0, 0.05, over=10000 agent_steps)'."),
    ("dqn", "train_freq=4", "updates per agent step: training.updates_per_step=0.5."),
    ("ppo", "save_freq=1000", "training.checkpoint.every_minutes=5 or training.checkpoint.every_updates=1000."),
    ("ppo", "log_interval=4", "logging.every_steps=2048 or logging.every_updates=10."),
    ("ppo", "tensorboard_log=logs", "`tensorboard --logdir runs`; logging.tensorboard=false leaves them out."),
    (
        "ppo",
        "wandb=true",
        "logging.writers=[wandb], with the project as {_target_: wandb, project: NAME} (docs/logging.md).",
    ),
    ("ppo", "save_path=x", "--runs-dir DIR, --run-id ID."),
    ("ppo", "n_stack=4", "environment.wrappers=[{id: frame_stack, count: 4}]."),
    ("ppo", "use_sde=true", "state-dependent exploration is not offered here: leave it out."),
    (
        "ppo",
        "steps=1e4",
        "write total_timesteps=1e5 for the whole run, training.phases.NAME.collect_steps=16 for one cycle.",
    ),
    ("dreamer", "n_steps=3", "rows that every environment collects per cycle: training.phases.NAME.collect_steps=16."),
]


@pytest.mark.parametrize(("algorithm", "word", "sentence"), ANSWERED)
def test_a_word_that_cannot_is_answered_with_ours(
    algorithm: str, word: str, sentence: str, configs: dict[str, dict[str, Any]]
) -> None:
    assert sentence in meaning(word, configs[algorithm])


def test_what_was_understood_is_said_in_one_line_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        config = compose("sac_pendulum", ["total_timesteps=1e4", "device=gpu"])
    train = config["training"]["phases"][1]["duration_steps"]
    prefill = config["training"]["phases"][0]["duration_steps"]
    assert (train + prefill, config["runtime"]["device"]) == (10_000, "cuda")
    assert caplog.messages == [
        f"total_timesteps=1e4 sets training.phases.train.duration_steps={train} ({prefill} more are those of prefill).",
        "device=gpu sets runtime.device=cuda.",
    ]


def test_an_offline_run_has_no_steps_to_count() -> None:
    with pytest.raises(ConfigError, match=r"phases \(train\) collect and learn.*or duration_updates"):
        compose("dqn_cartpole_offline", ["total_timesteps=1e4"])


def test_a_saved_config_takes_the_same_words() -> None:
    config = compose("ppo_cartpole")
    assert apply_overrides(config, ["total_timesteps=5e4"])["training"]["phases"][0]["duration_steps"] == 50_000


@pytest.mark.parametrize(
    ("experiment", "words", "expected"),
    [
        (None, ["env=Acrobot-v1"], ("Acrobot-v1", "ppo_acrobot")),
        (None, ["env_id=Acrobot-v1", "algo=DQN"], ("Acrobot-v1", "dqn_acrobot")),
        (None, ["algo=dqn"], ("CartPole-v1", "dqn_cartpole")),
        ("ppo_cartpole", ["env=Acrobot-v1"], ("Acrobot-v1", "ppo_cartpole")),
        ("ppo_cartpole", ["algo=ppo"], ("CartPole-v1", "ppo_cartpole")),
    ],
)
def test_env_and_algo_name_an_experiment(experiment: str | None, words: list[str], expected: tuple[str, str]) -> None:
    config = compose(experiment, words)
    assert (config["environment"]["id"], config["experiment"]["name"]) == expected


REFUSED = [
    ("ppo_cartpole", ["algo=dqn"], "ppo_cartpole is set up for ppo, and its settings do not fit. Write: rl-lab train"),
    (None, ["env=A-v0", "env_id=B-v0"], "env=A-v0 and env_id=B-v0 say the same: keep one."),
    (None, ["algorithm.gamma=0.9"], "algorithm.gamma is not a setting. Here that is 'algorithm.discount'."),
    (None, ["optimizers.controller.lr=1"], "Here that is 'optimizers.controller.learning_rate'."),
    (None, ["training.total_timesteps=3"], "Here that is 'training.phases.train.duration_steps'."),
    (None, ["environment.n_envs=3"], "environment.n_envs is not a setting. Here that is 'environment.num_envs'."),
    (None, ["num_env=3"], "num_env is not a setting. Did you mean 'num_envs'?"),
    (None, ["clip=1"], "'components.observation_normalizer.clip'? (Also: components.reward_normalizer.clip.)"),
    (None, ["=3"], "'=VALUE' lacks a key: write key=value, for example seed=3."),
    (None, ["~seed"], "~seed: a setting cannot be taken away, only changed: write seed=VALUE"),
    (None, ["algorithm.discount=[1"], "'algorithm.discount=[1' cannot be read: write key=value"),
    (None, ["environment=dmc/walker_wal"], "Did you mean 'dmc/walker_walk'? `rl-lab config explain environment` lists"),
    (
        None,
        ["environment=CartPole-v1"],
        "The id of an environment is written environment.id=CartPole-v1. `rl-lab config",
    ),
    ("cartpole", [], "There is no experiment 'cartpole'. Those of that name: ppo_cartpole, dqn_cartpole, "),
    ("PPO", [], "There is no experiment 'PPO'. Did you mean 'ppo'?"),
    (
        "CartPole-v1",
        [],
        "An environment needs an algorithm: CartPole-v1:ppo, or one of bandit, bc, diffusion_policy, dqn",
    ),
    ("CartPole-v1:PPO", [], "Did you mean 'ppo'? Algorithms:"),
    ("ppo:CartPole-v1", [], "Did you mean 'CartPole-v1:ppo'?"),
]


@pytest.mark.parametrize(("experiment", "words", "sentence"), REFUSED)
def test_other_mistakes_get_a_sentence_that_leads_on(experiment: str | None, words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        compose(experiment, words)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("word", ["+seed=3", "++seed=3", "seed=3e0"])
def test_a_plus_before_a_key_that_exists_and_a_whole_float_are_understood(word: str) -> None:
    assert repr(compose(None, [word])["seed"]) == "3"


def test_whole_numbers_may_be_written_1e5_anywhere() -> None:
    words = ["training.phases.train.duration_steps=1e5", "environment.num_envs=1e1", "evaluation.timeout_steps=1e3"]
    config = compose(None, words)
    assert config["training"]["phases"][0]["duration_steps"] == 100_000
    assert repr(config["environment"]["num_envs"]) == "10"
    from rl_lab.config.schema import read_settings

    assert repr(read_settings(config).evaluation.timeout_steps) == "1000"
    with pytest.raises(ConfigError, match=r"duration_steps is 1\.5: write a whole number of at least 1"):
        read_settings(compose(None, ["training.phases.train.duration_steps=1.5"]))


def test_an_experiment_without_its_package_line_says_which_line_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text("# my own\nalgorithm:\n  discount: 0.9\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml lacks the line `# @package _global_`, so"):
        compose("mine", config_dir=tmp_path)
    (folder / "mine.yaml").write_text("# @package _global_\n# my own\nalgorithm:\n  discount: 0.9\n")
    assert compose("mine", config_dir=tmp_path)["algorithm"]["discount"] == 0.9


TWICE = [
    (["lr=1e-3", "learning_rate=1e-4"], "lr=1e-3 and learning_rate=1e-4 both set optimizers.controller.learning_rate"),
    (["gamma=0.9", "algorithm.discount=0.99"], "gamma=0.9 and algorithm.discount=0.99 both set algorithm.discount"),
    (["algorithm.discount=0.99", "gamma=0.9"], "algorithm.discount=0.99 and gamma=0.9 both set algorithm.discount"),
    (["n_envs=4", "++environment.num_envs=8"], "n_envs=4 and ++environment.num_envs=8 both set environment.num_envs"),
    (["total_timesteps=1e5", "timesteps=5e4"], "both set training.phases.train.duration_steps: keep one."),
    (["device=gpu", "runtime.device=cpu"], "device=gpu and runtime.device=cpu both set runtime.device: keep one."),
]


@pytest.mark.parametrize(("words", "sentence"), TWICE, ids=[" ".join(words) for words, _ in TWICE])
def test_two_words_with_two_values_for_one_setting_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose("ppo_cartpole", words)
    assert sentence in str(refused.value)


def test_a_refused_line_says_nothing_of_its_other_words(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError):
        compose("ppo_cartpole", ["gamma=0.123", "n_steps=7", "tau=0.01"])  # PPO has no target network
    assert not caplog.text


def test_two_words_that_agree_are_one() -> None:
    config = compose("ppo_cartpole", ["lr=1e-3", "learning_rate=1e-3", "seed=1", "seed=2"])
    assert config["optimizers"]["controller"]["learning_rate"] == 1e-3 and config["seed"] == 2  # the last counts


def test_quiet_says_nothing_of_what_a_word_sets(caplog: pytest.LogCaptureFixture) -> None:
    for is_quiet in (True, False):
        with unsaid(is_quiet):
            compose("ppo_cartpole", ["gamma=0.9", "env=CartPole-v1"])
        assert ("gamma=0.9 sets algorithm.discount=0.9" in caplog.text) is not is_quiet


def test_a_training_among_many_does_not_repeat_what_its_parent_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(REPORTS_VARIABLE, "1")
    compose("ppo_cartpole", ["gamma=0.9"])
    assert not caplog.text


def test_a_run_in_place_of_an_experiment_is_answered_with_how_to_repeat_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").touch()
    for word in ("mine", "runs/mine"):
        sentence = f"It is a run: `rl-lab resume {word}` continues it, `rl-lab train runs/mine/config.yaml` repeats it."
        with pytest.raises(ConfigError) as refusal:
            compose(word)
        assert sentence in str(refusal.value)


def test_an_option_that_switches_something_on_needs_no_value() -> None:
    parser = Parser(prog="rl-lab train")
    assert settings_from_options(["--capture-video", "--compile"], parser) == ["capture_video=true", "compile=true"]
    with pytest.raises(UsageError, match="--lr lacks its value"):
        settings_from_options(["--lr"], parser)
