"""Memory you can predict: said before training, refused when it cannot fit, never exceeded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_row_log import KINDS, fill, make

from rl_lab.buffers import budget
from rl_lab.buffers.budget import predict, size
from rl_lab.buffers.prioritized import PrioritizedReplayBuffer
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.rollout import RolloutBuffer
from rl_lab.types import ActionSpec, ArraySpec, ConfigError, EnvSpec

# Rows as test_row_log makes them: 8 + 12 bytes of observation, 4 of reward, 3 of flags, 8 of action.
SPEC = EnvSpec(
    "toy",
    {"vector": ArraySpec((2,), "float32"), "image": ArraySpec((2, 2, 3), "uint8")},
    ActionSpec("discrete", (10,)),
)
ROW_BYTES = 35


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What is free, by place; a test may change it."""
    places = {"memory": 2_000_000_000, "disk": 5_000_000_000, "GPU memory": 1_000_000}
    monkeypatch.setattr(budget, "_free_bytes", lambda place, buffer: places[place])
    return places


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", ["cpu", "disk"])
def test_a_buffer_never_takes_more_than_was_predicted(kind: str, storage: str, tmp_path: Path) -> None:
    cls, settings = KINDS[kind]
    buffer = make(tmp_path, cls, storage=storage, **settings)
    predicted = buffer.memory_bytes(SPEC)
    assert buffer.allocated_bytes <= 40, "nothing is taken before the first row"
    for first in range(0, 200, 20):
        fill(buffer, range(first, first + 20), is_pending=True)
        assert buffer.allocated_bytes <= predicted


def test_the_sentence_tells_size_rows_and_what_is_free(free: dict[str, int]) -> None:
    buffers = {"replay": ReplayBuffer(num_envs=2, capacity_rows=1_000_000), "rollout": RolloutBuffer(capacity_steps=2)}
    assert predict(buffers, SPEC) == [
        "Replay 'replay' will take 35.0 MB of memory: 1,000,000 rows of 35 bytes; 2.0 GB are free."
    ]
    assert "rows of 135 bytes" in predict(buffers, SPEC, extra_bytes_per_row=100)[0]


def test_what_cannot_fit_is_refused_with_the_numbers_and_the_ways_out(free: dict[str, int]) -> None:
    free["memory"] = 3_500_000
    buffers = {"mine": ReplayBuffer(num_envs=2, capacity_rows=1_000_000)}
    with pytest.raises(ConfigError) as caught:
        predict(buffers, SPEC)
    message = str(caught.value)
    assert "buffers.mine would take 35.0 MB of memory (1,000,000 rows of 35 bytes), but 3.5 MB are free" in message
    assert "a smaller capacity_rows (at most 100,000 fit now)" in message
    assert "storage: disk (5.0 GB are free there)" in message
    assert "compressed frames" not in message, "these frames are too small for it"
    pixels = EnvSpec("toy", {"image": ArraySpec((64, 64, 3), "uint8")}, ActionSpec("discrete", (10,)))
    with pytest.raises(ConfigError, match=r"storage: disk .*; compressed frames \(compress_frames: 0.5\)"):
        predict(buffers, pixels)


def test_two_buffers_that_fit_alone_but_not_together_are_refused(free: dict[str, int]) -> None:
    free["memory"] = 50_000_000
    one, two = (ReplayBuffer(num_envs=2, capacity_rows=1_000_000) for _ in range(2))
    with pytest.raises(ConfigError, match=r"buffers.second would take 35.0 MB .* but 15.0 MB are free"):
        predict({"first": one, "second": two}, SPEC)


def test_a_disk_that_is_too_small_is_refused_without_recommending_itself(free: dict[str, int], tmp_path: Path) -> None:
    free["disk"] = 1_000_000
    buffer = ReplayBuffer(num_envs=2, capacity_rows=1_000_000, storage="disk", directory=str(tmp_path))
    with pytest.raises(ConfigError, match=r"35.0 MB of disk .* but 1.0 MB are free") as caught:
        predict({"replay": buffer}, SPEC)
    assert "storage: disk" not in str(caught.value)


def test_memory_that_is_taken_already_is_not_counted_twice(free: dict[str, int]) -> None:
    buffer = fill(make(None, capacity_rows=40), range(20))
    free["memory"] = 10
    assert "rows of 35 bytes" in predict({"replay": buffer}, SPEC)[0]


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_CGROUP", tmp_path)
    everything = budget.free_memory_bytes()
    assert everything > 2**20
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert budget.free_memory_bytes() > 2**20
    (tmp_path / "memory.max").write_text("5000000\n")
    assert budget.free_memory_bytes() == 2_000_000


def test_free_disk_counts_the_files_a_resumed_run_uses_again(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "replay" / "mine"
    before = budget._free_disk_bytes(str(folder))
    assert before > 0, "the folder itself need not be there"
    folder.mkdir(parents=True)
    (folder / "rows_000001.bin").touch()

    os.truncate(folder / "rows_000001.bin", 10**12)  # takes no space, but says that it does
    assert budget._free_disk_bytes(str(folder)) > 10**12
    assert budget._free_disk_bytes(None) > 0


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1234, "1.2 kB"), (999_960, "1.0 MB"), (12_345_000_000_000, "12,345.0 GB")],
)
def test_sizes_are_written_for_people(count: int, words: str) -> None:
    assert size(count) == words


def test_the_config_check_refuses_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_lab.config.compose import compose
    from rl_lab.experiment import build as wiring

    monkeypatch.setattr(budget, "free_memory_bytes", lambda: 1000)
    config: dict[str, Any] = compose("dqn_cartpole", [])
    with pytest.raises(ConfigError, match=r"buffers.replay would take .* of memory \(100,000 rows of \d+ bytes\)"):
        wiring.check(config)


def test_priorities_take_memory_wherever_the_rows_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: a copy is saved. The tree of 100,000 leaves has 6,256 sums more, of 8 bytes each."""
    settings = {"num_envs": 2, "capacity_rows": 100_000, "storage": "disk", "directory": str(tmp_path / "replay")}
    buffer = PrioritizedReplayBuffer(**settings)
    assert buffer.memory_bytes(SPEC) == ReplayBuffer(**settings).memory_bytes(SPEC), "on the disk there are none"
    sentences = predict({"mine": buffer}, SPEC)
    assert "Replay 'mine (priorities)' will take 1.7 MB of memory: 100,000 rows of 18 bytes" in sentences[1]
    monkeypatch.setattr(budget, "free_memory_bytes", lambda: 1_000_000)
    with pytest.raises(ConfigError) as refusal:
        predict({"mine": buffer}, SPEC)
    assert "buffers.mine would take 1.7 MB of memory for the priorities of 100,000 rows" in str(refusal.value)
    assert "a smaller capacity_rows (at most 58" in str(refusal.value) and "replay=uniform" in str(refusal.value)


def test_what_could_never_be_allocated_is_refused_not_tried() -> None:
    buffer = PrioritizedReplayBuffer(num_envs=1, capacity_rows=10**14)
    with pytest.raises(ConfigError, match="buffers.mine would take .* GB of memory"):
        predict({"mine": buffer}, SPEC)
