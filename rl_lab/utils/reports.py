"""How a training tells the process that started it where it stands: marked lines of JSON among what it prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

REPORTS_VARIABLE = "RL_LAB_REPORTS"  # set for a training whose reports somebody reads
MARK = "\x1e"  # begins a report; no text that we print holds it


def report_line(facts: Mapping[str, Any]) -> str:
    """One report: fraction, agent_steps, steps_per_second, return, score, activity, eta_s."""
    return MARK + json.dumps(dict(facts))


def read_report(line: str) -> dict[str, Any] | None:
    """What a line reports, or None where it is text."""
    if not line.startswith(MARK):
        return None
    try:
        facts = json.loads(line[1:])
    except json.JSONDecodeError:  # cut where its writer was killed
        return {}
    return facts if isinstance(facts, dict) else {}
