"""Lengthens SQLite's write-ahead log ahead of the writer: to overwrite takes a disk fewer steps than to append."""

import os
from contextlib import suppress

AHEAD = 32 << 20
"""Bytes that the writer finds beyond what it has used: more than it writes in a second."""
STEP = 1 << 18
"""Bytes written to the disk at a time: a commit waits for them."""
IN_USE = 4 << 20
"""Bytes used up to which the log is left alone: a service with little to do needs no more."""


def lengthen(log: str, used: int, most: int) -> None:
    """Append zeros to a log of which ``used`` bytes are in use, up to ``most`` bytes in all.

    The writer may go on meanwhile: what is appended never overwrites, and SQLite takes zeros for the end of the log,
    since no frame begins with them. Where there is no room, nothing happens.
    """
    if used < IN_USE:
        return
    with suppress(OSError):
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        try:
            missing = min(used + AHEAD, most) - os.fstat(file).st_size
            for _ in range(0, missing, STEP):
                os.write(file, bytes(STEP))
                os.fdatasync(file)
        finally:
            os.close(file)
