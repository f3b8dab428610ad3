"""Text from files and environments, made safe to print."""

from __future__ import annotations

import json


def printable(text: str, *, keep: str = "") -> str:
    r"""The text with everything escaped that could steer a terminal (`\u001b`, `\n`, ...), but what `keep` lists.

    The escapes are JSON's, so that JSON stays the same JSON. Lone surrogates, which cannot be encoded, are escaped too.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else json.dumps(each)[1:-1] for each in text)
