"""Mistakes that people make on the command line, and the sentence that each of them meets; none of them trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

MISTAKES = [
    ("train ppo_cartpol", "There is no experiment 'ppo_cartpol'. Did you mean 'ppo_cartpole'?"),
    ("train cartpole", "There is no experiment 'cartpole'. Those of that name: ppo_cartpole, "),
    ("train CartPole-v1", "An environment needs an algorithm: CartPole-v1:ppo, or one of "),
    ("train CartPole-v1:pp0", "'pp0' is neither an algorithm nor an experiment for CartPole-v1. Did you mean 'ppo'?"),
    ("train ppo_cartpole total_timesteps=-5", "write a whole number of agent steps of at least 1, such as 1e5."),
    ("train ppo_cartpole total_timesteps=lots", "write a number of agent steps, such as 100000 or 1e5."),
    ("train ppo_cartpole lr=fast", "learning_rate: 'fast' is neither a number nor a schedule."),
    ("train ppo_cartpole seed=abc", "seed is 'abc': write a whole number from 0 on."),
    ("train ppo_cartpole seed 3", "'seed' is a setting: write it without spaces, seed=3"),
    ("train ppo_cartpole seed = 3", "'seed' is a setting: write it without spaces, seed=3"),
    ("train ppo_cartpole total-timesteps 1e5", "is a setting: write it without spaces, total_timesteps=1e5"),
    ("train ppo_cartpole --seed", "--seed lacks its value: write seed=VALUE, or --seed VALUE."),
    ("train ppo_cartpole env=", "env= names nothing: write env=VALUE, such as env=CartPole-v1 or algo=ppo."),
    ("train ppo_cartpole n_envs=0", "environment.num_envs is 0: it must be a whole number of at least 1."),
    ("train ppo_cartpole device=tpu", "'tpu' is not known; allowed: auto, cpu, cuda, cuda:0, cuda:1, and so on.\n"),
    ("train ppo_cartpole gamma=2", "algorithm.discount is 2.0: write a number from 0 to 1."),
    ("train ppo_cartpole batch_size=7.5", "algorithm.minibatch_size is 7.5: write a whole number of samples (64)"),
    ("train ppo_cartpole ~seed", "~seed: a setting cannot be taken away, only changed: write seed=VALUE"),
    ("train ppo_cartpole seed=1,2", "'seed=1,2' asks for 2 trainings. Add -m to run them all, or give one value"),
    ("train ppo_cartpole algorithm.discount=[0.9", "must close what it opens"),
    ("train ppo_cartpole memory=lstmm", "memory=lstmm: there is no such choice. Did you mean 'lstm'?"),
    ("train ppo_cartpole policy=CnnLstmPolicy", "memory=lstm or memory=gru gives PPO one that remembers."),
    ("train ppo_cartpole evaluation.every_steps=often", "Allowed: a whole number or auto or null."),
    ("train ppo_cartpole training.phases.trian.duration_steps=5", "there is no phase 'trian'. Did you mean 'train'?"),
    ("train dqn_cartpole environment.id=Pendulum-v1", "needs discrete actions, and this environment's are continuous"),
    ("train --env NoSuchEnv-v0", "environment.id 'NoSuchEnv-v0' is not registered. `rl-lab envs` lists all ids;"),
    ("train ppo_cartpole runtime.precision=fp8", "'fp8' is not known; allowed: fp32, tf32, bf16, fp16."),
    ("train ppo_cartpole logging.rules.kl_hihg.above=1", "no rule is called 'kl_hihg'. Did you mean 'kl_high'?"),
    (
        "train PPO CartPole-v1",
        "'CartPole-v1' is a second experiment after 'PPO'; one is allowed. Did you mean CartPole-v1:ppo?",
    ),
    (
        "train CartPole-v1 DQN",
        "'DQN' is a second experiment after 'CartPole-v1'; one is allowed. Did you mean CartPole-v1:dqn?",
    ),
    ("train breakout", "An environment has that name: rl-lab train ppo_atari environment=atari/breakout."),
    ("train walker_walk", "An environment has that name: rl-lab train dmc/walker_walk:ppo."),
    (
        "train ppo_cartpole --render",
        "training draws nothing: `rl-lab play RUN` shows a policy, evaluation.video_every=1",
    ),
    ("train ppo_cartpole render_mode=human", "render_mode is not a setting here: training draws nothing:"),
    ("train ppo_cartpole --wandb", "wandb is not a setting here: logging.writers=[wandb]"),
    (
        "envs show cartpole",
        "'cartpole' is not registered; this environment is now called 'CartPole-v1'. Write CartPole-v1.",
    ),
    ("train ppo_cartpole seed=x --capture-video", "seed is 'x': write a whole number from 0 on."),
    ("train ppo_cartpole --configs size12m", "configs is not a setting here: presets are chosen one by one: size=12m,"),
    ("train ppo_cartpole run.steps=1e5", "run.steps is not a setting. Here: write total_timesteps=1e5 for the whole"),
    ("train ppo_cartpole algorithm.discount 0.9", "is a setting: write it without spaces, algorithm.discount=0.9"),
    ("train ppo_cartpole algorithm.discount =0.9", "is a setting: write it without spaces, algorithm.discount=0.9"),
    ("train ppo_cartpole algorithm.discount", "is a setting: write it without spaces, algorithm.discount=VALUE"),
    ("train ppo_cartpole environment=cartpole", "One of Gymnasium is written by its id: environment.id=CartPole-v1."),
    ("train ppo_cartpole environment.wrappers=[FrameStack]", "Write {id: NAME}, such as {id: frame_stack, count: 4}"),
    ("train Pendulum-v1:dqn", "this environment's are continuous (of size 1). Use `rl-lab train ID:sac`"),
    ("sweep nosuch.yaml", "there is no sweep file nosuch.yaml. docs/sweeps.md shows one; `rl-lab tune` needs none."),
    ("resume", "the following arguments are required: RUN\n"),
    ("tag", "the following arguments are required: RUN\n"),
    ("config explain algorithm.gamma", "algorithm.gamma is not a setting. Here that is 'algorithm.discount'."),
    ("evaluate @last --episode 5", "unknown option '--episode'. Did you mean '--episodes'?"),
    ("play @bset", "'@bset' names no run: write @last, @best, @best:ENVIRONMENT, an id, a unique prefix"),
]


@pytest.mark.parametrize(("words", "sentence"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_meets_a_sentence_that_leads_on(
    words: str, sentence: str, rl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = rl(*words.split())
    assert answer.code in (1, 2) and sentence in answer.err and "Traceback" not in answer.err
    assert not (tmp_path / "runs").exists(), "no run is left behind"
