"""Words that people know from other libraries, and the settings of ours that they stand for: one table.

A word is understood where it can mean one thing in the chosen experiment, and answered with a sentence otherwise
(translate.py). This file imports nothing of ours, so that completion and the command line can ask it at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DURATION = "PHASE.duration_steps"  # PHASE: the one phase that collects and learns
ROLLOUT = "PHASE.collect_steps"
PREFILL = "PREFILL.duration_steps"  # PREFILL: the one phase that collects before it, and learns nothing


@dataclass(frozen=True)
class Word:
    """`sets`: settings it may stand for, the first that the config has; `*` is every block of that level.

    `only` names a setting without which it is not understood. `values` translates values (None: nothing is to be set,
    and `remark` says why); a value that is not there stays as it is, unless `is_closed`.
    """

    sets: tuple[str, ...] = ()
    answer: str = ""  # where none of them is there: what to write instead
    only: str = ""
    values: Mapping[str, str | None] = field(default_factory=dict)
    is_closed: bool = False
    is_switch: bool = False  # an option without a value, --capture-video, switches it on
    remark: str = ""


ENVIRONMENT_WORDS = ("env", "env_id", "env_name", "environment_id", "gym_id")
ALGORITHM_WORDS = ("algo", "alg", "agent")
OWN_OPTIONS = (
    "seed",
    "preset",
    "size",
    "task",
    "memory",
    "decoder",
    "planner",
    "exploration",
    "environment",
    "runtime",
)  # also as --seed 3

SWITCH = {"true": "rolling", "false": "off", "1": "rolling", "0": "off"}
TERMINAL = {"0": "quiet", "1": None, "2": "plain", "true": None, "false": "quiet"}
POLICIES = {"MlpPolicy": None, "CnnPolicy": None, "MultiInputPolicy": None}
CHECKPOINTS = "training.checkpoint.every_minutes=5 or training.checkpoint.every_updates=1000"
RATIO = "updates per agent step: training.updates_per_step=0.5"

TABLE: dict[tuple[str, ...], Word] = {
    # how long, how many
    ("total_timesteps", "timesteps", "total_steps", "num_timesteps", "n_timesteps", "max_steps"): Word((DURATION,)),
    ("n_envs", "num_envs", "num_environments", "n_environments", "num_workers"): Word(("environment.num_envs",)),
    ("steps", "num_env_steps", "training_steps"): Word(
        (), "write total_timesteps=1e5 for the whole run, training.phases.NAME.collect_steps=16 for one cycle"
    ),
    ("configs",): Word(answer="presets are chosen one by one: size=12m, task=dmc_vision, preset=debug"),
    ("n_steps", "num_steps", "rollout_length", "rollout_steps", "rollout_fragment_length"): Word(
        ("algorithm.n_step", ROLLOUT),
        "rows that every environment collects per cycle: training.phases.NAME.collect_steps=16",
        only="algorithm.n_step|algorithm.epochs",
    ),
    ("batch_size", "minibatch_size", "mini_batch_size"): Word(
        ("algorithm.minibatch_size", "buffers.*.batch_size"),
        "REINFORCE learns from whole episodes: buffers.episodes.episodes_per_batch=16",
    ),
    ("n_epochs", "num_epochs", "epochs", "update_epochs"): Word(("algorithm.epochs",)),
    ("buffer_size", "replay_size", "memory_size", "replay_capacity", "buffer_capacity", "capacity"): Word(
        ("buffers.*.capacity_rows",)
    ),
    ("learning_starts", "start_steps", "random_steps", "prefill", "warmup_steps", "min_buffer_size"): Word(
        (PREFILL, "buffers.*.minimum_rows"), "a phase before the others collects at random (docs/phases.md)"
    ),
    ("batch_length", "sequence_length", "seq_len", "chunk_length"): Word(
        ("buffers.*.sequence_length", "algorithm.sequence_length")
    ),
    # learning
    ("lr", "learning_rate", "alpha_lr"): Word(("optimizers.*.learning_rate", "algorithm.learning_rate")),
    ("gamma", "discount", "discount_factor"): Word(("algorithm.discount",)),
    ("gae_lambda", "gae", "lam", "lambda", "lambda_"): Word(("algorithm.gae_lambda", "algorithm.lambda_")),
    ("clip_range", "clip_coef", "clip_eps", "clip_param", "clip_ratio"): Word(("algorithm.clip_range",)),
    ("ent_coef", "entropy_coef", "entropy_coeff", "entropy_coefficient", "ent_coeff"): Word(
        ("algorithm.loss_scales.entropy",),
        "SAC learns its temperature: components.temperature.initial=0.2; optimizers.temperature=null keeps it there",
    ),
    ("vf_coef", "value_coef", "vf_loss_coeff", "value_loss_coef"): Word(("algorithm.loss_scales.value",)),
    ("max_grad_norm", "grad_clip", "clip_grad_norm", "grad_norm"): Word(("optimizers.*.max_grad_norm",)),
    ("target_kl",): Word(("algorithm.target_kl",)),
    ("tau", "polyak"): Word(("algorithm.target_rate", "algorithm.slow_critic_rate")),
    ("target_update_interval", "target_network_frequency", "target_update_freq"): Word(
        ("algorithm.target_every", "algorithm.slow_critic_every")
    ),
    ("epsilon", "eps", "exploration_rate"): Word(("algorithm.epsilon", "components.strategy.epsilon")),
    ("exploration_fraction", "exploration_final_eps", "exploration_initial_eps", "eps_decay"): Word(
        answer="a schedule of random actions: algorithm.epsilon='linear(1.0, 0.05, over=10000 agent_steps)'"
    ),
    ("horizon", "imag_horizon", "imagination_horizon"): Word(("algorithm.horizon", "controllers.planner.horizon")),
    ("weight_decay",): Word(("optimizers.*.weight_decay",)),
    ("optimizer", "optim"): Word(("optimizers.*.name",)),
    ("utd", "utd_ratio", "updates_per_step"): Word(("training.updates_per_step",)),
    ("train_ratio", "replay_ratio", "train_freq", "gradient_steps", "train_every"): Word(answer=RATIO),
    ("normalize", "norm_obs", "normalize_observations"): Word(
        ("components.observation_normalizer.mode",), values=SWITCH, is_closed=True
    ),
    ("net_arch", "hidden_sizes", "hidden_size", "hidden_dim", "policy_kwargs", "fcnet_hiddens"): Word(
        answer="each part has its own: controllers.actor.hidden_sizes=[64,64] (`rl-lab config explain controllers`)"
    ),
    ("policy", "policy_type"): Word(
        answer="networks follow from the observations; memory=lstm or memory=gru gives PPO one that remembers",
        values=POLICIES,
        remark="networks follow from the observations",
    ),
    ("use_sde", "sde_sample_freq"): Word(answer="state-dependent exploration is not offered here: leave it out"),
    # the environment
    ("max_episode_steps", "time_limit", "episode_length", "max_ep_len"): Word(("environment.time_limit",)),
    ("frame_skip", "frameskip", "action_repeat"): Word(("environment.action_repeat",)),
    ("frame_stack", "n_stack", "framestack"): Word(
        answer="frames are stacked by a wrapper: environment.wrappers=[{id: frame_stack, count: 4}]"
    ),
    ("env_kwargs",): Word(("environment.kwargs",)),
    # the machine, the log, the run
    ("device", "accelerator"): Word(("runtime.device",)),
    ("cuda", "gpu", "use_cuda", "use_gpu", "num_gpus"): Word(answer="the device: runtime.device=cuda, cpu or auto"),
    ("precision", "dtype"): Word(("runtime.precision",)),
    ("compile", "torch_compile"): Word(("runtime.compile",), is_switch=True),
    ("threads", "num_threads", "n_threads"): Word(("runtime.threads",)),
    ("torch_deterministic", "deterministic"): Word(("runtime.deterministic",), is_switch=True),
    ("random_seed", "rng_seed"): Word(("seed",)),
    ("verbose", "progress_bar"): Word(
        ("logging.terminal",), values=TERMINAL, is_closed=True, remark="the live display is on by itself"
    ),
    ("eval_freq", "eval_every", "eval_interval", "evaluation_interval"): Word(("evaluation.every_steps",)),
    ("n_eval_episodes", "eval_episodes", "num_eval_episodes"): Word(("evaluation.episodes",)),
    ("n_eval_envs", "eval_envs", "num_eval_envs"): Word(("evaluation.num_envs",)),
    ("save_freq", "checkpoint_freq", "save_interval", "save_every"): Word(answer=CHECKPOINTS),
    ("log_interval", "log_freq", "log_every"): Word(answer="logging.every_steps=2048 or logging.every_updates=10"),
    ("tensorboard_log", "tensorboard", "tb_log", "logdir", "log_dir"): Word(
        answer="events are in every run: `tensorboard --logdir runs`; logging.tensorboard=false leaves them out"
    ),
    ("track", "wandb", "use_wandb", "wandb_project_name"): Word(
        answer="logging.writers=[wandb], with the project as {_target_: wandb, project: NAME} (docs/logging.md)"
    ),
    ("save_path", "output_dir", "model_path"): Word(
        answer="a run has a folder of its own: --runs-dir DIR, --run-id ID"
    ),
    ("run_name", "exp_name", "experiment_name"): Word(("experiment.name",)),
    ("run_id",): Word(("runs.id",)),
    ("capture_video", "record_video", "save_video"): Word(("evaluation.video",), is_switch=True),
    ("render", "render_mode", "render_env"): Word(
        answer="training draws nothing: `rl-lab play RUN` shows a policy, evaluation.video_every=1 films evaluations"
    ),
}
WORDS: dict[str, Word] = {name: word for names, word in TABLE.items() for name in names}
ALL_WORDS = (*ENVIRONMENT_WORDS, *ALGORITHM_WORDS, *WORDS)

BLOCKS = (
    *("experiment", "seed", "plugins", "environment", "algorithm", "components", "controllers", "optimizers"),
    *("buffers", "training", "evaluation", "logging", "runtime", "debug", "runs"),
)  # of a config
SAME_VALUES = {"runtime.device": {"gpu": "cuda"}}  # values of ours that other libraries spell otherwise
