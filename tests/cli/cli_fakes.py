"""What the command-line tests share. (A module of its own: every folder may have a conftest, one name only once.)"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """One command line's result."""

    code: int
    out: str
    err: str


@dataclass
class Calls:
    """A callable that remembers its calls and gives a fixed answer, or raises it."""

    answer: Any = None
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.seen.append((args, keywords))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer(*args, **keywords) if callable(self.answer) else self.answer
