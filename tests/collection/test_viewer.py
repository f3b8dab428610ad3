"""Whether a window can be opened."""

from __future__ import annotations

import pytest

from rl_lab.collection import viewer


@pytest.mark.parametrize(("variable", "can"), [("DISPLAY", True), ("WAYLAND_DISPLAY", True), ("HOME", False)])
def test_on_linux_a_display_is_needed(monkeypatch: pytest.MonkeyPatch, variable: str, can: bool) -> None:
    monkeypatch.setattr(viewer.sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, ":0")
    assert viewer.can_show() is can
