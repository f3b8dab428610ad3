"""Files chosen by name (`size=12m`, `task=dmc_vision`, `preset=debug`): which of them wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_lab.config.compose import compose
from rl_lab.config.explain import explain
from rl_lab.types import ConfigError


def test_groups_are_chosen_by_name() -> None:
    config = compose(None, ["memory=gru", "preset=debug"])
    assert config["components"]["memory"]["_target_"].endswith("GRUMemory")
    assert config["components"]["critic_encoder"] is None
    assert config["environment"]["num_envs"] == 2


def test_the_command_line_speaks_after_the_preset() -> None:
    assert compose(None, ["preset=debug", "environment.num_envs=5"])["environment"]["num_envs"] == 5
    assert compose(None, ["environment.num_envs=5", "preset=debug"])["environment"]["num_envs"] == 5


def test_the_keys_of_a_choice_that_is_replaced_go_with_it() -> None:
    """The experiment's own choice is a distribution on 0 to 100: an expected value has no such range."""
    assert compose("dqn_cartpole")["components"]["q_values"]["highest"] == 100.0
    replaced = compose("dqn_cartpole", ["q_values=expected"])["components"]["q_values"]
    assert "highest" not in replaced and replaced["hidden_sizes"] == [128, 128]
    uniform = compose("dqn_cartpole_rainbow", ["replay=uniform"])["buffers"]["replay"]
    assert uniform["_target_"] == "rl_lab.buffers.replay.ReplayBuffer" and not {"alpha", "beta"} & uniform.keys()
    assert "memory" not in compose("ppo_recall", ["memory=none"])["components"]
    kept = compose("dqn_cartpole", ["q_values=categorical"])["components"]["q_values"]
    assert kept == compose("dqn_cartpole")["components"]["q_values"]


def test_a_choice_that_the_experiment_overrides_is_refused() -> None:
    """Without a word, `replay=prioritized` would draw from a dataset uniformly."""
    with pytest.raises(ConfigError) as refused:
        compose("dqn_cartpole_offline", ["replay=prioritized"])
    assert str(refused.value) == (
        "replay=prioritized would change nothing: buffers.replay is the rl_lab.buffers.offline.OfflineBuffer of "
        "dqn_cartpole_offline. Leave replay out of the command, or train another experiment."
    )
    assert compose("dqn_cartpole_offline", ["replay=uniform", "q_values=quantile"])
    own_class = "buffers.replay._target_=rl_lab.buffers.prioritized.PrioritizedReplayBuffer"
    assert compose("dqn_cartpole_offline", ["replay=prioritized", own_class])


def test_an_experiments_choice_speaks_before_those_of_the_experiment_it_builds_on(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - dqn_cartpole_rainbow\n  - override /replay: uniform\n  - _self_\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    chosen = compose("mine", ["replay=uniform"], config_dir=tmp_path)["buffers"]["replay"]
    assert chosen == compose("mine", config_dir=tmp_path)["buffers"]["replay"]


@pytest.mark.parametrize("experiment", ["planet_pendulum", "dreamer_v1", "dreamer_v2", "dreamer_v3_cartpole"])
def test_a_preset_may_speak_of_one_algorithm_alone(experiment: str) -> None:
    def batch(*words: str) -> int:
        return int(compose(experiment, words)["buffers"]["replay"]["batch_size"])

    assert batch() > batch("preset=debug") == 4
    assert batch("preset=debug", "buffers.replay.batch_size=6") == 6
    assert compose(experiment, ["preset=debug"])["buffers"]["replay"]["capacity_rows"] == 10_000  # little memory
    assert explain("buffers.replay.batch_size", experiment, ["preset=debug"]).source.startswith("preset_for/debug_")


@pytest.mark.parametrize("experiment", ["tdmpc", "tdmpc_pendulum", "tdmpc2", "tdmpc2_pendulum", "tdmpc2_tasks"])
def test_the_three_cycles_of_a_debugged_prefill_hold_a_rollout(experiment: str) -> None:
    config = compose(experiment, ["preset=debug"])
    assert config["algorithm"]["horizon"] <= config["training"]["limit_cycles"]
    plan = config["algorithm"].get("plan_horizon")
    assert plan is None or plan <= config["algorithm"]["horizon"]


def test_a_size_chosen_by_name_replaces_the_experiments_own_numbers() -> None:
    parts = compose("dreamer_v3_cartpole", ["size=12m", "components.dynamics.hidden=100"])["components"]
    assert parts["dynamics"]["deter"] == parts["decoder"]["deter"] == 2048
    assert parts["dynamics"]["hidden"] == 100
    assert parts["dynamics"]["latent"]["classes"] == 16
    assert explain("components.dynamics.deter", "dreamer_v3_cartpole", ["size=12m"]).source == "size/12m.yaml"
    assert explain("components.dynamics.deter", "dreamer_v3_cartpole").source == "experiment/dreamer_v3_cartpole.yaml"
    older = compose("dreamer_v1", ["size=1m"])["components"]
    assert older["encoder"]["depth"] == older["decoder"]["depth"] == 4


def test_one_word_makes_everything_eager() -> None:
    runtime = compose("ppo_cartpole", ["runtime=eager"])["runtime"]
    assert runtime["capture"] is False and runtime["compile"] is False
    assert compose("ppo_cartpole")["runtime"]["capture"] == "auto"
    assert explain("runtime.capture", "ppo_cartpole", ["runtime=eager"]).source == "runtime/eager.yaml"


@pytest.mark.parametrize("experiment", ["dreamer_v1", "dreamer_v2", "dreamer_v3", "planet"])
def test_a_decoder_chosen_by_name_replaces_the_whole_block(experiment: str, tmp_path: Path) -> None:
    text = f"# @package _global_\ndefaults:\n  - {experiment}\n  - override /decoder: barlow\n"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "twins.yaml").write_text(text)
    for config in (compose(experiment, ["decoder=barlow"]), compose("twins", config_dir=tmp_path)):
        assert config["components"]["decoder"].keys() == {"_target_", "input", "target", "redundancy"}
        assert config["algorithm"]["loss_scales"]["reconstruction"] == 0.05
    changed = compose(experiment, ["decoder=barlow", "components.decoder.redundancy=0.1"])
    assert changed["components"]["decoder"]["redundancy"] == 0.1


def test_a_preset_does_not_bring_back_a_part_that_an_experiment_does_without(tmp_path: Path) -> None:
    text = "# @package _global_\ndefaults:\n  - override /algorithm: dreamer\nbuffers: {replay: null}\n"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "offline.yaml").write_text(text)
    assert compose("offline", ["preset=debug"], config_dir=tmp_path)["buffers"]["replay"] is None


def test_a_task_replaces_the_environment_of_the_experiment_and_the_command_line_that_of_the_task() -> None:
    environment = compose("dreamer_v3", ["task=dmc_vision", "preset=debug"])["environment"]
    assert (environment["id"], environment["kwargs"]["observation"]) == ("dmc/walker_walk", "pixels")
    assert (environment["num_envs"], environment["vectorization"]) == (2, "sync")  # the preset wins over the task
    words = ["environment=dmc/cartpole_swingup", "task=dmc_vision", "environment.num_envs=3"]
    environment = compose("dreamer_v3", words)["environment"]
    assert (environment["id"], environment["kwargs"]["observation"]) == ("dmc/cartpole_swingup", "pixels")
    assert environment["num_envs"] == 3
    assert compose("Acrobot-v1:dreamer", ["task=classic_control"])["environment"]["id"] == "Acrobot-v1"
    assert compose("planet_cartpole_swingup", ["task=dmc_proprio"])["environment"]["action_repeat"] == 1


def test_a_task_sets_the_train_ratio_of_the_phases_that_have_one() -> None:
    words = ["task=dmc_vision", "training.phases.train.updates_per_step=0.1"]
    assert compose("dreamer_v3", words)["training"]["phases"][1]["updates_per_step"] == 0.1
    assert compose("dreamer_v2", words[:1])["training"]["phases"][1]["updates_per_step"] == 0.25
    assert compose("ppo", words[:1])["training"]["phases"] == compose("ppo")["training"]["phases"]


def test_the_train_ratio_is_a_setting_wherever_there_is_one() -> None:
    assert compose("dreamer_v3", ["training.updates_per_step=0.5"])["training"]["phases"][1]["updates_per_step"] == 0.5
    with pytest.raises(ConfigError) as refusal:
        compose("ppo", ["training.updates_per_step=2"])
    assert "training.updates_per_step is 2, but none of the phases (train) has a train ratio" in str(refusal.value)


def test_a_task_of_another_kind_than_the_environment_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        compose("dreamer_v3", ["task=dmc_vision", "environment=minigrid/doorkey_5x5"])
    assert "task=dmc_vision does not fit environment=minigrid/doorkey_5x5, which has no environment.kwargs" in str(
        refusal.value
    )
    assert "Leave one of the two out" in str(refusal.value)


def test_another_game_named_by_its_group_is_set_up_as_the_experiments_task_says() -> None:
    for experiment in ("ppo_atari", "dqn_atari", "dreamer_v3_atari100k"):
        by_group = compose(experiment, ["environment=atari/breakout"])
        assert by_group == compose(experiment, ["environment.id=atari/breakout"])
    kwargs = compose("ppo_atari", ["environment=atari/breakout", "environment.kwargs.clip_reward=false"])[
        "environment"
    ]["kwargs"]
    assert kwargs["episodic_life"] and not kwargs["clip_reward"]
    other = compose("ppo_atari", ["environment=crafter"])["environment"]
    assert other["id"] == "rl_lab/Crafter-v1" and "episodic_life" not in other["kwargs"]
    with pytest.raises(ConfigError, match="task=atari does not fit environment=crafter, which has no environment.kwar"):
        compose("ppo", ["task=atari", "environment=crafter"])


def test_another_environment_of_the_suite_keeps_the_wrappers_through_which_the_experiment_sees_it() -> None:
    own = compose("ppo_doorkey")["environment"]
    other = compose("ppo_doorkey", ["environment=minigrid/doorkey_8x8"])["environment"]
    assert other["id"] == "MiniGrid-DoorKey-8x8-v0" and other["wrappers"] == own["wrappers"] != []
    assert other["spec"] == {"max_episode_steps": 640} and other["num_envs"] == own["num_envs"]
    assert compose("ppo_doorkey", ["environment=gymnasium"])["environment"]["wrappers"] == []
    words = ["environment=minigrid/doorkey_8x8", "environment.wrappers=[]"]
    assert compose("ppo_doorkey", words)["environment"]["wrappers"] == []


def test_ppo_says_in_explain_when_it_normalises() -> None:
    for part, word in (("observation_normalizer", "rolling"), ("reward_normalizer", "return_scale")):
        found = explain(f"components.{part}.mode", "Hopper-v5:ppo")
        assert found.value == "auto" and f"auto: {word} with continuous actions, else off" in found.documentation
