"""The bytes of one direction as frames that may be inserted, dropped or kept until they are whole, within bounds."""

from collections.abc import Callable
from typing import Final

from mediator.nats.frames import ProtocolViolationError

MAX_UNFINISHED: Final = 64 * 1024 * 1024
"""Bytes for which :class:`UnfinishedCommands` has room."""


class UnfinishedCommands:
    """Counts the bytes that all clients have the gateway hold: of commands that are not whole, and before their login.

    For a command whose size is known these are all of its bytes, sent or not, so that what is accepted finds room.
    """

    def __init__(self, limit: int = MAX_UNFINISHED) -> None:
        self._limit = limit
        self.total = 0

    def has_room(self, size: int) -> bool:
        """Return whether so many bytes more may wait."""
        return self.total + size <= self._limit


class FrameStream:
    """One direction: where the last chunk ended, and inserted frames that wait for the end of a payload."""

    def __init__(self, read_frames: Callable[[bytes, int, int, list[bytes]], None]) -> None:
        """``read_frames`` reads frames of a chunk from a place on; the bytes between the two are to be passed on first.

        It raises :class:`ProtocolViolationError`, having set how far the data was good.
        """
        self._read_frames = read_frames
        self._rest: list[bytes] = []
        self.missing = 0
        """Bytes that are missing at least before the kept ones make a frame."""
        self._left = 0
        """Bytes of a payload that are still to come."""
        self._dropping = 0
        """Bytes of a refused payload that are still to come."""
        self._waiting: list[bytes] = []
        self.good = 0, 0
        """The bytes that are to be passed on if what follows them is wrong."""
        self.unfinished = 0
        """Bytes of a frame that waits to be whole, or of what is known of it."""
        self.held = 0
        """Bytes of the inserted frames that wait."""
        self.violation: ProtocolViolationError | None = None
        """What was wrong behind the frames that were passed on last; nothing more may be fed."""

    def insert(self, frame: bytes) -> bytes:
        """Return a frame if it can be inserted now; otherwise :meth:`feed` inserts it as soon as possible."""
        if not self._left:
            return frame
        self._waiting.append(frame)
        self.held += len(frame)
        return b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take a chunk and return what to pass on; sets ``violation``."""
        if self._dropping:
            dropped = min(self._dropping, len(data))
            self._dropping -= dropped
            data = data[dropped:]
            if not data:
                return []
        if self._rest:
            self._rest.append(data)
            self.missing -= len(data)
            if self.missing > 0:
                return []
            data = b"".join(self._rest)
            self._rest.clear()
            self.unfinished = 0
        out: list[bytes] = []
        mark = at = min(self._left, len(data))
        self._left -= at
        if self._waiting and not self._left:
            out += (data[:at], *self._waiting)
            self._waiting.clear()
            self.held = 0
        else:
            mark = 0
        try:
            self._read_frames(data, at, mark, out)
        except ProtocolViolationError as error:
            self.violation = error
            mark, at = self.good
            out.append(data[mark:at])
        return out

    def drop(self, data: bytes, at: int, end: int, mark: int, out: list[bytes]) -> int:
        """Pass on the bytes before ``at``, drop those up to ``end``, and return where to continue."""
        out.append(data[mark:at])
        self._dropping = max(0, end - len(data))
        return min(end, len(data))

    def end(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        """Pass on up to ``at``, which may be in a later chunk, and keep the rest."""
        if at > len(data):
            self._left = at - len(data)
        elif at < len(data):
            self._rest.append(data[at:])
            self.unfinished = len(data) - at + self.missing
        if mark < at:
            out.append(data[mark:at] if mark or at < len(data) else data)
