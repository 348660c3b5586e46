"""Keeps the memory of glibc's allocator together, which gives each thread a heap of its own."""

import ctypes
from contextlib import suppress
from typing import Final

_M_ARENA_MAX: Final = -8  # mallopt(3)
_ARENAS: Final = 2
"""For the event loop, and for the threads that write, read and embed. By default eight for each core: what a database
connection frees in one of them is of no use to the others, so that memory grows for hours."""


def limit_arenas() -> None:
    """Let all threads share a few heaps. To be called before there are threads; other allocators than glibc's stay."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)
