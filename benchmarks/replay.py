"""Replay buffers beside Stable-Baselines3's and, where it is installed, TorchRL's, alternately in one process.

    pip install stable-baselines3 && pip install --no-deps "torchrl==0.14.*" "tensordict==0.14.*" \\
        pyvers hoptorch orjson importlib-metadata zipp    # without their wish for another torch
    python benchmarks/replay.py                          # 1,000,000 rows, five rounds; images 100,000 (--image-rows)
    python benchmarks/replay.py --rows 200000 --rounds 3 --json figures.json

1. Adding rows from 16 environments, 17-dim state, 6-dim action: what each library's own collection hands over,
   numpy arrays for Stable-Baselines3, tensors as the Collector gives them here, a TensorDict for TorchRL.
2. Sampling 256 one-step transitions of that.
3. Sampling sequences [16, 64] of that, and of 64x64x3 images. TorchRL holds whole episodes one after the other and
   looks for their ends once (cache_values), which is where its SliceSampler is fastest.
4. Prioritised: sampling 256 and giving their priorities back.
5. Bytes per row against the information in it.

Each figure is the best round of a side, rounds taken in turn, so that a busy machine hits all sides alike.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.prioritized import PrioritizedReplayBuffer
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.sequence import SequenceReplay
from rl_lab.types import ActionSpec, ArraySpec, Batch, EnvSpec

ENVS, STATE, ACTION, IMAGE = 16, 17, 6, (64, 64, 3)
EPISODE = 1000  # rows of an episode
Calls = dict[str, Callable[[], Any]]


def row(time_index: int, *, image: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(time_index)
    flags = {name: torch.zeros(ENVS, dtype=torch.bool) for name in ("is_first", "is_last", "is_terminal")}
    flags["is_first"][:] = time_index % EPISODE == 0
    flags["is_last"][:] = time_index % EPISODE == EPISODE - 1
    observation = (
        {"image": torch.randint(0, 255, (ENVS, *IMAGE), dtype=torch.uint8, generator=generator)}
        if image
        else {"vector": torch.randn(ENVS, STATE, generator=generator)}
    )
    action = torch.rand(ENVS, ACTION, generator=generator)
    return {**observation, "reward": torch.randn(ENVS, generator=generator), **flags, "action": action}


def rates(calls: Calls, *, rounds: int, seconds: float) -> dict[str, float]:
    """Calls per second of each side, its best round."""
    best = dict.fromkeys(calls, 0.0)
    for call in calls.values():
        call()
    for _ in range(rounds):
        for side, call in calls.items():
            count, start = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - start) < seconds:
                for _ in range(20):
                    call()
                count += 20
            best[side] = max(best[side], count / elapsed)
    return best


def sb3_buffer(rows: int) -> Any:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer as Theirs

    box = spaces.Box(-np.inf, np.inf, (STATE,), np.float32)
    return Theirs(rows, box, spaces.Box(-1, 1, (ACTION,), np.float32), device="cpu", n_envs=ENVS)


def sb3_add(buffer: Any) -> Callable[[], None]:
    generator = np.random.default_rng(0)
    here, there = generator.normal(size=(2, ENVS, STATE)).astype(np.float32)
    action, reward = generator.random((ENVS, ACTION)).astype(np.float32), np.zeros(ENVS, np.float32)
    done, infos = np.zeros(ENVS, bool), [{} for _ in range(ENVS)]
    return lambda: buffer.add(here, there, action, reward, done, infos)


def torchrl_buffer(rows: int, *, sequence: bool, image: bool) -> tuple[Any, Callable[[], None]] | None:
    """TorchRL's replay, full of the same rows, and a call that adds 16 of them; None where it is not installed."""
    try:
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage
        from torchrl.data import TensorDictReplayBuffer as Theirs
        from torchrl.data.replay_buffers.samplers import RandomSampler, SliceSampler
    except ImportError as error:
        print(f"TorchRL is left out: {error}")
        return None
    sampler = SliceSampler(slice_len=64, traj_key="episode", cache_values=True) if sequence else RandomSampler()
    storage, size = LazyTensorStorage(rows, device="cpu"), 16 * 64 if sequence else 256
    buffer = Theirs(storage=storage, sampler=sampler, batch_size=size)
    content = row(1, image=image)
    if not sequence:  # a one-step learner's row there carries the next observation as well
        content["next_vector"] = content["vector"].clone()
    repeated = {key: value[:1].expand(EPISODE, *value.shape[1:]).clone() for key, value in content.items()}
    for episode in range(rows // EPISODE):
        repeated["episode"] = torch.full((EPISODE,), episode)
        buffer.extend(TensorDict(repeated, batch_size=[EPISODE]))
    content["episode"] = torch.arange(ENVS)
    ready = TensorDict(content, batch_size=[ENVS])
    return buffer, lambda: buffer.extend(ready)


def filled(buffer: Any, rows: int, *, image: bool = False) -> Any:
    templates = [row(index, image=image) for index in range(EPISODE if not image else 8)]
    for index in range(rows // ENVS):
        buffer.add(templates[index % len(templates)])
    return buffer


def fill_theirs(add: Callable[[], None], rows: int) -> None:
    for _ in range(rows // ENVS):
        add()


def one_step(arguments: argparse.Namespace, figures: dict[str, dict[str, float]]) -> None:
    settings = {"num_envs": ENVS, "capacity_rows": arguments.rows}
    ours = filled(ReplayBuffer(**settings), arguments.rows)
    theirs = sb3_buffer(arguments.rows)
    add_theirs = sb3_add(theirs)
    fill_theirs(add_theirs, arguments.rows)
    example = row(1)
    adding: Calls = {"ours": lambda: ours.add(example), "sb3": add_theirs}
    sampling: Calls = {"ours": ours.sample, "sb3": lambda: theirs.sample(256)}
    other = torchrl_buffer(arguments.rows, sequence=False, image=False)
    if other is not None:
        adding["torchrl"], sampling["torchrl"] = other[1], other[0].sample
    figures["sample 256 one-step"] = rates(sampling, rounds=arguments.rounds, seconds=arguments.seconds)
    figures["add from 16 envs"] = rates(adding, rounds=arguments.rounds, seconds=arguments.seconds)

    prioritized = filled(PrioritizedReplayBuffer(**settings), arguments.rows)
    priority = torch.rand(256)
    call = {"ours": lambda: prioritized.learned({**prioritized.sample(), "priority": priority})}
    figures["prioritised 256"] = rates(call, rounds=arguments.rounds, seconds=arguments.seconds)


def sequences(arguments: argparse.Namespace, figures: dict[str, dict[str, float]], *, image: bool) -> None:
    rows = arguments.image_rows if image else arguments.rows
    ours = filled(SequenceReplay(num_envs=ENVS, capacity_rows=rows, online_queue=False), rows, image=image)
    calls: Calls = {"ours": ours.sample}
    other = torchrl_buffer(rows, sequence=True, image=image)
    if other is not None:
        calls["torchrl"] = other[0].sample
    name = f"sample [16, 64] {'images' if image else 'states'}"
    figures[name] = rates(calls, rounds=arguments.rounds, seconds=arguments.seconds)


def memory(figures: dict[str, dict[str, float]]) -> None:
    observation = {"vector": ArraySpec((STATE,), "float32")}
    spec = EnvSpec("benchmark", observation, ActionSpec("continuous", (ACTION,)))
    buffer = ReplayBuffer(num_envs=ENVS, capacity_rows=16_000)
    buffer.add(row(0))
    information = sum(value[0].numel() * value.element_size() for value in row(0).values())
    predicted = buffer.memory_bytes(spec) / 16_000
    figures["bytes per row"] = {"ours": predicted, "information": information}


BARS = {
    "sample 256 one-step": {"sb3": 2.0},
    "add from 16 envs": {"sb3": 2.0, "torchrl": 2.0},
    "sample [16, 64] states": {"torchrl": 3.0},
    "sample [16, 64] images": {"torchrl": 3.0},
}


def report(figures: dict[str, dict[str, float]]) -> None:
    print(f"{'what':<24}{'ours':>12}{'sb3':>12}{'torchrl':>12}   ratio (bar)")
    for what, sides in figures.items():
        cells = "".join(
            f"{sides[side]:>12,.0f}" if side in sides else f"{'-':>12}" for side in ("ours", "sb3", "torchrl")
        )
        verdicts = [
            f"{sides['ours'] / sides[side]:.2f}x {side} ({bar:g}x)"
            for side, bar in BARS.get(what, {}).items()
            if side in sides
        ]
        if what == "prioritised 256":
            verdicts = [f"{sides['ours']:,.0f}/s (5,000/s)"]
        if what == "bytes per row":
            verdicts = [
                f"{sides['ours'] / sides['information']:.3f}x the {sides['information']:.0f} of information (1.05x)"
            ]
        print(f"{what:<24}{cells}   {', '.join(verdicts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--image-rows", type=int, default=100_000, help="12 kB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a round of one side")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)  # TorchRL logs every allocation
    figures: dict[str, dict[str, float]] = {}
    one_step(arguments, figures)
    sequences(arguments, figures, image=False)
    sequences(arguments, figures, image=True)
    memory(figures)
    report(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
