"""Flipped bits in the files of a replay: checkpoints that hold the row are refused, the others load exactly."""

from __future__ import annotations

import copy
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from test_row_log import assert_same_batches, fill, make, saved

from rl_lab.buffers.sequence import SequenceReplay
from rl_lab.types import RunError
from rl_lab.utils.tree import equal

SETTINGS: dict[str, Any] = {
    "sequence_length": 3,
    "capacity_rows": 240,
    "write_back": ["latent"],
    "online_queue": False,
}


def run_with_checkpoints(directory: Path, storage: str) -> list[tuple[Any, Any]]:
    """States of a replay that turns over several times, with what was written back, and each state's first batches."""
    buffer, checkpoints = make(directory, SequenceReplay, **SETTINGS, storage=storage), []
    for first in range(0, 600, 60):
        fill(buffer, range(first, first + 60), extra=True)
        for _ in range(2):
            batch = buffer.sample()
            buffer.write(batch["index"], "latent", batch["latent"] + 1)
        checkpoints.append(saved(buffer))
    return [(state, batches_of(directory, storage, state)) for state in checkpoints]


def batches_of(directory: Path, storage: str, state: Any) -> list[Any]:
    buffer = make(directory, SequenceReplay, **SETTINGS, storage=storage)
    buffer.set_state(state)
    return [buffer.sample() for _ in range(12)]


@pytest.mark.parametrize("storage", ["cpu", "disk"])
def test_a_flipped_bit_is_met_by_those_who_hold_its_block_only(storage: str, tmp_path: Path) -> None:
    checkpoints = run_with_checkpoints(tmp_path, storage)
    chance, refused, loaded = random.Random(storage), 0, 0
    files = sorted({each["file"] for state, _ in checkpoints for kind in ("segments", "patches")
                    for each in state["log"][kind]})  # fmt: skip
    for file in chance.choices(files, k=60):
        path, kind = tmp_path / file, "segments" if file.startswith("rows") else "patches"
        content = path.read_bytes()
        position = chance.randrange(len(content))
        path.write_bytes(
            content[:position] + bytes([content[position] ^ 1 << chance.randrange(8)]) + content[position + 1 :]
        )
        for state, batches in checkpoints:
            named = [each["blocks"] for each in state["log"][kind] if each["file"] == file]
            row = position // named[0]["row_bytes"] if named else 0
            is_held = named and named[0]["first_block"] * named[0]["block_rows"] <= row < named[0]["rows"]
            if is_held:
                with pytest.raises(RunError, match=rf"{file}: block \d+ \(rows \d+ to \d+\) has changed since it was"):
                    batches_of(tmp_path, storage, state)
                refused += 1
            else:
                assert equal(batches_of(tmp_path, storage, state), batches)
                loaded += 1
        path.write_bytes(content)
    assert refused > 50 and loaded > 200


def test_only_blocks_of_rows_that_are_still_there_are_needed(tmp_path: Path) -> None:
    """120 rows of each environment, files of 15 rows, blocks of one row."""
    for state, _ in run_with_checkpoints(tmp_path, "cpu"):
        log, end = state["log"], state["answered"]
        first = log["segments"][0]["blocks"]
        assert first["first_row"] + first["first_block"] * first["block_rows"] == max(0, end - 120)
        for patch in log["patches"]:
            last = patch["last_indices"][patch["blocks"]["first_block"] :]
            assert len(last) and min(last) >= 2 * max(0, end - 120)


@pytest.mark.parametrize("storage", ["cpu", "disk"])
def test_states_from_before_there_were_blocks_still_load_and_go_on(storage: str, tmp_path: Path) -> None:
    """Such a state names the beginning of each file with one checksum."""
    state, batches = run_with_checkpoints(tmp_path, storage)[-1]

    def old(each: Any) -> dict[str, Any]:
        blocks = each["blocks"]
        content = (tmp_path / each["file"]).read_bytes()[: blocks["rows"] * blocks["row_bytes"]]
        checksum = {"rows": blocks["rows"], "bytes": len(content), "crc32": zlib.crc32(content)}
        own = {"first_time": blocks["first_row"]} if "layout" in each else {"keys": list(each["keys"])}
        return {"file": each["file"], **({"layout": each["layout"]} if "layout" in each else {}), **own, **checksum}

    log = state["log"]
    state = copy.deepcopy(state)
    state["log"] = {
        "layouts": log["layouts"],
        "stretches": [old(each) for each in log["segments"]],
        "patches": [old(each) for each in log["patches"]],
    }
    assert equal(batches_of(tmp_path, storage, state), batches)
    buffer, again = (make(tmp_path, SequenceReplay, **SETTINGS, storage=storage) for _ in range(2))
    buffer.set_state(state)
    fill(buffer, range(600, 640), extra=True)
    again.set_state(saved(buffer))
    assert_same_batches(again, buffer)
    file = state["log"]["stretches"][-1]["file"]
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(RunError, match=rf"{file}: block 0 .* has changed since it was written"):
        batches_of(tmp_path, storage, state)
