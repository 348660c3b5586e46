"""Splits a request that asks for several things into its parts, so that each may find an agent of its own."""

import re

MAX_PARTS = 8
"""Each is one more text to encode and to look up; what is left of a longer request is in its whole."""

_ENDS = re.compile(r"(?<=[.!?])\s+|[。！？\n]+")


def parts(request: str) -> list[str]:
    """Return the sentences of a request, at most ``MAX_PARTS``; none when it is a single one."""
    found = [part for part in (piece.strip() for piece in _ENDS.split(request)) if part]
    return found[:MAX_PARTS] if len(found) > 1 else []
