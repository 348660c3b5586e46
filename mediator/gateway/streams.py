"""The bytes of a client's connection as frames that may be inserted, dropped or kept until whole, within bounds."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from mediator.nats.frames import ProtocolViolationError

MAX_UNHEARD: Final = 512 * 1024
"""Bytes of a client, at most, that wait for a server that has not answered its CONNECT."""
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

    __slots__ = (
        "_dropping",
        "_left",
        "_read_frames",
        "_rest",
        "_waiting",
        "good",
        "held",
        "missing",
        "out",
        "unfinished",
        "violation",
    )

    def __init__(self, read_frames: Callable[[bytes, int, int], tuple[int, int]]) -> None:
        """``read_frames`` reads frames of a chunk from a place on; the bytes between the two are to be passed on first.

        It returns from where to pass on, and up to where, which may be in a later chunk: the rest is kept. Raises
        :class:`ProtocolViolationError`, having set how far the data was good.
        """
        self._read_frames = read_frames
        self.out: list[bytes] = []
        """What is passed on, until it is taken out."""
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

    def insert(self, data: bytes) -> None:
        """Insert frames, if any, as soon as no payload is under way; not while a chunk of this direction is read."""
        if not data:
            return
        if self._left:
            self._waiting.append(data)
            self.held += len(data)
        else:
            self.out.append(data)

    def feed(self, data: bytes) -> None:
        """Take a chunk; sets ``violation``."""
        if self._dropping:
            dropped = min(self._dropping, len(data))
            self._dropping -= dropped
            data = data[dropped:]
            if not data:
                return
        if self._rest:
            self._rest.append(data)
            self.missing -= len(data)
            if self.missing > 0:
                return
            data = b"".join(self._rest)
            self._rest.clear()
            self.unfinished = 0
        mark = at = min(self._left, len(data))
        self._left -= at
        if self._waiting and not self._left:
            self.out += (data[:at], *self._waiting)
            self._waiting.clear()
            self.held = 0
        else:
            mark = 0
        try:
            mark, at = self._read_frames(data, at, mark)
        except ProtocolViolationError as error:
            self.violation = error
            mark, at = self.good
            self.out.append(data[mark:at])
            return
        if at > len(data):
            self._left = at - len(data)
        elif at < len(data):
            self._rest.append(data[at:])
            self.unfinished = len(data) - at + self.missing
        if mark < at:
            self.out.append(data[mark:at] if mark or at < len(data) else data)

    def drop(self, data: bytes, at: int, end: int, mark: int) -> int:
        """Pass on the bytes before ``at``, drop those up to ``end``, and return where to continue."""
        self.out.append(data[mark:at])
        self._dropping = max(0, end - len(data))
        return min(end, len(data))


class ConnectionStreams(ABC):
    """Both directions of one connection: what is to be written, what is counted, and which answers are the gateway's.

    nats-server answers each command of a verbose client, so commands and answers are counted.
    """

    connected = False
    """Whether the client has sent its CONNECT."""
    _verbose = True
    """As nats-server has it until CONNECT says otherwise."""
    _commands = 0
    _commands_answered = 0
    _own_commands: deque[int] | None = None
    """Numbers of the commands whose answers the client must not see; None: it had none yet, as most never have."""

    # Bytes that are counted for all clients.
    _unfinished = 0
    _unheard = 0
    """Bytes that passed to the server, which has not answered the client's CONNECT yet."""
    _heard = False

    def __init__(self, unfinished: UnfinishedCommands) -> None:
        self._all_unfinished = unfinished
        self._up, self._down = FrameStream(self._read_client_frames), FrameStream(self._read_server_frames)

    @abstractmethod
    def _read_client_frames(self, data: bytes, at: int, mark: int) -> tuple[int, int]:
        """Read what the client wrote, as :class:`FrameStream` asks for."""

    @abstractmethod
    def _read_server_frames(self, data: bytes, at: int, mark: int) -> tuple[int, int]:
        """Read what the server wrote."""

    def close(self) -> None:
        """Count nothing for this connection any more."""
        self._all_unfinished.total -= self._unfinished
        self._unfinished = 0

    def receive_from_server(self, data: bytes) -> None:
        """Take what the server wrote; raises :class:`ProtocolViolationError`."""
        if self.connected and not self._heard:
            self._heard = True
            self._all_unfinished.total -= self._unheard
            self._unfinished -= self._unheard
        self._down.feed(data)
        if self._down.violation is not None:
            raise self._down.violation

    def data_to_send(self) -> tuple[bytes, bytes, int]:
        """Return what is to be written to the server and to the client, and how many bytes for the client must wait.

        The latter wait for the end of a payload.
        """
        to_server, to_client = b"".join(self._up.out), b"".join(self._down.out)
        self._up.out.clear()
        self._down.out.clear()
        return to_server, to_client, self._down.held

    def _may_wait(self, size: int) -> bool:
        """Return whether a command of so many bytes may wait here until it is whole."""
        return self._all_unfinished.has_room(size - self._unfinished)

    def _count_unfinished(self, passed: Sequence[bytes]) -> None:
        """Count what waits, and what passed to the server.

        Raises :class:`ProtocolViolationError` if all have too much waiting and the server has not let this client in.
        """
        size = self._up.unfinished
        if not self._heard:
            # More than this is not written to a server that does not read.
            self._unheard = min(self._unheard + sum(map(len, passed)), MAX_UNHEARD)
            size += self._unheard
        if size != self._unfinished:
            self._all_unfinished.total += size - self._unfinished
            self._unfinished = size
        if size and not self._heard and not self._all_unfinished.has_room(0):
            raise ProtocolViolationError("Authorization Timeout")

    def _command(self, frame: bytes) -> bytes:
        """Count a command that the server answers."""
        self._commands += 1
        return frame

    def _own_command(self, frame: bytes) -> bytes:
        """Count a command of the gateway, whose answer the client must not see."""
        if self._verbose:
            if self._own_commands is None:
                self._own_commands = deque()
            self._own_commands.append(self._commands)
        self._commands += 1
        return frame

    def _answers_own_command(self) -> bool:
        """Count an answer; return whether it answers a command of the gateway."""
        number = self._commands_answered
        self._commands_answered += 1
        if self._own_commands and self._own_commands[0] == number:
            self._own_commands.popleft()
            return True
        return False

    def _insert_command(self, frame: bytes) -> None:
        self._up.insert(self._own_command(frame))
