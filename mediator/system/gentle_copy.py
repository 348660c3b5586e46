"""Paces a long copy so that those who use the same disk or processor are hardly held up."""

import os
import time

REST_BYTES = 1 << 20
"""Bytes after which a copy rests."""
SYNC_BYTES = 4 << 20
"""Bytes after which they are written to the disk: a large heap of unwritten ones would delay the commits of others."""


class GentleCopy:
    """Rests after each piece of a copy as long as the piece took."""

    def __init__(self, file: int) -> None:
        """``file`` is the descriptor of the file that is written."""
        self._file = file
        self._unsynced = 0
        self._unrested = 0
        self._since = time.perf_counter()

    def written(self, size: int) -> None:
        """Note that ``size`` bytes were written, and rest when it is time to."""
        self._unsynced += size
        self._unrested += size
        if self._unsynced >= SYNC_BYTES:
            os.fdatasync(self._file)
            self._unsynced = 0
        if self._unrested >= REST_BYTES:
            time.sleep(time.perf_counter() - self._since)
            self._since = time.perf_counter()
            self._unrested = 0
