"""Divides the files that the system lets this process open among what listens, so that none can take all."""

import resource
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

OWN_FILES: Final = 300
"""For the database, the journal, our own connections and those we make to others; half of all there are, if fewer."""


def divide(wanted: Mapping[str, int], available: int) -> dict[str, int]:
    """Give each what it wants, or an equal part of what those that want less leave over; at least 1."""
    given: dict[str, int] = {}
    left = available
    for number, name in enumerate(sorted(wanted, key=lambda each: wanted[each])):
        given[name] = max(1, min(wanted[name], left // (len(wanted) - number)))
        left -= given[name]
    return given


def budget(wanted: Mapping[str, int]) -> dict[str, int]:
    """Have the system allow as many open files as are ``wanted`` if it lets us, and divide what it allows."""
    allowed = _allow(sum(wanted.values()) + OWN_FILES)
    return divide(wanted, allowed - min(OWN_FILES, allowed // 2))


def _allow(count: int) -> int:
    """Raise the limit of open files to ``count``, as far as the hard one goes; return how many there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return count if soft == resource.RLIM_INFINITY else min(count, soft)
