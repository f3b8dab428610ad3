"""Where a run comes from: resumed, continued with more steps, begun with another run's weights, parts loaded.

manifest.json holds it under `lineage`: an entry for each event, with the time, the checkpoint and the counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rl_lab.runs.run_directory import RunDirectory
from rl_lab.utils.text import printable

if TYPE_CHECKING:  # commands that only read manifests start without torch
    from rl_lab.runs.checkpoint import Checkpoint

NOTHING: Mapping[str, Any] = MappingProxyType({})
EVENTS = ("resumed", "continued", "warm_start", "warm_start_optimizer", "loaded")


def entry(event: str, *, source: str, checkpoint: str | None, counts: Mapping[str, int], **more: Any) -> dict[str, Any]:
    """One event. `source` is the run it took something from, `counts` where this run then stood."""
    assert event in EVENTS, event
    known = {"source": source, "checkpoint": checkpoint, "counts": dict(counts)}
    return {"event": event, "time": datetime.now(UTC).isoformat(), **known, **more}


def place_of(checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Where a run goes on from; None: from its beginning."""
    if checkpoint is None:
        return {"checkpoint": None, "counts": {"agent_steps": 0}}
    return {"checkpoint": checkpoint.path.name, "counts": checkpoint.counts}


def warm_origin(checkpoint: Checkpoint, with_optimizers: bool) -> dict[str, Any]:
    """The first event of a run that begins with the weights of another."""
    event, source = "warm_start_optimizer" if with_optimizers else "warm_start", checkpoint.path.parent.parent.name
    facts = {"counts": {"agent_steps": 0}, "source_counts": checkpoint.counts}
    return entry(event, source=source, checkpoint=checkpoint.path.name, **facts)


def add_lineage(run: RunDirectory, event: str, beside: Mapping[str, Any] = NOTHING, **facts: Any) -> None:
    """Note an event in the run's manifest, and what goes `beside` it. What a killed process noted, and the one that
    resumed it repeats, is noted once."""
    manifest = run.read_manifest()
    new, before = entry(event, **facts), lineage_of(manifest)
    if not any({**each, "time": new["time"]} == new for each in before if event == "loaded"):
        run.write_manifest({**manifest, **beside, "lineage": [*before, new]})


def lineage_of(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events, oldest first; whatever else may stand there is left out."""
    found = manifest.get("lineage") or []
    return [each for each in found if isinstance(each, dict) and each.get("event") in EVENTS]


def sentences(manifest: Mapping[str, Any]) -> list[str]:
    """Each event as a line: `2026-01-01 12:00 resumed at 40,000 agent steps (step_000000040000)`."""
    return [f"{str(each.get('time'))[:16].replace('T', ' ')} {_said(each)}" for each in lineage_of(manifest)]


def parents(manifest: Mapping[str, Any]) -> list[str]:
    """The runs that this one took weights or parts from."""
    events = [each for each in lineage_of(manifest) if each["event"] not in ("resumed", "continued")]
    return list(dict.fromkeys(str(each.get("source")) for each in events))


def mark(manifest: Mapping[str, Any]) -> str:
    """For a narrow column: `from mine, resumed 2x`."""
    events = lineage_of(manifest)
    counts = Counter(each["event"] for each in events if each["event"] in ("continued", "resumed"))
    times = [event if count == 1 else f"{event} {count}x" for event, count in counts.items()]
    return printable(", ".join([*(f"from {source}" for source in parents(manifest)), *times]))


def _said(each: Mapping[str, Any]) -> str:
    where = f"({each.get('checkpoint') or 'from its beginning'})"
    at, then = _steps(each.get("counts")), _steps(each.get("source_counts"))
    source, event = each.get("source"), each["event"]
    said = {
        "resumed": f"resumed {at} {where}",
        "continued": f"continued {at} {where} {_reason(each)}",
        "warm_start": f"begun with the weights of {source} {then} {where}",
        "warm_start_optimizer": f"begun with the weights and optimizers of {source} {then} {where}",
        "loaded": f"{at}, phase {each.get('phase')}: loaded {each.get('parts')} of {source} {then} {where}",
    }
    return printable(said[event])


def _reason(each: Mapping[str, Any]) -> str:
    """With which durations a run went on; or with those it had, after something else had stopped it."""
    return f"with {each.get('changes')}" if each.get("changes") else f"after it was stopped: {each.get('stopped_by')}"


def _steps(counts: Any) -> str:
    steps = counts.get("agent_steps") if isinstance(counts, dict) else None
    return f"at {steps:,} agent steps" if isinstance(steps, int) else "at an unknown step"
