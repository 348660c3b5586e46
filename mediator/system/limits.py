"""Limits of this process: the files it may open, divided among its listeners, and the heaps of glibc's allocator."""

import ctypes
import resource
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

OWN_FILES: Final = 300
"""For the database, the journal and our own connections; half of all descriptors, if that is less."""
_M_ARENA_MAX: Final = -8  # mallopt(3)
_ARENAS: Final = 2
"""glibc's default is eight for each core: what a thread frees in one of them is of no use to the others. With two, an
hour of mixed load took 187 MB and 18 MB more at its end, instead of about 20 more (`python -m benchmarks mixed`)."""


def divide(wanted: Mapping[str, int], available: int) -> dict[str, int]:
    """Give each what it wants, or an equal share of what the more modest ones leave; at least 1."""
    given: dict[str, int] = {}
    left = available
    for number, name in enumerate(sorted(wanted, key=lambda each: wanted[each])):
        given[name] = max(1, min(wanted[name], left // (len(wanted) - number)))
        left -= given[name]
    return given


def budget_files(wanted: Mapping[str, int]) -> dict[str, int]:
    """Raise the system's limit to what is ``wanted`` if possible, and divide what it allows."""
    allowed = _raise_file_limit(sum(wanted.values()) + OWN_FILES)
    return divide(wanted, allowed - min(OWN_FILES, allowed // 2))


def _raise_file_limit(count: int) -> int:
    """Raise the soft limit of open files to ``count``, at most to the hard one; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return count if soft == resource.RLIM_INFINITY else min(count, soft)


def limit_malloc_arenas() -> None:
    """Let all threads share a few heaps; to be called before they start. Does nothing without glibc."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)
