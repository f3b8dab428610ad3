"""A line below a notebook's cell that is written over, where an IPython kernel runs us. Nothing is imported for it."""

from __future__ import annotations

import html
import sys
from typing import Any


def in_notebook() -> bool:
    """Whether a kernel runs this process; a plain IPython shell is a terminal like any other."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookLine:
    """Text and HTML that replace what was shown before; no widget, so that a saved notebook keeps the last of them."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        line = f'<pre style="white-space: pre-wrap; margin: 0">{html.escape(text)}</pre>'
        content = {"text/plain": text, "text/html": line}
        if self._handle is None:
            display = sys.modules["IPython"].display  # type: ignore[attr-defined]
            self._handle = display.display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
