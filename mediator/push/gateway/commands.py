"""Counts commands: a verbose client's, whose every one the server answers, and those of all that are not whole yet."""

from collections import deque
from collections.abc import Sequence
from typing import Final

MAX_UNFINISHED: Final = 64 * 1024 * 1024
"""Bytes for which :class:`UnfinishedCommands` has room."""
MAX_UNHEARD: Final = 512 * 1024
"""Bytes of a client, at most, that wait for a server that has not answered its CONNECT."""


class CommandCounter:
    """Tells which of these answers are for commands of the gateway, which the client must not see."""

    def __init__(self) -> None:
        self.verbose = True
        """As nats-server has it until CONNECT says otherwise."""
        self._sent = 0
        self._answered = 0
        self._own: deque[int] = deque()

    def note(self, frame: bytes) -> bytes:
        """Count a command that the server answers."""
        self._sent += 1
        return frame

    def note_own(self, frame: bytes) -> bytes:
        """Count a command of the gateway."""
        if self.verbose:
            self._own.append(self._sent)
        return self.note(frame)

    def answers_own(self) -> bool:
        """Count an answer; return whether it answers a command of the gateway."""
        number = self._answered
        self._answered += 1
        if self._own and self._own[0] == number:
            self._own.popleft()
            return True
        return False


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


class UnfinishedInput:
    """What one connection has there."""

    def __init__(self, everybody: UnfinishedCommands) -> None:
        self._everybody = everybody
        self._counted = 0
        self._unheard = 0
        """Bytes that passed to the server, which has not answered the client's CONNECT yet."""
        self._answered = False

    def may_wait(self, size: int) -> bool:
        """Return whether a command of so many bytes may wait until it is whole."""
        return self._everybody.has_room(size - self._counted)

    def count(self, unfinished: int, passed: Sequence[bytes]) -> bool:
        """Count what waits, and what passed to the server; return whether the client may go on.

        It may not if all have too much waiting and the server has not let it in yet.
        """
        if not self._answered:
            # More than this is not written to a server that does not read.
            self._unheard = min(self._unheard + sum(map(len, passed)), MAX_UNHEARD)
        size = unfinished + self._unheard
        if size != self._counted:
            self._everybody.total += size - self._counted
            self._counted = size
        return self._answered or not size or self._everybody.has_room(0)

    def answered(self) -> None:
        """Take note that the server has answered the client's CONNECT."""
        if not self._answered:
            self._answered = True
            self._everybody.total -= self._unheard
            self._counted -= self._unheard
            self._unheard = 0

    def close(self) -> None:
        """Count nothing of this connection any more."""
        self._everybody.total -= self._counted
        self._counted = 0
