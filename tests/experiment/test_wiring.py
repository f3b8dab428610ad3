"""From a config to a whole experiment: the order things are built in, and what is refused on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rl_lab.config.compose import compose
from rl_lab.config.schema import read_settings, refuse_steps_that_never_come
from rl_lab.experiment import build as wiring
from rl_lab.experiment.build import build, build_agent, build_environment, build_parts, build_runtime, check
from rl_lab.runs.checkpoint import Checkpoint
from rl_lab.runs.run_directory import RunDirectory
from rl_lab.runs.state import gather_state
from rl_lab.types import ConfigError, Counts
from rl_lab.workflows.dreamer import Dreamer
from tests.doubles import CPU, ScriptedEnvironment, env_rows

DEBUG = ["preset=debug", "algorithm.epochs=1"]


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    return compose("ppo_cartpole", DEBUG)


@pytest.fixture
def config(composed: dict[str, Any]) -> dict[str, Any]:
    """A fresh copy of the debug run."""
    return wiring_copy(composed)


def wiring_copy(config: dict[str, Any]) -> dict[str, Any]:
    import copy

    return copy.deepcopy(config)


def parts_of(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    environment = build_environment(config, stream="train_environment")
    return build_parts(config, environment.spec, build_runtime(config))


# --- the small blocks --------------------------------------------------------------------------


def test_settings_are_read_from_their_blocks(config: dict[str, Any]) -> None:
    settings = read_settings(config)
    assert (settings.experiment.name, settings.seed, settings.plugins) == ("ppo_cartpole", 0, ())
    assert [phase.name for phase in settings.phases] == ["train"]
    assert settings.evaluation.final_episodes == 2


@pytest.mark.parametrize(
    ("phase", "updates", "cycles"),
    [
        ({"collect_steps": 1, "duration_steps": 100}, 3, None),  # it learns: however many rows a batch needs
        ({"collect_steps": 1, "duration_steps": 100, "workflow_hooks": []}, None, 3),
        ({"collect_steps": 1, "duration_cycles": 2}, 2, None),  # shorter already
        ({"type": "offline", "duration_updates": 1}, 1, None),
        ({"type": "eval_only", "duration_cycles": 5}, None, 3),
    ],
)
def test_a_limit_ends_every_phase_after_so_many_cycles_or_updates(
    config: dict[str, Any], phase: dict[str, Any], updates: int | None, cycles: int | None
) -> None:
    config["training"]["phases"] = [{"name": "train", **phase}]
    (limited,) = read_settings(config).phases
    assert (limited.duration_updates, limited.duration_cycles, limited.duration_steps) == (updates, cycles, None)


def set_path(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    node: Any = config
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[last] = value


REFUSED: list[tuple[str, Any, str]] = [
    ("seeed", 1, "seeed is not a block of a config. Did you mean 'seed'? Blocks: experiment, seed"),
    ("seed", -1, "seed is -1: write a whole number from 0 on."),
    ("seed", 2**63, f"seed is {2**63}: write a whole number below 2**63."),
    ("plugins", 3, "plugins is 3: write a list of packages, such as [my_package]."),
    ("plugins", "mine", "plugins is 'mine': write a list of packages, such as [my_package]."),
    ("seed", True, "seed is True: write a whole number from 0 on."),
    ("seed", 1.5, "seed is 1.5: write a whole number from 0 on."),
    ("components", 5, "components is 5: it is a block of settings, such as `components: {...}`."),
    ("training.phases", [], "training.phases is empty: write at least one phase."),
    ("training.phases", [3], "training.phases.0 is 3. Allowed: a mapping."),
    ("training.phases.0.colect_steps", 3, "training.phases.0.colect_steps is unknown. Did you mean 'collect_steps'?"),
    (
        "training.phases.0.buffer",
        "rolout",
        "uses the buffer 'rolout', which is not configured. Did you mean 'rollout'?",
    ),
    ("training.phases.0.workflow_hooks", ["update_controler"], "Did you mean 'update_controller'?"),
    ("training.phases.0.freeze", ["encodr"], "freezes 'encodr', which is no component or controller. Did you mean"),
    ("training.limit_cycles", 0, "training.limit_cycles is 0: write a whole number of at least 1."),
    (
        "training.stop.eval_retrun",
        1,
        "training.stop.eval_retrun is not a setting of StopBlock. Did you mean 'eval_return'",
    ),
    ("training.checkpoint.every_updates", 0, "training.checkpoint.every_updates is 0: write a number above 0, or null"),
    ("evaluation.every_steps", -5, "evaluation.every_steps is -5: write a number above 0, or null for never."),
    ("evaluation.num_envs", 0, "evaluation.num_envs is 0: write a whole number of at least 1."),
    ("evaluation.episodes", 0, "evaluation.episodes is 0: write a whole number of at least 1."),
    ("evaluation.final_episodes", -1, "evaluation.final_episodes is -1: write a whole number of at least 0."),
    ("evaluation.dream_every_steps", 0, "evaluation.dream_every_steps is 0: write a whole number of at least 1."),
    (
        "evaluation.dream_every_steps",
        500,
        "evaluation.dream_every_steps is 500, but PPO has no world model to dream with: write null, or train one, such "
        "as `rl-lab train dreamer_v3`.",
    ),
    ("plugins", "my_package", "plugins is 'my_package': write a list of packages, such as [my_package]."),
    ("plugins", [3], "plugins is [3]: write a list of packages, such as [my_package]."),
    ("evaluation.video", "yes", "evaluation.video is 'yes'. Allowed: true or false."),
    ("logging.every_updates", 0, "logging.every_updates is 0: write a number above 0, or null for never."),
    ("logging.terminal", "liv", "logging.terminal is 'liv'. Did you mean 'live'? Allowed: auto, live, plain, quiet."),
    ("environment.num_envs", 0, "environment.num_envs is 0"),
    ("environment.num_env", 2, "environment.num_env is not a setting of make_environment. Did you mean 'num_envs'?"),
    ("environment.id", "CartPol-v1", "Did you mean 'CartPole-v1'?"),
    ("algorithm._target_", "rl_lab.components.networks.encoders.ObservationEncoder", "algorithm"),
    ("algorithm.discout", 0.9, "algorithm.discout is not a setting of PPO. Did you mean 'discount'?"),
    ("algorithm.discount", "high", "algorithm.discount is 'high'. Allowed: a number."),
    ("components.encoder", 5, "components.encoder has no `_target_`: write which class to build."),
    ("components.encoder", None, "controllers.actor.input is 'encoder', which is no component built before it."),
    ("components.encoder.activation", "tanhh", "tanh"),
    ("components.extra", {"_target_": "torch.nn.Identity"}, "components.extra is not used by PPO."),
    (
        "controllers.actor.input",
        "encodr",
        "controllers.actor.input is 'encodr', which is no component built before it.",
    ),
    ("controllers.critic", None, "The workflow needs controllers.critic, which the config does not have"),
    ("optimizers.controller.learning_rate", "quick", "'quick' is neither a number nor a schedule"),
    ("optimizers.controller.name", "adm", "Did you mean 'adam'?"),
    ("optimizers.controller", None, "The workflow needs optimizers.controller"),
    (
        "optimizers.controller.parts",
        ["critc", "encoder"],
        "parts names 'critc', which is no component. Did you mean 'critic'",
    ),
    (
        "optimizers.controller.parts",
        ["nobody"],
        "optimizers.controller.parts is ['nobody']: none of them is a component.",
    ),
    ("optimizers.controller.parts", "encoder", "optimizers.controller.parts is 'encoder': write a list, such as"),
    ("optimizers.controller.betas", [0.9], "optimizers.controller.betas is [0.9]. Allowed: a list of 2."),
    ("buffers.rollout.size", 5, "buffers.rollout.size is not a setting of RolloutBuffer."),
    ("runtime.device", "tpu", "runtime device: 'tpu' is not known; allowed: auto, cpu, cuda"),
    ("runs.id", 5, "runs.id is 5. Allowed: a text or null."),
    ("plugins", ["no_such_plugin_anywhere"], "plugins names 'no_such_plugin_anywhere', which Python does not find"),
]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED, ids=[f"{path}={value}" for path, value, _ in REFUSED])
def test_a_wrong_config_is_refused_before_anything_runs(
    config: dict[str, Any], path: str, value: Any, message: str
) -> None:
    set_path(config, path, value)
    with pytest.raises(ConfigError) as refusal:
        check(config)
    assert message in str(refusal.value)


@pytest.mark.parametrize("block", ["runs", "optimizers", "seed"])
def test_a_missing_block_is_named(config: dict[str, Any], block: str) -> None:
    del config[block]
    with pytest.raises(ConfigError, match=f"The config lacks the block '{block}'"):
        read_settings(config)


def test_an_optimizer_must_say_what_it_trains(config: dict[str, Any]) -> None:
    del config["optimizers"]["controller"]["parts"]
    with pytest.raises(ConfigError, match=r"optimizers\.controller does not say what it trains: write `parts: \[enc"):
        check(config)


def test_an_algorithm_must_be_a_workflow(config: dict[str, Any]) -> None:
    config["algorithm"] = {"_target_": "torch.nn.Identity"}
    with pytest.raises(ConfigError, match=r"algorithm\._target_ builds a Identity, which is not a Workflow"):
        check(config)


@pytest.mark.parametrize(
    ("experiment", "workflow"), [("dqn_cartpole", "DQN"), ("dqn_cartpole_rainbow", "DQN"), ("sac_pendulum", "SAC")]
)
def test_a_buffer_of_other_steps_than_the_algorithm_is_refused(experiment: str, workflow: str) -> None:
    config = compose(experiment, ["preset=debug", "algorithm.n_step=2", "buffers.replay.n_step=4"])
    with pytest.raises(ConfigError) as refusal:
        check(config)
    assert str(refusal.value) == (
        f"algorithm.n_step is 2, so {workflow} learns from 3 rows at a time, but buffer 'replay' gives 5: write "
        "`buffers.replay.n_step: ${algorithm.n_step}`."
    )


# --- parts -------------------------------------------------------------------------------------


def linear(**settings: Any) -> dict[str, Any]:
    return {"_target_": "rl_lab.components.networks.encoders.MLP", "hidden_sizes": [4], **settings}


def test_parts_are_built_after_those_they_read(config: dict[str, Any]) -> None:
    config["components"] = {
        "last": linear(input="middle"),
        "middle": linear(input="encoder"),
        "encoder": config["components"]["encoder"],
    }
    components, controllers, _ = parts_of(config)
    assert list(components) == ["encoder", "middle", "last"]
    assert list(controllers) == ["actor", "critic", "random"]


def test_parts_that_read_each_other_are_refused(config: dict[str, Any]) -> None:
    config["components"] |= {"one": linear(input="two"), "two": linear(input="one")}
    with pytest.raises(ConfigError, match="take their input from each other in a circle: one, two"):
        parts_of(config)


def test_a_part_set_to_null_is_not_there(config: dict[str, Any]) -> None:
    config["components"]["critic_encoder"] = None
    config["components"]["encoder"]["hidden_sizes"] = [16]
    components, controllers, optimizers = parts_of(config)
    assert "critic_encoder" not in components
    first_layer = next(parameter for parameter in controllers["critic"].parameters())
    assert first_layer.shape[1] == components["encoder"].output_size, "of a list of inputs, the first that is there"
    names = {name.split(".")[0] for name in optimizers["controller"].rule.names}
    assert names == {"encoder", "actor", "critic"}


def test_an_optimizer_trains_exactly_its_parts(config: dict[str, Any]) -> None:
    config["optimizers"]["controller"]["parts"] = ["actor", "encoder"]
    components, controllers, optimizers = parts_of(config)
    trained = {id(parameter) for parameter in optimizers["controller"].parameters}
    expected = [*components["encoder"].parameters(), *controllers["actor"].parameters()]
    assert trained == {id(parameter) for parameter in expected}


def test_memory_stands_between_encoder_and_controllers() -> None:
    config = compose("ppo_cartpole", [*DEBUG, "memory=lstm", "components.memory.hidden_size=5"])
    components, controllers, optimizers = parts_of(config)
    assert list(components)[-1] == "memory"
    assert next(controllers["actor"].parameters()).shape[1] == 5
    assert any(name.startswith("memory.") for name in optimizers["controller"].rule.names)


def test_the_same_seed_starts_from_the_same_weights(config: dict[str, Any]) -> None:
    spec = build_environment(config, stream="train_environment").spec

    def weights(seed: int) -> torch.Tensor:
        agent = build_agent({**config, "seed": seed}, spec, runtime=build_runtime(config))
        return torch.cat([parameter.flatten() for parameter in agent.controllers["actor"].parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_each_use_has_environments_of_its_own_seeds(config: dict[str, Any]) -> None:
    starts = [
        build_environment(config, stream=stream, num_envs=1).reset().observation["vector"].tolist()
        for stream in ("train_environment", "eval_environment", "play_environment", "train_environment")
    ]
    assert starts[0] == starts[3]
    assert len({str(start) for start in starts}) == 3


# --- the whole ---------------------------------------------------------------------------------


def test_a_config_is_not_changed_by_building(config: dict[str, Any]) -> None:
    before = wiring_copy(config)
    check(config)
    assert config == before


def test_a_check_writes_nothing(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "value"), [("components.encoder.hiden_sizes", [1]), ("training.phases.0.buffer", "nowhere")]
)
def test_a_config_refused_half_way_leaves_nothing_open(
    config: dict[str, Any], path: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    original = build_environment

    def remembering(*arguments: Any, **settings: Any) -> Any:
        made.append(original(*arguments, **settings))
        made[-1].close = lambda: made.append("closed")
        return made[-1]

    monkeypatch.setattr(wiring, "build_environment", remembering)
    set_path(config, path, value)
    with pytest.raises(ConfigError):
        check(config)
    assert made[1:] == ["closed"]


def test_an_experiment_carries_everything_a_checkpoint_needs(config: dict[str, Any], runs_dir: Path) -> None:
    run = RunDirectory.create(runs_dir, run_id="a", name="a", seed=0)
    experiment = build(config, run=run, quiet=True)
    try:
        assert experiment.targets.keys() == {
            *("progress", "phase_state", "components", "controllers", "optimizers", "buffers"),
            *("collector", "workflow_custom", "logger", "rng"),
        }
        assert list(experiment.targets)[-1] == "rng", "restoring the others may draw random numbers"
        experiment.housekeeping.save()
        assert (run.checkpoints_dir / "latest").is_dir()
    finally:
        experiment.close()


def test_components_without_parameters_need_no_place_in_a_checkpoint(config: dict[str, Any]) -> None:
    experiment = build(config, run=None, quiet=True)
    experiment.close()
    for section in ("components", "controllers"):
        assert all(isinstance(part, nn.Module) for part in experiment.targets[section].values())


def test_buffers_hold_the_longest_collection_of_their_phases(config: dict[str, Any]) -> None:
    second = {**config["training"]["phases"][0], "name": "longer", "collect_steps": 77}
    config["training"]["phases"].append(second)
    settings = read_settings(config)
    environment: Any = ScriptedEnvironment([env_rows([0.0])])
    assert wiring.build_buffers(config, settings, environment, CPU)["rollout"].capacity_steps == 77  # type: ignore[attr-defined]


def test_a_setting_that_compiles_nothing_is_remarked(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(wiring.MetricLogger, "message", lambda _, text, level="info": said.append((level, text)))
    config["runtime"]["compile"] = True
    config["debug"]["check_finite"] = False  # which compiles nothing itself
    check(config)
    assert said == [("warning", "runtime.compile is true, but PPO names no methods to compile: nothing is.")]


def test_a_part_that_no_optimizer_trains_is_named(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(wiring.MetricLogger, "message", lambda _, text, level="info": said.append(text))
    config["optimizers"]["controller"]["parts"] = ["encoder", "actor"]
    build(config, run=None, quiet=True).close()
    assert said == ["critic never learns: no optimizer names it in its `parts`."]


def test_an_offline_run_cannot_wait_for_steps(config: dict[str, Any]) -> None:
    config["evaluation"] |= {"every_updates": 5, "warmup_steps": 100}
    config["training"]["phases"] = [{"name": "learn", "type": "offline", "buffer": "rollout", "duration_updates": 1}]
    with pytest.raises(ConfigError, match="evaluation.warmup_steps is 100, but no phase takes steps: write 0."):
        check(config)


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        ("logging.", {"logging": {"every_updates": None, "every_steps": 300}}),
        ("evaluation.", {"evaluation": {"every_steps": 300}}),
        ("evaluation.dream_", {"evaluation": {"dream_every_steps": 300}}),
    ],
)
def test_steps_are_refused_as_a_measure_where_none_are_taken(
    config: dict[str, Any], place: str, changes: dict[str, Any]
) -> None:
    for block, values in changes.items():
        config[block] |= values
    refuse_steps_that_never_come(read_settings(config))
    config["training"]["phases"] = [{"name": "look", "type": "eval_only", "duration_cycles": 1}]
    refuse_steps_that_never_come(read_settings(config))  # updates would be no better a measure
    config["training"]["phases"] = [{"name": "learn", "type": "offline", "buffer": "rollout", "duration_updates": 1}]
    read_settings(config)  # a run that was made so can still be opened
    with pytest.raises(ConfigError) as refusal:
        check(config)
    assert str(refusal.value) == (
        f"{place}every_steps is 300, but no phase takes steps: write `{place}every_steps: null` and "
        f"`{place}every_updates: 300`."
    )


def test_what_was_captured_before_a_restore_is_recorded_anew(config: dict[str, Any]) -> None:
    forgotten: list[str] = []
    experiment = build(config, run=None, quiet=True)
    try:
        experiment.agent.runtime.forget_captures = lambda: forgotten.append("all")  # type: ignore[method-assign]
        state = gather_state(experiment.targets)
        checkpoint = Checkpoint(Path("unsaved"), {}, state)
        experiment.restore(checkpoint)
        experiment.warm_start(checkpoint, with_optimizers=True)
        experiment.agent.workflow.enter_phase(experiment.settings.phases[0])
    finally:
        experiment.close()
    assert forgotten == ["all"] * 3


def test_each_replay_draws_from_a_stream_of_its_own(config: dict[str, Any]) -> None:
    block = {"_target_": "rl_lab.buffers.replay.ReplayBuffer", "capacity_rows": 100}
    environment: Any = ScriptedEnvironment([env_rows([0.0])])

    def seeds(seed: int) -> list[int]:
        changed = {**config, "seed": seed, "buffers": {"first": block, "second": block}}
        buffers = wiring.build_buffers(changed, read_settings(config), environment, CPU)
        return [buffer.seed for buffer in buffers.values()]  # type: ignore[attr-defined]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 4


def test_steps_of_an_earlier_process_are_no_speed_of_this_one() -> None:
    from rl_lab.experiment.live import make_usage
    from rl_lab.metrics.time_split import TimeSplit
    from rl_lab.orchestration.phase_scheduler import PhaseScheduler
    from rl_lab.types import Phase
    from tests.doubles import Clock

    phases = [Phase("train", collect_steps=1, duration_steps=100)]
    earlier = PhaseScheduler(phases)
    earlier.report(Counts(agent_steps=50))
    scheduler, clock = PhaseScheduler(phases), Clock()
    usage = make_usage(TimeSplit(clock), clock, scheduler)
    scheduler.set_state(earlier.get_state())
    clock.now_s = 1.0
    scheduler.report(Counts(agent_steps=10))
    assert usage(0.6)["time/agent_steps_per_second"] == 10.0


def test_usage_tells_speed_and_time_left() -> None:
    from rl_lab.experiment.live import make_usage
    from rl_lab.metrics.time_split import TimeSplit
    from rl_lab.orchestration.phase_scheduler import PhaseScheduler
    from rl_lab.types import Phase
    from tests.doubles import Clock

    scheduler, clock = PhaseScheduler([Phase("train", collect_steps=1, duration_steps=100)]), Clock()
    usage = make_usage(TimeSplit(clock), clock, scheduler)
    clock.now_s = 1.0
    scheduler.report(Counts(agent_steps=10))
    assert usage(0.1)["time/agent_steps_per_second"] == 10.0
    clock.now_s = 3.0
    scheduler.report(Counts(agent_steps=40, updates=4))
    second = usage(0.5)
    assert (second["time/agent_steps_per_second"], second["time/updates_per_second"]) == (20.0, 2.0)
    assert second["time/eta_s"] == pytest.approx(2.5)  # two seconds for four tenths, five tenths to go


def test_drawing_by_priority_is_refused_where_nobody_notes_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dreamer, "notes_priorities", False)
    config = compose("rl_lab/Corridor-v0:dreamer", ["buffers.replay.uniform=0.5", "buffers.replay.priority=0.5"])
    with pytest.raises(ConfigError, match=r"buffers.replay draws by priority, but \w+ notes none: draw uniformly"):
        build(config, run=None, quiet=True)
