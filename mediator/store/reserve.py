"""Reserved disk space, so that ACK, DELETE and the clean-up work on a full disk (A9)."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import structlog

from mediator.system.private_files import open_file

MIN_BYTES = 2 << 20
MAX_BYTES = 256 << 20

_log = structlog.get_logger("store")


class Reserve:
    """A file beside the database, at least as large as the database's write-ahead log.

    What is in the log may have to go into the database file before the log has room again for anything else. Where
    the disk has no room for the reserve, nothing may be added to the database; when the disk is full, the database gets
    the space. Used by the writer, but for ``give_back``.
    """

    def __init__(self, path: Path) -> None:
        """Begin without any: the space that a former run kept may be needed to open the database."""
        self._path = path
        self._size = 0
        self.short = False
        """Whether there is no room for it: what would add to the database is refused."""
        self._unlink()

    def give_back(self) -> None:
        """Let the database have the space."""
        self._miss()
        self._size = 0
        self._unlink()

    def grow(self, log_bytes: int) -> None:
        """Keep up with a log that has grown to so many bytes."""
        if 2 * self._size < 3 * log_bytes and self._size < MAX_BYTES and not self.short:
            self.adjust(log_bytes)

    def adjust(self, log_bytes: int) -> None:
        """Take as much space as a log of so many bytes asks for, and give back what is much more.

        Where there was no room, the disk must have twice as much, so that a message or two do not fill it again.
        """
        size = min(max(2 * log_bytes, MIN_BYTES), MAX_BYTES)
        if size <= self._size <= 4 * size and not self.short:
            return
        try:
            if self.short:
                disk = os.statvfs(self._path.parent)
                if disk.f_bavail * disk.f_frsize + self._size < 2 * size:
                    return
            self._allocate(size)
        except OSError as error:
            # Any other failure is not about room, and the database will meet it too.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._miss()
            return
        if self.short:
            _log.warning("there is room on the disk again")
        self._size, self.short = size, False

    def _miss(self) -> None:
        if not self.short:
            _log.error("the disk is full: no mail is accepted until there is room again")
        self.short = True

    def _allocate(self, size: int) -> None:
        file = open_file(self._path, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(file, min(size, os.fstat(file).st_size))
            os.posix_fallocate(file, 0, size)
        finally:
            os.close(file)

    def _unlink(self) -> None:
        with suppress(OSError):
            self._path.unlink()
