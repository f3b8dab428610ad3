"""Count what a reader opens who follows one batch through the package: files, and their lines.

    python scripts/journey.py                 the journeys of docs/architecture.md
    python scripts/journey.py --write         writes them there

A journey has stations, functions that the batch or its makers pass in this order. A file counts, whole,

- if it is on the call stack when a station is reached: the way from one to the next;
- if it is a workflow, a component or a kernel of which a function is called on the way: the maths. (Not the door,
  through which a formula's fast version is called, if there is one.)

What runs while a module is imported does not count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PACKAGE = str(ROOT / "rl_lab")
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- scripts/journey.py -->", "<!-- end -->"
SMALL = ["evaluation.final_episodes=0", "evaluation.video=false", "logging.tensorboard=false"]
PPO = ["ppo_cartpole", *SMALL]
DREAMER = [
    *(
        "rl_lab/Corridor-v0:dreamer",
        *SMALL,
        "size=1m",
        "buffers.replay.batch_size=2",
        "buffers.replay.sequence_length=9",
    ),
    *("training.phases.prefill.duration_steps=64", "environment.num_envs=2"),
]
DOOR = ("rl_lab/kernels/door.py", "rl_lab/kernels/digest.py")  # a reader of the formula need not open the decorator
MATHS = ("rl_lab/workflows/", "rl_lab/components/", "rl_lab/kernels/")
TO_PPO = (  # module, function; the last one ends the journey when it is called
    *(
        ("cli/train", "run"),
        ("config/compose", "compose"),
        ("experiment/build", "build"),
        ("experiment/build", "build_agent"),
    ),
    *(
        ("collection/collector", "Collector.collect"),
        ("workflows/ppo", "PPO.act"),
        ("buffers/rollout", "RolloutBuffer.add"),
    ),
    *(("buffers/rollout", "RolloutBuffer.sample"), ("workflows/ppo", "PPO.update_controller")),
    ("training/optimizer", "Optimizer.apply"),
)
TO_DREAMER = (("workflows/dreamer", "Dreamer.update"), ("training/optimizer", "Optimizer.apply"))
JOURNEYS = {  # name -> command words, stations, the first function whose call stack counts (None: the command's)
    "PPO, from the command to the first gradient step": (PPO, TO_PPO, None),
    "Dreamer, from the sample to the optimizer step": (DREAMER, TO_DREAMER, "Dreamer.update"),
}


class Ended(Exception):
    """The journey is over."""


class Recorder:
    """The files of one journey, in the order in which a reader opens them."""

    def __init__(self, stations: Sequence[tuple[str, str]], first: str | None) -> None:
        self.stations, self.first = list(stations), first
        self.files: dict[str, None] = {}
        self.is_learning = False  # maths counts from here on: before, parts are only made

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name == "<module>":
            return
        file = Path(code.co_filename).relative_to(ROOT).as_posix()
        if self.is_learning and file.startswith(MATHS) and file not in DOOR:
            self.files[file] = None
        module, function = self.stations[0]
        if code.co_qualname != function or file != f"rl_lab/{module}.py":
            return
        for each in reversed(_stack(frame, self.first)):
            self.files[each] = None
        self.is_learning = self.is_learning or function in ("Collector.collect", "Dreamer.update")
        self.stations.pop(0)
        if not self.stations:
            sys.setprofile(None)
            raise Ended


def _stack(frame: FrameType, first: str | None) -> list[str]:
    """The package's files on the call stack, innermost first, up to the function that the journey begins with."""
    found: list[str] = []
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith(PACKAGE) and not caller.f_code.co_filename.endswith(DOOR):
            found.append(Path(caller.f_code.co_filename).relative_to(ROOT).as_posix())
        if caller.f_code.co_qualname == first:
            break
        caller = caller.f_back
    return found


def files_of(name: str, *, fast_paths: bool) -> dict[str, int]:
    """The files of one journey with their lines."""
    from rl_lab.cli.main import main

    words, stations, first = JOURNEYS[name]
    recorder = Recorder(stations, first)
    with tempfile.TemporaryDirectory() as folder, suppress(Ended):
        command = ["train", *words, f"runtime.fast_paths={'on' if fast_paths else 'off'}", "-q", "--runs-dir", folder]
        sys.setprofile(recorder)
        try:
            main(command)
        finally:
            sys.setprofile(None)
    assert not recorder.stations, f"never reached: {recorder.stations}"
    return {file: len((ROOT / file).read_text().splitlines()) for file in recorder.files}


def page() -> str:
    """The journeys as docs/architecture.md has them."""
    parts = []
    for name in JOURNEYS:
        plain, fast = (files_of(name, fast_paths=on) for on in (False, True))
        more = {file: lines for file, lines in fast.items() if file not in plain}
        parts.append(f"**{name}**: {len(plain)} files, {sum(plain.values()):,} lines.")
        parts.append("\n".join(f"{index}. `{file}` ({lines})" for index, (file, lines) in enumerate(plain.items(), 1)))
        kernels = ", ".join(f"`{file}` ({lines})" for file, lines in more.items()) or "nothing"
        parts.append(f"With fast paths: {kernels} more.")
    return "\n\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write them to docs/architecture.md")
    writes, text = parser.parse_args().write, page()
    if writes:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")
    print(text)
