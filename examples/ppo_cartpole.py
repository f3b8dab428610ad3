"""PPO on CartPole-v1 without YAML: every part made by hand, and the loop in sight.

    python examples/ppo_cartpole.py [--steps 100000] [--seed 0]

`rl-lab train ppo_cartpole` does the same with checkpoints, logs and resume. Read this to see what fits where.
"""

from __future__ import annotations

import argparse

from rl_lab.buffers.rollout import RolloutBuffer
from rl_lab.collection.collector import Collector
from rl_lab.collection.evaluator import Evaluator
from rl_lab.components.heads.actor_critic import Actor, Critic
from rl_lab.components.networks.encoders import ObservationEncoder
from rl_lab.components.networks.normalizers import ObservationNormalizer, RewardNormalizer
from rl_lab.environments.factory import make_environment
from rl_lab.training.optimizer import Optimizer
from rl_lab.training.runtime import Runtime
from rl_lab.training.schedules import Schedule
from rl_lab.types import Counts, Phase, Progress
from rl_lab.utils.seeding import seed_everything
from rl_lab.utils.timing import Stopwatch
from rl_lab.workflows.context import Parts, WorkflowContext
from rl_lab.workflows.ppo import PPO

NUM_ENVS, COLLECT_STEPS = 32, 64


def build(seed: int) -> tuple[PPO, RolloutBuffer]:
    """Environments, then parts whose sizes follow from the spec, then the workflow that uses them."""
    seed_everything(seed)
    runtime = Runtime(device="cpu")
    environment = make_environment(id="CartPole-v1", num_envs=NUM_ENVS, seed=seed)
    spec = environment.spec
    encoder = ObservationEncoder(observation=spec.observation, hidden_sizes=[])
    actor = Actor(input_size=encoder.output_size, action=spec.action, hidden_sizes=[64, 64])
    critic = Critic(input_size=encoder.output_size, hidden_sizes=[64, 64])
    learning = {"encoder": encoder, "actor": actor, "critic": critic}
    optimizer = Optimizer(parameters=learning, learning_rate=Schedule("linear", 4e-3, 1e-4), max_grad_norm=0.5)
    normalizers = {
        "observation_normalizer": ObservationNormalizer(observation=spec.observation),
        "reward_normalizer": RewardNormalizer(num_envs=NUM_ENVS),
    }
    buffer = RolloutBuffer(capacity_steps=COLLECT_STEPS)
    context = WorkflowContext(
        components=Parts("components", {"encoder": encoder, **normalizers}),
        controllers=Parts("controllers", {"actor": actor, "critic": critic}),
        optimizers=Parts("optimizers", {"controller": optimizer}),
        collector=Collector(environment, {"rollout": buffer}, device=runtime.device, stopwatch=Stopwatch()),
        evaluator=Evaluator(
            lambda: make_environment(id="CartPole-v1", num_envs=10, seed=seed, stream="eval_environment"),
            make_render_environment=lambda: make_environment(id="CartPole-v1", render=True, stream="play_environment"),
            device=runtime.device,
        ),
        runtime=runtime,
        spec=spec,
        num_envs=NUM_ENVS,
    )
    scales = {"policy": 1.0, "value": 0.5, "entropy": 0.0}
    workflow = PPO(discount=0.98, gae_lambda=0.9, epochs=6, minibatch_size=512, loss_scales=scales)
    workflow.initialize(context)
    return workflow, buffer


def main(arguments: list[str] | None = None) -> float:
    """Train, evaluate, and return the mean return of 20 deterministic episodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="agent steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    workflow, buffer = build(options.seed)
    done, cycle = Counts(), 0
    while done.agent_steps < options.steps:
        progress = Progress(fraction=done.agent_steps / options.steps, run=done, phase=done, cycles=cycle)
        phase = Phase("train", collect_steps=COLLECT_STEPS, duration_steps=options.steps, progress=progress)
        collected = workflow.collect_step(cycle, phase=phase)
        workflow.update_controller(buffer.sample(), phase=phase)
        done, cycle = done + collected.counts + Counts(updates=1), cycle + 1
        if cycle % 10 == 0:
            mean_return = collected.metrics.get("collect/episode_return_mean", float("nan"))
            print(f"{done.agent_steps:>8,} agent steps   mean return of the last 100 episodes {mean_return:6.1f}")
    score = float(workflow.evaluate(episodes=20)["eval/episode_return_mean"])
    print(f"deterministic evaluation, 20 episodes: {score:.1f}")
    return score


if __name__ == "__main__":
    main()
