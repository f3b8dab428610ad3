"""Every promise on a page names the test behind it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_pages import ROOT


@pytest.mark.parametrize("page", ["resume.md", "security.md"])
def test_every_promise_names_a_test_that_exists(page: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / page).read_text())
    assert len(named) >= 8
    for file, test in named:
        assert f"def {test}(" in Path(ROOT / file).read_text(), f"{page} names {file}::{test}, which does not exist"
