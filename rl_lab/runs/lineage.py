"""Where a run comes from: resumed, continued with more steps, begun with another run's weights, parts loaded.

manifest.json holds it under `lineage`: an entry for each event, with the time, the checkpoint and the counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rl_lab.runs.run_directory import RunDirectory
from rl_lab.utils.text import printable

EVENTS = ("resumed", "continued", "warm_start", "warm_start_optimizer", "loaded")


def entry(event: str, *, source: str, checkpoint: str | None, agent_steps: int, **more: str) -> dict[str, Any]:
    """One event. `source` is the run it took something from, `agent_steps` where this run then stood."""
    assert event in EVENTS, event
    known = {"source": source, "checkpoint": checkpoint, "agent_steps": agent_steps}
    return {"event": event, "time": datetime.now(UTC).isoformat(), **known, **more}


def add_lineage(run: RunDirectory, event: str, **facts: Any) -> None:
    """Note an event in the run. One that a killed process noted and a resumed one repeats is noted once."""
    manifest = run.read_manifest()
    new, before = entry(event, **facts), lineage_of(manifest)
    repeated = {**before[-1], "time": new["time"]} == new if before and event == "loaded" else False
    if not repeated:
        run.write_manifest({**manifest, "lineage": [*before, new]})


def lineage_of(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events, oldest first; whatever else may stand there is left out."""
    found = manifest.get("lineage") or []
    return [each for each in found if isinstance(each, dict) and each.get("event") in EVENTS]


def sentences(manifest: Mapping[str, Any]) -> list[str]:
    """Each event as a line: `2026-01-01 12:00 resumed at 40,000 agent steps (step_000000040000)`."""
    return [f"{str(each.get('time'))[:16].replace('T', ' ')} {_said(each)}" for each in lineage_of(manifest)]


def mark(manifest: Mapping[str, Any]) -> str:
    """For a narrow column: `from mine, resumed 2x`."""
    events = lineage_of(manifest)
    sources = dict.fromkeys(str(each.get("source")) for each in events if each["event"] not in ("resumed", "continued"))
    counts = Counter(each["event"] for each in events if each["event"] in ("continued", "resumed"))
    times = [event if count == 1 else f"{event} {count}x" for event, count in counts.items()]
    return printable(", ".join([*(f"from {source}" for source in sources), *times]))


def _said(each: Mapping[str, Any]) -> str:
    steps, where = each.get("agent_steps"), f"({each.get('checkpoint') or 'its beginning'})"
    at = f"at {steps:,} agent steps" if isinstance(steps, int) else "at no known step"
    source, event = each.get("source"), each["event"]
    said = {
        "resumed": f"resumed {at} {where}",
        "continued": f"continued {at} {where} with {each.get('changes')}",
        "warm_start": f"begun with the weights of {source} {where}",
        "warm_start_optimizer": f"begun with the weights and optimizers of {source} {where}",
        "loaded": f"loaded {each.get('parts')} of {source} {where} {at}, in phase {each.get('phase')}",
    }
    return printable(said[event])
