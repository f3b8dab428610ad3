"""What saving a replay costs beside a plain write of the same bytes, alternately in one process.

    python benchmarks/replay_checkpoint.py                               # 200,000 rows of 64x64x3 images, 2.5 GB
    python benchmarks/replay_checkpoint.py --rows 1000000 --rounds 1     # 12 GB of memory, twice that of disk
    python benchmarks/replay_checkpoint.py --envs 1 --directory /data --json figures.json

1. The first save: every row of the replay, with checksums, until the disk has it.
2. The plain write: the same number of bytes from memory into one file, until the disk has it.
3. The second save, after 1,000 new rows.
4. Reading all of it back.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.types import Batch

IMAGE, ACTION, NEW_ROWS = (64, 64, 3), 6, 1000
PLAIN_BLOCK_BYTES = 4 * 2**20


def row(envs: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    flags = {name: torch.zeros(envs, dtype=torch.bool) for name in ("is_first", "is_last", "is_terminal")}
    image = torch.randint(0, 255, (envs, *IMAGE), dtype=torch.uint8, generator=generator)
    action = torch.rand(envs, ACTION, generator=generator)
    return {"image": image, "reward": torch.randn(envs, generator=generator), **flags, "action": action}


def fill(buffer: ReplayBuffer, rows: int, envs: int) -> None:
    several = [row(envs, seed) for seed in range(16)]
    for index in range(rows // envs):
        buffer.add(several[index % len(several)])


def plain_write_seconds(path: Path, byte_count: int) -> float:
    block = np.random.default_rng(0).integers(0, 255, PLAIN_BLOCK_BYTES, dtype=np.uint8)
    os.sync()  # what others have written is not this side's to wait for
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for first in range(0, byte_count, PLAIN_BLOCK_BYTES):
            file.write(block[: byte_count - first])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def save_seconds(buffer: ReplayBuffer) -> float:
    os.sync()  # what others have written is not this side's to wait for
    start = time.perf_counter()
    buffer.get_state()
    return time.perf_counter() - start


def one_round(place: Path, rows: int, envs: int, *, plain_first: bool) -> dict[str, float]:
    """One measurement of each side; a disk that slows down after a burst hits the second one."""
    folder = place / "replay"
    buffer = ReplayBuffer(num_envs=envs, capacity_rows=rows + 2 * NEW_ROWS, directory=str(folder))
    fill(buffer, rows, envs)
    byte_count = rows // envs * envs * sum(value[0].nbytes for value in row(envs, 0).values())
    plain = plain_write_seconds(place / "plain.bin", byte_count) if plain_first else 0.0
    first = save_seconds(buffer)
    assert byte_count == sum(path.stat().st_size for path in folder.iterdir()), "both sides write the same bytes"
    plain = plain or plain_write_seconds(place / "plain.bin", byte_count)
    fill(buffer, NEW_ROWS, envs)
    second = save_seconds(buffer)
    state = buffer.get_state()
    start = time.perf_counter()
    buffer.set_state(state)
    read = time.perf_counter() - start
    shutil.rmtree(folder)
    return {"bytes": byte_count, "first_s": first, "plain_s": plain, "second_s": second, "read_s": read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4, help="even: each side goes first as often")
    parser.add_argument("--directory", type=Path, help="where to write (default: the temporary directory)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="replay_checkpoint_", dir=arguments.directory))
    try:
        rounds = [
            one_round(place, arguments.rows, arguments.envs, plain_first=index % 2 == 0)
            for index in range(arguments.rounds)
        ]
    finally:
        shutil.rmtree(place)
    gigabytes = rounds[0]["bytes"] / 1e9
    figures = {name: median(each[name] for each in rounds) for name in rounds[0]}
    figures["ratio"] = median(each["plain_s"] / each["first_s"] for each in rounds)
    print(
        f"{arguments.rows:,} rows of {arguments.envs} environments, {gigabytes:.2f} GB, {len(rounds)} rounds, medians"
    )
    print(f"  first save            {figures['first_s']:8.2f} s  {gigabytes / figures['first_s']:6.2f} GB/s")
    print(f"  plain write and fsync {figures['plain_s']:8.2f} s  {gigabytes / figures['plain_s']:6.2f} GB/s")
    each = ", ".join(f"{each['plain_s'] / each['first_s']:.2f}" for each in rounds)
    print(f"  ratios by round, the plain write first in the 1st, 3rd, ...: {each}")
    print(f"  first save at {figures['ratio']:.0%} of the plain write's speed (aim: 50 %)")
    part = figures["second_s"] / figures["first_s"]
    print(f"  second save           {figures['second_s']:8.3f} s  after {NEW_ROWS:,} new rows, {part:.1%} of the first")
    print(f"  reading back          {figures['read_s']:8.2f} s  {gigabytes / figures['read_s']:6.2f} GB/s")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
