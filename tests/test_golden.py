"""Parameters after a few updates, per algorithm: a refactor that changes no maths changes none of these numbers.

The numbers are compared within rounding, since processors sum in different orders. Where that tips a choice (the larger
of two nearly equal values, the sign of a gradient that is nearly zero), a case has numbers of a second processor, too,
and has to equal one of both entirely. When a change of the maths is meant, `RL_LAB_WRITE_GOLDEN=1 pytest
tests/test_golden.py` writes them anew, and `RL_LAB_WRITE_GOLDEN="an Intel Xeon"` those of such a processor; say why in
the commit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from rl_lab.config.compose import compose
from rl_lab.experiment.build import build
from tests.tiny_diffusion import TINY_DIFFUSION, with_detour
from tests.tiny_dreamer import TINY_DREAMER
from tests.tiny_planet import TINY_PLANET
from tests.tiny_tdmpc import TINY_TDMPC
from tests.tiny_tdmpc2 import TINY_TDMPC2
from tests.tiny_world_models import TINY_WORLD_MODELS

GOLDEN = Path(__file__).parent / "golden.json"
SMALL = ["environment.num_envs=4", "training.phases.train.collect_steps=16", "evaluation.final_episodes=0"]
PPO = ["algorithm.epochs=2", "algorithm.minibatch_size=32", "training.phases.train.duration_cycles=3"]
DQN = ["buffers.replay.minimum_rows=64", "algorithm.target_every=8", "training.phases.train.duration_cycles=4"]
SAC = [
    "training.phases.prefill.duration_steps=64",
    "training.phases.train.updates_per_step=0.05",
    "training.phases.train.duration_cycles=3",
]
DREAMER = [
    *TINY_DREAMER,
    "environment.num_envs=4",
    "buffers.replay.batch_size=4",
    "buffers.replay.sequence_length=9",
    "training.phases.prefill.duration_steps=64",
    "training.phases.train.updates_per_step=0.05",
    "training.phases.train.duration_cycles=3",
]
DECODER_FREE = [word for word in DREAMER if not word.startswith("components.decoder.")]
OLDER_DREAMER = [
    "algorithm.horizon=4",
    "components.dynamics.deter=16",
    *(f"components.{part}.units=16" for part in ("encoder", "decoder", "reward_head", "continue_head")),
    *(f"controllers.{part}.units=16" for part in ("actor", "critic")),
    *DREAMER[-5:],
]
IMITATION = ["training.phases.train.duration_updates=4", "optimizers.controller.learning_rate=1e-3"]
CASES = {
    "ppo": ["ppo_cartpole", *PPO],
    "ppo_continuous_normalised": ["ppo_pendulum", *PPO],
    "ppo_gru": ["ppo_recall", *PPO],
    "ppo_lstm": ["ppo_recall", "memory=lstm", *PPO],
    "ppo_pixels": ["rl_lab/PixelCatch-v0:ppo", *PPO],
    "ppo_masked": ["rl_lab/MaskedChain-v0:ppo", *PPO],
    "ppo_multi_discrete": [
        "rl_lab/MultiTarget-v0:ppo",
        *PPO,
        "algorithm.value_clip_range=0.2",
        "algorithm.target_kl=0.5",
    ],
    "reinforce": ["reinforce_cartpole", "training.phases.train.duration_cycles=24"],
    "dqn": [
        *("dqn_cartpole", "q_values=expected", "algorithm.n_step=3", "algorithm.target_rate=0.005"),
        *("training.phases.train.updates_per_step=1.0", *DQN),
    ],
    "dqn_categorical": ["dqn_cartpole", *DQN],
    "dqn_rainbow": ["dqn_cartpole_rainbow", "buffers.replay.beta=0.4", *DQN],
    "dqn_quantiles_masked": ["rl_lab/MaskedChain-v0:dqn", "q_values=quantile", *DQN],
    "dqn_pixels": ["rl_lab/PixelCatch-v0:dqn", "buffers.replay.batch_size=16", *DQN],
    "sac": ["sac_pendulum", *SAC],
    "sac_discrete": ["sac_cartpole", "algorithm.n_step=3", *SAC],
    "dreamer_v1": ["dreamer_v1", *OLDER_DREAMER],
    "dreamer_v2": ["dreamer_v2", *OLDER_DREAMER, "components.dynamics.latent.classes=4"],
    "dreamer_v3": ["rl_lab/Corridor-v0:dreamer", *DREAMER],
    "dreamer_v3_continuous": ["rl_lab/PointMass-v0:dreamer", *DREAMER],
    "dreamer_v3_infonce": ["rl_lab/Corridor-v0:dreamer", "decoder=infonce", *DECODER_FREE],
    "dreamer_v3_barlow": ["rl_lab/PixelCatch-v0:dreamer", "decoder=barlow", *DECODER_FREE],
    "dreamer_v2_both": ["dreamer_v2", "algorithm.policy_gradient=both", *OLDER_DREAMER],
    "dreamer_v3_2023": ["dreamer_v3_2023", "environment=gymnasium", "environment.id=Pendulum-v1", *OLDER_DREAMER],
    "dreamer_v3_pixels": ["rl_lab/PixelCatch-v0:dreamer", *DREAMER],
    "dreamer_plan2explore": [
        *("rl_lab/Corridor-v0:dreamer", "exploration=plan2explore", *DREAMER),
        "optimizers.exploration.learning_rate=constant(4e-5, warmup=1000 updates)",
    ],
    "planet": ["rl_lab/PointMass-v0:planet", *TINY_PLANET, *DREAMER[-6:]],
    "tdmpc": ["rl_lab/PointMass-v0:tdmpc", *TINY_TDMPC, "training.phases.pretrain.duration_updates=3", *SAC],
    "tdmpc2_tasks": [
        *("tdmpc2_tasks", *(word for word in TINY_TDMPC2 if "continue_head" not in word)),
        *("training.phases.pretrain.duration_updates=3", *SAC),
    ],
    "planet_mppi": ["planet_pendulum", "planner=mppi", *TINY_PLANET, *DREAMER[-6:]],
    "tdmpc2": [
        *("rl_lab/PointMass-v0:tdmpc2", *TINY_TDMPC2, "training.phases.pretrain.duration_updates=3", *SAC),
    ],
    "diffusion_policy": ["rl_lab/Detour-v0:diffusion_policy", *TINY_DIFFUSION, *with_detour(), *IMITATION],
    "diffusion_policy_transformer": [
        *("rl_lab/Detour-v0:diffusion_policy", "denoiser=transformer_small", *TINY_DIFFUSION[:2]),
        *("sampler=ddpm", *with_detour(), *IMITATION),
    ],
    "bc": ["rl_lab/Detour-v0:bc", *with_detour(), *IMITATION],
    "bc_mixture": ["rl_lab/Detour-v0:bc", "actor=mixture", *with_detour(), *IMITATION],
    "world_models": ["world_models_follow_real", *TINY_WORLD_MODELS, "training.phases.train.duration_updates=2"],
    "world_models_dream": ["world_models_follow", *TINY_WORLD_MODELS, "training.phases.train.duration_updates=2"],
    "sac_pixels": ["sac_pixels", "buffers.replay.batch_size=16", *SAC],
    "reinforce_no_baseline": ["reinforce_cartpole_no_baseline", "training.phases.train.duration_cycles=24"],
}


Fingerprint = dict[str, list[float]]


def fingerprint(case: str) -> Fingerprint:
    """Sum, sum of squares and two entries of every parameter and statistic after training."""
    experiment, *overrides = CASES[case]
    config = compose(experiment, [*SMALL, "training.phases.train.duration_steps=null", *overrides])
    trained = build(config, run=None, quiet=True)
    try:
        trained.orchestrator.run()
        assert trained.housekeeping.counts.updates >= 2
        modules = {**trained.agent.components, **trained.agent.controllers}
        tensors = {
            f"{part}.{name}": tensor.detach().double().flatten()
            for part, module in modules.items()
            if isinstance(module, torch.nn.Module)
            for name, tensor in module.state_dict().items()
        }
        return {
            name: [float(t.sum()), float(t.square().sum()), float(t[0]), float(t[-1])] for name, t in tensors.items()
        }
    finally:
        trained.close()


def one_line_per_tensor(golden: dict[str, Fingerprint]) -> str:
    """As JSON, sorted, so that a diff shows which tensors changed."""
    cases = []
    for case, numbers_by_name in sorted(golden.items()):
        lines = [f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in sorted(numbers_by_name.items())]
        cases.append(f" {json.dumps(case)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(cases) + "\n}\n"


@pytest.mark.parametrize("case", CASES)
def test_parameters_after_a_few_updates_are_the_golden_ones(case: str) -> None:
    found = fingerprint(case)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if processor := os.environ.get("RL_LAB_WRITE_GOLDEN"):
        write(golden, case, found, processor)
        return
    expected = {name: numbers for name, numbers in golden.items() if name == case or name.startswith(f"{case} on ")}
    unlike = {name: differing(found, numbers) for name, numbers in expected.items()}
    assert not all(unlike.values()), unlike


def differing(found: Fingerprint, expected: Fingerprint) -> list[str]:
    """The tensors that are not the expected ones within rounding."""
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [name for name in found if found[name] != pytest.approx(expected[name], rel=2e-3, abs=2e-4)]


def write(golden: dict[str, Fingerprint], case: str, found: Fingerprint, processor: str) -> None:
    """A case's new numbers put an end to those of other processors."""
    if processor == "1":
        golden = {name: numbers for name, numbers in golden.items() if not name.startswith(f"{case} on ")}
        golden[case] = found
    elif differing(found, golden[case]):
        golden[f"{case} on {processor}"] = found
    GOLDEN.write_text(one_line_per_tensor(golden))


def test_a_tensor_of_other_numbers_or_another_name_differs() -> None:
    assert differing({"a": [1.0, 2.0]}, {"a": [1.0, 2.0001]}) == []
    assert differing({"a": [1.0, 2.0]}, {"a": [1.0, 2.1]}) == ["a"]
    assert differing({"a": [1.0]}, {"b": [1.0]}) == ["a", "b"]


def test_the_golden_file_is_as_the_writer_writes_it() -> None:
    assert GOLDEN.read_text() == one_line_per_tensor(json.loads(GOLDEN.read_text()))


def test_the_same_seed_gives_the_same_parameters_and_another_seed_others() -> None:
    config = compose("ppo_cartpole", [*SMALL, *PPO, "training.phases.train.duration_steps=null"])
    sums = []
    for seed in (0, 0, 1):
        trained = build({**config, "seed": seed}, run=None, quiet=True)
        trained.orchestrator.run()
        sums.append([float(p.detach().double().sum()) for p in trained.agent.controllers["actor"].parameters()])
        trained.close()
    assert sums[0] == sums[1]
    assert sums[0] != sums[2]
