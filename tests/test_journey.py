"""docs/architecture.md names the files that a batch really passes, and there are few of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = {"PPO": (16, 3_500), "Dreamer": (14, 2_800)}  # files, lines


def test_the_journeys_on_the_page_are_those_that_are_made() -> None:
    """`python scripts/journey.py --write` writes them anew."""
    made = subprocess.run([sys.executable, "scripts/journey.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    page = (ROOT / "docs" / "architecture.md").read_text()
    for text in (made.stdout, page):
        assert re.search(r"^\*\*PPO, .* files, .* lines", text, re.MULTILINE)
    files = [re.findall(r"^\d+\. `(.*?)`", text, re.MULTILINE) for text in (made.stdout, page)]
    assert files[0] == files[1]
    for name, count, lines in re.findall(r"^\*\*(\w+), .*?: (\d+) files, ([\d,]+) lines", made.stdout, re.MULTILINE):
        most_files, most_lines = LIMITS[name]
        assert int(count) <= most_files and int(lines.replace(",", "")) <= most_lines, (name, count, lines)
