"""A row holds what the window gathered, whoever interrupted it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.metrics import logger as logger_module
from rl_lab.metrics.csv_writer import CsvWriter
from rl_lab.metrics.logger import MetricLogger
from rl_lab.metrics.monitor import Monitor, Rule
from rl_lab.metrics.sinks import Sink
from rl_lab.metrics.writers import JsonlWriter, Row, Writer
from rl_lab.types import ConfigError, Counts, RunError
from rl_lab.utils.tree import equal, numpy_to_tensors

COUNTS = Counts(env_frames=8, agent_steps=4, episodes=1, updates=2)


class MemoryWriter(Writer):
    """Keeps what it is given."""

    name = "memory"

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.messages: list[tuple[str, str]] = []
        self.is_closed = False

    def write(self, row: Row) -> None:
        self.rows.append(row)

    def message(self, text: str, level: str) -> None:
        self.messages.append((level, text))

    def close(self) -> None:
        self.is_closed = True


class BrokenWriter(Writer):
    name = "broken"

    def close(self) -> None:
        raise RunError("the disk is gone")


def awkward_metrics(index: int) -> dict[str, Any]:
    """Numbers whose naive sums depend on order and precision, in every form a hook may hand over."""
    noise = torch.randn((), generator=torch.Generator().manual_seed(index))
    return {
        "loss/policy": noise * 10.0**index,
        "loss/value": noise.double() / 3,
        "controller/entropy": noise.bfloat16(),
        "controller/approx_kl": float(noise) * 1e-9,
        "train/grad_norm": np.float32(noise.item()),
        "train/epochs_done": index,
        "eval/episode_return_max": noise if index % 2 else float(noise),
    }


def test_a_row_opens_with_the_counters_and_sorts_its_metrics() -> None:
    logger = MetricLogger([])
    logger.add({"loss/value": 1.0, "collect/episode_return_mean": torch.tensor(2.0)})
    row = logger.write(COUNTS, wall_s=1.5, values={"eval/episodes": 10})
    assert list(row.items()) == [
        ("env_frames", 8),
        ("agent_steps", 4),
        ("episodes", 1),
        ("updates", 2),
        ("wall_s", 1.5),
        ("collect/episode_return_mean", 2.0),
        ("eval/episodes", 10),
        ("loss/value", 1.0),
    ]
    assert type(row["eval/episodes"]) is int


def test_the_end_of_a_name_chooses_mean_maximum_minimum_or_sum() -> None:
    logger = MetricLogger([], strict_names=False)
    for value in (1.0, 5.0, 3.0):
        logger.add(dict.fromkeys(["loss/x", "loss/x_max", "loss/x_min", "loss/x_total"], torch.tensor(value)))
    row = logger.write(COUNTS, wall_s=0.0)
    assert (row["loss/x"], row["loss/x_max"], row["loss/x_min"], row["loss/x_total"]) == (3.0, 5.0, 1.0, 9.0)


def test_a_write_begins_a_new_window() -> None:
    logger = MetricLogger([])
    logger.add({"loss/value": 1.0})
    logger.write(COUNTS, wall_s=0.0)
    logger.add({"loss/policy": 2.0})
    row = logger.write(COUNTS, wall_s=0.0)
    assert "loss/value" not in row and row["loss/policy"] == 2.0


def test_numbers_of_every_kind_may_share_a_metric() -> None:
    logger = MetricLogger([])
    values = (1, 2.0, True, np.float32(4.0), np.int64(5), torch.tensor(6.0), torch.tensor(7), torch.tensor(True))
    for value in values:
        logger.add({"loss/value": value})
    assert logger.write(COUNTS, wall_s=0.0)["loss/value"] == 27.0 / 8
    given = {"train/phase_index": np.int64(3), "train/clip_range": torch.tensor(0.25), "train/epochs_done": True}
    row = logger.write(COUNTS, wall_s=0.0, values=given)
    assert (row["train/phase_index"], row["train/clip_range"], row["train/epochs_done"]) == (3, 0.25, 1)
    assert all(type(value) in (int, float) for value in row.values())


@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_a_window_cut_by_a_checkpoint_gives_the_same_row_bit_for_bit(cut: int) -> None:
    whole = MetricLogger([])
    for index in range(5):
        whole.add(awkward_metrics(index))
    expected = whole.write(COUNTS, wall_s=1.0)

    before = MetricLogger([])
    for index in range(cut):
        before.add(awkward_metrics(index))
    state = numpy_to_tensors(before.get_state())
    after = MetricLogger([])
    after.add({"loss/value": 99.0})  # forgotten: the state replaces the window
    after.set_state(state)
    for logger in (before, after):  # saving changes nothing for the run that goes on
        for index in range(cut, 5):
            logger.add(awkward_metrics(index))
    assert equal(before.get_state(), after.get_state())
    assert equal(after.write(COUNTS, wall_s=1.0), expected)
    assert equal(before.write(COUNTS, wall_s=1.0), expected)


def test_a_checkpoint_loads_without_running_code(tmp_path: Path) -> None:
    logger = MetricLogger([JsonlWriter(tmp_path / "metrics.jsonl")])
    logger.add(awkward_metrics(1))
    torch.save(logger.get_state(), tmp_path / "state.pt")
    assert equal(torch.load(tmp_path / "state.pt", weights_only=True), logger.get_state())


def test_long_windows_are_packed_without_changing_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, packed = MetricLogger([]), MetricLogger([])
    for index in range(50):
        plain.add(awkward_metrics(index % 7))
    monkeypatch.setattr(logger_module, "PACK_LENGTH", 8)
    for index in range(50):
        packed.add(awkward_metrics(index % 7))
    assert len(packed._tensors["loss/policy"]) < 8
    assert equal(packed.write(COUNTS, wall_s=0.0), plain.write(COUNTS, wall_s=0.0))


def test_nothing_is_read_from_a_device_before_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[torch.Size] = []
    original = torch.Tensor.tolist

    def counted(self: torch.Tensor) -> Any:
        reads.append(self.shape)
        return original(self)

    def forbidden(self: torch.Tensor) -> Any:
        raise AssertionError("a single value was read from its device")

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    monkeypatch.setattr(torch.Tensor, "item", forbidden)
    monkeypatch.setattr(torch.Tensor, "__float__", forbidden)
    logger = MetricLogger([])
    for index in range(10):
        logger.add({"loss/policy": torch.tensor(float(index)), "loss/value": torch.tensor(2.0)})
    assert reads == []
    assert logger.write(COUNTS, wall_s=0.0)["loss/policy"] == 4.5
    assert reads == [torch.Size([20])]


def test_non_finite_values_are_kept_and_named() -> None:
    logger = MetricLogger([])
    logger.add({"loss/value": torch.tensor(math.nan), "loss/policy": math.inf, "loss/entropy": 1.0})
    row = logger.write(COUNTS, wall_s=0.0)
    assert math.isnan(row["loss/value"]) and row["loss/policy"] == math.inf
    assert logger.last_non_finite == ("loss/policy", "loss/value")
    logger.add({"loss/value": 1.0})
    logger.write(COUNTS, wall_s=0.0)
    assert logger.last_non_finite == ()


def test_sums_beyond_all_numbers_do_not_raise() -> None:
    logger = MetricLogger([], strict_names=False)
    for name, values in {"x": (math.inf, -math.inf), "y": (1e308, 1e308), "z_max": (math.nan, 1.0)}.items():
        for value in values:
            logger.add({f"loss/{name}": value})
    row = logger.write(COUNTS, wall_s=0.0)
    assert math.isnan(row["loss/x"]) and row["loss/y"] == math.inf and math.isnan(row["loss/z_max"])


def test_every_writer_gets_rows_and_messages() -> None:
    first, second = MemoryWriter(), Writer()
    logger = MetricLogger([first, second])
    row = logger.write(COUNTS, wall_s=0.0)
    logger.message("environment 3 was restarted", "warning")
    logger.message("saved")
    logger.flush()
    logger.close()
    assert first.rows == [row]
    assert first.messages == [("warning", "environment 3 was restarted"), ("info", "saved")]


def test_a_writer_that_fails_to_close_does_not_keep_others_open() -> None:
    memory = MemoryWriter()
    with pytest.raises(RunError, match="the disk is gone"):
        MetricLogger([BrokenWriter(), memory]).close()
    assert memory.is_closed


def test_a_writer_new_since_the_checkpoint_starts_afresh(tmp_path: Path) -> None:
    state = MetricLogger([]).get_state()
    logger = MetricLogger([JsonlWriter(tmp_path / "metrics.jsonl")])
    logger.set_state(state)
    logger.write(COUNTS, wall_s=0.0)
    logger.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["agent_steps"] == 4


def test_our_own_mistakes_are_caught() -> None:
    logger = MetricLogger([])
    with pytest.raises(AssertionError, match=r"'loss/value' has shape \(2,\), not one number"):
        logger.add({"loss/value": torch.zeros(2)})
    with pytest.raises(AssertionError, match="'loss/value' still holds its graph: detach it"):
        logger.add({"loss/value": torch.zeros((), requires_grad=True)})
    logger.add({"loss/policy": 1.0})
    with pytest.raises(AssertionError, match=r"\['loss/policy'\] were both added to the window and given to write"):
        logger.write(COUNTS, wall_s=0.0, values={"loss/policy": 2.0})
    with pytest.raises(AssertionError, match="different names"):
        MetricLogger([Writer(), Writer()])


def test_an_undocumented_name_is_refused_when_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_LAB_STRICT_METRIC_NAMES", "1")
    with pytest.raises(
        ConfigError, match=r"'controller/entropi' is not documented.*Did you mean 'controller/entropy'\?"
    ):
        MetricLogger([]).add({"controller/entropi": 1.0})
    with pytest.raises(ConfigError, match=r"'controller/mine' is not documented: add it .*names\.md"):
        MetricLogger([]).write(COUNTS, wall_s=0.0, values={"controller/mine": 1.0})
    monkeypatch.delenv("RL_LAB_STRICT_METRIC_NAMES")
    MetricLogger([]).add({"controller/mine": 1.0})  # a user's own workflow


def test_a_name_without_a_known_prefix_is_always_refused() -> None:
    with pytest.raises(ConfigError, match=r"'policy/entropy' has no known prefix: .* collect/, train/, controller/"):
        MetricLogger([], strict_names=False).add({"policy/entropy": 1.0})


def test_sinks_and_the_monitor_get_the_rows_of_a_second_together(tmp_path: Path) -> None:
    rules = {"support": Rule(metric="train/clipped_target_fraction", above=0.01, tip="Widen the support.")}
    writer, now = MemoryWriter(), [100.0]
    sink = Sink(CsvWriter(tmp_path))
    logger = MetricLogger([writer, sink], monitor=Monitor(rules), clock=lambda: now[0])

    def rows_after(seconds: float, fraction: float = 0.0) -> tuple[int, int, int]:
        now[0] += seconds
        logger.add({"train/clipped_target_fraction": fraction})
        logger.write(COUNTS, wall_s=0.0)
        return len(writer.rows), len((tmp_path / "metrics.csv").read_text().splitlines()) - 1, len(writer.messages)

    assert rows_after(0.0) == (1, 1, 0), "the first row is there at once"
    assert rows_after(0.5, fraction=0.5) == (2, 1, 0)
    assert rows_after(0.6) == (3, 3, 1)
    assert rows_after(0.1) == (4, 3, 1)
    assert rows_after(0.1, fraction=math.nan) == (5, 5, 1), "learning may end here"
    assert rows_after(0.1) == (6, 5, 1)
    state = logger.get_state()
    assert state["writers"]["csv"]["rows"] == len((tmp_path / "metrics.csv").read_text().splitlines()) - 1 == 6
    assert rows_after(0.1) == (7, 6, 1)
    logger.close()
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) - 1 == 7


def test_what_the_monitor_finds_in_a_row_is_said_once_and_survives_a_resume() -> None:
    rules = {"support": Rule(metric="train/clipped_target_fraction", above=0.01, tip="Widen the support.")}
    writer, kept = MemoryWriter(), []
    logger = MetricLogger([writer], monitor=Monitor(rules, keep=kept.append))
    for fraction in (0.005, 0.25, 0.5):
        logger.add({"train/clipped_target_fraction": fraction})
        logger.write(Counts(agent_steps=1200), wall_s=0.0)
    logger.deliver()
    said = "train/clipped_target_fraction is 0.25 at 1,200 agent steps, above 0.01. Widen the support."
    assert writer.messages == [("warning", said)]
    assert [alert["rule"] for alert in kept[-1]] == ["support"]
    resumed = MetricLogger([writer], monitor=Monitor(rules))
    resumed.set_state(logger.get_state())
    resumed.add({"train/clipped_target_fraction": 0.5})
    resumed.write(Counts(), wall_s=0.0)
    resumed.deliver()
    assert len(writer.messages) == 1
    resumed.restart()
    resumed.add({"train/clipped_target_fraction": 0.5})
    resumed.write(Counts(), wall_s=0.0)
    resumed.deliver()
    assert len(writer.messages) == 2
