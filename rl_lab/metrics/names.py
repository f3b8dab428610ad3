"""Every metric name, its unit, its meaning and its healthy value. docs/metrics.md is rendered from here.

`python -m rl_lab.metrics.names` prints the tables that stand between the markers of docs/metrics.md.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from typing import NamedTuple

from rl_lab.types import ConfigError, did_you_mean


class Meaning(NamedTuple):
    """What one metric says: its unit, its definition, and how to read it."""

    unit: str
    description: str
    advice: str = ""
    warn_above: float | None = None  # a row that holds more says so, once


COUNTERS: dict[str, Meaning] = {
    "env_frames": Meaning(
        "frames",
        "Raw simulator frames, action repeats included.",
        "Compare with papers that count frames. Equals `agent_steps` when nothing repeats actions.",
    ),
    "agent_steps": Meaning(
        "agent steps",
        "Decisions the policy took, summed over all environments. Resets are not decisions.",
        "The x axis of every curve here.",
    ),
    "episodes": Meaning("episodes", "Finished episodes of all training environments; evaluation is not counted."),
    "updates": Meaning("updates", "Batches taken through every update hook of a phase. Skipped hooks do not count."),
    "wall_s": Meaning(
        "s", "Seconds of training since the run began, earlier sessions of a resumed run included.", "Not reproducible."
    ),
}
"""The five counters that open every row. "Step" never stands alone."""


NAMES: dict[str, Meaning] = {
    # --- what the training environments answered
    "collect/episode_return_mean": Meaning(
        "return",
        "Mean undiscounted return of the last 100 finished training episodes.",
        "Rises, with noise. Flat from the start: look at `controller/entropy` and at the reward itself. "
        "Falls after rising: lower the learning rate or the clip range.",
    ),
    "collect/episode_return_min": Meaning(
        "return",
        "Smallest return among the last 100 training episodes.",
        "Far below the mean late in a run: the policy still fails from some starts.",
    ),
    "collect/episode_return_max": Meaning(
        "return",
        "Largest return among the last 100 training episodes.",
        "Above the mean early on: good behaviour is being found. Equal to the mean at a low value: no exploration.",
    ),
    "collect/episode_length_mean": Meaning(
        "agent steps",
        "Mean length of the last 100 training episodes.",
        "At the time limit: the task is survived, or the agent is stuck. Read it beside the return.",
    ),
    "collect/environment_restarts": Meaning(
        "count",
        "Environment workers restarted after a crash since the run began.",
        "0. Otherwise read the messages in `run.log`: the environment raised or died.",
    ),
    "collect/optimal_arm_rate": Meaning(
        "fraction",
        "Bandits: fraction of the pulls that took one of the best arms.",
        "Rises from 1 / arms. Epsilon-greedy stays below 1 by design; the others approach 1.",
    ),
    "collect/regret_mean": Meaning(
        "reward per agent step",
        "Bandits: how much more the best arm is worth than the pulled one, mean over the pulls.",
        "Falls towards 0. Level above 0: it settled on a wrong arm, or explores too much.",
    ),
    # --- how learning proceeds
    "train/epochs_done": Meaning(
        "epochs",
        "Passes over the rollout in one update.",
        "The configured number. Fewer: `target_kl` stopped the update early, so the learning rate is high.",
    ),
    "train/gradient_steps": Meaning(
        "optimizer steps",
        "Optimizer steps in one update.",
        "Epochs times minibatches; fewer when `target_kl` stopped it.",
    ),
    "train/learning_rate": Meaning("1", "Learning rate of the newest optimizer step.", "Follows its schedule."),
    "train/grad_norm": Meaning(
        "1",
        "Global gradient norm before clipping.",
        "Steady or slowly changing. Always above the clip limit: lower the learning rate or scale rewards. "
        "Spikes: look at the losses of the same row.",
    ),
    "train/*_learning_rate": Meaning(
        "1", "Learning rate of one optimizer of several; `*` is its name.", "Follows its schedule."
    ),
    "train/*_grad_norm": Meaning(
        "1",
        "Gradient norm of one optimizer of several, before clipping; `*` is its name.",
        "As `train/grad_norm`.",
    ),
    "train/grad_norm/*": Meaning(
        "1",
        "Gradient norm of one part, with `log_module_norms: true`.",
        "Parts of one network within a few orders of magnitude of each other.",
    ),
    "train/explained_variance": Meaning(
        "1",
        "1 minus var(return target - value) / var(return target) over the rollout.",
        "Climbs towards 1. Near 0: values are no better than a constant. Negative: worse; "
        "give the critic more capacity or more epochs, or normalise rewards.",
    ),
    "train/phase_fraction": Meaning("fraction", "How much of the current phase is done.", "0 to 1."),
    "train/phase_index": Meaning("index", "Which phase of the curriculum runs, from 0.", "Whole numbers that rise."),
    "train/clipped_target_fraction": Meaning(
        "fraction",
        "Categorical values (C51): how much of the targets' probability lies outside `lowest` … `highest` and is moved "
        "to an end.",
        "0. Above 0.01 the run warns once: set `components.q_values.lowest` and `highest` to returns that can occur.",
        warn_above=0.01,
    ),
    "train/clip_range": Meaning("1", "PPO's limit on the probability ratio.", "Follows its schedule."),
    "train/model_kl": Meaning(
        "nats",
        "World models: KL divergence of the posterior from the prior, without free nats.",
        "Falls, then levels off above 0. Near 0 from the start: the latent carries nothing; lower `free_nats` or the "
        "scale of `representation`. Rising for long: the model meets much that is new to it.",
    ),
    "train/posterior_entropy": Meaning(
        "nats",
        "World models: entropy of the latent after looking, summed over its parts.",
        "Starts near its maximum and falls. Below `train/prior_entropy`: looking helps.",
    ),
    "train/prior_entropy": Meaning(
        "nats",
        "World models: entropy of the latent before looking, summed over its parts.",
        "Falls towards `train/posterior_entropy` as the world becomes predictable.",
    ),
    # --- what the policy is like
    "controller/entropy": Meaning(
        "nats",
        "Mean entropy of the action distribution. For continuous actions it is a differential entropy.",
        "Starts near its maximum (ln of the number of actions) and falls slowly. Collapses early: raise the entropy "
        "scale. Never falls: the advantage carries no signal, or the entropy scale is too high. "
        "Continuous actions may go below 0; that is no error.",
    ),
    "controller/epsilon": Meaning(
        "fraction", "Fraction of actions taken at random while collecting.", "Follows its schedule."
    ),
    "controller/temperature": Meaning(
        "return / nat",
        "SAC: what one nat of entropy is worth.",
        "Falls from its start and levels off where the policy has the entropy asked for. Rises without end: the policy "
        "cannot reach its target entropy, so lower `components.temperature.target_entropy`.",
    ),
    "controller/approx_kl": Meaning(
        "nats",
        "Estimated KL divergence between the policy that collected the rollout and the updated one.",
        "Below about 0.02 for PPO. Larger: fewer epochs, a smaller learning rate, or set `target_kl`.",
    ),
    "controller/clip_fraction": Meaning(
        "fraction",
        "Fraction of samples whose probability ratio left the clip range.",
        "0.05 to 0.3. Higher: updates are too large. Always 0: they are too small.",
    ),
    "controller/policy_std": Meaning(
        "action units",
        "Mean standard deviation of continuous actions, in the policy's own range of -1 to 1.",
        "Shrinks as the agent grows sure. Grows without end: lower the entropy scale.",
    ),
    "controller/value_mean": Meaning(
        "return",
        "Mean value the critic predicted for the rollout.",
        "Follows the discounted return. Runs away from it: the critic diverges.",
    ),
    "controller/advantage_std": Meaning(
        "return",
        "Standard deviation of the advantages before they are normalised.",
        "Above 0. Exactly 0: every action is worth the same, so nothing can be learnt.",
    ),
    # --- losses
    "controller/imagined_return": Meaning(
        "return",
        "Dreamer: mean return of the dreams an update learnt from, discounted and bootstrapped.",
        "Rises with the real return. Far above what episodes bring: the model promises too much; collect more.",
    ),
    "controller/imagined_reward": Meaning(
        "reward per agent step",
        "Dreamer: mean reward of a dreamt step.",
        "Close to the mean reward of real steps.",
    ),
    "controller/return_scale": Meaning(
        "return",
        "Dreamer: range between the percentiles of dreamt returns, by which advantages are divided.",
        "At its smallest value (1) while returns are small; then it follows their range.",
    ),
    "loss/policy": Meaning(
        "1",
        "Policy-gradient loss, unscaled.",
        "Small and around 0; its sign and size are no measure of progress.",
    ),
    "loss/value": Meaning(
        "return squared",
        "Regression error of the critic, unscaled.",
        "Rises while returns grow, then falls. Very large: normalise rewards.",
    ),
    "loss/critic": Meaning(
        "return squared",
        "SAC: half the squared error of each critic, summed over both.",
        "Rises while returns grow, then levels off. Explodes: lower the critic's learning rate or the reward's scale.",
    ),
    "loss/temperature": Meaning(
        "return",
        "SAC: temperature times the entropy above its target.",
        "Around 0. Far above for long: there is more entropy than asked for, and the temperature falls.",
    ),
    "loss/entropy": Meaning(
        "nats", "Entropy term of the loss, unscaled: minus the mean entropy.", "Minus `controller/entropy`."
    ),
    "loss/reconstruction": Meaning(
        "1",
        "World models: error of the reconstructed observation, summed over its elements.",
        "Falls fast, then slowly. Level and high: the model is too small, or the observation is noise.",
    ),
    "loss/dynamics": Meaning(
        "nats",
        "World models: `train/model_kl` where above `free_nats`; teaches the prior.",
        "Falls towards `free_nats` in predictable worlds.",
    ),
    "loss/representation": Meaning(
        "nats",
        "World models: the same value as `loss/dynamics`; teaches the posterior.",
        "As `loss/dynamics`.",
    ),
    "loss/reward": Meaning("nats", "World models: error of the predicted reward.", "Falls."),
    "loss/continue": Meaning(
        "nats", "World models: error of the predicted continuation.", "Falls to the entropy of the discount, near 0."
    ),
    "loss/action_mask": Meaning(
        "nats",
        "Dreamer: error of the predicted action mask, summed over the actions.",
        "Falls towards 0 where the state tells what is allowed.",
    ),
    "loss/replay_value": Meaning(
        "nats", "Dreamer: error of the critic on replayed rows.", "Falls as `loss/value` does."
    ),
    "loss/*": Meaning(
        "1",
        "Any further loss term, unscaled; `*` is its key under `loss_scales`.",
        "Listed in the workflow that defines it.",
    ),
    # --- evaluation
    "eval/episode_return_mean": Meaning(
        "return",
        "Mean return of the evaluation episodes, acted deterministically. It chooses the `best` checkpoint.",
        "At or above the training return. Far below: the policy relies on its own noise.",
    ),
    "eval/episode_return_std": Meaning(
        "return", "Standard deviation of the return over evaluation episodes.", "Shrinks. Large: evaluate longer."
    ),
    "eval/episode_return_min": Meaning("return", "Smallest evaluation return.", "Near the mean for a reliable policy."),
    "eval/episode_return_max": Meaning("return", "Largest evaluation return.", "What the policy can do at best."),
    "eval/episode_length_mean": Meaning("agent steps", "Mean length of the evaluation episodes.", "As in training."),
    "eval/episodes": Meaning("episodes", "Evaluation episodes behind these figures.", "As configured."),
    "eval/timed_out_episodes": Meaning(
        "episodes",
        "Evaluation episodes that a time limit ended.",
        "All of them where surviving is the task; elsewhere 0, or the policy stands still.",
    ),
    "eval/cut_episodes": Meaning(
        "episodes",
        "Evaluation episodes cut by `evaluation.timeout_steps`; each counts with its return so far.",
        "0. More: the returns would have gone on, so raise the time-out.",
    ),
    # --- wall-clock: never reproducible
    "time/agent_steps_per_second": Meaning(
        "agent steps / s", "Agent steps over wall-clock since the last row, everything included.", "Steady."
    ),
    "time/updates_per_second": Meaning("updates / s", "Updates over wall-clock since the last row.", "Steady."),
    "time/eta_s": Meaning("s", "Estimated seconds until the run ends.", "Falls as fast as the clock runs."),
    "time/environment_fraction": Meaning(
        "fraction",
        "Fraction of wall-clock since the last row spent in environment steps.",
        "Dominant: use a native or async vector environment.",
    ),
    "time/policy_fraction": Meaning(
        "fraction",
        "Fraction spent choosing actions.",
        "Dominant: more environments per call, a smaller network, or the other device.",
    ),
    "time/device_fraction": Meaning(
        "fraction",
        "Fraction spent waiting for a GPU to finish the updates queued on it; 0 on a CPU.",
        "Large is good: the GPU never waits for data. What update and device leave is what it may have waited.",
    ),
    "time/update_fraction": Meaning(
        "fraction",
        "Fraction spent sampling and in update hooks.",
        "Dominant with a big network: a GPU, compilation, larger batches.",
    ),
    "time/evaluation_fraction": Meaning(
        "fraction", "Fraction spent evaluating.", "Small. Otherwise evaluate more rarely or fewer episodes."
    ),
    "time/checkpoint_fraction": Meaning("fraction", "Fraction spent saving checkpoints.", "At most 0.02."),
    "time/logging_fraction": Meaning("fraction", "Fraction spent on metrics and the display.", "At most 0.02."),
    "time/overhead_fraction": Meaning(
        "fraction",
        "Fraction in none of the sections above.",
        "At most 0.1. Higher in short windows; otherwise collect more rows per cycle.",
    ),
    # --- the machine: never reproducible
    "system/cpu_percent": Meaning(
        "%", "Use of all cores of the machine since the last sample.", "100 means that every core is busy."
    ),
    "system/ram_gib": Meaning(
        "GiB",
        "Resident memory of this process and its children; shared pages count once per process.",
        "Level after the first minutes. Grows without end: a leak, often in an environment.",
    ),
    "system/gpu_memory_gib": Meaning(
        "GiB", "GPU memory that torch holds in this process, all GPUs together.", "Level after the first updates."
    ),
    "system/gpu_percent": Meaning(
        "%",
        "Fraction of the last moments in which the GPU was busy, as its driver reports it.",
        "Low on a GPU run: environments or small batches keep it waiting.",
    ),
}
"""Metric name -> meaning. A `*` stands for any text; an exact name is found before a pattern."""

PREFIXES = ("collect/", "train/", "controller/", "loss/", "eval/", "time/", "system/")
WALL_CLOCK_PREFIXES = ("time/", "system/")


def meaning_of(name: str) -> Meaning | None:
    """What the table says about a name, or None."""
    if name in NAMES:
        return NAMES[name]
    patterns = (pattern for pattern in NAMES if "*" in pattern and fnmatchcase(name, pattern))
    return next((NAMES[pattern] for pattern in patterns), None)


def check_name(name: str, *, strict: bool) -> None:
    """Refuse a name outside the known prefixes and, when strict, a name that the table does not list."""
    if not name.startswith(PREFIXES):
        raise ConfigError(
            f"Metric '{name}' has no known prefix: a name begins with one of {', '.join(PREFIXES)}."
            f"{did_you_mean(name, NAMES)}"
        )
    if not name.isprintable():
        raise ConfigError(f"Metric {name!r} holds characters that cannot be printed.")
    if strict and meaning_of(name) is None:
        raise ConfigError(
            f"Metric '{name}' is not documented: add it with its unit and meaning to NAMES in rl_lab/metrics/names.py "
            f"and to docs/metrics.md, or build the MetricLogger with strict_names=False.{did_you_mean(name, NAMES)}"
        )


def is_wall_clock(name: str) -> bool:
    """Whether a row's key may differ between two otherwise identical runs."""
    return name == "wall_s" or name.startswith(WALL_CLOCK_PREFIXES)


def render_markdown() -> str:
    """The counters and one table per prefix, as they stand in docs/metrics.md."""
    sections = [_render_table("The counters", COUNTERS)]
    for prefix in PREFIXES:
        sections.append(_render_table(f"`{prefix}`", {name: NAMES[name] for name in NAMES if name.startswith(prefix)}))
    return "\n\n".join(sections)


def _render_table(title: str, meanings: dict[str, Meaning]) -> str:
    lines = [f"### {title}", "", "| name | unit | meaning | healthy, and what to do otherwise |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {text.unit} | {text.description} | {text.advice} |" for name, text in meanings.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(render_markdown() + "\n")
