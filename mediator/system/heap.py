"""Bounds the heaps of glibc's allocator, which gives each thread one of its own."""

import ctypes
from contextlib import suppress
from typing import Final

_M_ARENA_MAX: Final = -8  # mallopt(3)
_ARENAS: Final = 2
"""glibc's default is eight for each core: what a thread frees in one of them is of no use to the others. With two, an
hour of mixed load took 187 MB and 18 MB more at its end, instead of about 20 more (`python -m benchmarks mixed`)."""


def limit_arenas() -> None:
    """Let all threads share a few heaps; to be called before they start. Does nothing without glibc."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)
