"""Divides the file descriptors of this process among its listeners, so that none can use up all."""

import resource
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

OWN_FILES: Final = 300
"""For the database, the journal and our own connections; half of all descriptors, if that is less."""


def divide(wanted: Mapping[str, int], available: int) -> dict[str, int]:
    """Give each what it wants, or an equal share of what the more modest ones leave; at least 1."""
    given: dict[str, int] = {}
    left = available
    for number, name in enumerate(sorted(wanted, key=lambda each: wanted[each])):
        given[name] = max(1, min(wanted[name], left // (len(wanted) - number)))
        left -= given[name]
    return given


def budget(wanted: Mapping[str, int]) -> dict[str, int]:
    """Raise the system's limit to what is ``wanted`` if possible, and divide what it allows."""
    allowed = _allow(sum(wanted.values()) + OWN_FILES)
    return divide(wanted, allowed - min(OWN_FILES, allowed // 2))


def _allow(count: int) -> int:
    """Raise the soft limit of open files to ``count``, at most to the hard one; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return count if soft == resource.RLIM_INFINITY else min(count, soft)
